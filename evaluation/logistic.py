"""Multinomial logistic regression on extracted features, fitted on all images at once by L-BFGS. The images are spread
over all processes.

The protocol is that of MSN (2204.07141) and of its code, `logistic_eval.py`: each feature vector is centred by its own
mean and divided by its L2 norm, and the classifier has no bias. With a weight matrix W, normalised features x_i and
labels y_i, it minimises

    sum_i cross_entropy(W x_i, y_i) + strength / 2 * |W|^2

MSN minimises the same function divided by the number of images. The probe during pretraining (`probe`) runs only a few
iterations, but features with a large common mean need many. It therefore standardises each feature over the training
images instead of centring each vector.

Shape letters: N images of this process, b of them in one chunk, D features per image, C classes.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.evaluation.accuracy import true_class_rank
from tessera.evaluation.features import LabelledFeatures, full_float32, normaliser
from tessera.runtime.collectives import all_gather, all_reduce_sum

STRENGTH = 0.0025
"""Weight of the L2 penalty in the README of MSN's code, for a loss that is summed over the images."""
HISTORY = 10
"""Number of past gradients from which L-BFGS estimates the curvature."""
TOLERANCE = 1e-6
"""The fit ends when the largest entry of the gradient is at most this fraction of its value at zero weights, or when
the loss no longer falls. The rounding errors of float32 do not allow a much smaller value."""
CHUNK = 8192
"""Number of images whose logits are in memory at a time."""


class Classifier(NamedTuple):
    """A fitted classifier."""

    weight: Tensor
    """Weights, (D, C) float32."""
    iterations: int
    """Number of iterations of L-BFGS."""


def normalised(features: Tensor) -> Tensor:
    """Subtract the mean of each row from the row, and divide the row by its L2 norm: (N, D) -> (N, D)."""
    return F.normalize(features - features.mean(1, keepdim=True), dim=1)


def probe(train: LabelledFeatures, val: LabelledFeatures, iterations: int, device: torch.device) -> float:
    """Return the top-1 accuracy (0 to 1) over all processes. Arguments are those of `probe_ranks`."""
    return _shares(probe_ranks(train, val, iterations, device))[0]


def probe_ranks(train: LabelledFeatures, val: LabelledFeatures, iterations: int, device: torch.device) -> Tensor:
    """Return the rank of the true class (M,) on `val` of a classifier that is fitted on `train`.

    Each feature is normalised to mean 0 and variance 1 over the training images. Each feature vector is then divided by
    its L2 norm. The L2 penalty has the weight `STRENGTH`. Call this function on all processes. The memory on `device`
    does not grow with the number of images, unless the features are on this device.

    Args:
        train: features (N, D) and labels (N,) of this process's part of the training set.
        val: features (M, D) and labels (M,) of this process's part of the images that are scored.
        iterations: largest number of iterations of L-BFGS.
        device: device of the computation. The features may be on another device.
    """
    inputs, scored = train.features.clone(), val.features.clone()
    normalise = normaliser(inputs)
    inputs, scored = (F.normalize(normalise(part), dim=1) for part in (inputs, scored))
    classes = int(torch.cat(all_gather(train.labels)).max()) + 1
    classifier = fit(inputs, train.labels, classes, STRENGTH, iterations, device=device)
    return ranks(classifier, scored, val.labels)


@torch.no_grad()
def fit(
    features: Tensor,
    labels: Tensor,
    classes: int,
    strength: float,
    iterations: int,
    *,
    device: torch.device | None = None,
) -> Classifier:
    """Fit a classifier. Call this function on all processes. It returns the same classifier on every process.

    The computation is in float32. Losses and gradients of chunks are summed in float64, so the number of processes
    changes the result only by rounding.

    Args:
        features: normalised features (N, D) of this process's part of the training images.
        labels: labels (N,) of these images.
        classes: number of classes C.
        strength: weight of the L2 penalty for a loss that is summed over the images.
        iterations: largest number of iterations.
        device: device of the computation. None selects the device of the features.
    """
    images = int(all_reduce_sum(torch.tensor(len(labels))))
    weight = torch.zeros(features.shape[1], classes, device=device or features.device)

    def objective() -> float:
        """Set the gradient of `weight` and return the loss, both divided by the number of images."""
        loss = torch.zeros((), dtype=torch.float64, device=weight.device)
        gradient = torch.zeros_like(weight, dtype=torch.float64)
        for x, y in _chunks(features, labels, weight.device):
            scores = (x @ weight).log_softmax(1)  # (b, C)
            loss -= scores.gather(1, y[:, None]).sum(dtype=torch.float64)
            error = scores.exp_().scatter_add_(1, y[:, None], scores.new_full((len(y), 1), -1.0))
            gradient += x.T @ error
        total = all_reduce_sum(torch.cat([loss[None], gradient.flatten()]))
        weight.grad = ((total[1:].view_as(weight) + strength * weight) / images).float()
        return float(total[0] + strength / 2 * weight.double().square().sum()) / images

    with full_float32():
        objective()
        assert weight.grad is not None
        solver = torch.optim.LBFGS(
            [weight],
            max_iter=iterations,
            max_eval=25 * iterations,  # a line search computes the loss at most 25 times
            history_size=HISTORY,
            line_search_fn="strong_wolfe",
            tolerance_grad=TOLERANCE * float(weight.grad.abs().max()),
            tolerance_change=1e-12,
        )
        solver.step(objective)
    return Classifier(weight, solver.state[weight]["n_iter"])


def _chunks(features: Tensor, labels: Tensor, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in zip(features.split(CHUNK), labels.split(CHUNK), strict=True):
        yield x.to(device), y.to(device)


def accuracy(classifier: Classifier, features: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the top-1 and top-5 accuracy (0 to 1) over all processes. Call this function on all processes.

    Args:
        classifier: return value of `fit`.
        features: normalised features (N, D) of this process's part of the scored images.
        labels: labels (N,) of these images.
    """
    return _shares(ranks(classifier, features, labels))


@torch.no_grad()
def ranks(classifier: Classifier, features: Tensor, labels: Tensor) -> Tensor:
    """Return the rank of the true class of each image, on the CPU: (N, D), (N,) -> (N,) int64."""
    with full_float32():
        chunks = _chunks(features, labels, classifier.weight.device)
        return torch.cat([true_class_rank(x @ classifier.weight, y).cpu() for x, y in chunks])


def _shares(places: Tensor) -> tuple[float, float]:
    """Return the shares of ranks (N,) of all processes that are below 1 and below 5. Collective."""
    counts = torch.stack([(places < 1).sum(), (places < 5).sum(), torch.tensor(len(places))])
    top1, top5, images = all_reduce_sum(counts).tolist()
    return top1 / images, top5 / images
