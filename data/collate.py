"""Batches put together image by image, in memory that is given: crops of one size, packed crops, or whole images.

B images, n crops of each in a view, S x S pixels of a crop. In memory, pixels lie in the order row, column, channel, in
which images are decoded and resized.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch, Cut, Drawn, Packing, Photometric, Uncut
from data.decode import Picture, as_tensor
from data.resample import cut
from encoders.images import Mask, best_fit, pack

WHOLE = 3 * 2**20
"""bytes for each whole image in shared memory, on average: a million pixels"""


class Transform(Protocol):
    """What becomes of an image. It must be picklable, draw from `rng` alone, and touches no pixel."""

    @property
    def crops(self) -> tuple[int, ...]:
        """Crops per image in each view."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Side of the crops of each view; packed ones have at most as many pixels as a square of that side."""
        ...

    @property
    def packing(self) -> Packing | None:
        """How the crops are packed, where they are of many sizes."""
        ...

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> Drawn:
        """For an image of `size` (H, W)."""
        ...


class Writer(Protocol):
    """Takes the images of a batch one by one."""

    def put(self, picture: Picture, drawn: Drawn) -> None:
        """The next image.

        Raises:
            ImageError: it is damaged. Nothing has been taken then.
        """
        ...

    def batch(self, keys: Sequence[str], labels: Sequence[int] | None = None, skipped: Sequence[str] = ()) -> Batch:
        """The images that were put, with their names and classes."""
        ...


def writer(transform: Transform, images: int, memory: Tensor | None = None) -> "CropWriter | PackWriter":
    """What cuts the crops of at most `images` images."""
    kind = CropWriter if transform.packing is None else PackWriter
    return kind(transform, images, memory)


def needs_workers(transform: Transform) -> bool:
    """Whether no device can cut these crops together: they are packed, or parts of images that are resized whole."""
    drawn = transform.draw((64, 64), np.random.default_rng(0))
    return transform.packing is not None or any(each.window for each in drawn.cuts)


def crop_bytes(transform: Transform, images: int) -> int:
    """Most bytes of the crops of some images."""
    return images * sum(n * 3 * side**2 for n, side in zip(transform.crops, transform.sizes, strict=True))


def collate(
    transform: Transform,
    images: Sequence[Tensor],
    rngs: Sequence[np.random.Generator],
    keys: Sequence[str] | None = None,
) -> Batch:
    """Images (3, H, W) uint8 that are decoded already as one batch; without `keys` their names are empty."""
    crops = writer(transform, len(images))
    for image, rng in zip(images, rngs, strict=True):
        crops.add(image, transform.draw((image.shape[1], image.shape[2]), rng))
    return crops.batch([""] * len(images) if keys is None else keys)


