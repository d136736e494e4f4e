"""What goes into an encoder: images of one size or packed ones of many, and a mask on the encoder's output grid.

B images, C channels, H x W pixels; h x w grid of tokens; T = sum over images of h * w tokens; V visible tokens;
P = patch * patch * C. The tokens of a batch lie flat, image after image and row by row; `grids` (B, 2) says how they
split.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


@dataclass(frozen=True)
class PackedImages:
    """Images of many sizes, cut in patches that lie flat, as NaViT (2307.06304) takes them."""

    patches: Tensor
    """(T, P): the pixels of each patch in (row, column, channel) order"""
    grids: Tensor
    """(B, 2) int64 on the CPU: rows and columns of patches of each image"""
    patch: int
    """side of a patch in pixels"""
    sequences: Tensor | None = None
    """(R,) int64 on the CPU: how many images, one after the other, share each sequence; None: nobody packed them"""

    def __len__(self) -> int:
        return len(self.grids)

    @cached_property
    def lengths(self) -> Tensor:
        """(B,) int64 on the CPU: patches of each image."""
        return self.grids.prod(1)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PackedImages":
        """On another device, except what decides shapes."""
        return replace(self, patches=self.patches.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedImages":
        return replace(self, patches=self.patches.pin_memory())

    def unpack(self) -> list[Tensor]:
        """The images again: B of (C, H, W)."""
        pieces = self.patches.split(self.lengths.tolist())
        return [
            rearrange(piece, "(h w) (p1 p2 c) -> c (h p1) (w p2)", h=int(h), p1=self.patch, p2=self.patch)
            for piece, (h, _) in zip(pieces, self.grids, strict=True)
        ]


Images = Tensor | PackedImages
"""(B, C, H, W), or images of many sizes"""


@dataclass(frozen=True)
class Mask:
    """Which tokens of a batch are hidden. Lives on the encoder's output grid and is indexed like its tokens."""

    hidden: Tensor
    """(T,) bool"""
    visible: Tensor
    """(V,) int64, ascending: the flat places of the tokens that are not hidden"""
    lengths: Tensor
    """(B,) int64 on the CPU: visible tokens of each image, which decide shapes"""

    @classmethod
    def from_hidden(cls, hidden: Tensor, grids: Tensor) -> "Mask":
        """From `hidden` (T,) bool and `grids` (B, 2).

        Raises:
            ValueError: `hidden` is not bool or does not have one entry for each token.
        """
        counts = grids.cpu().prod(1)
        if hidden.dtype != torch.bool or hidden.shape != (int(counts.sum()),):
            raise ValueError(
                f"a mask must be bool with one entry for each of {int(counts.sum())} tokens, "
                f"not {hidden.dtype} of shape {tuple(hidden.shape)}"
            )
        ends = counts.cumsum(0)
        before = F.pad((~hidden).cpu().cumsum(0), (1, 0))  # (T + 1,): visible tokens in front of each place
        return cls(hidden, (~hidden).nonzero().squeeze(1), before[ends] - before[ends - counts])

    def check(self, grids: Tensor) -> None:
        """Whether this is a mask of images with these `grids` (B, 2).

        Raises:
            ValueError: it belongs to other images.
        """
        counts = grids.prod(1)
        if self.hidden.shape != (int(counts.sum()),) or self.lengths.shape != counts.shape:
            shapes = sorted({f"{int(h)} x {int(w)}" for h, w in grids})
            raise ValueError(
                f"a mask of {self.hidden.numel()} tokens in {len(self.lengths)} images does not fit {len(grids)} "
                f"images of {', '.join(shapes[:3])} tokens; make it by Mask.from_hidden(hidden, encoder.grids(images))"
            )
        if bool((self.lengths > counts).any()):
            raise ValueError("this mask has images of other sizes: it shows more tokens of an image than there are")

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Mask":
        """On another device, except `lengths`."""
        hidden, visible = (t.to(device, non_blocking=non_blocking) for t in (self.hidden, self.visible))
        return Mask(hidden, visible, self.lengths)

    def pin_memory(self) -> "Mask":
        return Mask(self.hidden.pin_memory(), self.visible.pin_memory(), self.lengths)


def patchify(images: Tensor, patch: int) -> Tensor:
    """Pixels of each patch, (row, column, channel) order as in MAE (2111.06377): (B, C, H, W) -> (T, P).

    Raises:
        ValueError: a side is not a multiple of `patch`.
    """
    if images.shape[-2] % patch or images.shape[-1] % patch:
        raise ValueError(
            f"images of {images.shape[-2]} x {images.shape[-1]} pixels do not divide into patches of {patch}"
        )
    return rearrange(images, "b c (h p1) (w p2) -> (b h w) (p1 p2 c)", p1=patch, p2=patch)


def pack(views: Sequence[Images], patch: int) -> PackedImages:
    """One long batch of all images of all views, in their order; each (B, C, H, W) or packed already.

    Raises:
        ValueError: a side is not a multiple of `patch`, or packed images have other patches.
    """
    parts = []
    for view in views:
        if isinstance(view, Tensor):
            grid = torch.tensor([view.shape[-2] // patch, view.shape[-1] // patch])
            view = PackedImages(patchify(view, patch), grid.expand(len(view), 2), patch)
        if view.patch != patch:
            raise ValueError(f"these images are packed in patches of {view.patch} pixels, not of {patch}")
        parts.append(view)
    sequences = [part.sequences for part in parts if part.sequences is not None]
    return PackedImages(
        torch.cat([part.patches for part in parts]),
        torch.cat([part.grids for part in parts]),
        patch,
        torch.cat(sequences) if len(sequences) == len(parts) else None,
    )


def places(grids: Tensor) -> Tensor:
    """Row and column of every token of a batch: (B, 2) -> (2, T) int64 on the CPU."""
    each = [
        torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")).flatten(1)
        for rows, columns in grids.tolist()
    ]
    return torch.cat(each, 1)


def best_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Images into sequences of at most `budget` tokens, best fit decreasing: the longest first, each into the fullest
    sequence that still has room.

    Returns:
        The numbers of the images in each sequence.

    Raises:
        ValueError: an image has more tokens than a sequence.
    """
    return _fit_in_turn(sorted(range(len(lengths)), key=lambda i: -lengths[i]), lengths, budget, min)


def first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """As `best_fit`, but greedy: images in their order, each into the first sequence with room."""
    return _fit_in_turn(range(len(lengths)), lengths, budget, lambda rooms: rooms[0])


def _fit_in_turn(
    order: Iterable[int],
    lengths: Sequence[int],
    budget: int,
    choose: Callable[[list[tuple[int, int]]], tuple[int, int]],
) -> list[list[int]]:
    sequences: list[list[int]] = []
    room: list[int] = []
    for image in order:
        if lengths[image] > budget:
            raise ValueError(
                f"an image of {lengths[image]} tokens does not fit a sequence of {budget}: raise token_budget, "
                "or make images smaller"
            )
        rooms = [(left, place) for place, left in enumerate(room) if left >= lengths[image]]
        if rooms:
            place = choose(rooms)[1]
        else:
            place = len(room)
            room.append(budget)
            sequences.append([])
        room[place] -= lengths[image]
        sequences[place].append(image)
    return sequences
