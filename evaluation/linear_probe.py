"""Linear probe of frozen features: DINO's protocol (2104.14294) over DINOv2's grid of rates and inputs (2304.07193).

    accelerate launch evaluation/linear_probe.py --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS

Linear classifiers, one for each rate and input, are trained together by SGD with momentum 0.9, without weight decay,
the rate falling to 0 along a cosine. Every epoch sees other random crops (area 0.08 to 1) and flips; with
`--no-augment` the encoder runs only once over the centre crops, which is faster by about the number of epochs.

Rate and input are chosen on a part of `--train` that is held out, by classifiers that never saw it. The reported
accuracy is that of a classifier that was trained with them on all of `--train`; `--val` chooses nothing. (DINO and
DINOv2 report the best of all epochs or classifiers on the reported set itself, which flatters.) Published inputs:

    DINO ViT-S      --blocks 4
    DINO ViT-B      --blocks 1 --average_pool yes
    DINOv2          --blocks 1,4 --average_pool both --epochs 10 --head_batch_size 1024
    MAE             --blocks 1 --batch_norm

`--batch_norm` takes its mean and variance from the centre crops of the whole training set, where MAE takes those of a
batch of 16,384, and the optimizer stays SGD where MAE has LARS.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from data.batch import ViewParameters
from data.collate import ViewShape
from data.crops import RandomCrop, RandomCropConfig
from encoders.base import Encoder
from evaluation.features import (
    EvaluationError,
    FeatureSettings,
    check_disjoint,
    check_labels,
    extract,
    input_size,
    load_encoder,
    open_labelled,
    resize_size,
)
from evaluation.heads import Heads, Part, normaliser, score, train_heads
from evaluation.results import report, result_path
from runtime.collectives import all_gather, all_reduce_sum
from runtime.processes import exit_on_user_error, make_accelerator
from runtime.settings import parse

RATES = [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1]  # DINOv2's


class ProbeSettings(FeatureSettings):
    """Accuracy of linear classifiers on an encoder's frozen features."""

    train: str | list[str]
    """labelled SHARDS to train on"""
    val: str | list[str]
    """labelled SHARDS that are scored, and choose nothing"""
    blocks: list[int] = Field([1], min_length=1)
    """inputs to try: the pooled outputs (class tokens) of this many last blocks, side by side"""
    average_pool: Literal["no", "yes", "both"] = "no"
    """whether the mean of the last block's tokens is put beside them; both: try either"""
    augment: bool = True
    """encode new random crops and flips in every epoch; without, centre crops once"""
    batch_norm: bool = False
    """bring each feature to mean 0 and variance 1 first"""
    rates: list[float] = Field(RATES, min_length=1)
    """learning rates to try, at 256 images a step: scaled by head_batch_size / 256"""
    epochs: int = Field(100, ge=1)
    """passes over the training images"""
    head_batch_size: int = Field(256, ge=1)
    """images of one step of the classifiers, over all processes"""
    holdout: float = Field(0.1, ge=0, lt=1)
    """share of the training images that choose rate and input"""
    seed: int = Field(0, ge=0, lt=2**31)
    """initial weights and order of the images"""
    output: str | None = None
    """JSON file; without it, evaluation/linear_probe.json in the run folder or beside the encoder"""


@dataclass(frozen=True)
class Input:
    """What a classifier sees: some neighbouring columns of the kept features."""

    blocks: int
    average_pool: bool
    columns: slice


class Take:
    """The features that are kept of an image: the pooled outputs of the last `blocks` blocks, the last one last, then
    with `average` the mean of the last tokens. (B, 3, H, W) -> (B, (blocks + average) * dim)."""

    def __init__(self, blocks: int, average: bool) -> None:
        self.blocks, self.average = blocks, average

    def __call__(self, encoder: Encoder, images: Tensor) -> Tensor:
        found = [encoder(images)] if self.blocks == 1 else encoder.intermediate(images, self.blocks)
        parts = [features.pooled for features in found]
        if self.average:
            if found[-1].tokens.shape[1] != parts[-1].shape[1]:
                raise ValueError("tokens and pooled output differ in width: use --average_pool no")
            parts.append(found[-1].tokens.unflatten(0, (len(images), -1)).mean(1))  # (T, D) -> (B, D)
        return torch.cat([part.float() for part in parts], dim=1)


def inputs(blocks: Sequence[int], average_pool: str, dim: int) -> list[Input]:
    """All inputs to try, as columns of what `Take(max(blocks), ...)` keeps.

    Raises:
        EvaluationError: less than one block.
    """
    if min(blocks) < 1:
        raise EvaluationError(f"--blocks must be at least 1, not {min(blocks)}")
    end = max(blocks) * dim
    averages = {"no": [False], "yes": [True], "both": [False, True]}[average_pool]
    return [Input(n, avg, slice(end - n * dim, end + avg * dim)) for n in dict.fromkeys(blocks) for avg in averages]


def held_out(keys: Sequence[str], share: float) -> Tensor:
    """Which samples choose: (N,) bool, a function of the name of each sample alone."""
    digests = (hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest() for key in keys)
    return torch.tensor([int.from_bytes(digest) < share * 2**64 for digest in digests], dtype=torch.bool)


class EpochCrop:
    """The random crop of an image in one epoch, a function of seed, epoch and place of the image."""

    packing = None

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.crop = RandomCrop(RandomCropConfig(size=size, scale=(0.08, 1.0)))
        self.views, self.seed, self.epoch = (ViewShape(1, size),), seed, epoch

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[ViewParameters]:
        """From the `size` (H, W) of an image."""
        return self.crop.draw(size, np.random.default_rng([self.seed, self.epoch, int(rng.integers(2**63))]))


