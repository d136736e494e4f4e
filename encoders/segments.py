"""Boundaries of the images in a flat sequence of tokens.

Letters in shapes: B images; T tokens of all images (keys and values); S packed sequences, or S prefix tokens of
an image in `insert_prefix` and `split_prefix`; L length of the longest packed sequence, to which all sequences are
padded (L' for keys, if queries and keys have different lengths).
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


def copy_to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device` without waiting for the device."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


@dataclass(frozen=True)
class Segments:
    """Boundaries of images in a flat sequence of tokens (T, D). Each token attends only to tokens of the same image.

    Each forward pass makes one `Segments` object, which all blocks share. Derived tensors are computed at first use and
    then cached. No property makes the CPU wait for the device.
    """

    lengths: Tensor
    """Number of tokens of each image: (B,) int64 on the CPU, at least 1."""
    device: torch.device
    """Device of the tokens."""
    queries: Tensor | None = None
    """Number of queries of each image: (B,) int64 on the CPU. None if every token is a query."""
    sequences: Tensor | None = None
    """Number of images in each packed sequence: (S,) int64 on the CPU. A packed sequence consists of consecutive
    images. None if the images are not grouped into sequences."""
    uniform: bool = field(init=False)
    """True if all images have the same number of tokens and the same number of queries."""

    def __post_init__(self):
        counts = (self.lengths, self.query_lengths)
        object.__setattr__(self, "uniform", all(bool((n == n[0]).all()) for n in counts))

    def prepared(self) -> "Segments":
        """Compute what compiled blocks read, and return this object.

        A block that is compiled cannot pin memory for a copy to a GPU. If it computed a value at first use, its
        recomputation, which finds the value, would be another graph.
        """
        _ = self.runs, self.image_ids
        return self

    @property
    def query_lengths(self) -> Tensor:
        """Number of queries of each image: (B,) int64 on the CPU."""
        return self.lengths if self.queries is None else self.queries

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Runs of consecutive images of equal lengths, each as (images, queries per image, tokens per image)."""
        lengths = torch.stack([self.query_lengths, self.lengths], 1)  # (B, 2)
        values, images = lengths.unique_consecutive(dim=0, return_counts=True)
        return [(n, q, t) for n, (q, t) in zip(images.tolist(), values.tolist(), strict=True)]

    @cached_property
    def image_ids(self) -> Tensor:
        """Index of the image that each token belongs to: (T,) int64 on the device."""
        counts, images = copy_to_device(self.lengths, self.device), torch.arange(len(self.lengths), device=self.device)
        return torch.repeat_interleave(images, counts, output_size=int(self.lengths.sum()))

    @cached_property
    def first_tokens(self) -> Tensor:
        """Index of the first token of each image: (B,) int64 on the device."""
        return copy_to_device(self.lengths.cumsum(0) - self.lengths, self.device)

    @cached_property
    def cumulative_lengths(self) -> tuple[Tensor, Tensor]:
        """Cumulative number of queries and cumulative number of tokens: two tensors (B + 1,) int32 on the device.

        Entry i counts the queries or tokens of all images before image i. Entry 0 is therefore 0.
        """
        ends = torch.stack([self.query_lengths, self.lengths]).cumsum(1)
        queries, tokens = copy_to_device(F.pad(ends, (1, 0)).int(), self.device)
        return queries, tokens

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Largest number of queries of an image, and largest number of tokens of an image."""
        return int(self.query_lengths.max()), int(self.lengths.max())

    @cached_property
    def padded(self) -> tuple["PaddedSequences", "PaddedSequences"]:
        """Layout of the queries in padded sequences, and layout of the keys and values in padded sequences."""
        assert self.sequences is not None
        rows = torch.repeat_interleave(self.sequences)  # (B,): sequence of each image
        counts = (self.query_lengths, self.lengths)
        queries, tokens = (_pad(n, rows, len(self.sequences), self.device) for n in counts)
        return queries, tokens

    @cached_property
    def attention_mask(self) -> Tensor:
        """True where a query and a key of the padded sequences belong to the same image: (S, 1, L, L') bool.

        A query that is padding attends to all keys, because a softmax over zero keys would be NaN.
        """
        queries, keys = (padded.image_ids for padded in self.padded)
        return ((queries[:, :, None] == keys[:, None, :]) | (queries[:, :, None] < 0))[:, None]


@dataclass(frozen=True)
class PaddedSequences:
    """Layout of T tokens in S sequences of L slots each. Slots without a token are padding.

    The tensors `positions` and `image_ids` are on the device of the tokens.
    """

    positions: Tensor
    """Index of the slot of each token, from 0 to S * L - 1: (T,) int64."""
    image_ids: Tensor
    """Index of the image that the token in each slot belongs to, or -1 for padding: (S, L) int64."""


def _pad(lengths: Tensor, rows: Tensor, sequences: int, device: torch.device) -> PaddedSequences:
    """Make the padded layout of images. Image i has `lengths[i]` tokens and belongs to sequence `rows[i]`."""
    images = torch.repeat_interleave(lengths)  # (T,): image of each token
    token_rows = rows[images]  # (T,): sequence of each token
    counts = torch.bincount(token_rows, minlength=sequences)
    longest = int(counts.max())
    positions = token_rows * longest + torch.arange(len(token_rows)) - (counts.cumsum(0) - counts)[token_rows]
    image_ids = torch.full((sequences * longest,), -1).index_copy(0, positions, images)
    return PaddedSequences(
        copy_to_device(positions, device), copy_to_device(image_ids.unflatten(0, (sequences, longest)), device)
    )


def insert_prefix(x: Tensor, prefix: Tensor, lengths: Tensor) -> Tensor:
    """Insert prefix tokens before the patch tokens of each image: (T, D) -> (T + B * S, D).

    Args:
        x: patch tokens of all images, image after image.
        prefix: prefix tokens of each image, (B, S, D), or of all images, (1, S, D).
        lengths: number of patch tokens of each image: (B,) on the CPU.
    """
    parts = _split(x, lengths)
    counts = [len(part) for part in parts]
    prefixes = [prefix.expand(n, -1, -1) for n in counts] if len(prefix) == 1 else prefix.split(counts)
    return _joined([torch.cat(pair, 1).flatten(0, 1) for pair in zip(prefixes, parts, strict=True)])


def split_prefix(x: Tensor, count: int, lengths: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return the prefix tokens (B, S, D) and the patch tokens (T, D) of all images. Reverse `insert_prefix`.

    Args:
        x: tokens of all images: (T + B * S, D).
        count: number of prefix tokens S of each image.
        lengths: number of patch tokens of each image: (B,) on the CPU. If all images have equal lengths, it may also be
            the number of images, which `torch.export` can keep dynamic.
    """
    parts = _split(x, lengths + count if isinstance(lengths, Tensor) else lengths)
    return _joined([part[:, :count] for part in parts]), _joined([part[:, count:].flatten(0, 1) for part in parts])


def image_means(x: Tensor, lengths: Tensor | int) -> Tensor:
    """Return the mean of the tokens of each image: (T, D) -> (B, D). `lengths` is that of `split_prefix`."""
    return _joined([part.mean(1) for part in _split(x, lengths)])


def _split(x: Tensor, lengths: Tensor | int) -> list[Tensor]:
    """Split the tokens of images (T, D) into runs of images with equal numbers of tokens, (images, N, D) each."""
    if not isinstance(lengths, Tensor):
        return [x.unflatten(0, (lengths, -1))]
    values, counts = lengths.unique_consecutive(return_counts=True)
    runs = list(zip(counts.tolist(), values.tolist(), strict=True))
    parts = x.split([images * tokens for images, tokens in runs])
    return [part.unflatten(0, run) for part, run in zip(parts, runs, strict=True)]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # `torch.cat` copies even a single tensor


def token_positions(grids: Tensor, segments: Segments, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the position of each token in its image, and the grid of this image: two tensors (2, T) int64.

    The first tensor holds the row and the column of each token. The second tensor holds the number of rows and the
    number of columns of the image that the token belongs to.

    Args:
        grids: number of token rows and of token columns of each image, (B, 2) int64 on the CPU.
        segments: boundaries of the images in the sequence of the T tokens.
        visible: indices (T,) of the T tokens among all tokens of the images, ascending int64. None if the sequence
            contains all tokens.
    """
    counts = grids.prod(1)
    numbers = torch.cat([(counts.cumsum(0) - counts)[:, None], grids], 1)  # (B, 3)
    numbers = copy_to_device(numbers, segments.device)
    flat = torch.arange(len(segments.image_ids), device=segments.device) if visible is None else visible
    start, *sides = numbers.index_select(0, segments.image_ids).unbind(1)
    index = flat - start  # index of each token within its image
    return torch.stack([index // sides[1], index % sides[1]]), torch.stack(sides)
