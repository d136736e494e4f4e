"""Linear probe of frozen features, with DINO's protocol (2104.14294) and DINOv2's grid of classifiers (2304.07193).

    accelerate launch evaluation/linear_probe.py --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS

The grid has one linear classifier for each combination of learning rate and input. All classifiers are trained together
by SGD with momentum 0.9 and without weight decay. The learning rates fall to 0 along a cosine. Every epoch uses new
random crops (area 0.08 to 1) and flips. With `--no-augment`, the encoder runs only once over the centre crops, which
reduces its work by a factor of about the number of epochs.

Learning rate and input are chosen by their accuracy on a held-out part of `--train`, with classifiers that are not
trained on this part. The reported accuracy is that of a classifier with the chosen learning rate and input that is
trained on all of `--train`. `--val` is never used to choose. (DINO and DINOv2 report the best accuracy of all epochs or
classifiers on the test set, which is optimistic.) Published inputs:

    DINO ViT-S      --blocks 4
    DINO ViT-B      --blocks 1 --average_pool yes
    DINOv2          --blocks 1,4 --average_pool both --epochs 10 --head_batch_size 1024
    MAE             --blocks 1 --batch_norm

There are two differences from MAE. `--batch_norm` uses the mean and variance of the centre crops of the whole training
set, and MAE uses those of each batch of 16,384 images. The optimizer here is SGD, and MAE uses LARS.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from tessera.data.batch import ViewParameters
from tessera.data.collate import ViewShape
from tessera.data.crops import RandomCrop, RandomCropConfig
from tessera.encoders.base import Encoder
from tessera.evaluation.classes import open_labelled_pair
from tessera.evaluation.features import (
    EvaluationError,
    FeatureSettings,
    LabelledFeatures,
    check_finite,
    check_labels,
    extract,
    input_size,
    load_encoder,
    resize_size,
)
from tessera.evaluation.heads import Heads, HeadTraining, accuracy, normaliser, train_heads
from tessera.evaluation.results import Evaluation, check_output, report
from tessera.runtime import streams
from tessera.runtime.collectives import all_gather
from tessera.runtime.processes import exit_on_user_error, make_accelerator
from tessera.runtime.settings import parse

RATES = [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1]
"""Grid of learning rates in DINOv2."""


class ProbeSettings(FeatureSettings):
    """Measure the accuracy of linear classifiers on an encoder's frozen features."""

    train: str | list[str]
    """labelled SHARDS to train on"""
    val: str | list[str]
    """labelled test SHARDS; never used to choose hyperparameters"""
    blocks: list[int] = Field([1], min_length=1)
    """numbers of blocks to try; for each number n, the input is the concatenated pooled outputs of the last n blocks"""
    average_pool: Literal["no", "yes", "both"] = "no"
    """append the mean of the last block's tokens to the input; `both` tries inputs with and without the mean"""
    augment: bool = True
    """true: encode new random crops and flips in every epoch; false: encode the centre crops once"""
    batch_norm: bool = False
    """normalise each feature to mean 0 and variance 1"""
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
    output: str | None = None
    """JSON result file, which must not exist; default: a new file in OUTPUT/evaluation, or next to the encoder"""


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
    """Return a bool mask (N,) that is True for held-out samples, which are about the fraction `share` of all samples.

    The choice depends only on the name of each sample.
    """
    digests = (hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest() for key in keys)
    return torch.tensor([int.from_bytes(digest) < share * 2**64 for digest in digests], dtype=torch.bool)


class EpochCrop:
    """Random crop that is determined by the seed, the epoch and the index of the image."""

    packing = None

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.crop = RandomCrop(RandomCropConfig(size=size, scale=(0.08, 1.0)))
        self.views, self.seed, self.epoch = (ViewShape(1, size),), seed, epoch

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[ViewParameters]:
        """Draw a random crop for an image of `size` (H, W)."""
        return self.crop.draw(size, np.random.default_rng([self.seed, self.epoch, int(rng.integers(2**63))]))


