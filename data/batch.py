"""What the loader yields.

B images; a view is a stack of crops of one size, crop-major: crop c of image b lies at row c * B + b.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from encoders.images import Mask


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
class Batch:
    """The part of one optimizer step's images that one process gets in one forward pass."""

    views: list[Tensor]
    """one (crops * B, 3, H, W) tensor a view; uint8 from the loader, normalised floats after `data.augment.finish`"""
    crops: tuple[int, ...]
    """crops per image in each view, e.g. (2, 8)"""
    keys: list[str] = field(default_factory=list)
    """B sample names: `shard.tar/key`"""
    labels: Tensor | None = None
    """(B,) int64, or None when the shards carry none or none were asked for"""
    photometric: list[Photometric | None] = field(default_factory=list)
    """one a view, always on the CPU; None: nothing to do but normalise"""
    masks: Mask | None = None
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
