"""Map-style datasets that return decoded samples, for training and for evaluation.

`torch.utils.data.DataLoader` asks for all samples of a batch in one call (`__getitems__`), so a dataset can read
the samples of a batch in advance. A sample is decoded only when the collator requests this sample.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from tessera.data.batch import SampleParameters, largest_shrink
from tessera.data.collate import Sample, Skipped, Transform
from tessera.data.colors import of_bands
from tessera.data.crops import MixedCrops, avoid_nodata
from tessera.data.decode import MAX_PIXELS, ImageError, Picture, Undecoded
from tessera.data.failures import DroppedError, ResourceError
from tessera.data.maps import MapKind, checked_map, cut_map, map_member
from tessera.data.sampler import MixtureSampler, sample_rng
from tessera.data.shards import ShardError, Source
from tessera.data.shards.shard import Shard
from tessera.data.user_code import Augment
from tessera.encoders.base import PixelType, Preprocessing

MOST_SKIPPED = 100
"""Number of consecutive corrupt images after which a run stops."""
MOST_DROPPED = 1000
"""Number of consecutive samples that the user's stages may drop before a run stops."""
BANDS = re.compile(r"image with (\d+) bands")
"""Number of bands in the message about an image whose bands are not the channels that are read."""
TYPES = re.compile(r"an image of the type (\w+) in a data set of the type (\w+)")
"""Types in the message about an image that does not have the type of the data set."""
MOST_NAMED = 10
"""Maximum number of corrupt images that an error message or the log names one by one."""
DRAWN = 8
"""Number of samples whose random parameters are drawn before the first of these samples is decoded.

To draw and decode one sample after another would be slower, because decoding evicts other data from the processor
caches.
"""
MOST_HELD = 2**26
"""Maximum total size in bytes of the images that wait to be cropped. When the limit is reached, these images are
cropped before further images are read. The limit is needed because all images except JPEGs are decoded when they are
read, so several large images could be in memory at the same time."""


@dataclass(frozen=True)
class Decoding:
    """Limits on accepted images, the form of decoded images, and the kind of maps."""

    channels: int = 3
    max_pixels: int = MAX_PIXELS
    """Maximum number of pixels of an image. Larger images count as corrupt."""
    maps: MapKind | None = None
    """Kind of the maps; None if maps are not read."""
    pixel_type: PixelType = "uint8"
    """Type of the data set."""
    nodata: float | Literal["auto"] | None = None
    """Value of pixels without data; `auto` for the value that each file names."""
    fill: tuple[float, ...] | None = None
    """Value of each channel for pixels without data; None leaves their values as they are."""
    fewer_channels: bool = False
    """True to accept images with fewer channels."""

    @classmethod
    def of(cls, preprocessing: Preprocessing, max_pixels: int = MAX_PIXELS, maps: MapKind | None = None) -> "Decoding":
        """Return the decoding of the images that a preprocessing describes."""
        form = {"pixel_type": preprocessing.pixel_type, "nodata": preprocessing.nodata, "fill": preprocessing.fill}
        form["fewer_channels"] = preprocessing.fewer_channels
        return cls(preprocessing.channels, max_pixels, maps, **form)

    def picture(self, image: Undecoded) -> Picture:
        """Read the header of an encoded image, or convert a decoded image.

        Raises:
            ImageError: the image is damaged, too large or of an unsupported format.
        """
        form = {"pixel_type": self.pixel_type, "nodata": self.nodata, "fill": self.fill, "fewer": self.fewer_channels}
        return Picture(image, max_pixels=self.max_pixels, channels=self.channels, **form)


class Address(NamedTuple):
    """Position in the run, and the sample at this position: its source, and its index in the source."""

    position: int
    source: int
    number: int


class _Drawn(NamedTuple):
    """An encoded sample, and the random parameters that were drawn for the sample."""

    key: str
    picture: Picture
    views: SampleParameters
    label: int | None
    map: bytes | None
    """Encoded map; None if maps are not read."""


class _Failed(NamedTuple):
    """Reason why a sample cannot be used."""

    reason: str
    corrupt: bool = False
    """True if the image is corrupt."""
    dropped: bool = False
    """True if a stage of the user dropped the sample, which is then not reported."""


def cure_of(reasons: Sequence[str], source: Source, channels: int, flag: str = "") -> str:
    """Return a sentence that says what to do about images that cannot be read.

    Args:
        reasons: reason of each image, the message of its `ImageError`.
        source: source of the images.
        channels: number of channels that are read.
        flag: flag that sets the number of channels; empty if it cannot be set.
    """
    if cure := cure_of_bands(reasons, channels, flag):
        return cure
    types = {match.groups() if (match := TYPES.search(reason)) else ("", "") for reason in reasons}
    if len(types) == 1 and all(pair := types.pop()) and not flag:
        return f"They are {pair[0]}, but the encoder takes {pair[1]}. Use an encoder that was trained on {pair[0]}."
    return next((shard.cure for shard in source.shards if shard.cure != Shard.cure), Shard.cure)


