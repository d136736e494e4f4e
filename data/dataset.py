"""Map-style datasets that return decoded samples, for training and for evaluation.

`torch.utils.data.DataLoader` asks for all samples of a batch in one call (`__getitems__`), so that a dataset can read
the samples of a batch in advance. A sample is decoded only when the collator requests this sample.
"""

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from tessera.data.batch import SampleParameters, largest_shrink
from tessera.data.collate import Sample, Skipped, Transform
from tessera.data.crops import MixedCrops
from tessera.data.decode import MAX_PIXELS, ImageError, Picture
from tessera.data.maps import checked_map, cut_map
from tessera.data.sampler import MixtureSampler, sample_rng
from tessera.data.shards import ShardError, ShardList
from tessera.data.shards.errors import ResourceError
from tessera.data.shards.reader import Reader, UnreadableError
from tessera.data.shards.tar import MAP

MOST_SKIPPED = 100
"""Number of consecutive corrupt images after which a run stops."""
MOST_NAMED = 10
"""Number of corrupt images that an error message or the log names one by one."""
DRAWN = 8
"""Number of samples whose random parameters are drawn before the first of these samples is decoded.

To draw and decode one sample after another would be slower, because decoding evicts other data from the processor
caches.
"""
MOST_HELD = 2**26
"""Size in bytes of encoded and decoded images from which no further samples are drawn before these are decoded. Images
of most formats are decoded when they are drawn, so that several large images would be in memory at a time."""


@dataclass(frozen=True)
class Decoding:
    """Limits on accepted images, the number of channels of decoded images, and the classes of segmentation maps."""

    channels: int = 3
    max_pixels: int = MAX_PIXELS
    """Maximum number of pixels of an image. Larger images count as corrupt."""
    map_classes: int | None = None
    """Number of classes of segmentation maps; None if maps are not read."""

    def picture(self, encoded: bytes) -> Picture:
        """Read the header of an encoded image.

        Raises:
            ImageError: the image is damaged, too large or of an unsupported format.
        """
        return Picture(encoded, max_pixels=self.max_pixels, channels=self.channels)

    def encoded_map(self, reader: Reader, shard: int, sample: int) -> bytes | None:
        """Return the encoded segmentation map of a sample, or None if maps are not read.

        Raises:
            ShardError: the sample has no map.
        """
        return None if self.map_classes is None else reader.map(shard, sample)

    def cropped_map(
        self, encoded: bytes | None, key: str, size: tuple[int, int], views: SampleParameters
    ) -> Tensor | None:
        """Return the segmentation map (S, T) uint8 of the only crop of the sample `key`, an image of `size` (H, W).

        Raises:
            ShardError: the map is damaged, does not have the size of the image, or has a value that is no class.
        """
        if encoded is None:
            return None
        try:
            values = checked_map(encoded, size, self.map_classes)
        except ImageError as error:
            raise ShardError(f"the segmentation map of {key}: {error}. Correct the member KEY.{MAP}.") from None
        (view,) = views
        return cut_map(values, view)[0]


class _Address(NamedTuple):
    """A position in the run, and the location of the sample at this position: source, shard, number in the shard."""

    position: int
    source: int
    shard: int
    number: int


class _Drawn(NamedTuple):
    """An encoded sample, and the random parameters that were drawn for the sample."""

    key: str
    picture: Picture
    views: SampleParameters
    label: int | None
    map: bytes | None
    """Encoded segmentation map; None if maps are not read."""


class _Failed(NamedTuple):
    """Reason why a sample cannot be used."""

    reason: str
    corrupt: bool
    """True if the image is corrupt; False if the shard of the sample cannot be read."""


