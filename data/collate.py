"""The collator makes one batch from samples. It writes one image after another into the memory of the batch.

Shapes: a batch has B images with C channels. A view has n crops of each image, with S x S pixels each. Pixels are
stored in the order row, column, channel, which is also the order of the decoders and of the resize operation.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tessera.data.batch import Batch, SampleParameters, View, ViewParameters
from tessera.data.resample import cut
from tessera.data.user_code import Augment
from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.encoders.images import best_fit, pack

NO_PIXELS = torch.empty(0, dtype=torch.uint8)
"""Placeholder that replaces the decoded image of a sample after its crops are cut, so that the memory is freed."""


CutView = Callable[[Tensor, int, ViewParameters, Tensor], None]
"""Function `cut(image, number, view, out)` that cuts the crops of view `number` from an image (C, H, W) into `out`."""


def cut_plainly(image: Tensor, number: int, view: ViewParameters, out: Tensor) -> None:
    """Cut the crops of a view without further changes."""
    del number
    cut(image, view, out)


class ViewShape(NamedTuple):
    """Number and size of the crops of one view."""

    crops: int
    """Number of crops per image (n)."""
    size: int
    """Side length of a crop in pixels. A packed crop has at most as many pixels as a square of this side length."""


@dataclass(frozen=True)
class Packing:
    """Settings for packing crops of different sizes into sequences."""

    patch: int
    """Side of a patch in pixels."""
    budget: int
    """Maximum number of patches in a packed sequence. A sequence can contain several images."""


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
    """Pixels of the decoded image, (C, H, W)."""
    views: SampleParameters
    label: int | None = None
    position: int | None = None
    """Position of the sample in the run, counted from 0; None in evaluation."""
    source: int = 0
    """Index of the source that the sample comes from, in a mixture of sources."""
    map: Tensor | None = None
    """Map (S, T) of the only crop; None if maps are not read."""
    bands: int | None = None
    """Number of channels that the image has; None for all."""


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
    augment: Augment | None = None
    """Augmentation of the user; None for none."""
    cut_for: Callable[[str], CutView] | None = None
    """Function that returns the `CutView` of the sample of a name; None cuts the crops without further changes."""

    @property
    def size(self) -> int:
        """Maximum size of the crops of a batch, in bytes."""
        pixels = sum(view.crops * view.size**2 for view in self.transform.views)
        return self.images * self.preprocessing.channels * pixels * self.preprocessing.dtype.itemsize

    def __call__(self, samples: Iterable[Sample | Skipped], memory: Tensor | None = None) -> Batch:
        """Return a batch of the usable samples.

        Pixels are written to `memory` (bytes,) uint8, or to new memory if `memory` is None or too small.
        """
        builder: CropBuilder | PackBuilder | None = None
        kept: list[Sample] = []
        skipped: list[str] = []
        for sample in samples:
            if isinstance(sample, Skipped):
                skipped.append(sample.reason)
                continue
            builder = builder or self._builder(sample.views, memory)
            self._add(builder, sample)
            kept.append(sample._replace(image=NO_PIXELS))
        if builder is None:
            return Batch([], skipped=skipped, preprocessing=self.preprocessing)
        batch, order = builder.build()
        kept = [kept[i] for i in order]
        labels = [sample.label for sample in kept if sample.label is not None]
        positions = [sample.position for sample in kept if sample.position is not None]
        maps = [sample.map for sample in kept if sample.map is not None]
        bands = [sample.bands or self.preprocessing.channels for sample in kept]
        return replace(
            batch,
            keys=[sample.key for sample in kept],
            labels=torch.tensor(labels) if labels else None,
            positions=np.array(positions) if positions else None,
            sources=np.array([sample.source for sample in kept]),
            maps=torch.stack(maps) if maps else None,
            bands=np.array(bands) if self.preprocessing.fewer_channels else None,
            skipped=skipped,
            preprocessing=self.preprocessing,
        )

    def _add(self, builder: "CropBuilder | PackBuilder", sample: Sample) -> None:
        if self.augment is None or sample.position is None:
            builder.add(sample.image, sample.views, self.cut_for(sample.key) if self.cut_for else cut_plainly)
            return
        with self.augment.cutting(sample.key, sample.position) as cut_view:
            builder.add(sample.image, sample.views, cut_view)

    def _builder(self, views: SampleParameters, memory: Tensor | None) -> "CropBuilder | PackBuilder":
        """Return the builder of a batch whose first sample has the parameters `views`."""
        form = {"channels": self.preprocessing.channels, "memory": memory, "dtype": self.preprocessing.dtype}
        if self.transform.packing is not None:
            return PackBuilder(self.transform.packing, **form)
        # The shapes do not come from `transform.views`, because the sizes of `MixedCrops` change from step to step.
        shapes = [ViewShape(len(view.boxes), view.shape[0]) for view in views]
        return CropBuilder(shapes, self.images, **form)


def collate(
    transform: Transform,
    images: Sequence[Tensor],
    rngs: Sequence[np.random.Generator],
    preprocessing: Preprocessing = IMAGENET,
) -> Batch:
    """Return a batch made from decoded images (C, H, W), with one random generator per image.

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
        dtype: type of the crops.
    """

    def __init__(
        self,
        shapes: Sequence[ViewShape],
        images: int,
        channels: int = 3,
        memory: Tensor | None = None,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        self._shapes, self._images, self._channels, self._dtype = shapes, images, channels, dtype
        size = images * sum(shape.crops * channels * shape.size**2 for shape in shapes)
        self._memory = _room(memory, size * dtype.itemsize)
        self._crops = self._split(self._memory, images)
        self._samples: list[SampleParameters] = []

    def add(self, image: Tensor, views: SampleParameters, cut_view: CutView = cut_plainly) -> None:
        """Cut the crops of an image (C, H, W), and add them to the batch."""
        for number, (view, crops) in enumerate(zip(views, self._crops, strict=True)):
            cut_view(image, number, view, crops[:, len(self._samples)])
        self._samples.append(views)

    def build(self) -> tuple[Batch, Sequence[int]]:
        """Return the batch and, for each image of the batch, the index of the `add` call that added the image."""
        images, memory, crops = len(self._samples), self._memory, self._crops
        if images < self._images:  # the batch is not full, so remove the space that was left free
            memory = torch.cat([view[:, :images].flatten() for view in crops]).view(torch.uint8)
            crops = self._split(memory, images)
        stacks = [view.flatten(0, 1).permute(0, 3, 1, 2) for view in crops]  # (n * B, C, S, S)
        views = [View.from_samples(s, column) for s, column in zip(stacks, _columns(self._samples), strict=True)]
        return Batch(views, memory=memory), range(images)

    def _split(self, memory: Tensor, images: int) -> list[Tensor]:
        """Split `memory` into the crops of each view. Return one tensor (n, B, S, S, C) per view."""
        shapes = [(view.crops, images, view.size, view.size, self._channels) for view in self._shapes]
        parts = memory.view(self._dtype).split([int(np.prod(shape)) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class PackBuilder:
    """Builds a batch of packed crops. Each image has one crop of any size. Crops are packed into few sequences.

    Args:
        packing: side of a patch, and maximum number of patches in a sequence.
        channels: number of channels of an image (C).
        memory: memory of the batch, as in `CropBuilder`.
        dtype: type of the crops.
    """

    def __init__(
        self,
        packing: Packing,
        channels: int = 3,
        memory: Tensor | None = None,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        self._packing, self._channels, self._memory, self._dtype = packing, channels, memory, dtype
        self._samples: list[SampleParameters] = []
        self._crops: list[Tensor] = []

    def add(self, image: Tensor, views: SampleParameters, cut_view: CutView = cut_plainly) -> None:
        """Cut the crop of an image (C, H, W), and add the crop to the batch."""
        (view,) = views
        crop = torch.empty((1, *view.size, self._channels), dtype=self._dtype)
        cut_view(image, 0, view, crop)
        self._crops.append(crop.permute(0, 3, 1, 2))  # (1, C, h, w)
        self._samples.append(views)

    def build(self) -> tuple[Batch, Sequence[int]]:
        """Return the batch and, for each image of the batch, the index of the `add` call that added the image.

        Raises:
            ValueError: an image has more patches than a sequence can hold.
        """
        sizes = [view.size for (view,) in self._samples]
        lengths = [height * width // self._packing.patch**2 for height, width in sizes]
        sequences = best_fit(lengths, self._packing.budget)
        order = [image for sequence in sequences for image in sequence]
        packed = pack([self._crops[i] for i in order], self._packing.patch)
        memory = _room(self._memory, packed.patches.nbytes)
        patches = memory.view(self._dtype).view_as(packed.patches).copy_(packed.patches)
        counts = torch.tensor([len(sequence) for sequence in sequences])
        images = replace(packed, patches=patches, sequences=counts)
        (column,) = _columns([self._samples[i] for i in order])
        return Batch([View.from_samples(images, column)], memory=memory), order


def _columns(samples: Sequence[SampleParameters]) -> list[tuple]:
    """Group parameters by view. The input has one row per image. The output has one row per view."""
    return list(zip(*samples, strict=True))


def _room(memory: Tensor | None, size: int) -> Tensor:
    """Return the first `size` bytes of `memory`, or new memory if `memory` is None or too small."""
    if memory is None or len(memory) < size:
        return torch.empty(size, dtype=torch.uint8)
    return memory[:size]