def cure_of_bands(reasons: Sequence[str], channels: int, flag: str = "") -> str:
    """Return what to do about images of another number of bands than `channels`, or "" for other reasons."""
    found = {int(match[1]) if (match := BANDS.search(reason)) else channels for reason in reasons}
    if len(found) != 1 or (bands := found.pop()) == channels:
        return ""
    advice = f"Give {flag} {bands}." if flag else f"Use an encoder of {bands} channels."
    return f"They have {bands} bands, but {channels} channels are read. {advice}"


def in_blocks(sources: Sequence[Source], sampler: MixtureSampler) -> list[Source]:
    """Return the sources of a mixture for reading in the order of its sampler."""
    return [source.in_blocks(one.block, len(sources)) for source, one in zip(sources, sampler.samplers, strict=True)]


def addresses(
    sources: Sequence[Source], sampler: MixtureSampler, positions: Sequence[int] | np.ndarray
) -> list[Address]:
    """Return the address of the sample at each position in the run."""
    return _addresses(sources, positions, *sampler(np.asarray(positions)))


def replacements(sources: Sequence[Source], sampler: MixtureSampler, position: int) -> Iterator[Address]:
    """Yield the addresses of samples that may replace an unusable sample at a position (`MixtureSampler`)."""
    for found in sampler.replacements(position):
        yield from _addresses(sources, [position], *found)


def _addresses(
    sources: Sequence[Source],
    positions: Sequence[int] | np.ndarray,
    chosen: np.ndarray,
    shards: np.ndarray,
    samples: np.ndarray,
) -> list[Address]:
    numbers = np.empty_like(samples)
    for number, source in enumerate(sources):
        numbers[chosen == number] = source.number(shards[chosen == number], samples[chosen == number])
    return [Address(*map(int, one)) for one in zip(positions, chosen, numbers, strict=True)]


def prepare(sources: Sequence[Source], wanted: Sequence[Address]) -> None:
    """Download the samples at some addresses to the cache."""
    for number, source in enumerate(sources):
        source.prepare([one.number for one in wanted if one.source == number])