class CropWriter:
    """Cuts crops of one size, each into its place.

    Args:
        transform: what drew them.
        images: most images that come (B).
        memory: (bytes,) uint8; where it is too small, or None, there will be other memory.
    """

    def __init__(self, transform: Transform, images: int, memory: Tensor | None = None):
        self._crops, self._sizes, self._images = transform.crops, transform.sizes, images
        self._memory = _room(memory, crop_bytes(transform, images))
        self._views = self._split(self._memory, images)
        self._drawn: list[Drawn] = []

    def put(self, picture: Picture, drawn: Drawn) -> None:
        self.add(*_decoded(picture, drawn))

    def add(self, image: Tensor, drawn: Drawn) -> None:
        """The next image (3, H, W) uint8, decoded."""
        for each, view in zip(drawn.cuts, self._views, strict=True):
            cut(image, each, view[:, len(self._drawn)])
        self._drawn.append(drawn)

    def batch(self, keys: Sequence[str], labels: Sequence[int] | None = None, skipped: Sequence[str] = ()) -> Batch:
        images, memory, views = len(self._drawn), self._memory, self._views
        if images < self._images:  # the crops of those that are there move together
            memory = torch.cat([view[:, :images].flatten() for view in views])
            views = self._split(memory, images)
        stacks = [view.flatten(0, 1).permute(0, 3, 1, 2) for view in views]  # (n * B, 3, S, S)
        return replace(_batch(self._drawn, self._crops, keys, labels, skipped), views=stacks, memory=memory)

    def _split(self, memory: Tensor, images: int) -> list[Tensor]:
        """Views (n, B, S, S, 3) of `memory`."""
        shapes = [(n, images, side, side, 3) for n, side in zip(self._crops, self._sizes, strict=True)]
        parts = memory.split([int(np.prod(shape)) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class PackWriter:
    """Cuts crops of many sizes, one an image, and packs them in the order in which they fill sequences best.

    Args: see `CropWriter`.
    """

    def __init__(self, transform: Transform, images: int, memory: Tensor | None = None):
        assert transform.packing is not None
        self._packing, self._transform, self._memory = transform.packing, transform, memory
        self._drawn: list[Drawn] = []
        self._cut: list[Tensor] = []

    def put(self, picture: Picture, drawn: Drawn) -> None:
        self.add(*_decoded(picture, drawn))

    def add(self, image: Tensor, drawn: Drawn) -> None:
        """The next image (3, H, W) uint8, decoded."""
        (each,) = drawn.cuts
        crop = torch.empty((1, *each.size, 3), dtype=torch.uint8)
        cut(image, each, crop)
        self._cut.append(crop.permute(0, 3, 1, 2))  # (1, 3, h, w)
        self._drawn.append(drawn)

    def batch(self, keys: Sequence[str], labels: Sequence[int] | None = None, skipped: Sequence[str] = ()) -> Batch:
        """
        Raises:
            ValueError: an image has more patches than a sequence.
        """
        areas = [drawn.cuts[0].size[0] * drawn.cuts[0].size[1] for drawn in self._drawn]
        sequences = best_fit([area // self._packing.patch**2 for area in areas], self._packing.budget)
        order = [image for sequence in sequences for image in sequence]
        packed = pack([self._cut[i] for i in order], self._packing.patch)
        memory = _room(self._memory, packed.patches.numel())
        patches = memory.view_as(packed.patches).copy_(packed.patches)
        counts = torch.tensor([len(sequence) for sequence in sequences])
        drawn, keys = [self._drawn[i] for i in order], [keys[i] for i in order]
        labels = None if labels is None else [labels[i] for i in order]
        batch = _batch(drawn, self._transform.crops, keys, labels, skipped)
        return replace(batch, views=[replace(packed, patches=patches, sequences=counts)], memory=memory)


class ImageWriter:
    """Puts whole images one behind the other, for a device that cuts the crops.

    Args:
        crops: see `Transform`.
        memory: see `CropWriter`; where images outgrow it, they move.
        encoded: whether the device decodes too, as far as it can: plain JPEGs that are whole.
    """

    def __init__(self, crops: tuple[int, ...], memory: Tensor | None = None, *, encoded: bool = False):
        self._crops, self._encoded, self._used = crops, encoded, 0
        self._memory = torch.empty(WHOLE, dtype=torch.uint8) if memory is None else memory
        self._drawn: list[Drawn] = []
        self._places: list[tuple[int, int, int, int]] = []  # start, encoded bytes, height, width

    def put(self, picture: Picture, drawn: Drawn) -> None:
        if self._encoded and picture.plain and picture.ends:
            pixels = as_tensor(picture.encoded)
            self._places.append((self._used, len(pixels), *picture.size))
        else:
            image, drawn = _decoded(picture, drawn)
            pixels = image.permute(1, 2, 0).reshape(-1)
            self._places.append((self._used, 0, image.shape[1], image.shape[2]))
        self._append(pixels)
        self._drawn.append(drawn)

    def _append(self, pixels: Tensor) -> None:
        end = self._used + len(pixels)
        if end > len(self._memory):
            larger = torch.empty(max(2 * len(self._memory), end), dtype=torch.uint8)
            larger[: self._used] = self._memory[: self._used]
            self._memory = larger
        self._memory[self._used : end] = pixels
        self._used = end

    def batch(self, keys: Sequence[str], labels: Sequence[int] | None = None, skipped: Sequence[str] = ()) -> Batch:
        places = np.array(self._places, dtype=np.int64).reshape(-1, 4)
        cuts = [Cut.together(cuts) for cuts in zip(*(drawn.cuts for drawn in self._drawn), strict=True)]
        uncut = Uncut(places[:, 2:], places[:, 0], places[:, 1], cuts)
        memory = self._memory[: self._used]
        return replace(_batch(self._drawn, self._crops, keys, labels, skipped), uncut=uncut, memory=memory)


def _decoded(picture: Picture, drawn: Drawn) -> tuple[Tensor, Drawn]:
    """An image at the smallest size that its crops allow, and where they lie in that."""
    shrink = picture.fraction(drawn.shrink(picture.size))
    if shrink > 1:
        drawn = replace(drawn, cuts=[each.shrunk(shrink) for each in drawn.cuts])
    return picture.pixels(shrink), drawn


def _room(memory: Tensor | None, size: int) -> Tensor:
    """The beginning of `memory`, or memory of its own for what does not fit."""
    if memory is None or len(memory) < size:
        return torch.empty(size, dtype=torch.uint8)
    return memory[:size]


def _batch(
    drawn: Sequence[Drawn],
    crops: tuple[int, ...],
    keys: Sequence[str],
    labels: Sequence[int] | None,
    skipped: Sequence[str],
) -> Batch:
    """All but the pixels."""
    return Batch(
        [],
        crops,
        keys=list(keys),
        labels=None if labels is None else torch.tensor(labels),
        photometric=[Photometric.together(parts) for parts in zip(*(d.photometric for d in drawn), strict=True)],
        masks=_mask([d.hidden for d in drawn]),
        skipped=list(skipped),
    )


def _mask(hidden: Sequence[Tensor | None]) -> Mask | None:
    known = [h for h in hidden if h is not None]
    grids = torch.tensor([h.shape for h in known])
    return Mask.from_hidden(torch.cat([h.flatten() for h in known]), grids) if known else None
