"""One batch: from positions or places to samples that are read, drawn for, decoded and cut."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from data.batch import Batch, Drawn
from data.collate import WHOLE, ImageWriter, Transform, Writer, crop_bytes, needs_workers, writer
from data.decode import MAX_PIXELS, ImageError, Picture
from data.sampler import Mixture, sample_rng
from data.shards import ShardError, ShardList
from data.shards.reader import Reader, UnreadableError
from runtime.settings import Section

MOST_SKIPPED = 100  # corrupt images in a row
MOST_NAMED = 10  # of them
DRAWN = 8  # samples drawn for in a row: decoding empties the processor's caches; each may hold the pixels of a PNG


class LoaderConfig(Section):
    """Who decodes images and cuts the crops."""

    crops: Literal["auto", "workers", "device"] = "auto"
    """who cuts the crops; auto: the device where it is a GPU and crops are of one size, else the loader's workers"""
    decode: Literal["cpu", "device"] = "cpu"
    """who decodes JPEGs; device: a GPU, which then cuts the crops too"""
    max_pixels: int = Field(default=MAX_PIXELS, ge=1)
    """larger images count as corrupt"""

    def resolved(self, transform: Transform) -> "LoaderConfig":
        """With `auto` replaced by what it means here.

        Raises:
            ValueError: settings that cannot be on this machine or for this transform.
        """
        cuda = torch.cuda.is_available()
        apart = (cuda or self.crops == "device") and needs_workers(transform)
        if self.decode == "device" and not cuda:
            raise ValueError("decode device needs CUDA, which is not here: leave decode at cpu")
        if self.decode == "device" and self.crops == "workers":
            raise ValueError("decode device leaves no pixels to the workers: set crops to device too")
        if apart and "device" in (self.crops, self.decode):
            raise ValueError("crops of many sizes are cut by the workers: leave crops at auto and decode at cpu")
        crops = ("device" if cuda and not apart else "workers") if self.crops == "auto" else self.crops
        return self.model_copy(update={"crops": crops})


@dataclass
class Training:
    """Makes the batch of one forward pass, given its number in the run and memory for it."""

    transform: Transform
    config: LoaderConfig
    images: int
    sources: list[ShardList]
    mixture: Mixture
    seed: int
    accumulation: int
    positions: Callable[..., np.ndarray]
    """of a step and of `micro`, one of its passes"""

    @property
    def size(self) -> int:
        """Bytes that are enough for nearly every batch."""
        return WHOLE * self.images if self.config.crops == "device" else crop_bytes(self.transform, self.images)

    @functools.cached_property
    def _readers(self) -> list[Reader]:
        """In the process that reads."""
        orders = self.mixture.orders
        return [Reader(opened, len(orders), order.block) for opened, order in zip(self.sources, orders, strict=True)]

    def __call__(self, number: int, memory: Tensor | None = None) -> Batch:
        step, micro = divmod(number, self.accumulation)
        positions = self.positions(step, micro=micro)  # (B,)
        batch, keys, skipped = self._writer(memory), [], []
        sources, shards, samples = self.mixture(positions)
        for source, reader in enumerate(self._readers):
            reader.prepare(shards[sources == source], samples[sources == source])
        places = [_Place(*map(int, place)) for place in zip(positions, sources, shards, samples, strict=True)]
        for start in range(0, len(places), DRAWN):
            some = places[start : start + DRAWN]
            for place, sample in zip(some, [self._draw(place) for place in some], strict=True):
                key, missed = self._put(batch, place, sample)
                keys.append(key)
                skipped += missed
        return batch.batch(keys, skipped=skipped)

    def _writer(self, memory: Tensor | None) -> Writer:
        if self.config.crops == "device":
            return ImageWriter(self.transform.crops, memory, encoded=self.config.decode == "device")
        return writer(self.transform, self.images, memory)

    def _draw(self, place: "_Place") -> "_Sample | _Missed":
        """The encoded sample at a place, and what is drawn for it."""
        reader, key = self._readers[place.source], ""
        try:
            key = reader.name(place.shard, place.sample)
            picture = Picture(reader.image(place.shard, place.sample), max_pixels=self.config.max_pixels)
            return _Sample(key, picture, self.transform.draw(picture.size, sample_rng(self.seed, place.position)))
        except ImageError as error:
            return _Missed(f"{key}: {error}", corrupt=True)
        except UnreadableError as error:
            return _Missed(f"sample {place.sample} of {error}", corrupt=False)

    def _put(self, batch: Writer, place: "_Place", sample: "_Sample | _Missed") -> tuple[str, list[str]]:
        """Adds a sample, or the next good one of its lane: its key, and what is said of those before it."""
        missed: list[_Missed] = []
        while True:
            if isinstance(sample, _Sample):
                try:
                    batch.put(sample.picture, sample.drawn)
                    return sample.key, [one.reason for one in missed]
                except ImageError as error:
                    sample = _Missed(f"{sample.key}: {error}", corrupt=True)
            missed.append(sample)
            corrupt = [one.reason for one in missed if one.corrupt]
            if len(corrupt) == MOST_SKIPPED:
                first = "\n  ".join(corrupt[:MOST_NAMED])
                raise ShardError(
                    f"{MOST_SKIPPED} corrupt images in a row; make these shards again. The first:\n  {first}"
                )
            _, shards, samples = self.mixture(np.array([place.position]), later=len(missed))
            sample = self._draw(place._replace(shard=int(shards[0]), sample=int(samples[0])))


class _Place(NamedTuple):
    """Where a sample comes in the run, and where it lies."""

    position: int
    source: int
    shard: int
    sample: int


class _Sample(NamedTuple):
    """A sample that is about to be decoded."""

    key: str
    picture: Picture
    drawn: Drawn


class _Missed(NamedTuple):
    """A sample that is no good."""

    reason: str
    corrupt: bool
    """the image, and not its shard"""


@dataclass
class Evaluation:
    """Makes a batch of neighbouring samples, given their places in the whole list."""

    transform: Transform
    images: int
    shards: ShardList
    labels: bool
    max_pixels: int

    @property
    def size(self) -> int:
        """Bytes that are enough for every batch."""
        return crop_bytes(self.transform, self.images)

    @functools.cached_property
    def _reader(self) -> Reader:
        return Reader(self.shards)  # in the process that reads

    def __call__(self, places: range, memory: Tensor | None = None) -> Batch:
        ends = np.cumsum(self.shards.counts)
        shards = np.searchsorted(ends, places, side="right")  # (B,)
        samples = places - (ends - self.shards.counts)[shards]  # (B,)
        self._reader.prepare(shards, samples)
        batch, keys, skipped, labels = writer(self.transform, len(places), memory), [], [], []
        key = ""
        for place, shard, sample in zip(places, map(int, shards), map(int, samples), strict=True):
            try:
                key = self._reader.name(shard, sample)
                label = self._reader.label(shard, sample) if self.labels else 0
                picture = Picture(self._reader.image(shard, sample), max_pixels=self.max_pixels)
                batch.put(picture, self.transform.draw(picture.size, sample_rng(0, place)))
            except ImageError as error:
                skipped.append(f"{key}: {error}")
                continue
            except UnreadableError as error:
                skipped.append(f"sample {sample} of {error}")
                continue
            keys.append(key)
            labels.append(label)
        if not keys:  # a batch that only says what was skipped
            return Batch([], self.transform.crops, skipped=skipped)
        return batch.batch(keys, labels if self.labels else None, skipped)
