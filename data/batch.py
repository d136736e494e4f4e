"""The batch that the loader yields, and the random parameters that a transform draws for one image.

Shapes: a batch has B images with C channels and H x W pixels. A view has n crops of each image, N = n * B crops in
total. Crops are stored in crop-major order: crop c of image b is row c * B + b. Crops of different sizes are packed
into sequences, and a packed view has one crop of each image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.encoders.images import Images, Mask, PackedImages


@dataclass
class ColorParameters:
    """Random colour changes of N crops. `data.augment.augment_colors` applies the changes on any device.

    All tensors are (N,) float32 unless noted. The tensors stay on the CPU, so that the CPU can decide which crops need
    which operation without waiting for a device.
    """

    brightness: Tensor
    """Brightness factor of each crop. The factor 1 leaves the brightness unchanged."""
    contrast: Tensor
    """Contrast factor of each crop. The factor 1 leaves the contrast unchanged."""
    saturation: Tensor
    """Saturation factor of each crop. The factor 1 leaves the saturation unchanged."""
    hue: Tensor
    """Shift of the hue of each crop, from -0.5 to 0.5 turns of the colour circle; 0 leaves the hue unchanged."""
    order: Tensor
    """(N, 4) int64: order in which brightness (0), contrast (1), saturation (2) and hue (3) of a crop are changed."""
    grayscale: Tensor
    """(N,) bool: True for each crop that is converted to gray."""
    blur: Tensor
    """Standard deviation of the Gaussian blur of each crop, in pixels; 0 for a crop that is not blurred."""
    solarize: Tensor
    """(N,) bool: True for each crop that is solarised. Solarising inverts values of 0.5 and above."""

    def __getstate__(self) -> dict[str, Any]:
        # Tensors are pickled as NumPy arrays, because worker processes send arrays by value. To send a tensor, a worker
        # would need a block of shared memory and an open file.
        return {name: value.numpy(force=True) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: torch.from_numpy(value) for name, value in state.items()})

    @classmethod
    def stack(cls, images: Sequence["ColorParameters"]) -> "ColorParameters":
        """Combine the parameters of B images, each (n, ...), into parameters (n * B, ...) in crop-major order."""
        columns = ([getattr(image, f.name) for image in images] for f in fields(cls))
        return cls(*(torch.stack(column, dim=1).flatten(0, 1) for column in columns))


@dataclass
class CropParameters:
    """Boxes of N crops, and the operations that turn each box into a crop: resize, cut a window, mirror, rotate."""

    boxes: np.ndarray
    """(N, 4) int64: top, left, height and width of each box, in pixels of the image."""
    size: tuple[int, int]
    """Height and width to which each box is resized, in pixels."""
    flips: np.ndarray
    """(N,) bool: True for each box that is mirrored left to right after the resize."""
    degrees: np.ndarray | None = None
    """(N,): counter-clockwise rotation of each crop in degrees, applied after mirroring; None for no rotation."""
    window: tuple[int, int, int, int] | None = None
    """Top, left, height and width of the part of the resized box that becomes the crop; None for the whole box."""

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of a crop in pixels."""
        return self.size if self.window is None else self.window[2:]

    def shrunk(self, shrink: int) -> "CropParameters":
        """Return the parameters for an image that was shrunk by the factor `shrink`.

        The edges of the scaled boxes are rounded to whole pixels.
        """
        start, end = self.boxes[:, :2], self.boxes[:, :2] + self.boxes[:, 2:]
        start, end = ((2 * edge + shrink) // (2 * shrink) for edge in (start, end))
        return replace(self, boxes=np.concatenate([start, end - start], axis=1))

    @classmethod
    def stack(cls, images: Sequence["CropParameters"]) -> "CropParameters":
        """Combine the parameters of B images, each (n, ...), into parameters (n * B, ...) in crop-major order."""
        stacked = [np.stack(column, axis=1) for column in ([p.boxes for p in images], [p.flips for p in images])]
        boxes, flips = (column.reshape(-1, *column.shape[2:]) for column in stacked)
        degrees = [image.degrees for image in images if image.degrees is not None]
        return cls(boxes, images[0].size, flips, np.stack(degrees, axis=1).ravel() if degrees else None)


@dataclass
class ViewParameters:
    """Random parameters of the n crops of one image in one view. The parameters are drawn before decoding."""

    boxes: CropParameters
    color: ColorParameters | None = None
    """Colour changes of the crops; None if the colours do not change."""
    masks: tuple[np.ndarray, ...] = ()
    """Masks of the crops: any number of bool arrays (n, h, w). True marks a hidden token."""


SampleParameters = Sequence[ViewParameters]
"""Parameters of one image: one `ViewParameters` per view."""


def largest_shrink(views: SampleParameters, size: tuple[int, int]) -> int:
    """Return the largest factor, 1, 2, 4 or 8, by which an image of `size` (H, W) can shrink before it is cropped.

    The factor is limited so that no box becomes smaller than the crop to which the box is resized. If a view keeps only
    a window of the resized box, as in evaluation, the factor is 1.
    """
    most = min(min(size[0] // view.boxes.size[0], size[1] // view.boxes.size[1]) for view in views)
    if most < 2 or any(view.boxes.window for view in views):
        return 1
    most = min(int((view.boxes.boxes[:, 2:] // view.boxes.size).min()) for view in views)
    return next(shrink for shrink in (8, 4, 2, 1) if shrink <= max(most, 1))


@dataclass(frozen=True)
class Packing:
    """Settings for packing crops of different sizes into sequences."""

    patch: int
    """Side of a patch in pixels."""
    budget: int
    """Maximum number of patches in a packed sequence. A sequence can contain several images."""


@dataclass
class RawImages:
    """Sizes and byte positions of whole images, whose pixels are in `Batch.memory`.

    `data.resample.cut_views` cuts the crops of these images on a device.
    """

    sizes: np.ndarray
    """(B, 2) int64: height and width of each image."""
    starts: np.ndarray
    """(B,) int64: index in `Batch.memory` of the first byte of each image.

    The pixels of an image are stored in the order row, column, channel.
    """


@dataclass
class View:
    """One view of a batch: n crops of each of B images. The crops either all have the same size or are packed."""

    images: Images
    """Crops (n * B, C, H, W) in crop-major order, or packed images. The loader yields uint8 values, and
    `data.augment.to_model_input` returns normalised floats. The tensor is empty before the crops are cut from
    `Batch.raw`."""
    crops: int
    """Number of crops per image (n)."""
    masks: tuple[Mask, ...] = ()
    """Masks, each of which covers all n * B crops in crop-major order. The tuple is empty for methods without masks,
    and can hold several masks for methods such as I-JEPA."""
    color: ColorParameters | None = None
    """Colour changes that still have to be applied to the crops; None if there are no such changes."""
    boxes: CropParameters | None = None
    """Boxes of the crops that still have to be cut from `Batch.raw`; None if the crops are already cut."""

    @classmethod
    def from_samples(cls, images: Images, samples: Sequence[ViewParameters], *, raw: bool = False) -> "View":
        """Return a view made from crops and from the random parameters of each image.

        If `raw` is true, the crops are cut later on a device, and the view stores the crop boxes for this purpose.

        Raises:
            ValueError: the images have different numbers of masks, or a mask has a wrong shape.
        """
        color = [sample.color for sample in samples if sample.color is not None]
        crops = len(samples[0].boxes.boxes)
        return cls(
            images,
            crops=crops,
            masks=_stack_masks([sample.masks for sample in samples], crops),
            color=ColorParameters.stack(color) if color else None,
            boxes=CropParameters.stack([sample.boxes for sample in samples]) if raw else None,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "View":
        """Return a copy of the view on a device. Colour changes and crop boxes stay on the CPU."""
        masks = tuple(mask.to(device, non_blocking) for mask in self.masks)
        return replace(self, images=self.images.to(device, non_blocking=non_blocking), masks=masks)

    def pin_memory(self) -> "View":
        return replace(self, images=self.images.pin_memory(), masks=tuple(mask.pin_memory() for mask in self.masks))


def _stack_masks(images: Sequence[tuple[np.ndarray, ...]], crops: int) -> tuple[Mask, ...]:
    """Return the masks of a batch in crop-major order. `images` holds, for each image, its masks (n, h, w)."""
    if len({len(masks) for masks in images}) > 1:
        counts = sorted({len(masks) for masks in images})
        raise ValueError(
            f"The images of a batch have different numbers of masks: {counts}. Draw equally many masks for every image."
        )
    return tuple(_stack_mask(column, crops) for column in zip(*images, strict=True))


def _stack_mask(images: Sequence[np.ndarray], crops: int) -> Mask:
    """Combine the masks of B images into one mask of n * B crops, in crop-major order.

    `images` holds one bool array (n, h, w) per image. Each array may have its own h and w.
    """
    if any(array.ndim != 3 or len(array) != crops for array in images):
        shapes = sorted({array.shape for array in images})
        raise ValueError(
            f"The masks of a batch have the shapes {shapes}. The mask of an image with {crops} crops must have the "
            f"shape ({crops}, rows, columns)."
        )
    grids = [array[crop] for crop in range(crops) for array in images]  # n * B grids, each (h, w)
    hidden = torch.from_numpy(np.concatenate([grid.ravel() for grid in grids]))
    return Mask.from_hidden(hidden, torch.tensor([grid.shape for grid in grids]))


@dataclass
class Batch:
    """Views, labels, segmentation maps and sample names of one forward pass of one process."""

    views: list[View]
    keys: list[str] = field(default_factory=list)
    """Names of the B samples, each in the form `shard.tar/key`."""
    labels: Tensor | None = None
    """(B,) int64: class number of each image; None if labels are missing or were not requested."""
    positions: np.ndarray | None = None
    """(B,) int64: position of each sample in the run, counted from 0; None in evaluation. The positions are a NumPy
    array, because a worker process sends arrays by value. Each tensor would need a block of shared memory with an open
    file."""
    sources: np.ndarray | None = None
    """(B,) int64: index of the source of each sample, in a mixture of sources; None if the batch has no samples."""
    maps: Tensor | None = None
    """(B, S, T) uint8: segmentation map of each image, cut like its only crop; None if maps were not requested."""
    skipped: list[str] = field(default_factory=list)
    """Corrupt images that were replaced or left out, each in the form `shard.tar/key: reason`."""
    preprocessing: Preprocessing = IMAGENET
    """Mean and standard deviation with which `data.augment.to_model_input` normalises the pixels."""
    raw: RawImages | None = None
    """Whole images from which the device cuts the crops; None if the loader has cut the crops."""
    memory: Tensor | None = None
    """(bytes,) uint8: the buffer that holds the pixels of all views, or of `raw`.

    A single copy moves the buffer to a device.
    """

    def __len__(self) -> int:
        """Return the number of images (B)."""
        return len(self.raw.sizes) if self.raw else len(self.views[0].images) // self.views[0].crops

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Return a copy of the batch on a device. Colour changes and crop boxes stay on the CPU."""
        labels, maps = (
            None if one is None else one.to(device, non_blocking=non_blocking) for one in (self.labels, self.maps)
        )
        if self.memory is None:
            views = [view.to(device, non_blocking) for view in self.views]
            return replace(self, views=views, labels=labels, maps=maps)
        batch = self.in_memory(self.memory.to(device, non_blocking=non_blocking))
        masks = [tuple(mask.to(device, non_blocking) for mask in view.masks) for view in self.views]
        return replace(batch, views=_with_masks(batch.views, masks), labels=labels, maps=maps)

    def pin_memory(self) -> "Batch":
        """Return a copy of the batch in pinned memory, from which CUDA can copy in the background."""
        labels, maps = (None if one is None else one.pin_memory() for one in (self.labels, self.maps))
        if self.memory is None:
            return replace(self, views=[view.pin_memory() for view in self.views], labels=labels, maps=maps)
        batch = self.in_memory(self.memory.pin_memory())
        masks = [tuple(mask.pin_memory() for mask in view.masks) for view in self.views]
        return replace(batch, views=_with_masks(batch.views, masks), labels=labels, maps=maps)

    def in_memory(self, memory: Tensor) -> "Batch":
        """Return a batch whose pixels are in `memory` instead of in the buffer of this batch.

        The bytes of the old buffer are not copied. The caller must write the same bytes to `memory` before the pixels
        are used.
        """
        if self.memory is None:
            raise ValueError("The memory of this batch cannot be replaced, because its views do not share a buffer.")
        if self.raw is not None:
            return replace(self, memory=memory)
        moved = memory.storage_offset() - self.memory.storage_offset()

        def part(pixels: Tensor) -> Tensor:
            return memory.as_strided(pixels.shape, pixels.stride(), pixels.storage_offset() + moved)

        def images(view: View) -> Images:
            if isinstance(view.images, PackedImages):
                return replace(view.images, patches=part(view.images.patches))
            return part(view.images)

        return replace(self, views=[replace(view, images=images(view)) for view in self.views], memory=memory)


def _with_masks(views: Sequence[View], masks: Sequence[tuple[Mask, ...]]) -> list[View]:
    return [replace(view, masks=own) for view, own in zip(views, masks, strict=True)]
