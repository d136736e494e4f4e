"""Linear probe of frozen features, with DINO's protocol (2104.14294) and DINOv2's grid of classifiers (2304.07193).

    accelerate launch evaluation/linear_probe.py --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS

The grid has one linear classifier for each combination of learning rate and input. All classifiers are trained together
by SGD with momentum 0.9 and without weight decay. The learning rates fall to 0 along a cosine. Every epoch uses new
random crops (area 0.08 to 1) and flips. With `--no-augment`, the encoder runs only once, over the centre crops, instead
of once per epoch.

Learning rate and input are chosen by their accuracy on a held-out part of `--train`, with classifiers that are not
trained on this part; of equal accuracies, the one with the lowest cross-entropy there wins. A second classifier with
the chosen learning rate and input is trained on all of `--train`, and its accuracy is reported. `--val` is never used
to choose. (DINO and DINOv2 report the best accuracy of all epochs or classifiers on the test set, which is optimistic.)
The flags for published protocols are:

    DINO ViT-S      --blocks 4
    DINO ViT-B      --blocks 1 --average_pool yes
    DINOv2          --blocks 1,4 --average_pool both --epochs 10 --head_batch_size 1024
    MAE             --blocks 1 --batch_norm

There are two differences from MAE. `--batch_norm` uses the mean and variance over the centre crops of all training
images, whereas MAE uses those of each batch of 16,384 images. The optimizer here is SGD, whereas MAE uses LARS.

The result does not depend on the number of processes.

Shape letters: N images of this process, b of them in one step, D features per image, R learning rates, C classes.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from tessera.data.batch import ViewParameters
from tessera.data.collate import ViewShape
from tessera.data.crops import RandomCrop, RandomCropConfig
from tessera.encoders.base import Encoder
from tessera.evaluation.accuracy import true_class_rank
from tessera.evaluation.command import LabelledData, LabelledSettings, Result, make_command
from tessera.evaluation.features import EvaluationError, LabelledFeatures, extract, input_size, normaliser
from tessera.runtime.collectives import all_gather, all_reduce_sum, rank
from tessera.runtime.progress import track

RATES = [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1]
"""Grid of learning rates in DINOv2."""
MOMENTUM = 0.9


class ProbeSettings(LabelledSettings, frozen=True):
    """Measure the accuracy of linear classifiers on an encoder's frozen features."""

    centre_pixels: ClassVar[bool] = False

    blocks: list[int] = Field([1], min_length=1)
    """numbers of blocks to try; for each number n, the input is the concatenated pooled outputs of the last n blocks"""
    average_pool: Literal["no", "yes", "both"] = "no"
    """append the mean of the last block's tokens to the input; `both` tries inputs with and without the mean"""
    augment: bool = True
    """true: encode new random crops and flips in every epoch; false: encode the centre crops once"""
    batch_norm: bool = False
    """normalise each feature to mean 0 and variance 1 over the training images"""
    rates: list[float] = Field(RATES, min_length=1)
    """learning rates to try; each learning rate is multiplied by head_batch_size / 256"""
    epochs: int = Field(100, ge=1)
    """number of passes over the training images"""
    head_batch_size: int = Field(256, ge=1)
    """number of images in a training step of the classifiers, over all processes"""
    holdout: float = Field(0.1, ge=0, lt=1)
    """share of the training images that is held out to choose the learning rate and the input"""
    seed: int = Field(0, ge=0, lt=2**31)
    """seed of the initial weights and of the order of the images"""

    def options(self) -> dict[str, Any]:
        """Return the settings as arguments for `extract`. The features contain the inputs of all classifiers."""
        return super().options() | {"feature": LastBlocks(max(self.blocks), self.average_pool != "no")}


@dataclass(frozen=True)
class HeadInput:
    """Input of a classifier: a range of columns of the extracted features."""

    blocks: int
    """Number of last blocks whose pooled outputs are part of the input."""
    average_pool: bool
    """True if the mean of the last block's tokens is part of the input."""
    columns: slice
    """Columns of the extracted features that form the input."""


class LastBlocks:
    """Function that computes features from the last blocks: (B, C, H, W) -> (B, (blocks + average) * dim).

    The features are the pooled outputs of the last `blocks` blocks in order of depth, followed by the mean of the last
    block's tokens if `average` is true.
    """

    def __init__(self, blocks: int, average: bool) -> None:
        self.blocks, self.average = blocks, average

    def __call__(self, encoder: Encoder, images: Tensor) -> Tensor:
        found = [encoder(images)] if self.blocks == 1 else encoder.intermediate(images, self.blocks)
        parts = [features.pooled for features in found]
        if self.average:
            if found[-1].tokens.shape[1] != parts[-1].shape[1]:
                raise ValueError("The tokens and the pooled output differ in width. Use --average_pool no.")
            parts.append(found[-1].tokens.unflatten(0, (len(images), -1)).mean(1))  # (T, D) -> (B, D)
        return torch.cat([part.float() for part in parts], dim=1)


