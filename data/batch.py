"""What the loader yields, and what a transform says about one image on the way there.

B images; a view is a stack of crops of one size, crop-major: crop c of image b lies at row c * B + b. Images of many
sizes are packed instead, one crop each. n crops of one image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from encoders.images import Images, Mask, PackedImages


@dataclass
class Photometric:
    """Drawn photometric changes for the N crops of one view; `data.augment.photometric` applies them on any device.

    All tensors are (N,) float32 unless said otherwise, and a value that changes nothing is part of the range. They stay
    on the CPU: which crops need which operation is decided there, so that no device is ever waited for.
    """

    brightness: Tensor
    """factor; 1 changes nothing"""
    contrast: Tensor
    """factor; 1 changes nothing"""
    saturation: Tensor
    """factor; 1 changes nothing"""
    hue: Tensor
    """shift in turns of the colour circle, -0.5 to 0.5; 0 changes nothing"""
    order: Tensor
    """(N, 4) int64: the order of the four above"""
    grayscale: Tensor
    """bool"""
    blur: Tensor
    """standard deviation in pixels; 0 changes nothing"""
    solarize: Tensor
    """bool: invert values of one half and above"""

    def __getstate__(self) -> dict[str, Any]:
        # As arrays these travel from a worker by value; as tensors each would cost shared memory and an open file.
        return {name: value.numpy(force=True) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: torch.from_numpy(value) for name, value in state.items()})

    @classmethod
    def together(cls, parts: Sequence["Photometric | None"]) -> "Photometric | None":
        """Of one view of B images, n crops each: of n * B, crop-major; None where there is nothing to do."""
        known = [part for part in parts if part is not None]
        columns = ([getattr(part, f.name) for part in known] for f in fields(cls))
        return cls(*(torch.stack(column, dim=1).flatten(0, 1) for column in columns)) if known else None


@dataclass
class Cut:
    """Where the N crops of one view lie in their images, and what becomes of them."""

    boxes: np.ndarray
    """(N, 4) int64: top, left, height, width in pixels of the image"""
    size: tuple[int, int]
    """height and width to which a box is resized"""
    flips: np.ndarray
    """(N,) bool: mirrored left and right after that"""
    degrees: np.ndarray | None = None
    """(N,): turned counter-clockwise after that; None: nothing is turned"""
    window: tuple[int, int, int, int] | None = None
    """top, left, height, width of what is kept of a resized box; None: all of it"""

    def shrunk(self, shrink: int) -> "Cut":
        """For the image at 1 / `shrink` of its size, edges to whole pixels; a multiple of `shrink` keeps its size."""
        start, end = self.boxes[:, :2], self.boxes[:, :2] + self.boxes[:, 2:]
        start, end = ((2 * edge + shrink) // (2 * shrink) for edge in (start, end))  # rounded
        return replace(self, boxes=np.concatenate([start, end - start], axis=1))

    @classmethod
    def together(cls, parts: Sequence["Cut"]) -> "Cut":
        """Of one view of B images, n crops each: of n * B, crop-major."""
        stacked = [np.stack(column, axis=1) for column in ([p.boxes for p in parts], [p.flips for p in parts])]
        boxes, flips = (column.reshape(-1, *column.shape[2:]) for column in stacked)
        degrees = [part.degrees for part in parts if part.degrees is not None]
        return cls(boxes, parts[0].size, flips, np.stack(degrees, axis=1).ravel() if degrees else None)


@dataclass
class Drawn:
    """All that is random in one image. It is drawn from the size of the image, before a pixel is decoded."""

    cuts: list[Cut]
    """one a view, of n crops"""
    photometric: list[Photometric | None]
    """one a view, of n crops"""
    hidden: Tensor | None = None
    """(h, w) bool: the hidden tokens of the one crop of a transform that masks"""

    def shrink(self, size: tuple[int, int]) -> int:
        """1, 2, 4 or 8: at this fraction of its `size` (H, W) no box of the image is smaller than its crop.

        What keeps a window of a resized image, the crop of evaluation, is never made from less than all pixels.
        """
        most = min(min(size[0] // cut.size[0], size[1] // cut.size[1]) for cut in self.cuts)
        if most < 2 or any(cut.window for cut in self.cuts):  # no box is larger than its image
            return 1
        most = min(int((cut.boxes[:, 2:] // cut.size).min()) for cut in self.cuts)
        return next(shrink for shrink in (8, 4, 2, 1) if shrink <= max(most, 1))


@dataclass(frozen=True)
class Packing:
    """How crops of many sizes make one batch."""

    patch: int
    """side of a patch in pixels"""
    budget: int
    """patches of a sequence that images share"""


@dataclass
class Uncut:
    """Whole images in the memory of a batch, and what `data.resample.cut` cuts out of them on any device."""

    sizes: np.ndarray
    """(B, 2) int64: height and width"""
    starts: np.ndarray
    """(B,) int64: where in the memory an image begins, in bytes"""
    encoded: np.ndarray
    """(B,) int64: bytes of a JPEG that the device decodes; 0: pixels, in the order row, column, channel"""
    cuts: list[Cut]
    """one a view, of n * B crops"""
    device: torch.device | None = None
    """where to decode and cut; None: where the memory is"""


@dataclass
class Batch:
    """The part of one optimizer step's images that one process gets in one forward pass."""

    views: list[Images]
    """one (crops * B, 3, H, W) tensor a view, or packed images; uint8 from the loader, normalised floats after
    `data.augment.finish`; none before that where whole images come"""
    crops: tuple[int, ...]
    """crops per image in each view, e.g. (2, 8)"""
    keys: list[str] = field(default_factory=list)
    """B sample names: `shard.tar/key`"""
    labels: Tensor | None = None
    """(B,) int64, or None when the shards carry none or none were asked for"""
    photometric: list[Photometric | None] = field(default_factory=list)
    """one a view, always on the CPU; None: nothing to do but normalise"""
    masks: Mask | None = None
    """of the images of the one view of a method that masks"""
    skipped: list[str] = field(default_factory=list)
    """`shard.tar/key: reason` of each corrupt image that was met on the way, and replaced or left out"""
    uncut: Uncut | None = None
    """whole images in place of the views"""
    memory: Tensor | None = None
    """(bytes,) uint8: what the loader's views are parts of, or the images of `uncut`; it is moved as one"""

    @property
    def images(self) -> int:
        """How many images the batch holds (B)."""
        return len(self.uncut.sizes) if self.uncut else len(self.views[0]) // self.crops[0]

    def to(self, device: Any, non_blocking: bool = False) -> "Batch":
        batch = replace(
            self,
            labels=None if self.labels is None else self.labels.to(device, non_blocking=non_blocking),
            masks=self.masks and self.masks.to(device, non_blocking),
        )
        if self.uncut and self.uncut.encoded.any():  # decoders read from the CPU
            return replace(batch, uncut=replace(self.uncut, device=torch.device(device)))
        if self.memory is not None:
            return batch.over(self.memory.to(device, non_blocking=non_blocking))
        return replace(batch, views=[view.to(device, non_blocking=non_blocking) for view in self.views])

    def pin_memory(self) -> "Batch":
        batch = replace(
            self,
            labels=None if self.labels is None else self.labels.pin_memory(),
            masks=self.masks and self.masks.pin_memory(),
        )
        if self.memory is not None:
            return batch.over(self.memory.pin_memory())
        return replace(batch, views=[view.pin_memory() for view in self.views])

    def over(self, memory: Tensor) -> "Batch":
        """The batch in other memory, which holds, or will hold, the same bytes."""
        assert self.memory is not None
        moved = memory.storage_offset() - self.memory.storage_offset()

        def part(pixels: Tensor) -> Tensor:
            return memory.as_strided(pixels.shape, pixels.stride(), pixels.storage_offset() + moved)

        views = [
            replace(view, patches=part(view.patches)) if isinstance(view, PackedImages) else part(view)
            for view in self.views
        ]
        return replace(self, views=views, memory=memory)
