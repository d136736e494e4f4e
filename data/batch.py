"""The batch that the loader yields, and the random parameters that a transform draws for one image.

Shapes: a batch has B images with C channels and H x W pixels. A view has n crops of each image, N = n * B crops in
total. They are crop-major: crop c of image b is row c * B + b. Crops of different sizes are packed, and a packed view
has one crop of each image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from encoders.base import IMAGENET, Preprocessing
from encoders.images import Images, Mask, PackedImages


@dataclass
class ColorParameters:
    """Random colour changes of N crops, which `data.augment.augment_colors` applies on any device.

    All tensors are (N,) float32 unless noted. The tensors stay on the CPU, where the code decides which crops need
    which operation without waiting for a device.
    """

    brightness: Tensor
    """Brightness factor; 1 for no change."""
    contrast: Tensor
    """Contrast factor; 1 for no change."""
    saturation: Tensor
    """Saturation factor; 1 for no change."""
    hue: Tensor
    """Shift of the hue in turns of the colour circle, -0.5 to 0.5; 0 for no change."""
    order: Tensor
    """(N, 4) int64: order in which brightness (0), contrast (1), saturation (2) and hue (3) are changed."""
    grayscale: Tensor
    """bool: True for a crop that becomes gray."""
    blur: Tensor
    """Standard deviation of the Gaussian blur in pixels; 0 for no blur."""
    solarize: Tensor
    """bool: True for a solarised crop, in which values of 0.5 and above are inverted."""

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes send NumPy arrays by value. A tensor would need a block of shared memory and an open file.
        return {name: value.numpy(force=True) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: torch.from_numpy(value) for name, value in state.items()})

    @classmethod
    def stack(cls, images: Sequence["ColorParameters"]) -> "ColorParameters":
        """Stack the parameters of B images, each (n, ...), into those of a batch, (n * B, ...) in crop-major order."""
        columns = ([getattr(image, f.name) for image in images] for f in fields(cls))
        return cls(*(torch.stack(column, dim=1).flatten(0, 1) for column in columns))


@dataclass
class CropParameters:
    """Boxes of N crops, and the operations that turn each box into a crop: resize, window, mirror, rotate."""

    boxes: np.ndarray
    """(N, 4) int64: top, left, height and width of each box, in pixels of the image."""
    size: tuple[int, int]
    """Height and width of a box after the resize."""
    flips: np.ndarray
    """(N,) bool: True for a box that is mirrored left to right after the resize."""
    degrees: np.ndarray | None = None
    """(N,): counter-clockwise rotation in degrees, after mirroring; None for no rotation."""
    window: tuple[int, int, int, int] | None = None
    """Top, left, height and width of the part of the resized box that becomes the crop; None for the whole box."""

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of a crop."""
        return self.size if self.window is None else self.window[2:]

    def shrunk(self, shrink: int) -> "CropParameters":
        """Return the boxes scaled to an image of 1 / `shrink` of the size, with edges rounded to whole pixels."""
        start, end = self.boxes[:, :2], self.boxes[:, :2] + self.boxes[:, 2:]
        start, end = ((2 * edge + shrink) // (2 * shrink) for edge in (start, end))
        return replace(self, boxes=np.concatenate([start, end - start], axis=1))

    @classmethod
    def stack(cls, images: Sequence["CropParameters"]) -> "CropParameters":
        """Stack the parameters of B images, each (n, ...), into those of a batch, (n * B, ...) in crop-major order."""
        stacked = [np.stack(column, axis=1) for column in ([p.boxes for p in images], [p.flips for p in images])]
        boxes, flips = (column.reshape(-1, *column.shape[2:]) for column in stacked)
        degrees = [image.degrees for image in images if image.degrees is not None]
        return cls(boxes, images[0].size, flips, np.stack(degrees, axis=1).ravel() if degrees else None)


@dataclass
class ViewParameters:
    """Random parameters of the n crops of one image in one view. They are drawn before the image is decoded."""

    boxes: CropParameters
    color: ColorParameters | None = None
    """Colour changes of the crops; None for no change."""
    masks: tuple[np.ndarray, ...] = ()
    """Masks of the crops: any number of bool arrays (n, h, w), in which True marks a hidden token."""


SampleParameters = Sequence[ViewParameters]
"""Parameters of one image: one `ViewParameters` per view."""


def largest_shrink(views: SampleParameters, size: tuple[int, int]) -> int:
    """Return the largest factor, 1, 2, 4 or 8, by which an image of `size` (H, W) can shrink before it is cropped.

    No box may become smaller than its crop. The factor is 1 if a view keeps only a window of the resized box, as in
    evaluation.
    """
    most = min(min(size[0] // view.boxes.size[0], size[1] // view.boxes.size[1]) for view in views)
    if most < 2 or any(view.boxes.window for view in views):
        return 1
    most = min(int((view.boxes.boxes[:, 2:] // view.boxes.size).min()) for view in views)
    return next(shrink for shrink in (8, 4, 2, 1) if shrink <= max(most, 1))


@dataclass(frozen=True)
class Packing:
    """Settings for packing crops of different sizes."""

    patch: int
    """Side of a patch in pixels."""
    budget: int
    """Maximum number of patches of a packed sequence. Several images can share a sequence."""


@dataclass
class RawImages:
    """Whole images of a batch, stored in `Batch.memory`. `data.resample.cut_views` cuts their crops on a device."""

    sizes: np.ndarray
    """(B, 2) int64: height and width of each image."""
    starts: np.ndarray
    """(B,) int64: index in `Batch.memory` of the first byte of each image. The memory order is row, column, channel."""


@dataclass
class View:
    """One view of a batch: n crops of each of B images. Either all crops have the same size, or they are packed."""

    images: Images
    """Crops (n * B, C, H, W) in crop-major order, or packed images. The loader yields uint8 values, and
    `data.augment.to_model_input` returns normalised floats. The tensor is empty before the crops are cut from
    `Batch.raw`."""
    crops: int
    """Crops per image (n)."""
    masks: tuple[Mask, ...] = ()
    """Masks of all n * B crops, in crop-major order. Methods without masks have none; I-JEPA has several."""
    color: ColorParameters | None = None
    """Colour changes that have not been applied yet; None if there are none."""
    boxes: CropParameters | None = None
    """Boxes of crops that must still be cut from `Batch.raw`; None once the crops are cut."""

    @classmethod
    def from_samples(cls, images: Images, samples: Sequence[ViewParameters], *, raw: bool = False) -> "View":
        """Return a view from its images and the parameters of each image. It keeps the crop boxes if `raw` is true.

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
        """Return a copy on a device. Random parameters stay on the CPU."""
        masks = tuple(mask.to(device, non_blocking) for mask in self.masks)
        return replace(self, images=self.images.to(device, non_blocking=non_blocking), masks=masks)

    def pin_memory(self) -> "View":
        return replace(self, images=self.images.pin_memory(), masks=tuple(mask.pin_memory() for mask in self.masks))


def _stack_masks(images: Sequence[tuple[np.ndarray, ...]], crops: int) -> tuple[Mask, ...]:
    """Return the masks of a batch, in crop-major order. `images` holds the masks of each image, each (n, h, w)."""
    if len({len(masks) for masks in images}) > 1:
        counts = sorted({len(masks) for masks in images})
        raise ValueError(f"The images of a batch have {counts} masks. Draw the same number of masks for every image.")
    return tuple(_stack_mask(column, crops) for column in zip(*images, strict=True))


def _stack_mask(images: Sequence[np.ndarray], crops: int) -> Mask:
    """Return one mask of n * B crops, in crop-major order, from B arrays (n, h, w) with any h and w."""
    if any(array.ndim != 3 or len(array) != crops for array in images):
        shapes = sorted({array.shape for array in images})
        raise ValueError(f"Masks have the shapes {shapes}. A mask of {crops} crops must be ({crops}, rows, columns).")
    grids = [array[crop] for crop in range(crops) for array in images]  # n * B grids, each (h, w)
    hidden = torch.from_numpy(np.concatenate([grid.ravel() for grid in grids]))
    return Mask.from_hidden(hidden, torch.tensor([grid.shape for grid in grids]))


@dataclass
class Batch:
    """Views, labels and sample names of one forward pass of one process."""

    views: list[View]
    keys: list[str] = field(default_factory=list)
    """B sample names, `shard.tar/key`."""
    labels: Tensor | None = None
    """(B,) int64: class number of each image; None if labels are missing or were not requested."""
    positions: np.ndarray | None = None
    """(B,) int64: position of each sample in the run, counted from 0; None in evaluation. An array, because a worker
    sends arrays by value, but each tensor as a block of shared memory with an open file."""
    skipped: list[str] = field(default_factory=list)
    """Corrupt images that were replaced or left out, each as `shard.tar/key: reason`."""
    preprocessing: Preprocessing = IMAGENET
    """Normalisation that `data.augment.to_model_input` applies."""
    raw: RawImages | None = None
    """Whole images from which the device cuts the crops; None if the loader has cut the crops."""
    memory: Tensor | None = None
    """(bytes,) uint8: the buffer that holds the pixels of all views, or of `raw`.

    A single copy moves the buffer to a device.
    """

    def __len__(self) -> int:
        """Number of images (B)."""
        return len(self.raw.sizes) if self.raw else len(self.views[0].images) // self.views[0].crops

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Return a copy on a device. Random parameters stay on the CPU."""
        labels = None if self.labels is None else self.labels.to(device, non_blocking=non_blocking)
        if self.memory is None:
            views = [view.to(device, non_blocking) for view in self.views]
            return replace(self, views=views, labels=labels)
        batch = self.in_memory(self.memory.to(device, non_blocking=non_blocking))
        masks = [tuple(mask.to(device, non_blocking) for mask in view.masks) for view in self.views]
        return replace(batch, views=_with_masks(batch.views, masks), labels=labels)

    def pin_memory(self) -> "Batch":
        """Return a copy in pinned memory, from which CUDA copies in the background."""
        labels = None if self.labels is None else self.labels.pin_memory()
        if self.memory is None:
            return replace(self, views=[view.pin_memory() for view in self.views], labels=labels)
        batch = self.in_memory(self.memory.pin_memory())
        masks = [tuple(mask.pin_memory() for mask in view.masks) for view in self.views]
        return replace(batch, views=_with_masks(batch.views, masks), labels=labels)

    def in_memory(self, memory: Tensor) -> "Batch":
        """Return the batch with `memory` in place of its buffer.

        `memory` must hold the same bytes as the replaced buffer by the time the pixels are read.
        """
        if self.memory is None:
            raise ValueError("The views of this batch do not share a buffer, so its memory cannot be replaced.")
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
