"""Inputs of encoders: images of one size, packed images of many sizes, and masks over tokens.

Letters in shapes: B images; C channels and H x W pixels of an image; h x w grid of the tokens of an image; T tokens of
all images (the sum of h * w); V visible tokens of all images; P = patch * patch * C values of a patch. The tokens of a
batch form one flat sequence, image after image and row by row. `grids` (B, 2) holds h and w of each image.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from encoders.errors import EncoderError


@dataclass(frozen=True)
class PackedImages:
    """Images of many sizes as one flat sequence of patches, the input of NaViT (2307.06304)."""

    patches: Tensor
    """Pixel values of each patch in (row, column, channel) order: (T, P)."""
    grids: Tensor
    """Rows and columns of patches of each image: (B, 2) int64 on the CPU."""
    patch: int
    """Side of a patch in pixels."""
    sequences: Tensor | None = None
    """Number of consecutive images in each packed sequence: (S,) int64 on the CPU. None if there are no sequences."""

    def __len__(self) -> int:
        return len(self.grids)

    @cached_property
    def lengths(self) -> Tensor:
        """Number of patches of each image: (B,) int64 on the CPU."""
        return self.grids.prod(1)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PackedImages":
        """Return a copy with the patches on `device`. The other tensors stay on the CPU."""
        return replace(self, patches=self.patches.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedImages":
        """Return a copy with the patches in pinned memory."""
        return replace(self, patches=self.patches.pin_memory())

    def unpack(self) -> list[Tensor]:
        """Return a list of the B images, each of shape (C, H, W)."""
        images = self.patches.split(self.lengths.tolist())
        return [
            rearrange(patches, "(h w) (p1 p2 c) -> c (h p1) (w p2)", h=int(h), p1=self.patch, p2=self.patch)
            for patches, (h, _) in zip(images, self.grids, strict=True)
        ]


Images = Tensor | PackedImages
"""Images of one size as a tensor (B, C, H, W), or packed images."""


@dataclass(frozen=True)
class Mask:
    """Hidden and visible tokens of a batch.

    The tokens are those of the encoder's output, in the same order. An image may have any number of hidden tokens,
    including zero.
    """

    hidden: Tensor
    """True for hidden tokens: (T,) bool."""
    visible: Tensor
    """Flat indices of the visible tokens: (V,) int64, ascending."""
    hidden_indices: Tensor
    """Flat indices of the hidden tokens: (T - V,) int64, ascending. Indexing with `hidden` would wait for the
    device."""
    lengths: Tensor
    """Number of visible tokens of each image: (B,) int64 on the CPU."""

    @classmethod
    def from_hidden(cls, hidden: Tensor, grids: Tensor) -> "Mask":
        """Make a mask from `hidden` (T,) bool and the `grids` (B, 2) of the images.

        Raises:
            EncoderError: `hidden` is not bool, or the length of `hidden` is not the number of tokens in `grids`.
        """
        counts = grids.cpu().prod(1)
        if hidden.dtype != torch.bool or hidden.shape != (int(counts.sum()),):
            raise EncoderError(
                f"A mask must be bool with one entry for each of {int(counts.sum())} tokens. "
                f"This one is {hidden.dtype} of shape {tuple(hidden.shape)}."
            )
        ends = counts.cumsum(0)
        before = F.pad((~hidden).cpu().cumsum(0), (1, 0))  # (T + 1,): number of visible tokens before each token
        visible, hidden_indices = (flags.nonzero().squeeze(1) for flags in (~hidden, hidden))
        return cls(hidden, visible, hidden_indices, before[ends] - before[ends - counts])

    def check(self, grids: Tensor) -> None:
        """Raise `EncoderError` if the mask does not belong to images with these `grids` (B, 2)."""
        counts = grids.prod(1)
        if self.hidden.shape != (int(counts.sum()),) or self.lengths.shape != counts.shape:
            shapes = sorted({f"{int(h)} x {int(w)}" for h, w in grids})
            raise EncoderError(
                f"A mask of {self.hidden.numel()} tokens in {len(self.lengths)} images does not fit {len(grids)} "
                f"images of {', '.join(shapes[:3])} tokens. Make it with "
                "Mask.from_hidden(hidden, encoder.grids(images))."
            )
        if bool((self.lengths > counts).any()):
            raise EncoderError(
                "The mask belongs to images of other sizes. An image has fewer tokens than the mask has visible tokens."
            )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Mask":
        """Return a copy on `device`. `lengths` stays on the CPU, where shapes are computed."""
        moved = (self.hidden, self.visible, self.hidden_indices)
        return Mask(*(tensor.to(device, non_blocking=non_blocking) for tensor in moved), lengths=self.lengths)

    def pin_memory(self) -> "Mask":
        """Return a copy in pinned memory."""
        pinned = (self.hidden, self.visible, self.hidden_indices)
        return Mask(*(tensor.pin_memory() for tensor in pinned), lengths=self.lengths)


def patchify(images: Tensor, patch: int) -> Tensor:
    """Cut images into patches: (B, C, H, W) -> (T, P).

    The values of a patch are in (row, column, channel) order, as in MAE (2111.06377).

    Raises:
        EncoderError: a side of the images is not a multiple of `patch`.
    """
    if images.shape[-2] % patch or images.shape[-1] % patch:
        raise EncoderError(
            f"Images of {images.shape[-2]} x {images.shape[-1]} pixels do not divide into patches of {patch} pixels. "
            "Resize them to multiples of the patch."
        )
    return rearrange(images, "b c (h p1) (w p2) -> (b h w) (p1 p2 c)", p1=patch, p2=patch)


def pack(views: Sequence[Images], patch: int) -> PackedImages:
    """Join the images of all views, in order, as packed images. A view is a tensor (B, C, H, W) or packed images.

    Raises:
        EncoderError: a side of an image is not a multiple of `patch`, or a packed view has patches of another size.
    """
    parts = []
    for view in views:
        if isinstance(view, Tensor):
            grid = torch.tensor([view.shape[-2] // patch, view.shape[-1] // patch])
            view = PackedImages(patchify(view, patch), grid.expand(len(view), 2), patch)
        if view.patch != patch:
            raise EncoderError(f"The images are packed in patches of {view.patch} pixels, not of {patch}.")
        parts.append(view)
    if len(parts) == 1:
        return parts[0]
    sequences = [part.sequences for part in parts if part.sequences is not None]
    return PackedImages(
        torch.cat([part.patches for part in parts]),
        torch.cat([part.grids for part in parts]),
        patch,
        torch.cat(sequences) if len(sequences) == len(parts) else None,
    )


def best_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack images into sequences of at most `budget` tokens by the rule best fit decreasing.

    Images are placed in order of decreasing length. Each image goes into the fullest sequence that has enough room.

    Returns:
        Indices of the images in each sequence.

    Raises:
        EncoderError: an image has more tokens than `budget`.
    """
    return _fit_in_turn(sorted(range(len(lengths)), key=lambda i: -lengths[i]), lengths, budget, min)


def first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack images into sequences of at most `budget` tokens by the rule first fit.

    Images are placed in the given order. Each image goes into the first sequence that has enough room.
    """
    return _fit_in_turn(range(len(lengths)), lengths, budget, lambda rooms: rooms[0])


def _fit_in_turn(
    order: Iterable[int],
    lengths: Sequence[int],
    budget: int,
    choose: Callable[[list[tuple[int, int]]], tuple[int, int]],
) -> list[list[int]]:
    """Pack images, one after the other in the given `order`.

    `choose` gets a pair (room, index) for each sequence that has enough room, and returns one of the pairs.
    """
    sequences: list[list[int]] = []
    room: list[int] = []
    for image in order:
        if lengths[image] > budget:
            raise EncoderError(
                f"An image of {lengths[image]} tokens does not fit a sequence of {budget}. "
                "Raise token_budget, or make the images smaller."
            )
        rooms = [(left, index) for index, left in enumerate(room) if left >= lengths[image]]
        if rooms:
            index = choose(rooms)[1]
        else:
            index = len(room)
            room.append(budget)
            sequences.append([])
        room[index] -= lengths[image]
        sequences[index].append(image)
    return sequences