def head_inputs(blocks: Sequence[int], average_pool: str, dim: int) -> list[HeadInput]:
    """Return all inputs to try. Their columns refer to the features that `LastBlocks(max(blocks), ...)` computes.

    Raises:
        EvaluationError: a number of blocks is less than 1.
    """
    if min(blocks) < 1:
        raise EvaluationError(f"--blocks is {min(blocks)}. It must be at least 1.")
    end = max(blocks) * dim
    averages = {"no": [False], "yes": [True], "both": [False, True]}[average_pool]
    return [
        HeadInput(number, average, slice(end - number * dim, end + average * dim))
        for number in dict.fromkeys(blocks)
        for average in averages
    ]


def held_out(keys: Sequence[str], share: float) -> Tensor:
    """Return a bool mask (N,) of the held-out samples. Their fraction of all samples is about `share`.

    The choice depends only on the name of each sample.
    """
    digests = (hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest() for key in keys)
    return torch.tensor([int.from_bytes(digest) < share * 2**64 for digest in digests], dtype=torch.bool)


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
            factor: multiplier of the learning rates.
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
    settings: ProbeSettings,
) -> None:
    """Train groups of heads, each group on the images that its mask selects. Call this function on all processes.

    The images of a step do not depend on the number of processes. Each process computes the gradient for its own images
    of the step, and the gradients are summed over the processes. The learning rates fall to 0 along a cosine.

    Args:
        features_of_epoch: function that takes the index of an epoch and returns the features and labels of this
            process's images. The tensors may be on any device.
        counts: number of images of each process.
        groups: pairs of a list of heads and a bool mask over the images of all processes. These heads are trained on
            the images that the mask selects.
        settings: settings of the command. Only `epochs`, `head_batch_size` and `seed` are used.
    """
    before = sum(counts[: rank()])
    images, start, end = sum(counts), before, before + counts[rank()]
    steps_per_epoch = math.ceil(images / settings.head_batch_size)
    steps = settings.epochs * steps_per_epoch
    epochs = range(settings.epochs)
    for epoch in track(epochs, "epochs of the classifiers", total=settings.epochs, shown=rank() == 0):
        part = features_of_epoch(epoch)
        batches = epoch_order(images, epoch, settings.seed).split(settings.head_batch_size)
        for step, batch in enumerate(batches, epoch * steps_per_epoch):
            factor = settings.head_batch_size / 256 * 0.5 * (1 + math.cos(math.pi * step / steps))
            own = batch[(batch >= start) & (batch < end)]
            for heads_of_group, mask in groups:
                if not mask[batch].any():
                    continue
                seen, count = own[mask[own]] - start, int(mask[batch].sum())
                for heads in heads_of_group:
                    x, labels = (t[seen].to(heads.weight.device) for t in (part.features, part.labels))
                    heads.step(x, labels, count, factor)


@torch.no_grad()
def evaluate(heads: Heads, part: LabelledFeatures, chunk: int = 1024) -> Tensor:
    """Return the top-1 and top-5 accuracy (0 to 1) and the mean cross-entropy of each classifier over all processes:
    (R, 3) float64. The cross-entropy of a classifier that diverged is infinite.
    """
    device = heads.weight.device
    total = torch.zeros(len(heads.rates), 3, dtype=torch.float64)
    for features, labels in zip(part.features.split(chunk), part.labels.split(chunk), strict=True):
        logits = heads.logits(features.to(device))  # (R, b, C)
        flat, answers = logits.flatten(0, 1), labels.to(device).repeat(len(logits))  # (R * b, C), (R * b,)
        place, loss = true_class_rank(flat, answers), F.cross_entropy(flat, answers, reduction="none")
        total += torch.stack([place < 1, place < 5, loss]).unflatten(1, (len(logits), -1)).sum(2).T.cpu()  # (R, 3)
    found = all_reduce_sum(total) / all_reduce_sum(torch.tensor(len(part.labels)))
    return found.nan_to_num(nan=math.inf)


def chosen_row(rows: Sequence[dict[str, Any]], losses: Sequence[float]) -> dict[str, Any]:
    """Return the row of the classifier with the highest accuracy on the held-out images. On few images, several are
    equal, and the one with the lowest cross-entropy there is returned: the smallest learning rate of them would be that
    of the least trained classifier.
    """
    return max(zip(rows, losses, strict=True), key=lambda pair: (pair[0]["holdout_top1"] or 0.0, -pair[1]))[0]


