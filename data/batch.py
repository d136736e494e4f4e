"""The batch that the loader yields, and the random parameters that a transform draws for one image.

Shapes: B images of a batch; n crops of one image in a view; N = n * B crops of a view, crop-major: crop c of image b is
row c * B + b. C channels, H x W pixels. Images of many sizes are packed instead, one crop each.
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

    All tensors are (N,) float32 unless noted. The tensors stay on the CPU: the code decides there which crops need
    which operation, so that it never waits for a device.
    """

    brightness: Tensor
    """Factor; 1 is the identity."""
    contrast: Tensor
    """Factor; 1 is the identity."""
    saturation: Tensor
    """Factor; 1 is the identity."""
    hue: Tensor
    """Shift in turns of the colour circle, -0.5 to 0.5; 0 is the identity."""
    order: Tensor
    """(N, 4) int64: order of the four changes above."""
    grayscale: Tensor
    """bool: convert to gray."""
    blur: Tensor
    """Standard deviation in pixels; 0 is the identity."""
    solarize: Tensor
    """bool: invert values of one half and above."""

    def __getstate__(self) -> dict[str, Any]:
        # A worker process sends arrays by value. Each tensor would cost a block of shared memory and an open file.
        return {name: value.numpy(force=True) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: torch.from_numpy(value) for name, value in state.items()})

    @classmethod
    def stack(cls, images: Sequence["ColorParameters"]) -> "ColorParameters":
        """Parameters of a batch, crop-major: B of (n, ...) -> (n * B, ...)."""
        columns = ([getattr(image, f.name) for image in images] for f in fields(cls))
        return cls(*(torch.stack(column, dim=1).flatten(0, 1) for column in columns))


@dataclass
class CropParameters:
    """Boxes of N crops, and how each box becomes a crop: resize, keep a window, mirror, rotate."""

    boxes: np.ndarray
    """(N, 4) int64: top, left, height, width in pixels of the image."""
    size: tuple[int, int]
    """Height and width of a resized box."""
    flips: np.ndarray
    """(N,) bool: mirror left and right after the resize."""
    degrees: np.ndarray | None = None
    """(N,): counter-clockwise rotation after that; None for no rotation."""
    window: tuple[int, int, int, int] | None = None
    """Top, left, height, width of the part of a resized box that is kept; None for all of the box."""

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of a crop."""
        return self.size if self.window is None else self.window[2:]

    def shrunk(self, shrink: int) -> "CropParameters":
        """Return the boxes for the image at 1 / `shrink` of its size, with edges rounded to whole pixels."""
        start, end = self.boxes[:, :2], self.boxes[:, :2] + self.boxes[:, 2:]
        start, end = ((2 * edge + shrink) // (2 * shrink) for edge in (start, end))
        return replace(self, boxes=np.concatenate([start, end - start], axis=1))

    @classmethod
    def stack(cls, images: Sequence["CropParameters"]) -> "CropParameters":
        """Parameters of a batch, crop-major: B of (n, ...) -> (n * B, ...)."""
        stacked = [np.stack(column, axis=1) for column in ([p.boxes for p in images], [p.flips for p in images])]
        boxes, flips = (column.reshape(-1, *column.shape[2:]) for column in stacked)
        degrees = [image.degrees for image in images if image.degrees is not None]
        return cls(boxes, images[0].size, flips, np.stack(degrees, axis=1).ravel() if degrees else None)


@dataclass
class ViewParameters:
    """Everything random about the n crops of one image in one view, drawn before the image is decoded."""

    boxes: CropParameters
    color: ColorParameters | None = None
    """None for no colour change."""
    masks: tuple[np.ndarray, ...] = ()
    """Masks of the crops, each (n, h, w) bool with True for a hidden token; none, one, or several per crop."""


SampleParameters = Sequence[ViewParameters]
"""Parameters of one image: one `ViewParameters` per view."""


def largest_shrink(views: SampleParameters, size: tuple[int, int]) -> int:
    """Largest of 1, 2, 4, 8 such that an image at 1 / shrink of its `size` (H, W) still has enough pixels for every
    crop.

    No box of the smaller image may be smaller than its crop. A view that keeps a window of the resized image, as the
    evaluation does, always uses all pixels.
    """
    most = min(min(size[0] // view.boxes.size[0], size[1] // view.boxes.size[1]) for view in views)
    if most < 2 or any(view.boxes.window for view in views):  # no box is larger than its image
        return 1
    most = min(int((view.boxes.boxes[:, 2:] // view.boxes.size).min()) for view in views)
    return next(shrink for shrink in (8, 4, 2, 1) if shrink <= max(most, 1))


@dataclass(frozen=True)
class Packing:
    """How crops of many sizes make one batch."""

    patch: int
    """Side of a patch in pixels."""
    budget: int
    """Most patches of a sequence that images share."""


@dataclass
class RawImages:
    """Whole images of a batch, in `Batch.memory`, from which a device cuts the crops (`data.resample.cut_views`)."""

    sizes: np.ndarray
    """(B, 2) int64: height and width."""
    starts: np.ndarray
    """(B,) int64: first byte of each image; pixels lie in the order row, column, channel."""


@dataclass
class View:
    """Crops of one size, or packed crops of many sizes: n of each of the B images of a batch."""

    images: Images
    """(n * B, C, H, W) crop-major, or packed images. uint8 from the loader, normalised floats after
    `data.augment.to_model_input`. Empty while whole images travel (`Batch.raw`)."""
    crops: int
    """Crops per image (n)."""
    masks: tuple[Mask, ...] = ()
    """Masks over all n * B crops, crop-major. Methods that hide nothing have none; I-JEPA has several per crop."""
    color: ColorParameters | None = None
    """Colour changes still to be applied; None for none."""
    boxes: CropParameters | None = None
    """Boxes of the crops, only while whole images travel."""

    @classmethod
    def from_samples(cls, images: Images, samples: Sequence[ViewParameters], *, raw: bool = False) -> "View":
        """View of B images with the parameters that were drawn for them; `raw` keeps the boxes.

        Raises:
            ValueError: the masks of two images, or of two crops, do not belong together.
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
        """Copy to a device. Parameters stay on the CPU."""
        masks = tuple(mask.to(device, non_blocking) for mask in self.masks)
        return replace(self, images=self.images.to(device, non_blocking=non_blocking), masks=masks)

    def pin_memory(self) -> "View":
        return replace(self, images=self.images.pin_memory(), masks=tuple(mask.pin_memory() for mask in self.masks))


