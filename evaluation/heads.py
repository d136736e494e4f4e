"""Linear classifiers on extracted features. Many classifiers are trained together, and the result does not depend on
the number of processes.

Shape letters: N images of this process, b of them in one step, D features per image, R learning rates, C classes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.evaluation.features import LabelledFeatures
from tessera.evaluation.results import true_class_rank
from tessera.runtime.collectives import all_reduce_sum, rank
from tessera.runtime.progress import track

MOMENTUM = 0.9
EPSILON = 1e-6  # epsilon of the batch norm in MAE's linear probe


@dataclass(frozen=True)
class HeadTraining:
    """Options of `train_heads`."""

    epochs: int
    """Number of passes over the training images."""
    batch_size: int
    """Number of images per step, over all processes. Learning rates are multiplied by `batch_size` / 256."""
    seed: int
    """Seed of the random order of the images."""
    progress: bool = False
    """True if a progress bar is shown."""


class Heads:
    """R linear classifiers on the same features, one per learning rate.

    The weights are one tensor (R, D + 1, C). The last of the D + 1 rows is the bias. All classifiers start from equal
    random weights with standard deviation 0.01. The method `step` computes the gradient of the mean cross-entropy in
    closed form: x^T (softmax - one-hot) / images.
    """

    def __init__(self, columns: slice, classes: int, rates: Sequence[float], seed: int, device: torch.device) -> None:
        """
        Args:
            columns: columns of the features that are the input of these classifiers.
            classes: number of classes.
            rates: learning rates, one per classifier.
            seed: seed of the initial weights.
            device: device of the weights.
        """
        self.columns = columns
        width = columns.stop - columns.start
        weight = 0.01 * torch.randn(width, classes, generator=torch.Generator().manual_seed(seed))
        weight = torch.cat([weight, torch.zeros(1, classes)])  # (D + 1, C)
        self.weight = weight.to(device).repeat(len(rates), 1, 1)  # (R, D + 1, C)
        self.momentum = torch.zeros_like(self.weight)
        self.rates = torch.tensor(rates, device=device)[:, None, None]

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of all classifiers for features `x`: (b, all columns) -> (R, b, C)."""
        return F.pad(x[:, self.columns], (0, 1), value=1.0) @ self.weight

    def step(self, x: Tensor, labels: Tensor, images: int, factor: float) -> None:
        """Take one step of SGD with momentum.

        Args:
            x: features (b, all columns) of the images that this process has in the step.
            labels: labels (b,) of these images.
            images: number of images in the step, over all processes.
            factor: number by which the learning rates are multiplied.
        """
        error = self.logits(x).softmax(-1)  # (R, b, C)
        error[:, torch.arange(len(labels), device=labels.device), labels] -= 1
        gradient = F.pad(x[:, self.columns], (0, 1), value=1.0).T @ (error / images)  # (R, D + 1, C)
        self.momentum.mul_(MOMENTUM).add_(all_reduce_sum(gradient))
        self.weight.sub_(factor * self.rates * self.momentum)


def epoch_order(images: int, epoch: int, seed: int) -> Tensor:
    """Return the order of the images in one epoch: a permutation (images,) that depends only on the arguments."""
    return torch.randperm(images, generator=torch.Generator().manual_seed(seed + 2**31 * (epoch + 1)))


@torch.no_grad()
def train_heads(
    features_of_epoch: Callable[[int], LabelledFeatures],
    counts: Sequence[int],
    groups: Sequence[tuple[Sequence[Heads], Tensor]],
    training: HeadTraining,
) -> None:
    """Train groups of heads, each group on the images that its mask selects. Call this function on all processes.

    The images of a step do not depend on the number of processes. Each process computes the gradient for its own images
    of the step, and the gradients are summed over the processes. The learning rates fall to 0 along a cosine.

    Args:
        features_of_epoch: function that returns the features and labels of this process's images for a given epoch
            number. The tensors may be on any device.
        counts: number of images of each process.
        groups: pairs of a list of heads and a bool mask over the images of all processes. These heads are trained on
            the images that the mask selects.
        training: epochs, batch size and seed.
    """
    before = sum(counts[: rank()])
    images, start, end = sum(counts), before, before + counts[rank()]
    steps_per_epoch = math.ceil(images / training.batch_size)
    steps = training.epochs * steps_per_epoch
    epochs = track(range(training.epochs), "epochs of the classifiers", total=training.epochs, shown=training.progress)
    for epoch in epochs:
        part = features_of_epoch(epoch)
        batches = epoch_order(images, epoch, training.seed).split(training.batch_size)
        for step, batch in enumerate(batches, epoch * steps_per_epoch):
            factor = training.batch_size / 256 * 0.5 * (1 + math.cos(math.pi * step / steps))
            own = batch[(batch >= start) & (batch < end)]
            for heads_of_group, mask in groups:
                if not mask[batch].any():
                    continue
                seen, count = own[mask[own]] - start, int(mask[batch].sum())
                for heads in heads_of_group:
                    x, labels = (t[seen].to(heads.weight.device) for t in (part.features, part.labels))
                    heads.step(x, labels, count, factor)


@torch.no_grad()
def accuracy(heads: Heads, part: LabelledFeatures, chunk: int = 1024) -> Tensor:
    """Return the top-1 and top-5 accuracy (0 to 1) of each classifier over all processes: (R, 2) float64."""
    device = heads.weight.device
    correct = torch.zeros(len(heads.rates), 2, dtype=torch.float64)
    for features, labels in zip(part.features.split(chunk), part.labels.split(chunk), strict=True):
        logits = heads.logits(features.to(device))  # (R, b, C)
        place = true_class_rank(logits.flatten(0, 1), labels.to(device).repeat(len(logits)))  # (R * b,)
        place = place.unflatten(0, (len(logits), -1))  # (R, b)
        correct += torch.stack([(place < 1).sum(1), (place < 5).sum(1)], dim=1).cpu()
    return all_reduce_sum(correct) / all_reduce_sum(torch.tensor(len(part.labels)))


def normaliser(train: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that normalises features in place with the mean and variance of the training features.

    The mean and the variance are computed once, over the training features `train` (N, D) of all processes. Applied to
    `train`, the function equals `BatchNorm1d(affine=False, eps=1e-6)` in training mode with all training features as
    one batch.
    """
    count = all_reduce_sum(torch.tensor(len(train)))
    mean = (all_reduce_sum(train.sum(0, dtype=torch.float64)) / count).float()  # (D,)
    squares = torch.zeros_like(mean, dtype=torch.float64)
    for rows in train.split(8192):
        squares += (rows - mean).square().sum(0, dtype=torch.float64)
    scale = (all_reduce_sum(squares) / count + EPSILON).rsqrt().float()  # (D,)
    return lambda features: features.sub_(mean).mul_(scale)
