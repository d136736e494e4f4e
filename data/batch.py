"""The batch that the loader yields, and the random parameters that a transform draws for one image.

Shapes: a batch has B images with C channels and H x W pixels. A view has n crops of each image, N = n * B crops in
total. Crops are stored in crop-major order: crop c of image b is row c * B + b. Crops of different sizes are packed
into sequences, and a packed view has one crop of each image.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.encoders.images import Images, Mask, PackedImages
from tessera.runtime.collectives import Share

Colors = Sequence[tuple[Any, np.ndarray]]
"""Colour changes of N crops: operations (`data.colors.Operation`) in the order in which they are applied, and their
parameters for each crop.

The parameters, (N,) or (N, k), stay on the CPU, so that the CPU can decide which crops need which operation without
waiting for a device. The parameters are NumPy arrays, because a worker process sends arrays by value, whereas each
tensor would need a block of shared memory with an open file.
"""


@dataclass
class ViewParameters:
    """Random parameters of the n crops of one image in one view. The parameters are drawn before decoding.

    A crop is made from a box of the image. The box is resized and mirrored, and can also be rotated or cut to a window.
    """

    boxes: np.ndarray
    """(n, 4) int64: top, left, height and width of each box, in pixels of the image."""
    size: tuple[int, int]
    """Height and width to which each box is resized, in pixels."""
    flips: np.ndarray
    """(n,) bool: True for each box that is mirrored left to right after the resize."""
    degrees: np.ndarray | None = None
    """(n,): counter-clockwise rotation of each crop in degrees, applied after mirroring; None for no rotation."""
    window: tuple[int, int, int, int] | None = None
    """Top, left, height and width of the part of the resized box that becomes the crop; None for the whole box."""
    colors: Colors = ()
    """Colour changes of the crops. `data.augment.augment_colors` applies them on any device."""
    masks: tuple[np.ndarray, ...] = ()
    """Masks of the crops: any number of bool arrays (n, h, w), for h x w tokens. True marks a hidden token."""
    is_plain: bool = False
    """True for crops that show another view's boxes without augmentation, such as those of DINOv3's Gram teacher."""

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of a crop in pixels."""
        return self.size if self.window is None else self.window[2:]

    def shrunk(self, shrink: int) -> "ViewParameters":
        """Return the parameters for an image that was shrunk by the factor `shrink`.

        The edges of the scaled boxes are rounded to whole pixels.
        """
        start, end = self.boxes[:, :2], self.boxes[:, :2] + self.boxes[:, 2:]
        start, end = ((2 * edge + shrink) // (2 * shrink) for edge in (start, end))
        return replace(self, boxes=np.concatenate([start, end - start], axis=1))


SampleParameters = Sequence[ViewParameters]
"""Parameters of one image: one `ViewParameters` per view."""


def largest_shrink(views: SampleParameters, size: tuple[int, int]) -> int:
    """Return the largest factor, 1, 2, 4 or 8, by which an image of `size` (H, W) can shrink before it is cropped.

    The factor is limited so that no box becomes smaller than the crop to which the box is resized. If a view keeps only
    a window of the resized box, as in evaluation, the factor is 1.
    """
    most = min(min(size[0] // view.size[0], size[1] // view.size[1]) for view in views)
    if most < 2 or any(view.window for view in views):
        return 1
    most = min(int((view.boxes[:, 2:] // view.size).min()) for view in views)
    return next(shrink for shrink in (8, 4, 2, 1) if shrink <= max(most, 1))


@dataclass
class View:
    """One view of a batch: n crops of each of B images. The crops either all have the same size or are packed."""

    images: Images
    """Crops (n * B, C, H, W) in crop-major order, or packed images. The loader yields values of the type of the images,
    and `data.augment.to_model_input` returns normalised floats."""
    crops: int
    """Number of crops per image (n)."""
    masks: tuple[Mask, ...] = ()
    """Masks, each of which covers all n * B crops in crop-major order. The tuple is empty for methods without masks,
    and can hold several masks for methods such as I-JEPA."""
    colors: Colors = ()
    """Colour changes that still have to be applied to the crops."""

    @classmethod
    def from_samples(cls, images: Images, samples: Sequence[ViewParameters]) -> "View":
        """Return a view made from crops and from the random parameters of each image.

        Raises:
            ValueError: the images have different numbers of masks, or a mask has a wrong shape.
        """
        crops = len(samples[0].boxes)
        return cls(
            images,
            crops=crops,
            masks=_stack_masks([sample.masks for sample in samples], crops),
            colors=_stack_colors([sample.colors for sample in samples]),
        )


def _stack_colors(images: Sequence[Colors]) -> Colors:
    """Return the colour changes of a batch in crop-major order. `images` holds the changes of each image."""
    stacked = []
    for column in zip(*images, strict=True):
        numbers = np.stack([numbers for _, numbers in column], axis=1)  # (n, B) or (n, B, k)
        stacked.append((column[0][0], numbers.reshape(-1, *numbers.shape[2:])))
    return stacked


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
    """Views, labels, maps and sample names of one forward pass of one process."""

    views: list[View]
    keys: list[str] = field(default_factory=list)
    """Names of the B samples, each in the form `shard.tar/key`."""
    labels: Tensor | None = None
    """(B,) int64: class number of each image; None if labels are missing or were not requested."""
    positions: np.ndarray | None = None
    """(B,) int64: position of each sample in the run, counted from 0; None in evaluation. The positions are a NumPy
    array, because a worker process sends arrays by value, whereas each tensor would need a block of shared memory with
    an open file."""
    sources: np.ndarray | None = None
    """(B,) int64: index of the source of each sample, in a mixture of sources; None if the batch has no samples."""
    maps: Tensor | None = None
    """(B, S, T): map of classes (uint8) or of depth (float32) of each image, cut to the only crop of the image; None if
    not requested."""
    bands: np.ndarray | None = None
    """(B,) int64: number of channels that each image has; None if all images have all channels."""
    skipped: list[str] = field(default_factory=list)
    """Corrupt images that were replaced or left out, each in the form `shard.tar/key: reason`."""
    preprocessing: Preprocessing = IMAGENET
    """Type, range, mean and standard deviation with which `data.augment.to_model_input` normalises the pixels."""
    share: Share | None = None
    """Share of this process in the images of a forward pass; None if all processes have equally many images."""
    memory: Tensor | None = None
    """(bytes,) uint8: the buffer that holds the pixels of all views. A single copy moves it to a device. None for
    batches of normalised floats."""

    def __len__(self) -> int:
        """Return the number of images (B)."""
        return len(self.views[0].images) // self.views[0].crops

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Return a copy of the batch on a device. Colour changes stay on the CPU."""
        return self._moved(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return a copy of the batch in pinned memory, from which CUDA can copy in the background."""
        return self._moved(lambda part: part.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of this batch until the work that is queued on `stream` when the batch is freed is done."""

        def record(part: Any) -> Any:
            part.record_stream(stream)
            return part

        self._moved(record)

    def _moved(self, move: Callable[[Any], Any]) -> "Batch":
        """Return a copy of the batch in which all tensors and masks are results of `move`."""
        labels, maps = (None if one is None else move(one) for one in (self.labels, self.maps))
        batch = self if self.memory is None else self.in_memory(move(self.memory))
        views = []
        for view in batch.views:
            images = move(view.images) if self.memory is None else view.images
            views.append(replace(view, images=images, masks=tuple(move(mask) for mask in view.masks)))
        return replace(batch, views=views, labels=labels, maps=maps)

    def in_memory(self, memory: Tensor) -> "Batch":
        """Return a batch whose pixels are in `memory` instead of in the buffer of this batch.

        The bytes of the old buffer are not copied. The caller must write the same bytes to `memory` before the pixels
        are used.
        """
        if self.memory is None:
            raise ValueError(
                "The memory of this batch cannot be replaced, because its views do not share a buffer. "
                "Pass a batch of `data.collate.Collator`."
            )
        moved = memory.storage_offset() - self.memory.storage_offset()

        def part(pixels: Tensor) -> Tensor:
            place = pixels.storage_offset() + moved // pixels.itemsize
            return memory.view(pixels.dtype).as_strided(pixels.shape, pixels.stride(), place)

        def images(view: View) -> Images:
            if isinstance(view.images, PackedImages):
                return replace(view.images, patches=part(view.images.patches))
            return part(view.images)

        return replace(self, views=[replace(view, images=images(view)) for view in self.views], memory=memory)
