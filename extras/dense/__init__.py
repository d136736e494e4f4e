"""Evaluations of patch tokens on maps, and of their places. Pages: docs/evaluation.md, docs/monitoring.md.

- `frozen`: settings, reading of images and maps, training of heads on frozen tokens.
- `segmentation`, `depth`: commands that train a linear head.
- `patch_knn`: the command that segments by the nearest tokens; `online`: the same during a run.
- `correspondence`: the command that scores tokens without labels.
"""
