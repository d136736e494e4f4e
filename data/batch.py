"""What the loader yields, and what a transform makes of one image on the way there.

B images; a view is a stack of crops of one size, crop-major: crop c of image b lies at row c * B + b. Images of many
sizes are packed instead, one crop each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from encoders.images import Images, Mask, best_fit, pack


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


@dataclass
class Crops:
    """The views of one image."""

    views: list[Tensor]
    """one (n, 3, S, S) uint8 a view"""
    photometric: list[Photometric | None]
    """one a view, of n crops"""
    hidden: Tensor | None = None
    """(h, w) bool: the hidden tokens of the one crop of a transform that masks"""


@dataclass(frozen=True)
class Packing:
    """How crops of many sizes make one batch."""

    patch: int
    """side of a patch in pixels"""
    budget: int
    """patches of a sequence that images share"""


@dataclass
class Batch:
    """The part of one optimizer step's images that one process gets in one forward pass."""

    views: list[Images]
    """one (crops * B, 3, H, W) tensor a view, or packed images; uint8 from the loader, normalised floats after
    `data.augment.finish`"""
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

    @property
    def images(self) -> int:
        """How many images the batch holds (B)."""
        return len(self.views[0]) // self.crops[0]

    def to(self, device: Any, non_blocking: bool = False) -> "Batch":
        return replace(
            self,
            views=[view.to(device, non_blocking=non_blocking) for view in self.views],
            labels=None if self.labels is None else self.labels.to(device, non_blocking=non_blocking),
            masks=self.masks and self.masks.to(device, non_blocking),
        )

    def pin_memory(self) -> "Batch":
        return replace(
            self,
            views=[view.pin_memory() for view in self.views],
            labels=None if self.labels is None else self.labels.pin_memory(),
            masks=self.masks and self.masks.pin_memory(),
        )


def collate(
    samples: Sequence[Crops],
    crops: tuple[int, ...],
    keys: Sequence[str],
    labels: Sequence[int] | None = None,
    *,
    packing: Packing | None = None,
    skipped: Sequence[str] = (),
) -> Batch:
    """B images as one batch. With `packing` they come in the order in which they fill sequences best.

    Raises:
        ValueError: an image has more patches than a sequence.
    """
    order, counts = list(range(len(samples))), None
    if packing is not None:
        areas = [sample.views[0].shape[-2] * sample.views[0].shape[-1] for sample in samples]
        sequences = best_fit([area // packing.patch**2 for area in areas], packing.budget)
        order = [image for sequence in sequences for image in sequence]
        counts = torch.tensor([len(sequence) for sequence in sequences])
        samples = [samples[i] for i in order]
    views = [_stack(stacked, packing, counts) for stacked in zip(*(sample.views for sample in samples), strict=True)]
    return Batch(
        views=views,
        crops=crops,
        keys=[keys[i] for i in order],
        labels=None if labels is None else torch.tensor([labels[i] for i in order]),
        photometric=[_together(drawn) for drawn in zip(*(sample.photometric for sample in samples), strict=True)],
        masks=_mask([sample.hidden for sample in samples]),
        skipped=list(skipped),
    )


def _stack(view: Sequence[Tensor], packing: Packing | None, counts: Tensor | None) -> Images:
    """One view of B images, each (n, 3, S, S): (n * B, 3, S, S) crop-major, or packed.

    Pixels stay in the order row, column, channel, in which images are decoded and resized: this is plain copying.
    """
    if packing is not None:
        return replace(pack(view, packing.patch), sequences=counts)
    pixels = torch.stack([crops.permute(0, 2, 3, 1) for crops in view], dim=1)  # (n, B, S, S, 3)
    return pixels.flatten(0, 1).permute(0, 3, 1, 2)  # (n * B, 3, S, S)


def _together(drawn: Sequence[Photometric | None]) -> Photometric | None:
    """Photometric changes of one view of B images, each of n crops: of n * B, crop-major."""
    known = [part for part in drawn if part is not None]
    columns = ([getattr(part, f.name) for part in known] for f in fields(Photometric))
    return Photometric(*(torch.stack(column, dim=1).flatten(0, 1) for column in columns)) if known else None


def _mask(hidden: Sequence[Tensor | None]) -> Mask | None:
    known = [h for h in hidden if h is not None]
    grids = torch.tensor([h.shape for h in known])
    return Mask.from_hidden(torch.cat([h.flatten() for h in known]), grids) if known else None
