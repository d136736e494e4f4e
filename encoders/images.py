"""What goes into an encoder: images of one size or packed ones of many, how their tokens lie, and a mask on the output.

B images, C channels, H x W pixels; h x w grid of tokens; T = sum over images of h * w tokens; V visible tokens;
P = patch * patch * C. The tokens of a batch lie flat, image after image and row by row; `grids` (B, 2) says how they
split.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
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


def onto(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of `numbers` on the CPU, for which nobody waits."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


@dataclass(frozen=True)
class Layout:
    """Which of the flat tokens are whose, made once for a forward pass. What follows from it is made when it is first
    asked for, and kept: all blocks share it, and nothing waits for the device.

    B images, T tokens (of which keys and values are made), Q queries; R sequences, padded to the longest, L' keys of
    the B images or L queries.
    """

    lengths: Tensor
    """(B,) int64 on the CPU: tokens of each image, none of them 0"""
    device: torch.device
    """where the tokens are"""
    queries: Tensor | None = None
    """(B,) int64 on the CPU: queries of each image; None: as many as tokens"""
    sequences: Tensor | None = None
    """(R,) int64 on the CPU: how many images, one after the other, share each sequence; None: nobody packed them"""
    uniform: bool = field(init=False)
    """whether all images have as many tokens, and as many queries"""

    def __post_init__(self):
        if self.sequences is not None and int(self.sequences.sum()) != len(self.lengths):
            raise ValueError(f"sequences of {int(self.sequences.sum())} images do not hold {len(self.lengths)} images")
        counts = (self.lengths, self.query_lengths)
        object.__setattr__(self, "uniform", all(bool((n == n[0]).all()) for n in counts))

    @property
    def query_lengths(self) -> Tensor:
        """(B,) int64 on the CPU."""
        return self.lengths if self.queries is None else self.queries

    @cached_property
    def owner(self) -> Tensor:
        """(T,) int64 on the device: the image of each token."""
        counts, images = onto(self.lengths, self.device), torch.arange(len(self.lengths), device=self.device)
        return torch.repeat_interleave(images, counts, output_size=int(self.lengths.sum()))

    @cached_property
    def starts(self) -> tuple[Tensor, Tensor]:
        """Two of (B + 1,) int32 on the device: the first query and the first token of each image, and their ends."""
        ends = torch.stack([self.query_lengths, self.lengths]).cumsum(1)
        first, second = onto(F.pad(ends, (1, 0)).int(), self.device)
        return first, second

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Most queries and most tokens of an image."""
        return int(self.query_lengths.max()), int(self.lengths.max())

    @cached_property
    def padded(self) -> tuple["Padded", "Padded"]:
        """Queries and tokens in padded sequences."""
        assert self.sequences is not None
        owner = torch.repeat_interleave(self.sequences)  # (B,): the sequence of each image
        queries, tokens = (_pad(n, owner, len(self.sequences), self.device) for n in (self.query_lengths, self.lengths))
        return queries, tokens

    @cached_property
    def pairs(self) -> Tensor:
        """(R, 1, L, L') bool on the device: which queries and keys of the padded sequences are of one image; what pads
        queries goes with all keys, so that no row of a softmax is empty."""
        queries, keys = (padded.images for padded in self.padded)
        return ((queries[:, :, None] == keys[:, None, :]) | (queries[:, :, None] < 0))[:, None]


@dataclass(frozen=True)
class Padded:
    """T tokens in R sequences, each padded to L, the length of the longest; on the device."""

    places: Tensor
    """(T,) int64: where in R * L each token lies"""
    images: Tensor
    """(R, L) int64: whose each place is; padding is -1"""


def _pad(lengths: Tensor, owner: Tensor, sequences: int, device: torch.device) -> Padded:
    """From the `lengths` (B,) of images and the sequence that is the `owner` (B,) of each."""
    images = torch.repeat_interleave(lengths)  # (T,): the image of each token
    rows = owner[images]  # (T,): its sequence
    counts = torch.bincount(rows, minlength=sequences)
    longest = int(counts.max())
    places = rows * longest + torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    whose = torch.full((sequences * longest,), -1).index_copy(0, places, images)
    return Padded(onto(places, device), onto(whose.unflatten(0, (sequences, longest)), device))


def places(grids: Tensor, layout: Layout, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Row and column of each token, and how many rows and columns its image has: (B, 2) -> two of (2, T) int64.

    Args:
        grids: on the CPU.
        layout: of the tokens that there are.
        visible: (T,) int64, ascending: their flat places on the full grids, None when none is missing.
    """
    counts = grids.prod(1)
    numbers = onto(torch.cat([(counts.cumsum(0) - counts)[:, None], grids], 1), layout.device)  # (B, 3)
    flat = torch.arange(len(layout.owner), device=layout.device) if visible is None else visible
    start, *sides = numbers.index_select(0, layout.owner).unbind(1)
    place = flat - start  # within the image
    return torch.stack([place // sides[1], place % sides[1]]), torch.stack(sides)


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
