"""Batches for training and evaluation: sampler, dataset and collator in a `torch.utils.data.DataLoader`.

A batch depends only on the shards, the seed and the position of the batch in the run. It does not depend on the number
of processes or workers, or on the step at which a run was resumed. The tar format and the shard patterns are those of
webdataset. The reader of webdataset is not used, because its shuffle buffer fills from a stream and cannot resume at an
exact sample; `data.stages` runs its stages, and `data.ordered_shards` is a source for its pipelines.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field, model_validator
from rich.filesize import decimal

from tessera.data.batch_sampler import BatchSampler
from tessera.data.batches import Batches
from tessera.data.collate import Collator, CutView, Transform
from tessera.data.dataset import Decoding, EvaluationDataset, TrainDataset
from tessera.data.decode import MAX_PIXELS
from tessera.data.maps import MapKind
from tessera.data.sampler import (
    BUFFER,
    STREAMS,
    GrowingSampler,
    MixtureSampler,
    ShuffledSampler,
    Weight,
    bounded_buffers,
    phases,
)
from tessera.data.shards import (
    DEFAULT,
    Access,
    ShardError,
    Shards,
    Source,
    WeightedShards,
    open_shards,
    open_sources,
)
from tessera.data.shards.open import shown_paths
from tessera.data.shards.source import refuse_mixed_classes
from tessera.data.user_code import Augment
from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.runtime.settings import Section

log = logging.getLogger(__name__)


class StreamConfig(Section):
    """Settings of the order of samples. The order changes if these settings, the seed or the shards change."""

    block: int | None = Field(default=None, ge=1)
    """number of neighbouring samples of a shard that stay together in the order; default: 1 for small data sets, 16
    from a million images on"""
    window: int = Field(default=BUFFER, ge=1)
    """number of samples in the shuffle buffer of each of the 64 virtual streams"""
    window_gb: float | None = Field(default=8, gt=0)
    """limit in GB on the total size of the encoded images whose indices are in the shuffle buffers; buffers get fewer
    samples if needed. A buffer holds indices of samples, not images: the images stay on the disk, or in the node's
    cache of remote shards"""
    growth: tuple[tuple[int, int, int], ...] | None = None
    """shards that were added during the run, as SOURCE,SHARDS,EPOCH: before this epoch, the source (counted from 0)
    consists of its first SHARDS shards; --resume sets this if shards were added"""

    def buffers(self, sources: Sequence[Source], streams: int = STREAMS) -> list[int]:
        """Return the number of samples in the shuffle buffer of a virtual stream, for each source of a mixture."""
        return bounded_buffers([source.mean_bytes for source in sources], self.window, self.window_gb, streams)


OLD_SETTINGS = {"decode": ("cpu",), "crops": ("auto", "workers", "device")}
"""Former settings of `LoaderConfig`, and the values that config.yaml files of older runs may still contain. They have
no effect."""


class LoaderConfig(Section):
    """Settings for decoding images."""

    max_pixels: int = Field(default=MAX_PIXELS, ge=1)
    """maximum number of pixels of an image; larger images count as corrupt"""

    @model_validator(mode="before")
    @classmethod
    def _without_old_settings(cls, values: Any) -> Any:
        """Remove `decode` and `crops`, which config.yaml files of older runs contain.

        Raises:
            ValueError: one of these settings has a value that is no longer supported.
        """
        if not isinstance(values, dict):
            return values
        for name, accepted in OLD_SETTINGS.items():
            if name in values and values[name] not in accepted:
                raise ValueError(
                    f"loader.{name} is {values[name]!r}, which is no longer supported. The loader's workers decode "
                    f"images and cut crops. Remove loader.{name}."
                )
        return {name: value for name, value in values.items() if name not in OLD_SETTINGS}


@dataclass(frozen=True)
class Reading:
    """Settings for reading and decoding samples."""

    workers: int = 0
    """Number of loader workers of this process. With 0 workers, this process decodes the images itself."""
    loader: LoaderConfig = LoaderConfig()  # noqa: RUF009 - the default is immutable
    source: Access = DEFAULT
    """Settings and knowledge for the access to shards."""
    preprocessing: Preprocessing = IMAGENET
    """Type of the images, and their range, mean and standard deviation, which each batch holds for its normalisation.

    Decoded images have one channel per mean.
    """

    classes: int | None = None
    """Number of classes of the labels in training; None if training reads no labels. `evaluation_batches` ignores this
    number, and reads labels if its argument `labels` is true."""
    maps: MapKind | None = None
    """Kind of the maps; None if maps are not read. With maps, the transform must draw a single crop."""
    augment: Augment | None = None
    """Augmentation of the user for training images; None for none."""
    workers_given: bool = False
    """True if the user chose the number of workers, which is then not lowered for lack of memory."""

    @property
    def decoding(self) -> Decoding:
        """Limits on accepted images, the form of decoded images, and the kind of maps."""
        return Decoding.of(self.preprocessing, self.loader.max_pixels, self.maps)


def training_batches(
    shards: WeightedShards,
    transform: Transform,
    batches: BatchSampler,
    *,
    seed: int,
    stream: StreamConfig = StreamConfig(),  # noqa: B008 - the default is immutable
    reading: Reading = Reading(),
) -> "Batches":
    """Return the training batches of this process, one batch for each forward pass.

    A corrupt image is replaced by a usable image that its virtual stream has in a later batch (`data.sampler`).
    `Batch.skipped` names the corrupt image.

    Args:
        shards: shards of one source or of a weighted mixture of sources.
        transform: draws the parameters of crops, colour changes and masks.
        batches: sampler that yields the positions of the samples for each forward pass of this process.
        seed: seed of the order and of all random parameters, 0 to 2**64 - 1.
        stream: settings of the order of samples.
        reading: settings of workers, decoding, access to remote shards, normalisation, labels and maps.

    Raises:
        ValueError: there are fewer images than a batch needs, or the augmentation does not fit the transform.
        ShardError: the shards cannot be used, or labels or maps are missing. Iterating over the batches also raises
            this error, if a shard vanishes or changes, if 100 images in a row cannot be read, or if a label or a map is
            wrong.
    """
    sources, weights = open_sources(shards, progress=batches.rank == 0, source=reading.source)
    if reading.classes is not None:
        refuse_mixed_classes(sources)
        for opened in sources:
            opened.require_labels()
    if reading.maps is not None:
        for opened in sources:
            opened.require_targets()
    if reading.augment is not None:
        reading.augment.check(len(transform.views), packed=transform.packing is not None)
    mixture = mixture_sampler(sources, weights, seed, stream, batches.batch_size, batches.streams)
    if batches.rank == 0:
        _warn_of_small_cache(sources, [sampler.buffer * batches.streams for sampler in mixture.samplers])
    _check_enough(mixture, batches.batch_size)
    read = {"decoding": reading.decoding, "classes": reading.classes, "augment": reading.augment}
    dataset = TrainDataset(sources, mixture, transform, seed, batches.batch_size, **read)
    collator = Collator(transform, batches.pass_size, reading.preprocessing, reading.augment)
    total = sum(source.images for source in sources)
    return Batches(dataset, batches, collator, reading.workers, total, given=reading.workers_given)


def mixture_sampler(
    sources: Sequence[Source],
    weights: Sequence[Weight],
    seed: int,
    stream: StreamConfig,
    batch_size: int,
    streams: int = STREAMS,
) -> MixtureSampler:
    """Return the sampler of a run over opened sources with their weights.

    Raises:
        ValueError: the weights cannot be used.
        ShardError: a source has no more shards than `stream.growth` names.
    """
    samplers: list[GrowingSampler] = []
    for number, opened in enumerate(sources):
        grown = [(shards, epoch) for source, shards, epoch in stream.growth or () if source == number]
        sizes, epochs = [*(shards for shards, _ in grown), len(opened.shards)], [0, *(epoch for _, epoch in grown)]
        if sizes != sorted(set(sizes)) or sizes[0] < 1 or epochs != sorted(epochs):
            raise ShardError(
                f"{shown_paths([shard.path for shard in opened.shards])} has {sizes[-1]} shards, but stream.growth of "
                f"this run counts {', '.join(map(str, sizes[:-1]))} shards up to the passes "
                f"{', '.join(map(str, epochs[1:]))} over this data. Give all shards of the run in their old order, and "
                "new ones at the end."
            )
        stages: list[tuple[int, ShuffledSampler]] = []
        for size, epoch in zip(sizes, epochs, strict=True):
            part = opened.first(size)
            buffer = stream.buffers([*sources[:number], part, *sources[number + 1 :]], streams)[number]
            one = ShuffledSampler(part.counts, seed, streams=streams, block=stream.block, buffer=buffer, source=number)
            stages.append((epoch, one))
        samplers.append(GrowingSampler(stages))
    table = [(step * batch_size, row) for step, row in phases(weights)]
    return MixtureSampler(samplers, table, seed, batch_size)


def evaluation_batches(
    shards: Shards,
    transform: Transform,
    batch_size: int,
    *,
    part: tuple[int, int] = (0, 1),
    labels: bool = True,
    images: int | None = None,
    reading: Reading = Reading(),
    cut_for: Callable[[str], CutView] | None = None,
) -> "Batches":
    """Return the evaluation batches of this process.

    The batches of all processes together contain every image once, or `images` images, in the order of the shards. Each
    process gets one contiguous part of the images. The sizes of the parts differ by at most one image.

    Corrupt images are left out, and `Batch.skipped` names them. A batch whose images are all corrupt is left out.

    Args:
        shards: patterns, paths or URLs of the shards, or a list of opened shards.
        transform: draws the crop parameters. The crops of an image depend only on the index of the image.
        batch_size: number of images per batch and process; the last batch may be smaller.
        part: rank of this process, and number of processes.
        labels: True to read the labels.
        images: number of images, spaced evenly over the shards; None for all images.
        reading: settings of workers, decoding, access to remote shards, normalisation and maps.
        cut_for: picklable function that returns the `CutView` of the sample of a name; None cuts the crops without
            further changes.

    Raises:
        ShardError: the shards cannot be used, or labels or maps are missing. Iterating over the batches also raises
            this error, if a label is not an integer or a map is wrong.
    """
    rank, world_size = part
    opened = open_shards(shards, progress=rank == 0, source=reading.source)
    if labels:
        opened.require_labels()
    if reading.maps is not None:
        opened.require_targets()
    count = opened.images if images is None else min(images, opened.images)
    chosen = np.linspace(0, opened.images - 1, count).round().astype(np.int64).tolist() if images else range(count)
    numbers = chosen[rank * count // world_size : (rank + 1) * count // world_size]
    batches = [numbers[start : start + batch_size] for start in range(0, len(numbers), batch_size)]
    dataset = EvaluationDataset(opened, transform, labels, reading.decoding)
    collator = Collator(transform, min(batch_size, opened.images), reading.preprocessing, cut_for=cut_for)
    return Batches(dataset, batches, collator, reading.workers, opened.images, given=reading.workers_given)


def _warn_of_small_cache(sources: Sequence[Source], spans: Sequence[int]) -> None:
    """Log a warning if the cache cannot hold all shard data that is needed at the same time.

    `spans` holds the number of samples that are needed at the same time, for each source.
    """
    limit = min(opened.access.settings.cache_gb for opened in sources) * 1e9
    needed = 0.0
    for opened, span in zip(sources, spans, strict=True):
        with suppress(ShardError):  # the error is raised again when the shard is read
            needed += opened.cached_bytes(span)
    if needed > limit:
        log.warning(
            "about %s of downloaded or decompressed shards are in use at a time, but the cache is limited to "
            "%s. The same data will be downloaded again and again. "
            "Raise source.cache_gb or lower stream.window_gb.",
            decimal(round(needed)),
            decimal(round(limit)),
        )


def _check_enough(mixture: MixtureSampler, batch_size: int) -> None:
    """Check that each source has enough images for one batch. With fewer images, every batch would repeat a sample.

    Raises:
        ValueError: a source has fewer images than a batch takes from this source.
    """
    for sampler, share in zip(mixture.samplers, mixture.shares.max(0).tolist(), strict=True):
        needed = int(batch_size * share)
        if sampler.images < needed:
            raise ValueError(
                f"A batch of {batch_size} takes {needed} images from a source that has only {sampler.images}. "
                f"Lower the batch size to {int(sampler.images / share)} or less, or add images."
            )
