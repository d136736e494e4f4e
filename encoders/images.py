"""Inputs of encoders: images of one size, packed images of many sizes, and masks over tokens.

Letters in shapes: B images; C channels and H x W pixels of an image; h x w grid of the tokens of an image; T tokens of
all images (the sum of h * w); V visible tokens of all images; P = patch * patch * C values of a patch. The tokens of a
batch form one flat sequence, image after image and row by row. `grids` (B, 2) holds h and w of each image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from tessera.encoders.errors import EncoderError


@dataclass(frozen=True)
class PackedImages:
    """Images of many sizes, stored as one flat sequence of patches, as in NaViT (2307.06304)."""

    patches: Tensor
    """Pixel values of each patch in (row, column, channel) order: (T, P)."""
    grids: Tensor
    """Number of patch rows and number of patch columns of each image: (B, 2) int64 on the CPU."""
    patch: int
    """Side of a patch in pixels."""
    sequences: Tensor | None = None
    """Number of images in each packed sequence: (S,) int64 on the CPU. A packed sequence consists of consecutive
    images. None if the images are not grouped into sequences."""

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

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of the patches until the work of `stream` is done, as `Tensor.record_stream` does."""
        self.patches.record_stream(stream)

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

    A mask has one entry for each token in the output of the encoder, in the order of the output. An image may have any
    number of hidden tokens, including zero.
    """

    hidden: Tensor
    """True for each hidden token, False for each visible token: (T,) bool."""
    visible: Tensor
    """Indices of the visible tokens among all T tokens of the batch: (V,) int64, ascending."""
    hidden_indices: Tensor
    """Indices of the hidden tokens among all T tokens of the batch: (T - V,) int64, ascending. Indexing with these
    indices does not wait for the device. Indexing with the bool tensor `hidden` would wait."""
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
                f"This mask has dtype {hidden.dtype} and shape {tuple(hidden.shape)}."
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
                f"images of {', '.join(shapes[:3])} tokens. Make the mask with "
                "Mask.from_hidden(hidden, encoder.grids(images))."
            )
        if bool((self.lengths > counts).any()):
            raise EncoderError(
                "The mask does not fit the sizes of the images. For one image, the mask has more visible tokens than "
                "the image has tokens. Make the mask with Mask.from_hidden(hidden, encoder.grids(images))."
            )

    def extended(self, grids: Tensor) -> "Mask":
        """Return a mask for more images. The masked images come first, and all tokens of the other images are visible.

        Args:
            grids: grids of all n images, including the masked images: (n, 2).
        """
        counts = grids[len(self.lengths) :].prod(1)
        tokens, more = len(self.hidden), int(counts.sum())
        return Mask(
            torch.cat([self.hidden, self.hidden.new_zeros(more)]),
            torch.cat([self.visible, torch.arange(tokens, tokens + more, device=self.visible.device)]),
            self.hidden_indices,
            torch.cat([self.lengths, counts]),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Mask":
        """Return a copy on `device`, except that `lengths` stays on the CPU, where tensor shapes are computed."""
        moved = (self.hidden, self.visible, self.hidden_indices)
        return Mask(*(tensor.to(device, non_blocking=non_blocking) for tensor in moved), lengths=self.lengths)

    def pin_memory(self) -> "Mask":
        """Return a copy in pinned memory, except that `lengths` is not copied."""
        pinned = (self.hidden, self.visible, self.hidden_indices)
        return Mask(*(tensor.pin_memory() for tensor in pinned), lengths=self.lengths)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of the mask until the work of `stream` is done, as `Tensor.record_stream` does."""
        for tensor in (self.hidden, self.visible, self.hidden_indices):
            tensor.record_stream(stream)


def patchify(images: Tensor, patch: int) -> Tensor:
    """Cut images into patches of `patch` x `patch` pixels: (B, C, H, W) -> (T, P).

    The values of a patch are in (row, column, channel) order, as in MAE (2111.06377).

    Raises:
        EncoderError: a side of the images is not a multiple of `patch`.
    """
    if images.shape[-2] % patch or images.shape[-1] % patch:
        raise EncoderError(
            f"Images of {images.shape[-2]} x {images.shape[-1]} pixels do not divide into patches of {patch} pixels. "
            f"Resize the images to sides that are multiples of {patch}."
        )
    return rearrange(images, "b c (h p1) (w p2) -> (b h w) (p1 p2 c)", p1=patch, p2=patch)


def can_pack(views: Sequence[Images], patch: int) -> bool:
    """Return True if `pack` can join the views, that is, if the sides of all images are multiples of `patch`."""
    return all(not isinstance(view, Tensor) or not (view.shape[-2] % patch or view.shape[-1] % patch) for view in views)


def pack(views: Sequence[Images], patch: int) -> PackedImages:
    """Join the images of all views, in order, into one `PackedImages`.

    A view is a tensor (B, C, H, W), which is cut into patches of `patch` x `patch` pixels, or images packed so.

    Raises:
        EncoderError: a side of an image is not a multiple of `patch`.
    """
    parts = []
    for view in views:
        if isinstance(view, Tensor):
            grid = torch.tensor([view.shape[-2] // patch, view.shape[-1] // patch])
            view = PackedImages(patchify(view, patch), grid.expand(len(view), 2), patch)
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
    """Pack images into sequences of at most `budget` tokens with the best-fit-decreasing rule.

    `lengths` holds the number of tokens of each image. Images are placed in order of decreasing length. Each image goes
    into the fullest sequence that has enough room.

    Returns:
        List of sequences. A sequence is a list of the indices of its images.

    Raises:
        EncoderError: an image has more tokens than `budget`.
    """
    sequences: list[list[int]] = []
    room: list[int] = []
    for image in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[image] > budget:
            raise EncoderError(
                f"An image of {lengths[image]} tokens does not fit a sequence of {budget} tokens. "
                "Raise token_budget, or make the images smaller."
            )
        fitting = [(left, index) for index, left in enumerate(room) if left >= lengths[image]]
        if fitting:
            _, index = min(fitting)
        else:
            index = len(sequences)
            sequences.append([])
            room.append(budget)
        room[index] -= lengths[image]
        sequences[index].append(image)
    return sequences
