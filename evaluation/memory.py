"""Limit the memory in which an evaluation encodes images.

An encoder keeps far more bytes per image than its features have: an image of 224 pixels takes 25 MB in the first stage
of Swin-T. The number of images that are encoded at once therefore depends on the encoder. A few images are encoded
while the bytes of all tensors that live at a time are counted.
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LIMITS = {"cpu": 2**27, "cuda": 2**31}
"""Largest number of bytes of the images that are encoded at once and of their activations, for each type of device. On
a CPU, larger batches are not faster."""
COPIES = 4
"""Number of float32 copies of a crop that live at a time before the encoder: its pixels, and the steps of colour
changes."""


def limit(device: torch.device) -> int:
    """Return the limit of `LIMITS` for a device. Types of devices without an own limit have that of CUDA."""
    return LIMITS.get(device.type, LIMITS["cuda"])


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of new tensors, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given:  # views and in-place operations return memory that is there already
                self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._alive:
            return

        def remove(_: weakref.ref) -> None:
            del self._alive[address]
            self.now -= size

        self._alive[address] = weakref.ref(storage, remove)
        self.now += size
        self.most = max(self.most, self.now)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]


def images_at_once(encode: Callable[[Tensor], Any], crops: Tensor, most: int = sys.maxsize) -> int:
    """Return the number of images that `encode` can encode at once within `LIMITS`: at least 1, and at most `most`.

    Args:
        encode: function of the crops of images in crop-major order, (n * B, C, H, W). It is called with one and with
            two images. The bytes of the weights, which it may copy to another type, do not count.
        crops: crops of one image, (n, C, H, W), on the device of the encoder.
        most: largest number.
    """
    if most == 1:
        return 1
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiled code does not show its tensors
        peaks = []
        for images in (1, 2):
            blank = crops.repeat(images, 1, 1, 1)
            with _LiveBytes() as live:
                encode(blank)
            peaks.append(live.most)
    each = peaks[1] - peaks[0] + COPIES * 4 * crops.numel()
    return max(1, min(most, limit(crops.device) // max(each, 1)))
