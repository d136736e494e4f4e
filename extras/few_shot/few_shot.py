"""Accuracy with few labels.

k-NN and logistic regression on frozen features, with a share of the training labels.

    tessera few_shot --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS

The features of all images are computed once, from centre crops. A share is a percentage of the training images. For
each share, this percentage of every class is drawn at random, and at least one image per class, as in MSN (2204.07141).
Each draw is scored by k-NN (`evaluation.knn`) and by logistic regression (`evaluation.logistic`). The L2 penalty of the
logistic regression is fixed, so no further labels are needed to choose it.

The drawn images depend on the seed, the index of the draw, and the names and classes of the training images. They do
not depend on the number of processes or workers. Within a draw, a larger share contains all images of a smaller share.

Shape letters: N training images of this process, A training images of all processes, D features per image.
"""

import hashlib
import statistics
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from tessera.evaluation import logistic
from tessera.evaluation.command import LabelledData, LabelledSettings, Result, make_command
from tessera.evaluation.features import LabelledFeatures
from tessera.evaluation.knn import knn_accuracy
from tessera.runtime.collectives import all_gather, rank
from tessera.runtime.progress import track

TIME_LIMIT = "04:00:00"
"""Time limit of a SLURM job (`tessera slurm`)."""

KNN, LOGISTIC = "knn", "logistic_regression"
"""Keys of the two classifiers in the result file."""


class FewShotSettings(LabelledSettings, frozen=True):
    """k-NN and logistic regression on frozen features, with a share of the training labels."""

    shares: list[Annotated[float, Field(gt=0, le=100)]] = Field([1, 2, 5, 10, 100], min_length=1)
    """percentages of the training images to use, taken from each class; at least one image of each class is used"""
    draws: int = Field(3, ge=1)
    """number of random draws for each share below 100 %"""
    k: int = Field(20, ge=1)
    """number of neighbours of k-NN, but at most the number of drawn images in the largest class"""
    temperature: float = Field(0.07, gt=0)
    """temperature of the vote of k-NN; each neighbour has the weight exp(similarity / temperature)"""
    strength: float = Field(logistic.STRENGTH, gt=0)
    """weight s of the L2 penalty: logistic regression minimises the sum of the cross-entropy over the drawn images plus
    s / 2 * |W|^2; s is 1 / C of scikit-learn's LogisticRegression"""
    iterations: int = Field(1000, ge=1)
    """largest number of L-BFGS iterations of a logistic regression"""
    seed: int = Field(0, ge=0, lt=2**31)
    """seed of the draws"""


def places_in_class(keys: Sequence[str], labels: Tensor, seed: int, draw: int) -> tuple[Tensor, Tensor]:
    """Shuffle the images of each class. Call this function on all processes.

    The images are sorted by a hash of the seed, the draw and the name of the sample.

    Args:
        keys: names of this process's N images.
        labels: classes (N,) of these images.
        seed: seed of all draws.
        draw: index of the draw.

    Returns:
        For each image of this process, its index within its shuffled class (N,), and the number of images of this class
        over all processes (N,).
    """
    names = (f"{seed}/{draw}/{key}".encode("utf-8", "surrogateescape") for key in keys)
    hashes = [int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) - 2**63 for name in names]
    parts = all_gather(torch.stack([labels.cpu(), torch.tensor(hashes, dtype=torch.int64)], dim=1))
    classes, digests = torch.cat(parts).unbind(1)  # (A,)
    order = digests.argsort(stable=True)
    order = order[classes[order].argsort(stable=True)]  # class after class, shuffled within each class
    sizes = classes.bincount()
    first = sizes.cumsum(0) - sizes  # index of the first image of each class in `order`
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order)) - first[classes[order]]
    start = sum(len(part) for part in parts[: rank()])
    return places[start : start + len(keys)], sizes[labels.cpu()]


def drawn(places: Tensor, sizes: Tensor, share: float) -> Tensor:
    """Return a bool mask (N,) that selects the first `share` percent of the images of each class.

    The number of images of a class is rounded, and is at least 1. `places` and `sizes` are the return values of
    `places_in_class`.
    """
    return places < (sizes.double() * share / 100).round().clamp(min=1)