def probe(
    train: LabelledFeatures,
    val: LabelledFeatures,
    settings: ProbeSettings,
    dim: int,
    accelerator: Accelerator | None,
    features_of_epoch: Callable[[int], LabelledFeatures] | None = None,
) -> dict[str, Any]:
    """Train all classifiers, choose one of them and return its accuracy on `val`. Call this function on all processes.

    Args:
        train: this process's part of the training set, including the held-out images.
        val: this process's part of the test set.
        settings: settings of the command.
        dim: width of the encoder's output.
        accelerator: accelerator of all processes. None selects a single process.
        features_of_epoch: function that returns `train` with the features of a given epoch. With None, every epoch uses
            the features in `train`.

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
    device = train.features.device if accelerator is None else accelerator.device
    final, choosing = (
        [Heads(one.columns, classes, settings.rates, settings.seed, device) for one in tried] for _ in range(2)
    )
    groups = [(final, torch.ones_like(everywhere))]
    if choose:
        groups.append((choosing, ~everywhere))
    progress = accelerator is not None and accelerator.is_main_process
    training = HeadTraining(settings.epochs, settings.head_batch_size, settings.seed, progress)
    counts = [len(labels) for labels in train_labels]
    train_heads(features_of_epoch or (lambda _: train), counts, groups, training)
    by_val = [accuracy(heads, val) for heads in final]
    kept = LabelledFeatures(train.features[held], train.labels[held])
    by_holdout = [accuracy(heads, kept)[:, 0] for heads in choosing] if choose else None
    return _chosen(tried, settings.rates, by_val, by_holdout) | {
        "protocol": "linear probe",
        "train_images": len(everywhere),
        "holdout_images": int(everywhere.sum()) if choose else 0,
        "val_images": sum(len(labels) for labels in val_labels),
        "classes": classes,
    }


def _chosen(
    tried: Sequence[HeadInput], rates: Sequence[float], by_val: list[Tensor], by_holdout: list[Tensor] | None
) -> dict[str, Any]:
    """Return the accuracies of all classifiers, and the classifier that is best on the held-out images."""
    rows = []
    for number, one in enumerate(tried):
        for rate, (top1, top5) in zip(rates, by_val[number].tolist(), strict=True):
            rows.append({"blocks": one.blocks, "average_pool": one.average_pool, "rate": rate})
            rows[-1] |= {"holdout_top1": None, "top1": top1, "top5": top5}
    if by_holdout is not None:
        for row, value in zip(rows, torch.cat(by_holdout).tolist(), strict=True):
            row["holdout_top1"] = value
    best = max(rows, key=lambda row: row["holdout_top1"] or 0.0)
    return {"top1": best["top1"], "top5": best["top5"], "chosen": best, "all": rows}


def run(settings: ProbeSettings) -> dict[str, Any]:
    """Compute the linear-probe accuracy, print the result and write it to a file.

    Return the result, or an empty dictionary on processes other than the main process.
    """
    accelerate = make_accelerator()
    check_output(settings.output)
    train_shards, val_shards = open_labelled_pair(settings.train, settings.val, settings.source, accelerate)
    encoder, file = load_encoder(settings)
    encoder.to(accelerate.device)
    size = input_size(encoder, settings.image_size)
    last_blocks = LastBlocks(max(settings.blocks), settings.average_pool != "no")
    extraction = replace(settings.extraction(), image_size=size, feature=last_blocks)
    train, val = (extract(encoder, shards, accelerate, extraction) for shards in (train_shards, val_shards))
    train_labels, val_labels = (torch.cat(all_gather(part.labels)) for part in (train, val))
    check_labels(train_labels, val_labels, train_shards.classes)
    check_finite(train.features, val.features)
    normalise = normaliser(train.features) if settings.batch_norm else lambda features: features

    def features_of_epoch(epoch: int) -> LabelledFeatures:
        augmented = replace(extraction, transform=EpochCrop(size, settings.seed, epoch), progress=False)
        found = extract(encoder, train_shards, accelerate, augmented)
        return found._replace(features=normalise(found.features))

    train, val = (part._replace(features=normalise(part.features)) for part in (train, val))
    result = probe(train, val, settings, encoder.dim, accelerate, features_of_epoch if settings.augment else None)
    if not accelerate.is_main_process:
        return {}
    facts = {"image_size": size, "resize": resize_size(size, settings.resize)}
    result["checkpoint"] = str(file or settings.checkpoint)
    result["settings"] = settings.model_dump(mode="json") | facts | {"processes": accelerate.num_processes}
    return show(result, settings, file)


def show(result: dict[str, Any], settings: ProbeSettings, file: Path | None) -> dict[str, Any]:
    """Print the result of the encoder in `file`, write it to a file, and return what the file holds."""
    columns = ["blocks", "average_pool", "rate", "holdout_top1", "top1", "top5"]
    rows = []
    for row in result["all"]:
        cells = [f"{row[column]:g}" if column == "rate" else row[column] for column in columns]
        rows.append([*cells, "<- chosen" if row is result["chosen"] else ""])
    if result["chosen"]["rate"] in (min(settings.rates), max(settings.rates)):
        print("The chosen rate is the smallest or largest of --rates. Other rates, or --batch_norm, may be better.")
    evaluation = Evaluation("linear_probe", file, settings.val, settings.output)
    return report(evaluation, result, ["blocks", "mean too", "rate", "held out", "top-1", "top-5", ""], rows)


if __name__ == "__main__":
    streams.protect()
    with exit_on_user_error():
        run(parse(ProbeSettings))
