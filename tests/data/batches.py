"""The loader with one keyword per setting, and other helpers for tests of batches."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch

from tessera.data.batch import Batch, ColorParameters, SampleParameters
from tessera.data.batches import Batches
from tessera.data.collate import CropBuilder, PackBuilder, RawBuilder, Transform, collate
from tessera.data.loader import LoaderConfig, Reading, StreamConfig
from tessera.data.loader import evaluation_batches as _evaluation_batches
from tessera.data.loader import training_batches as _training_batches
from tessera.data.sampler import BUFFER, STREAMS, BatchSampler
from tessera.data.shards import DEFAULT, Shards, SourceConfig, WeightedShards
from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.encoders.images import PackedImages


def training_batches(
    shards: WeightedShards,
    transform: Transform,
    *,
    batch_size: int,
    seed: int,
    steps: int,
    first_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    accumulation: int = 1,
    workers: int = 0,
    streams: int = STREAMS,
    block: int | None = None,
    window: int = BUFFER,
    window_gb: float | None = None,
    source: SourceConfig = DEFAULT,
    config: LoaderConfig = LoaderConfig(),  # noqa: B008 - frozen
    preprocessing: Preprocessing = IMAGENET,
    classes: int | None = None,
) -> Batches:
    """Batches of `data.loader.training_batches`."""
    return _training_batches(
        shards,
        transform,
        BatchSampler(batch_size, first_step, steps, rank, world_size, accumulation, streams),
        seed=seed,
        stream=StreamConfig(block=block, window=window, window_gb=window_gb),
        reading=Reading(workers, config, source, preprocessing, classes),
    )


def evaluation_batches(
    shards: Shards,
    transform: Transform,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    labels: bool = True,
    source: SourceConfig = DEFAULT,
    config: LoaderConfig = LoaderConfig(),  # noqa: B008 - frozen
    preprocessing: Preprocessing = IMAGENET,
) -> Batches:
    """Batches of `data.loader.evaluation_batches`."""
    reading = Reading(workers, config, source, preprocessing)
    part = (rank, world_size)
    return _evaluation_batches(shards, transform, batch_size, part=part, labels=labels, reading=reading)


def step_positions(
    step: int,
    batch_size: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    accumulation: int = 1,
    micro: int = 0,
    streams: int = STREAMS,
) -> np.ndarray:
    """Positions of one forward pass."""
    return BatchSampler(batch_size, 0, 1, rank, world_size, accumulation, streams).positions(step, micro)


def build(builder: CropBuilder | PackBuilder | RawBuilder, keys: Sequence[str] = ()) -> Batch:
    """Batch of a builder, with names where there are some."""
    batch, order = builder.build()
    return replace(batch, keys=[keys[i] for i in order] if keys else [])


def collated(
    transform: Transform,
    images: Sequence[torch.Tensor],
    rngs: Sequence[np.random.Generator],
    keys: Sequence[str] = (),
    preprocessing: Preprocessing = IMAGENET,
) -> Batch:
    """Batch of decoded images with names; a packed batch may have the images in another order."""
    return replace(collate(transform, images, rngs, preprocessing), keys=list(keys))


def pixels(batch: Batch) -> list[torch.Tensor]:
    """Images of each view as one tensor: crops, or flat patches."""
    return [view.images.patches if isinstance(view.images, PackedImages) else view.images for view in batch.views]


def color(batch: Batch, view: int = 0) -> ColorParameters:
    """Colour parameters of a view that has some."""
    found = batch.views[view].color
    assert found is not None
    return found


def same_color(one: ColorParameters | None, other: ColorParameters | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(torch.equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(ColorParameters))


def boxes(views: SampleParameters) -> np.ndarray:
    """(n, 4): boxes of the first view."""
    return views[0].boxes.boxes
