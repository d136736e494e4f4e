"""Rank of the true class among a classifier's scores. Top-1 and top-5 accuracy are computed from these ranks."""

import torch
from torch import Tensor

UNRANKED = 2**31
"""Rank of a true class without a valid score. This rank is larger than any number of classes."""


def true_class_rank(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the rank of the true class: (B, classes), (B,) -> (B,) int64. The highest score has rank 0.

    Among equal scores, the class with the smaller index ranks first. NaN ranks before all other scores, and a true
    class whose score is NaN gets the rank `UNRANKED`. A diverged classifier therefore never counts as correct.
    """
    own = scores.gather(1, labels[:, None])  # (B, 1)
    lower = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]  # (B, classes)
    ahead = ~(scores <= own) | ((scores == own) & lower)
    return ahead.sum(1).masked_fill(own.squeeze(1).isnan(), UNRANKED)