def probe(
    train: LabelledFeatures,
    val: LabelledFeatures,
    settings: ProbeSettings,
    dim: int,
    *,
    device: torch.device | None = None,
    features_of_epoch: Callable[[int], LabelledFeatures] | None = None,
) -> dict[str, Any]:
    """Train all classifiers, and choose the one that is best on the held-out images. Call this function on all
    processes.

    Return the accuracies of the chosen classifier and of all classifiers on `val`, as entries of the result file.

    Args:
        train: this process's part of the training set, including the held-out images.
        val: this process's part of the test set.
        settings: settings of the command.
        dim: width of the encoder's output.
        device: device of the computation. None selects the device of the features.
        features_of_epoch: function that takes the index of an epoch, and returns the images of `train` with new
            features for this epoch. None selects the features in `train` for every epoch.

    Raises:
        EvaluationError: there are several classifiers to choose from, and either no training image or every training
            image is held out.
    """
    tried = head_inputs(settings.blocks, settings.average_pool, dim)
    choose = len(tried) * len(settings.rates) > 1
    held = held_out(train.keys, settings.holdout)
    everywhere = torch.cat(all_gather(held))  # (training images of all processes,)
    if choose and not 0 < int(everywhere.sum()) < len(everywhere):
        raise EvaluationError(
            f"--holdout {settings.holdout} holds out {int(everywhere.sum())} of {len(everywhere)} training images. "
            "Some images must be held out, and some must remain. Change --holdout, or give only one input and one "
            "learning rate."
        )
    train_labels, val_labels = (all_gather(part.labels) for part in (train, val))
    classes = int(torch.cat([*train_labels, *val_labels]).max()) + 1
    device = device or train.features.device
    final, choosing = (
        [Heads(one.columns, classes, settings.rates, settings.seed, device) for one in tried] for _ in range(2)
    )
    groups = [(final, torch.ones_like(everywhere))]
    if choose:
        groups.append((choosing, ~everywhere))
    counts = [len(labels) for labels in train_labels]
    train_heads(features_of_epoch or (lambda _: train), counts, groups, settings)
    kept = LabelledFeatures(train.features[held], train.labels[held])
    rows, losses = [], list[float]()
    for one, heads, judged in zip(tried, final, choosing, strict=True):
        by_holdout = evaluate(judged, kept).tolist() if choose else [(None, None, 0.0)] * len(settings.rates)
        by_val = evaluate(heads, val).tolist()
        for rate, (holdout_top1, _, loss), (top1, top5, _) in zip(settings.rates, by_holdout, by_val, strict=True):
            rows.append({"blocks": one.blocks, "average_pool": one.average_pool, "rate": rate})
            rows[-1] |= {"holdout_top1": holdout_top1, "top1": top1, "top5": top5}
            losses.append(loss)
    best = chosen_row(rows, losses)
    return {
        "top1": best["top1"],
        "top5": best["top5"],
        "chosen": best,
        "all": rows,
        "protocol": "linear probe",
        "holdout_images": int(everywhere.sum()) if choose else 0,
    }


class EpochCrop:
    """Random crop that is determined by the seed, the epoch and the index of the image."""

    packing = None

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.crop = RandomCrop(RandomCropConfig(size=size, scale=(0.08, 1.0)))
        self.views, self.seed, self.epoch = (ViewShape(1, size),), seed, epoch

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[ViewParameters]:
        """Draw a random crop for an image of `size` (H, W)."""
        return self.crop.draw(size, np.random.default_rng([self.seed, self.epoch, int(rng.integers(2**63))]))


def score(settings: ProbeSettings, data: LabelledData, accelerator: Accelerator) -> Result:
    """Return the accuracies of the chosen classifier and of all classifiers."""
    size = input_size(data.encoder, settings.image_size)
    normalise = normaliser(data.train.features) if settings.batch_norm else lambda features: features

    def features_of_epoch(epoch: int) -> LabelledFeatures:
        options = settings.options() | {"transform": EpochCrop(size, settings.seed, epoch), "progress": False}
        found = extract(data.encoder, data.train_shards, accelerator, **options)
        return found._replace(features=normalise(found.features))

    train, val = (part._replace(features=normalise(part.features)) for part in (data.train, data.val))
    augmented = features_of_epoch if settings.augment else None
    entries = probe(train, val, settings, data.encoder.dim, device=accelerator.device, features_of_epoch=augmented)
    columns = ["blocks", "average_pool", "rate", "holdout_top1", "top1", "top5"]
    rows = []
    for row in entries["all"]:
        cells = [f"{row[column]:g}" if column == "rate" else row[column] for column in columns]
        rows.append([*cells, "<- chosen" if row is entries["chosen"] else ""])
    if entries["chosen"]["rate"] in (min(settings.rates), max(settings.rates)):
        otherwise = "" if settings.batch_norm else ", or --batch_norm"
        accelerator.print(
            f"The chosen learning rate is the smallest or largest of --rates. Try rates beyond it{otherwise}."
        )
    return Result(entries, ["blocks", "average pool", "rate", "held out", "top-1", "top-5", ""], rows)


run, main = make_command("linear_probe", ProbeSettings, score)


if __name__ == "__main__":
    main()