def few_shot(
    train: LabelledFeatures, val: LabelledFeatures, settings: FewShotSettings, device: torch.device | None = None
) -> list[dict[str, Any]]:
    """Return the accuracies for each share of the labels. Call this function on all processes.

    Args:
        train: this process's part of the training set, with keys.
        val: this process's part of the images that are scored.
        settings: settings of the command.
        device: device of the computation. None selects the device of the features.

    Raises:
        EvaluationError: a set is empty, a label is out of range, or a feature is not finite.
    """
    device = device or train.features.device
    inputs, targets = (logistic.normalised(part.features.to(device)) for part in (train, val))
    labels, answers = train.labels.to(device), val.labels.to(device)
    classes = int(torch.cat(all_gather(train.labels)).max()) + 1
    shuffled = [places_in_class(train.keys, train.labels, settings.seed, draw) for draw in range(settings.draws)]
    rows = []
    shares = [(share, 1 if share == 100 else settings.draws) for share in dict.fromkeys(settings.shares)]
    for share, draws in track(shares, "shares of the labels", total=len(shares), shown=rank() == 0):
        accuracies: dict[str, list[tuple[float, float]]] = {KNN: [], LOGISTIC: []}
        images, k, iterations = 0, 0, []
        for places, sizes in shuffled[:draws]:
            mask = drawn(places, sizes, share)
            of_class = torch.cat(all_gather(train.labels[mask])).bincount()
            # limit k, because some neighbours would always belong to other classes if k exceeded the size of a class
            images, k = int(of_class.sum()), min(settings.k, int(of_class.max()))
            bank = LabelledFeatures(train.features[mask], train.labels[mask])
            knn = knn_accuracy(bank, val, [k], settings.temperature, classes=classes, device=device)
            accuracies[KNN].append(knn[k])
            chosen = mask.to(device)
            classifier = logistic.fit(inputs[chosen], labels[chosen], classes, settings.strength, settings.iterations)
            accuracies[LOGISTIC].append(logistic.accuracy(classifier, targets, answers))
            iterations.append(classifier.iterations)
        row = {"share": share, "images": images, "draws": draws, "k": k, "iterations": iterations}
        rows.append(row | {name: summary(found) for name, found in accuracies.items()})
    return rows


def summary(accuracies: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the mean top-1 and top-5 accuracy over the draws, and the standard deviation and the list of the top-1
    accuracies.

    The standard deviation is that of a sample (divided by draws - 1). It is 0 for a single draw.

    Args:
        accuracies: top-1 and top-5 accuracy of each draw.
    """
    top1, top5 = zip(*accuracies, strict=True)
    deviation = statistics.stdev(top1) if len(top1) > 1 else 0.0
    return {
        "top1": statistics.fmean(top1),
        "top1_std": deviation,
        "top5": statistics.fmean(top5),
        "top1_of_draws": list(top1),
    }


def score(settings: FewShotSettings, data: LabelledData, accelerator: Accelerator) -> Result:
    """Return the accuracies for each share. `top1` is the accuracy of logistic regression for the smallest share."""
    rows = few_shot(data.train, data.val, settings, accelerator.device)
    if any(count >= settings.iterations for row in rows for count in row["iterations"]):
        accelerator.print("A logistic regression did not converge. Raise --iterations.")
    fewest = min(rows, key=lambda row: row["share"])
    entries = {
        "top1": fewest[LOGISTIC]["top1"],
        "top5": fewest[LOGISTIC]["top5"],
        "protocol": f"few-shot, logistic regression with {fewest['share']:g} % of the labels",
        "shares": rows,
    }
    cells = [
        [f"{row['share']:g} %", row["images"], row["draws"], row["k"], _cell(row[KNN]), _cell(row[LOGISTIC])]
        for row in rows
    ]
    return Result(entries, ["labels", "images", "draws", "k", "k-NN", "logistic regression"], cells)


def _cell(accuracy: dict[str, Any]) -> str:
    """Return the mean of the top-1 accuracy in percent, and its standard deviation if there are several draws."""
    mean = f"{100 * accuracy['top1']:.2f}"
    return f"{mean} ± {100 * accuracy['top1_std']:.2f} %" if len(accuracy["top1_of_draws"]) > 1 else f"{mean} %"


run, main = make_command("few_shot", FewShotSettings, score)
