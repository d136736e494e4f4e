"""The collator makes one batch from samples. It writes one image after another into the memory of the batch.

Shapes: a batch has B images with C channels. A view has n crops of each image, with S x S pixels each. Pixels are
stored in the order row, column, channel, which is also the order of the decoders and of the resize operation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tessera.data.batch import Batch, Packing, RawImages, SampleParameters, View
from tessera.data.resample import cut
from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.encoders.images import best_fit, pack

RAW_PIXELS = 2**20
"""Expected mean number of pixels of a whole image. The shared memory of a batch has room for images of this size."""


class ViewShape(NamedTuple):
    """Number and size of the crops of one view."""

    crops: int
    """Number of crops per image (n)."""
    size: int
    """Side length of a crop in pixels. A packed crop has at most as many pixels as a square of this side length."""


class Transform(Protocol):
    """Draws the random parameters of a sample. A transform must be picklable, and the generator passed to `draw` must
    be its only source of randomness."""

    @property
    def views(self) -> tuple[ViewShape, ...]:
        """Number and size of the crops of each view."""
        ...

    @property
    def packing(self) -> Packing | None:
        """Settings for packing crops of different sizes; None if all crops of a view have the same size."""
        ...

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> SampleParameters:
        """Draw the parameters of an image of `size` (H, W), one `ViewParameters` per view."""
        ...


class Sample(NamedTuple):
    """A decoded image with the random parameters that were drawn for the image."""

    key: str
    """Name of the sample, in the form `shard.tar/key`."""
    image: Tensor
    """Pixels of the decoded image, (C, H, W) uint8."""
    views: SampleParameters
    label: int | None = None
    position: int | None = None
    """Position of the sample in the run, counted from 0; None in evaluation."""
    source: int = 0
    """Index of the source that the sample comes from, in a mixture of sources."""
    map: Tensor | None = None
    """Segmentation map (S, T) uint8 of the only crop; None if maps are not read."""


class Skipped(NamedTuple):
    """Marker for a sample that cannot be used and is therefore left out of the batch."""

    reason: str
    """Name of the sample and the reason why it is left out, in the form `shard.tar/key: reason`."""


@dataclass
class Collator:
    """Makes one batch from samples. `torch.utils.data.DataLoader` calls the collator in a worker process."""

    transform: Transform
    images: int
    """Maximum number of images in a batch (B)."""
    preprocessing: Preprocessing = IMAGENET
    raw: bool = False
    """True to make batches of whole images, from which the device cuts the crops."""

    @property
    def size(self) -> int:
        """Size of the buffer for one batch, in bytes. The size is chosen so that nearly every batch fits."""
        channels = self.preprocessing.channels
        return channels * RAW_PIXELS * self.images if self.raw else crop_bytes(self.transform, self.images, channels)

    def __call__(self, samples: Iterable[Sample | Skipped], memory: Tensor | None = None) -> Batch:
        """Return a batch of the usable samples.

        Pixels are written to `memory` (bytes,) uint8, or to new memory if `memory` is None or too small.
        """
        builder: CropBuilder | PackBuilder | RawBuilder | None = None
        keys: list[str] = []
        labels: list[int] = []
        positions: list[int] = []
        sources: list[int] = []
        maps: list[Tensor] = []
        skipped: list[str] = []
        for sample in samples:
            if isinstance(sample, Skipped):
                skipped.append(sample.reason)
                continue
            builder = builder or self._builder(sample.views, memory)
            builder.add(sample.image, sample.views)
            keys.append(sample.key)
            sources.append(sample.source)
            if sample.label is not None:
                labels.append(sample.label)
            if sample.position is not None:
                positions.append(sample.position)
            if sample.map is not None:
                maps.append(sample.map)
        if builder is None:
            return Batch([], skipped=skipped, preprocessing=self.preprocessing)
        batch, order = builder.build()
        return replace(
            batch,
            keys=[keys[i] for i in order],
            labels=torch.tensor([labels[i] for i in order]) if labels else None,
            positions=np.array([positions[i] for i in order]) if positions else None,
            sources=np.array([sources[i] for i in order]),
            maps=torch.stack([maps[i] for i in order]) if maps else None,
            skipped=skipped,
            preprocessing=self.preprocessing,
        )

    def _builder(self, views: SampleParameters, memory: Tensor | None) -> "CropBuilder | PackBuilder | RawBuilder":
        """Return the builder of a batch whose first sample has the parameters `views`."""
        channels = self.preprocessing.channels
        if self.raw:
            return RawBuilder(channels, memory)
        if self.transform.packing is not None:
            return PackBuilder(self.transform.packing, channels, memory)
        # Not `transform.views`, because the sizes of `data.crops.MixedCrops` change from step to step.
        shapes = [ViewShape(len(view.boxes.boxes), view.boxes.shape[0]) for view in views]
        return CropBuilder(shapes, self.images, channels, memory)


def needs_workers(transform: Transform) -> bool:
    """Return True if only workers can cut the crops of a transform.

    A device can cut neither packed crops nor windows of resized boxes.
    """
    views = transform.draw((64, 64), np.random.default_rng(0))
    return transform.packing is not None or any(view.boxes.window for view in views)


def crop_bytes(transform: Transform, images: int, channels: int = 3) -> int:
    """Return the maximum total size in bytes of the crops of `images` images."""
    return images * sum(view.crops * channels * view.size**2 for view in transform.views)


def collate(
    transform: Transform,
    images: Sequence[Tensor],
    rngs: Sequence[np.random.Generator],
    preprocessing: Preprocessing = IMAGENET,
) -> Batch:
    """Return a batch made from decoded images (C, H, W) uint8, with one random generator per image.

    The names of the samples in the batch are empty strings.
    """
    samples = (
        Sample("", image, transform.draw((image.shape[1], image.shape[2]), rng))
        for image, rng in zip(images, rngs, strict=True)
    )
    return Collator(transform, len(images), preprocessing)(samples)


class CropBuilder:
    """Builds a batch of crops that have one size per view. Crops are written directly into the memory of the batch.

    Args:
        shapes: number and size of the crops of each view.
        images: maximum number of images (B).
        channels: number of channels of an image (C).
        memory: memory of the batch, (bytes,) uint8. New memory is allocated if `memory` is None or too small.
    """

    def __init__(
        self, shapes: Sequence[ViewShape], images: int, channels: int = 3, memory: Tensor | None = None
    ) -> None:
        self._shapes, self._images, self._channels = shapes, images, channels
        size = images * sum(shape.crops * channels * shape.size**2 for shape in shapes)
        self._memory = _room(memory, size)
        self._crops = self._split(self._memory, images)
        self._samples: list[SampleParameters] = []

    def add(self, image: Tensor, views: SampleParameters) -> None:
        """Cut the crops of an image (C, H, W) uint8, and add them to the batch."""
        for view, crops in zip(views, self._crops, strict=True):
            cut(image, view.boxes, crops[:, len(self._samples)])
        self._samples.append(views)

    def build(self) -> tuple[Batch, Sequence[int]]:
        """Return the batch and, for each image of the batch, the index of the `add` call that added the image."""
        images, memory, crops = len(self._samples), self._memory, self._crops
        if images < self._images:  # the batch is not full, so remove the space that was left free
            memory = torch.cat([view[:, :images].flatten() for view in crops])
            crops = self._split(memory, images)
        stacks = [view.flatten(0, 1).permute(0, 3, 1, 2) for view in crops]  # (n * B, C, S, S)
        views = [View.from_samples(s, column) for s, column in zip(stacks, _columns(self._samples), strict=True)]
        return Batch(views, memory=memory), range(images)

    def _split(self, memory: Tensor, images: int) -> list[Tensor]:
        """Split `memory` into the crops of each view. Return one tensor (n, B, S, S, C) per view."""
        shapes = [(view.crops, images, view.size, view.size, self._channels) for view in self._shapes]
        parts = memory.split([int(np.prod(shape)) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class PackBuilder:
    """Builds a batch of packed crops. Each image has one crop of any size. Crops are packed into few sequences.

    Args:
        packing: side of a patch, and maximum number of patches in a sequence.
        channels: number of channels of an image (C).
        memory: memory of the batch, as in `CropBuilder`.
    """

    def __init__(self, packing: Packing, channels: int = 3, memory: Tensor | None = None) -> None:
        self._packing, self._channels, self._memory = packing, channels, memory
        self._samples: list[SampleParameters] = []
        self._crops: list[Tensor] = []

    def add(self, image: Tensor, views: SampleParameters) -> None:
        """Cut the crop of an image (C, H, W) uint8, and add the crop to the batch."""
        (view,) = views
        crop = torch.empty((1, *view.boxes.size, self._channels), dtype=torch.uint8)
        cut(image, view.boxes, crop)
        self._crops.append(crop.permute(0, 3, 1, 2))  # (1, C, h, w)
        self._samples.append(views)

    def build(self) -> tuple[Batch, Sequence[int]]:
        """Return the batch and, for each image of the batch, the index of the `add` call that added the image.

        Raises:
            ValueError: an image has more patches than a sequence can hold.
        """
        sizes = [view.boxes.size for (view,) in self._samples]
        lengths = [height * width // self._packing.patch**2 for height, width in sizes]
        sequences = best_fit(lengths, self._packing.budget)
        order = [image for sequence in sequences for image in sequence]
        packed = pack([self._crops[i] for i in order], self._packing.patch)
        memory = _room(self._memory, packed.patches.numel())
        patches = memory.view_as(packed.patches).copy_(packed.patches)
        counts = torch.tensor([len(sequence) for sequence in sequences])
        images = replace(packed, patches=patches, sequences=counts)
        (column,) = _columns([self._samples[i] for i in order])
        return Batch([View.from_samples(images, column)], memory=memory), order


class RawBuilder:
    """Builds a batch of whole images, which are stored one after another. The device cuts the crops later.

    Args:
        channels: number of channels of an image (C).
        memory: memory of the batch, (bytes,) uint8. If the images do not fit, they are moved to new, larger memory.
    """

    def __init__(self, channels: int = 3, memory: Tensor | None = None) -> None:
        self._used = 0
        self._memory = torch.empty(channels * RAW_PIXELS, dtype=torch.uint8) if memory is None else memory
        self._samples: list[SampleParameters] = []
        self._starts: list[int] = []
        self._sizes: list[tuple[int, int]] = []

    def add(self, image: Tensor, views: SampleParameters) -> None:
        """Add a whole image (C, H, W) uint8 to the batch."""
        pixels = image.permute(1, 2, 0).reshape(-1)
        end = self._used + len(pixels)
        if end > len(self._memory):
            larger = torch.empty(max(2 * len(self._memory), end), dtype=torch.uint8)
            larger[: self._used] = self._memory[: self._used]
            self._memory = larger
        self._memory[self._used : end] = pixels
        self._starts.append(self._used)
        self._sizes.append((image.shape[1], image.shape[2]))
        self._samples.append(views)
        self._used = end

    def build(self) -> tuple[Batch, Sequence[int]]:
        """Return the batch and, for each image of the batch, the index of the `add` call that added the image."""
        raw = RawImages(np.array(self._sizes, dtype=np.int64), np.array(self._starts, dtype=np.int64))
        empty = torch.empty(0, dtype=torch.uint8)
        views = [View.from_samples(empty, column, raw=True) for column in _columns(self._samples)]
        return Batch(views, raw=raw, memory=self._memory[: self._used]), range(len(self._samples))


def _columns(samples: Sequence[SampleParameters]) -> list[tuple]:
    """Group parameters by view. The input has one row per image. The output has one row per view."""
    return list(zip(*samples, strict=True))


def _room(memory: Tensor | None, size: int) -> Tensor:
    """Return the first `size` bytes of `memory`, or new memory if `memory` is None or too small."""
    if memory is None or len(memory) < size:
        return torch.empty(size, dtype=torch.uint8)
    return memory[:size]
