"""Metrics, scores, pictures and alarms of a run.

- `recorder` collects the metrics of a step and hands them to `sinks` (JSON lines, TensorBoard, CSV, W&B, MLflow).
- `online` scores the encoder, `verdict` says in words what the scores mean.
- `slowest_rank` names the process for which the others wait, `profile` writes the profile of a few steps.
- `collapse` raises the alarm, `feature_maps` draws pictures, `progress_bar` shows progress.
"""
