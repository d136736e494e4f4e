"""k-NN accuracy on corrupted images. Page: docs/evaluation.md.

- `corruptions`: the command `tessera corruptions`.
- `images`: the fifteen corruptions of ImageNet-C.
"""
