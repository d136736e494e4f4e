"""Which images the evaluation of a run gets right, image by image."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from tessera.evaluation import logistic
from tessera.evaluation.command import labelled_data, open_subject
from tessera.evaluation.knn import KNNSettings, knn_ranks
from tessera.evaluation.splits import Flags
from tessera.evaluation.view_retrieval import ViewRetrievalSettings, crop_features, own_crop_found
from tessera.pretrain.config import RunConfig
from tessera.runtime.collectives import all_gather
from tessera.runtime.settings import validate

PROBE, VIEWS = "linear probe", "view retrieval"
Splits = tuple[Any, Any, Flags]
"""Labelled SHARDS of the k-NN bank, labelled SHARDS that are scored, and the flags of both for messages."""


class Outcomes(NamedTuple):
    """Which images an encoder gets right."""

    right: Tensor
    """1 for an image that it gets right, else 0, over the images of all processes: (M,) float64."""
    images: list[str]
    """Hashes of the images that are scored, and of those of the k-NN bank."""


def correct(
    checkpoint: str | Path, shards: Splits, config: RunConfig, accelerator: Accelerator, *, own_size: bool = False
) -> dict[str, Outcomes]:
    """Return which images k-NN and the linear probe classify correctly, by the name of the classifier.

    The classifiers are those of the evaluation during a run, and so is the size of the images. With `own_size`, it is
    that of the encoder. Collective.

    Raises:
        ShardError: the shards cannot be read, or a sample has no label.
        EvaluationError: the encoder cannot be used, the sets overlap, or a label is invalid.
    """
    own, (train, val, names) = config.evaluation, shards
    given = _settings(checkpoint, config, own_size=own_size) | {"train": train, "val": val, "k": [own.k]}
    settings = validate(KNNSettings, given)
    data = labelled_data(settings, accelerator, names)
    ranks = {f"{own.k}-NN": knn_ranks(data.train, data.val, [own.k], device=accelerator.device)[own.k]}
    if own.linear_iterations:
        places = logistic.probe_ranks(data.train, data.val, own.linear_iterations, accelerator.device)
        ranks[PROBE] = torch.cat(all_gather(places))
    images = [data.val_shards.samples_hash(), data.train_shards.samples_hash()]
    return {name: Outcomes((places < 1).double(), images) for name, places in ranks.items()}


def views_found(
    checkpoint: str | Path, data: Any, config: RunConfig, accelerator: Accelerator, *, own_size: bool = False
) -> dict[str, Outcomes]:
    """Return which images of the SHARDS `data` find their own crop (`evaluation.view_retrieval`).

    Collective.

    Raises:
        ShardError: the shards cannot be read.
        EvaluationError: the encoder cannot be used.
    """
    images = config.evaluation.view_images
    given = _settings(checkpoint, config, own_size=own_size) | {"data": data, "images": images}
    settings = validate(ViewRetrievalSettings, given)
    subject = open_subject(settings, accelerator)
    options = settings.options() | {"images": images, "progress": False}
    features = crop_features(subject.encoder, subject.val_shards, accelerator, **options)
    found = own_crop_found(features, accelerator.device).double().cpu()
    return {VIEWS: Outcomes(found, [subject.val_shards.samples_hash()])}


def _settings(checkpoint: str | Path, config: RunConfig, *, own_size: bool) -> dict[str, Any]:
    """Return the settings that evaluations of an encoder share with the run."""
    form = config.data
    found = {"image": form.image, "label": form.label, "stages": form.stages, "source": config.source}
    if not own_size:
        found["image_size"] = config.encoder.model_dump()["image_size"]
    own = {"checkpoint": str(checkpoint), "batch_size": config.evaluation.batch_size, "workers": config.workers}
    return own | found