def probe(
    train: Part,
    keys: Sequence[str],
    val: Part,
    settings: ProbeSettings,
    dim: int,
    accelerator: Accelerator | None,
    part_of: Callable[[int], Part] | None = None,
) -> dict[str, Any]:
    """Trains, chooses and scores; the result without what the command adds.

    Args:
        train: what is held out, and without `part_of` what is trained on.
        keys: names of the samples of `train`.
        val: what is scored.
        dim: width of the encoder's outputs.
        part_of: `train` with the features of an epoch.

    Raises:
        EvaluationError: no images to choose by, or none to train on.
    """
    tried = inputs(settings.blocks, settings.average_pool, dim)
    choose = len(tried) * len(settings.rates) > 1
    held = held_out(keys, settings.holdout)
    everywhere = torch.cat(all_gather(held))  # (all images of train,)
    if choose and not 0 < int(everywhere.sum()) < len(everywhere):
        raise EvaluationError(
            f"--holdout {settings.holdout} holds out {int(everywhere.sum())} of {len(everywhere)} training images, but "
            "some must choose the rate and some must train: change it, or give one of --rates and one input"
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
    train_heads(
        part_of or (lambda _: train),
        [len(labels) for labels in train_labels],
        groups,
        epochs=settings.epochs,
        batch_size=settings.head_batch_size,
        seed=settings.seed,
        accelerator=accelerator,
        progress=accelerator is not None and accelerator.is_main_process,
    )
    by_val = [score(heads, val, accelerator) for heads in final]
    kept = Part(train.features[held], train.labels[held])
    by_holdout = [score(heads, kept, accelerator)[:, 0] for heads in choosing] if choose else None
    return _chosen(tried, settings.rates, by_val, by_holdout) | {
        "protocol": "linear probe",
        "train_images": len(everywhere),
        "holdout_images": int(everywhere.sum()) if choose else 0,
        "val_images": sum(len(labels) for labels in val_labels),
        "classes": classes,
    }


def _chosen(
    tried: Sequence[Input], rates: Sequence[float], by_val: list[Tensor], by_holdout: list[Tensor] | None
) -> dict[str, Any]:
    """All classifiers with their accuracy, and the one that is best on what was held out."""
    rows = []
    for number, one in enumerate(tried):
        for rate, (top1, top5) in zip(rates, by_val[number].tolist(), strict=True):
            rows.append({"blocks": one.blocks, "average_pool": one.average_pool, "rate": rate})
            rows[-1] |= {"holdout_top1": None, "top1": top1, "top5": top5}
    if by_holdout is not None:
        for row, accuracy in zip(rows, torch.cat(by_holdout).tolist(), strict=True):
            row["holdout_top1"] = accuracy
    best = max(rows, key=lambda row: row["holdout_top1"] or 0.0)
    return {"top1": best["top1"], "top5": best["top5"], "chosen": best, "all": rows}


def run(settings: ProbeSettings) -> None:
    """The command."""
    accelerate = make_accelerator()
    check_disjoint(settings.train, settings.val)
    train_shards = open_labelled(settings.train, settings.source, accelerate)
    val_shards = open_labelled(settings.val, settings.source, accelerate)
    encoder, file = load_encoder(settings.checkpoint, settings.image_size)
    encoder.to(accelerate.device)
    size = input_size(encoder, settings.image_size)
    options: dict[str, Any] = settings.extraction_options()
    options |= {"image_size": size, "take": Take(max(settings.blocks), settings.average_pool != "no")}
    keys: list[str] = []
    train, train_labels = extract(encoder, train_shards, accelerator=accelerate, keys=keys, **options)
    val, val_labels = extract(encoder, val_shards, accelerator=accelerate, **options)
    check_labels(*(torch.cat(all_gather(labels)) for labels in (train_labels, val_labels)))
    broken = (~train.isfinite()).any() | (~val.isfinite()).any()
    if all_reduce_sum(broken.to(torch.int64)):
        raise EvaluationError("features that are not finite numbers: the encoder has diverged, or try --precision fp32")
    normalise = normaliser(train, accelerate) if settings.batch_norm else lambda features: features

    def part_of(epoch: int) -> Part:
        crop = EpochCrop(size, settings.seed, epoch)
        features, labels = extract(
            encoder, train_shards, accelerator=accelerate, transform=crop, progress=False, **options
        )
        return Part(normalise(features), labels)

    result = probe(
        Part(normalise(train), train_labels),
        keys,
        Part(normalise(val), val_labels),
        settings,
        encoder.dim,
        accelerate,
        part_of if settings.augment else None,
    )
    if not accelerate.is_main_process:
        return
    result |= {
        "checkpoint": str(file or settings.checkpoint),
        "settings": settings.model_dump(mode="json")
        | {"image_size": size, "resize": resize_size(size, settings.resize), "processes": accelerate.num_processes},
    }
    path = Path(settings.output) if settings.output else result_path(file, "linear_probe")
    columns = ["blocks", "average_pool", "rate", "holdout_top1", "top1", "top5"]
    rows = [
        [f"{row[c]:g}" if c == "rate" else row[c] for c in columns] + ["<- chosen" * (row is result["chosen"])]
        for row in result["all"]
    ]
    if result["chosen"]["rate"] in (min(settings.rates), max(settings.rates)):
        print("the chosen rate is an end of the grid: other --rates, or --batch_norm, may do better")
    report(path, result, ["blocks", "mean too", "rate", "held out", "top-1", "top-5", ""], rows)


if __name__ == "__main__":
    with exit_on_user_error():
        run(parse(ProbeSettings))
