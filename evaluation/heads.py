"""Linear classifiers on kept features, many trained at once, the same with any number of processes.

N images of this process's part of a set, b of them in one step, D features an image, R rates, C classes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from rich.progress import track
from torch import Tensor

from evaluation.results import places
from runtime.collectives import all_reduce_sum

MOMENTUM = 0.9
EPSILON = 1e-6  # of the batch norm of MAE's probe


@dataclass(frozen=True)
class Part:
    """This process's part of a labelled set."""

    features: Tensor
    """(N, D) float32"""
    labels: Tensor
    """(N,) int64"""


class Heads:
    """R linear classifiers on the same features, one a rate: one stack of weights (R, D + 1, C), the last row the bias.

    All start from the same weights, N(0, 0.01). The gradient of the mean cross-entropy is written out:
    x^T (softmax - one-hot) / images.
    """

    def __init__(self, columns: slice, classes: int, rates: Sequence[float], seed: int, device: torch.device) -> None:
        """`columns`: which of the kept features these classifiers see."""
        self.columns = columns
        width = columns.stop - columns.start
        weight = 0.01 * torch.randn(width, classes, generator=torch.Generator().manual_seed(seed))
        weight = torch.cat([weight, torch.zeros(1, classes)])  # (D + 1, C)
        self.weight = weight.to(device).repeat(len(rates), 1, 1)  # (R, D + 1, C)
        self.momentum = torch.zeros_like(self.weight)
        self.rates = torch.tensor(rates, device=device)[:, None, None]

    def logits(self, x: Tensor) -> Tensor:
        """Of the kept features: (b, all columns) -> (R, b, C)."""
        return F.pad(x[:, self.columns], (0, 1), value=1.0) @ self.weight

    def step(self, x: Tensor, labels: Tensor, images: int, factor: float, accelerator: Accelerator | None) -> None:
        """One step of SGD with momentum at `factor` times the rates.

        `x` (b, all columns) and `labels` (b,) are what this process has of the `images` of the step.
        """
        error = self.logits(x).softmax(-1)  # (R, b, C)
        error[:, torch.arange(len(labels), device=labels.device), labels] -= 1
        gradient = F.pad(x[:, self.columns], (0, 1), value=1.0).T @ (error / images)  # (R, D + 1, C)
        self.momentum.mul_(MOMENTUM).add_(all_reduce_sum(gradient))
        self.weight.sub_(factor * self.rates * self.momentum)


def order(images: int, epoch: int, seed: int) -> Tensor:
    """Places in the whole set of the images of an epoch: a permutation (images,), a function of its arguments."""
    return torch.randperm(images, generator=torch.Generator().manual_seed(seed + 2**31 * (epoch + 1)))


@torch.no_grad()
def train_heads(
    part_of: Callable[[int], Part],
    counts: Sequence[int],
    groups: Sequence[tuple[Sequence[Heads], Tensor]],
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    accelerator: Accelerator | None,
    progress: bool = False,
) -> None:
    """Trains each group of heads on the images that its mask (images of the whole set,) admits.

    A step takes the same images whatever the number of processes: each works on those that lie in its part, and the
    gradients are summed. Rates are scaled by `batch_size` / 256 and fall to 0 along a cosine. Called on all processes
    together.

    Args:
        part_of: this process's part with the features of an epoch, on any device.
        counts: images of each process's part.
        batch_size: images of one step, over all processes.
    """
    rank = 0 if accelerator is None else accelerator.process_index
    images, start, end = sum(counts), sum(counts[:rank]), sum(counts[: rank + 1])
    steps_per_epoch = math.ceil(images / batch_size)
    for epoch in track(range(epochs), "epochs of the classifiers", disable=not progress):
        part = part_of(epoch)
        for step, batch in enumerate(order(images, epoch, seed).split(batch_size), epoch * steps_per_epoch):
            factor = batch_size / 256 * 0.5 * (1 + math.cos(math.pi * step / (epochs * steps_per_epoch)))
            own = batch[(batch >= start) & (batch < end)]
            for heads_of_group, mask in groups:
                if not mask[batch].any():
                    continue
                seen, count = own[mask[own]] - start, int(mask[batch].sum())
                for heads in heads_of_group:
                    x, labels = (t[seen].to(heads.weight.device) for t in (part.features, part.labels))
                    heads.step(x, labels, count, factor, accelerator)


@torch.no_grad()
def score(heads: Heads, part: Part, accelerator: Accelerator | None, chunk: int = 1024) -> Tensor:
    """Top-1 and top-5 accuracy of each rate over all processes, 0 to 1: (R, 2) float64."""
    device = heads.weight.device
    right = torch.zeros(len(heads.rates), 2, dtype=torch.float64)
    for features, labels in zip(part.features.split(chunk), part.labels.split(chunk), strict=True):
        logits = heads.logits(features.to(device))  # (R, b, C)
        place = places(logits.flatten(0, 1), labels.to(device).repeat(len(logits)))  # (R * b,)
        place = place.unflatten(0, (len(logits), -1))  # (R, b)
        right += torch.stack([(place < 1).sum(1), (place < 5).sum(1)], dim=1).cpu()
    return all_reduce_sum(right) / all_reduce_sum(torch.tensor(len(part.labels)))


def normaliser(train: Tensor, accelerator: Accelerator | None) -> Callable[[Tensor], Tensor]:
    """Takes the mean and variance of `train` (N, D) over all processes out of features, in place.

    It is `BatchNorm1d(affine=False, eps=1e-6)` with the whole of `train` as its batch.
    """
    count = all_reduce_sum(torch.tensor(len(train)))
    mean = (all_reduce_sum(train.sum(0, dtype=torch.float64)) / count).float()  # (D,)
    squares = sum((rows - mean).square().sum(0, dtype=torch.float64) for rows in train.split(8192))
    assert isinstance(squares, Tensor)
    scale = (all_reduce_sum(squares) / count + EPSILON).rsqrt().float()  # (D,)
    return lambda features: features.sub_(mean).mul_(scale)
