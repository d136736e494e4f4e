"""Features of labelled images for training and for scoring, with the checks that every evaluation on both needs.

Shape letters: N training images of this process, M scored images of this process, D features per image.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from tessera.data.shards import Shards
from tessera.encoders.base import Encoder
from tessera.evaluation.classes import open_labelled_pair
from tessera.evaluation.features import (
    PIXELS,
    FeatureSettings,
    LabelledFeatures,
    check_finite,
    check_labels,
    extract,
    input_size,
    load_encoder,
    open_labelled,
    resize_size,
)
from tessera.runtime.collectives import all_gather, all_reduce_sum


class TrainAndVal(NamedTuple):
    """Features of a training set and of a set that is scored, and the encoder that computed them."""

    train: LabelledFeatures
    """This process's part of the training set."""
    val: LabelledFeatures
    """This process's part of the set that is scored. Without a second set, `train` itself."""
    encoder: Encoder
    file: Path | None
    """File of the encoder, or None for `--checkpoint pixels`."""


def labelled_features(
    settings: FeatureSettings, train: Shards, val: Shards | None, accelerator: Accelerator
) -> TrainAndVal:
    """Compute the features of the labelled shards `train` and `val`. Call this function on all processes.

    From the features of `--checkpoint pixels`, the mean training image is subtracted. Without this subtraction, all
    features point in nearly the same direction.

    Raises:
        ShardError: the shards cannot be read, or a sample has no label.
        EvaluationError: the encoder cannot be loaded or used, the sets overlap, or a label or a feature is invalid.
    """
    if val is None:
        opened = [open_labelled(train, settings.source, accelerator)]
    else:
        opened = open_labelled_pair(train, val, settings.source, accelerator)
    encoder, file = load_encoder(settings)
    encoder.to(accelerator.device)
    parts = [extract(encoder, shards, accelerator, settings.extraction()) for shards in opened]
    labels, targets = (torch.cat(all_gather(part.labels)) for part in (parts[0], parts[-1]))
    check_labels(labels, targets, opened[0].classes)
    check_finite(parts[0].features, parts[-1].features)
    if settings.checkpoint == PIXELS:
        centred = subtract_mean(*(part.features for part in (parts[0], parts[-1])))
        parts = [part._replace(features=features) for part, features in zip(parts, centred, strict=False)]
    return TrainAndVal(parts[0], parts[-1], encoder, file)


def subtract_mean(train: Tensor, val: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the mean of the training features of all processes from both sets of features: (N, D), (M, D)."""
    count = all_reduce_sum(torch.tensor(len(train), dtype=torch.float64))
    mean = all_reduce_sum(train.sum(0, dtype=torch.float64)) / count  # (D,)
    return train - mean.float(), val - mean.float()


def described(settings: FeatureSettings, found: TrainAndVal, accelerator: Accelerator) -> dict[str, Any]:
    """Return the entries that describe an evaluation in its result file: numbers of images and classes, and settings.

    Call this function on all processes.
    """
    labels, targets = (torch.cat(all_gather(part.labels)) for part in (found.train, found.val))
    size = input_size(found.encoder, settings.image_size)
    facts = {"image_size": size, "resize": resize_size(size, settings.resize), "processes": accelerator.num_processes}
    return {
        "checkpoint": str(found.file or settings.checkpoint),
        "train_images": len(labels),
        "val_images": len(targets),
        "classes": int(labels.max()) + 1,
        "settings": settings.model_dump(mode="json") | facts,
    }


@contextmanager
def full_float32() -> Iterator[None]:
    """Disable TF32 in matrix products within a `with` block, because its low precision would change the results."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