@dataclass
class TrainDataset(Dataset[Sample]):
    """Training samples. The seed and the position in the run determine a sample and its random parameters.

    A sample that cannot be used is replaced by a usable sample of a later batch (`MixtureSampler.replacements`).
    """

    sources: list[Source]
    sampler: MixtureSampler
    transform: Transform
    seed: int
    batch_size: int
    """Number of samples of an optimizer step, over all processes."""
    decoding: Decoding = Decoding()
    classes: int | None = None
    """Number of classes of the labels; None if labels are not read."""
    augment: Augment | None = None
    """Augmentation of the user; None for none."""

    def __post_init__(self) -> None:
        self.sources = in_blocks(self.sources, self.sampler)

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
            ShardError: the shards cannot be read, too many images in a row are corrupt, or a label or a map is
                wrong.
        """
        wanted = addresses(self.sources, self.sampler, positions)
        prepare(self.sources, wanted)
        start = 0
        while start < len(wanted):
            drawn, held = deque[_Drawn | _Failed](), 0
            while start + len(drawn) < len(wanted) and len(drawn) < DRAWN and held < MOST_HELD:
                drawn.append(self._draw(wanted[start + len(drawn)]))
                held += drawn[-1].picture.held_bytes if isinstance(drawn[-1], _Drawn) else 0
            while drawn:
                yield from self._decode(wanted[start], drawn.popleft())
                start += 1

    def _draw(self, address: Address) -> _Drawn | _Failed:
        """Read the encoded sample at an address, and draw its random parameters.

        Raises:
            ShardError: the label is missing, not an integer, or out of range; or the map is missing.
        """
        rng = sample_rng(self.seed, address.position)
        source, transform = self.sources[address.source], self._transform(address.position)
        at, labels = (self.seed, address.position), self.classes is not None
        drawn = _draw(source, address.number, at, transform, rng, self.decoding, labels=labels)
        if isinstance(drawn, _Drawn) and drawn.label is not None and not 0 <= drawn.label < (self.classes or 0):
            raise ShardError(
                f"the label of {drawn.key} is {drawn.label}, but the run has {self.classes} classes, numbered from 0. "
                "Correct the .cls member, or set the number of classes."
            )
        if isinstance(drawn, _Drawn) and (absent := drawn.picture.absent) is not None:
            drawn = drawn._replace(views=avoid_nodata(drawn.views, absent, transform, rng))
        if isinstance(drawn, _Drawn) and self.augment is not None:
            return drawn._replace(views=self.augment.views(drawn.views, drawn.picture.size))
        return drawn

    def _transform(self, position: int) -> Transform:
        """Return the transform of the sample at a position in the run."""
        if isinstance(self.transform, MixedCrops):
            return self.transform.at(self.seed, position // self.batch_size)
        return self.transform

    def _decode(self, address: Address, drawn: _Drawn | _Failed) -> Iterator[Sample | Skipped]:
        """Yield the decoded sample at an address.

        If the sample cannot be used, search the samples that may replace it. First yield a `Skipped` for each unusable
        sample, and then the usable sample.
        """
        failed: list[_Failed] = []
        others = replacements(self.sources, self.sampler, address.position)
        while isinstance(sample := _decoded(drawn, self.decoding), _Failed):
            failed.append(sample)
            if len(failed) >= MOST_DROPPED:
                raise ShardError(
                    f"{MOST_DROPPED} samples in a row are dropped by data.stages, or cannot be used. The last one: "
                    f"{sample.reason}. Correct the stages."
                )
            corrupt = [one.reason for one in failed if one.corrupt]
            if len(corrupt) == MOST_SKIPPED:
                cure = cure_of(corrupt, self.sources[address.source], self.decoding.channels, "--data.channels")
                first = "\n  ".join(corrupt[:MOST_NAMED])
                raise ShardError(
                    f"{MOST_SKIPPED} images in a row cannot be read. {cure} The first of these images are:\n  {first}"
                )
            address = next(others)
            drawn = self._draw(address)
        for one in failed:
            if not one.dropped:
                yield Skipped(one.reason)
        yield sample._replace(position=address.position, source=address.source)


@dataclass
class EvaluationDataset(Dataset[Sample | Skipped]):
    """All samples of a source in their order. Samples that cannot be used are left out."""

    source: Source
    transform: Transform
    labels: bool = True
    """True to read the label of each sample."""
    decoding: Decoding = Decoding()

    def __len__(self) -> int:
        return self.source.images

    def __getitem__(self, number: int) -> Sample | Skipped:
        """Return the decoded sample at an index of the source.

        Raises:
            ShardError: a label is missing or not an integer, or a map cannot be used.
        """
        return next(iter(self.__getitems__(range(number, number + 1))))

    def __getitems__(self, numbers: Sequence[int]) -> Iterator[Sample | Skipped]:
        """Yield the decoded samples at the given indices of the source.

        Raises:
            ShardError: a label is missing or not an integer, or a map cannot be used.
        """
        self.source.prepare(numbers)
        for number in numbers:
            rng = sample_rng(0, number)
            drawn = _draw(self.source, number, (0, number), self.transform, rng, self.decoding, labels=self.labels)
            sample = _decoded(drawn, self.decoding)
            if not isinstance(sample, _Failed):
                yield sample
            elif not sample.dropped:
                yield Skipped(sample.reason)


def _draw(
    source: Source,
    number: int,
    at: tuple[int, int],
    transform: Transform,
    rng: np.random.Generator,
    decoding: Decoding,
    *,
    labels: bool,
) -> _Drawn | _Failed:
    """Read an encoded sample, and draw its random parameters. `at` is the seed and the position of the sample.

    Raises:
        ShardError: a label or a map is missing, or resources of this machine run out.
    """
    key = ""
    try:
        key = source.name(number)
        picture = decoding.picture(source.image(number, at))
        views = transform.draw(picture.size, rng)
        if picture.bands < decoding.channels:
            views = [replace(view, colors=of_bands(view.colors, picture.bands)) for view in views]
        label = source.label(number) if labels else None
        encoded_map = None if decoding.maps is None else source.target(number)
        return _Drawn(key, picture, views, label, encoded_map)
    except ImageError as error:
        return _Failed(f"{key}: {error}", corrupt=True)
    except DroppedError as error:
        return _Failed(str(error), dropped=True)
    except MemoryError as error:
        raise _out_of_memory(key) from error


def _decoded(drawn: _Drawn | _Failed, decoding: Decoding) -> Sample | _Failed:
    """Decode a sample and cut its map.

    Raises:
        ShardError: the map is damaged, does not have the size of the image, or has a value that is not a class number;
            or the memory does not suffice.
    """
    if isinstance(drawn, _Failed):
        return drawn
    try:
        sample = decode_sample(drawn.key, drawn.picture, drawn.views)
    except MemoryError as error:
        raise _out_of_memory(drawn.key) from error
    except ImageError as error:
        return _Failed(f"{drawn.key}: {error}", corrupt=True)
    if drawn.map is None:
        return sample._replace(label=drawn.label)
    try:
        values = checked_map(drawn.map, drawn.picture.size, decoding.maps)
    except ImageError as error:
        raise ShardError(
            f"the map of {drawn.key} cannot be used: {error}. Correct the member KEY.{map_member(drawn.map)}."
        ) from None
    (view,) = drawn.views
    return sample._replace(label=drawn.label, map=cut_map(values, view)[0])


def _out_of_memory(key: str) -> ResourceError:
    return ResourceError(
        f"{key} cannot be decoded, because the memory of this process does not suffice. Use fewer loader workers, or "
        "lower loader.max_pixels, so that large images count as corrupt."
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
    return Sample(key, pixels, views, bands=picture.bands)