def _stack_masks(images: Sequence[tuple[np.ndarray, ...]], crops: int) -> tuple[Mask, ...]:
    """Masks of a batch, crop-major, from those of each of B images, (n, h, w) each."""
    if len({len(masks) for masks in images}) > 1:
        raise ValueError(f"Images have {sorted({len(masks) for masks in images})} masks. Draw as many for every image.")
    return tuple(_stack_mask(column, crops) for column in zip(*images, strict=True))


def _stack_mask(images: Sequence[np.ndarray], crops: int) -> Mask:
    """One mask of n * B crops, crop-major, from B arrays (n, h, w); the grids of two images may differ."""
    if any(array.ndim != 3 or len(array) != crops for array in images):
        shapes = sorted({array.shape for array in images})
        raise ValueError(f"A mask has the shapes {shapes}. It must be ({crops}, rows, columns) for {crops} crops.")
    grids = [array[crop] for crop in range(crops) for array in images]  # n * B of (h, w)
    hidden = torch.from_numpy(np.concatenate([grid.ravel() for grid in grids]))
    return Mask.from_hidden(hidden, torch.tensor([grid.shape for grid in grids]))


@dataclass
class Batch:
    """Images of one forward pass of one process."""

    views: list[View]
    keys: list[str] = field(default_factory=list)
    """B sample names, `shard.tar/key`."""
    labels: Tensor | None = None
    """(B,) int64, or None where labels are missing or not asked for."""
    positions: Tensor | None = None
    """(B,) int64 on the CPU: position of each sample in the run; None in evaluation."""
    skipped: list[str] = field(default_factory=list)
    """`shard.tar/key: reason` of each corrupt image that was replaced or left out."""
    preprocessing: Preprocessing = IMAGENET
    """Normalisation that `data.augment.to_model_input` applies."""
    raw: RawImages | None = None
    """Whole images from which the device cuts the crops; None where the loader has cut them."""
    memory: Tensor | None = None
    """(bytes,) uint8: the buffer that holds the pixels of all views, or of `raw`. It moves as one copy."""

    def __len__(self) -> int:
        """Number of images (B)."""
        return len(self.raw.sizes) if self.raw else len(self.views[0].images) // self.views[0].crops

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Copy to a device, except parameters, which stay on the CPU."""
        labels = None if self.labels is None else self.labels.to(device, non_blocking=non_blocking)
        if self.memory is None:
            views = [view.to(device, non_blocking) for view in self.views]
            return replace(self, views=views, labels=labels)
        batch = self.in_memory(self.memory.to(device, non_blocking=non_blocking))
        masks = [tuple(mask.to(device, non_blocking) for mask in view.masks) for view in self.views]
        return replace(batch, views=_with_masks(batch.views, masks), labels=labels)

    def pin_memory(self) -> "Batch":
        """Copy to pinned memory, from which CUDA copies in the background."""
        labels = None if self.labels is None else self.labels.pin_memory()
        if self.memory is None:
            return replace(self, views=[view.pin_memory() for view in self.views], labels=labels)
        batch = self.in_memory(self.memory.pin_memory())
        masks = [tuple(mask.pin_memory() for mask in view.masks) for view in self.views]
        return replace(batch, views=_with_masks(batch.views, masks), labels=labels)

    def in_memory(self, memory: Tensor) -> "Batch":
        """Return the batch with `memory`, which holds or will hold the same bytes, in place of its own."""
        if self.memory is None:
            raise ValueError("The views of this batch have memory of their own.")
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