@dataclass
class TrainDataset(Dataset[Sample]):
    """Training samples. The seed and the position in the run determine a sample and its random parameters.

    A sample that cannot be used is replaced by the next usable sample of the same virtual stream (`data.sampler`).
    """

    sources: list[ShardList]
    sampler: MixtureSampler
    transform: Transform
    seed: int
    batch_size: int
    """Number of samples of an optimizer step, over all processes."""
    decoding: Decoding = Decoding()
    classes: int | None = None
    """Number of classes of the labels; None if labels are not read."""

    @functools.cached_property
    def _readers(self) -> list[Reader]:
        samplers = self.sampler.samplers  # a cached property, so that each worker process opens its own readers
        return [Reader(opened, len(samplers), one.block) for opened, one in zip(self.sources, samplers, strict=True)]

    def __getitem__(self, position: int) -> Sample:
        """Return the decoded sample at a position in the run.

        Raises:
            ShardError: the shards cannot be read, or too many images in a row are corrupt.
        """
        return next(one for one in self.__getitems__([position]) if isinstance(one, Sample))

    def __getitems__(self, positions: Sequence[int] | np.ndarray) -> Iterator[Sample | Skipped]:
        """Yield the decoded sample at each position in the run.

        If a sample cannot be used, yield a `Skipped` for this sample, and then the sample that replaces it.

        Raises:
            ShardError: the shards cannot be read, too many images in a row are corrupt, or a label or a segmentation
                map is wrong.
        """
        sources, shards, numbers = self.sampler(np.asarray(positions))
        for source, reader in enumerate(self._readers):
            reader.prepare(shards[sources == source], numbers[sources == source])
        addresses = [_Address(*map(int, one)) for one in zip(positions, sources, shards, numbers, strict=True)]
        start = 0
        while start < len(addresses):
            drawn, held = deque[_Drawn | _Failed](), 0
            while start + len(drawn) < len(addresses) and len(drawn) < DRAWN and held < MOST_HELD:
                drawn.append(self._draw(addresses[start + len(drawn)]))
                held += drawn[-1].picture.held_bytes if isinstance(drawn[-1], _Drawn) else 0
            while drawn:
                yield from self._decode(addresses[start], drawn.popleft())
                start += 1

    def _draw(self, address: _Address) -> _Drawn | _Failed:
        """Read the encoded sample at an address, and draw its random parameters."""
        reader, key = self._readers[address.source], ""
        try:
            key = reader.name(address.shard, address.number)
            encoded = reader.image(address.shard, address.number)
            picture = self.decoding.picture(encoded)
            views = self._transform(address.position).draw(picture.size, sample_rng(self.seed, address.position))
            encoded_map = self.decoding.encoded_map(reader, address.shard, address.number)
            return _Drawn(key, picture, views, self._label(reader, address), encoded_map)
        except ImageError as error:
            return _Failed(f"{key}: {error}", corrupt=True)
        except MemoryError as error:
            raise _out_of_memory(key) from error
        except UnreadableError as error:
            return _Failed(f"sample {address.number} of {error}", corrupt=False)

    def _transform(self, position: int) -> Transform:
        """Return the transform of the sample at a position in the run."""
        if isinstance(self.transform, MixedCrops):
            return self.transform.at(self.seed, position // self.batch_size)
        return self.transform

    def _label(self, reader: Reader, address: _Address) -> int | None:
        """Return the label of the sample at an address, or None if labels are not read.

        Raises:
            ShardError: the label is missing, not an integer, or not the number of a class.
        """
        if self.classes is None:
            return None
        label = reader.label(address.shard, address.number)
        if not 0 <= label < self.classes:
            raise ShardError(
                f"the label of {reader.name(address.shard, address.number)} is {label}, but the run has "
                f"{self.classes} classes, numbered from 0. Correct the .cls member, or set the number of classes."
            )
        return label

    def _decode(self, address: _Address, drawn: _Drawn | _Failed) -> Iterator[Sample | Skipped]:
        """Yield the decoded sample at an address.

        If the sample cannot be used, search the virtual stream for the next usable sample. First yield a `Skipped` for
        each unusable sample, and then the usable sample.
        """
        failed: list[_Failed] = []
        while True:
            if isinstance(drawn, _Drawn):
                try:
                    sample = decode_sample(drawn.key, drawn.picture, drawn.views)
                    break
                except MemoryError as error:
                    raise _out_of_memory(drawn.key) from error
                except ImageError as error:
                    drawn = _Failed(f"{drawn.key}: {error}", corrupt=True)
            failed.append(drawn)
            corrupt = [one.reason for one in failed if one.corrupt]
            if len(corrupt) == MOST_SKIPPED:
                first = "\n  ".join(corrupt[:MOST_NAMED])
                raise ShardError(
                    f"{MOST_SKIPPED} images in a row are corrupt. Make the shards of these images again. "
                    f"The first of these images are:\n  {first}"
                )
            _, shards, numbers = self.sampler(np.array([address.position]), later=len(failed))
            drawn = self._draw(address._replace(shard=int(shards[0]), number=int(numbers[0])))
        for one in failed:
            yield Skipped(one.reason)
        cropped = self.decoding.cropped_map(drawn.map, drawn.key, drawn.picture.size, drawn.views)
        yield sample._replace(position=address.position, label=drawn.label, map=cropped)


@dataclass
class EvaluationDataset(Dataset[Sample | Skipped]):
    """All samples of a list of shards, in the order of the shards. Samples that cannot be used are left out."""

    shards: ShardList
    transform: Transform
    labels: bool = True
    """True to read the label of each sample."""
    decoding: Decoding = Decoding()

    def __len__(self) -> int:
        return self.shards.images

    @functools.cached_property
    def _reader(self) -> Reader:
        return Reader(self.shards)  # a cached property, so that each worker process opens its own reader

    def __getitem__(self, number: int) -> Sample | Skipped:
        """Return the decoded sample with the index `number`. Indices count the samples of all shards in order.

        Raises:
            ShardError: a label is missing or not an integer, or a segmentation map cannot be used.
        """
        return next(iter(self.__getitems__(range(number, number + 1))))

    def __getitems__(self, numbers: Sequence[int]) -> Iterator[Sample | Skipped]:
        """Yield the decoded samples with the indices `numbers`. Indices count the samples of all shards in order.

        Raises:
            ShardError: a label is missing or not an integer, or a segmentation map cannot be used.
        """
        ends = np.cumsum(self.shards.counts)
        shards = np.searchsorted(ends, numbers, side="right")  # (B,)
        within = np.asarray(numbers) - (ends - self.shards.counts)[shards]  # (B,)
        self._reader.prepare(shards, within)
        for number, shard, sample in zip(numbers, map(int, shards), map(int, within), strict=True):
            yield self._sample(number, shard, sample)

    def _sample(self, number: int, shard: int, sample: int) -> Sample | Skipped:
        key = ""
        try:
            key = self._reader.name(shard, sample)
            label = self._reader.label(shard, sample) if self.labels else None
            picture = self.decoding.picture(self._reader.image(shard, sample))
            views = self.transform.draw(picture.size, sample_rng(0, number))
            found = decode_sample(key, picture, views)
            encoded_map = self.decoding.encoded_map(self._reader, shard, sample)
            cropped = self.decoding.cropped_map(encoded_map, key, picture.size, views)
            return found._replace(label=label, map=cropped)
        except ImageError as error:
            return Skipped(f"{key}: {error}")
        except MemoryError as error:
            raise _out_of_memory(key) from error
        except UnreadableError as error:
            return Skipped(f"sample {sample} of {error}")


def _out_of_memory(key: str) -> ResourceError:
    return ResourceError(
        f"{key}: the memory of this process does not suffice to decode the image. Use fewer loader workers, or lower "
        "loader.max_pixels, so that large images count as corrupt."
    )


def decode_sample(key: str, picture: Picture, views: SampleParameters) -> Sample:
    """Decode an image at the smallest size that its crops allow, and scale the crop boxes to this size.

    Raises:
        ImageError: the image is damaged.
    """
    shrink = picture.fraction(largest_shrink(views, picture.size))
    if shrink > 1:
        views = [view.shrunk(shrink) for view in views]
    pixels: Tensor = picture.pixels(shrink)
    return Sample(key, pixels, views)
