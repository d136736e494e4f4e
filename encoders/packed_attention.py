"""Attention of packed images with different numbers of tokens. Three equivalent kernels are available.

`encoders.attention` imports this module only at first use, because `torch.nn.attention.varlen` imports torch's
compiler, which takes seconds.

Letters in shapes: d width of one head; T tokens of all images; S packed sequences, each padded to L tokens.
"""

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from tessera.encoders.dot_product import dot_product_attention
from tessera.encoders.segments import PaddedSequences, Segments

VARLEN_TAKES_SCALE = "scale" in inspect.signature(varlen_attn).parameters

FEW_RUNS = 8
"""Largest number of runs for which attention is computed run by run, with the kernels for batches. A run consists of
consecutive images of the same size. If all crops of a view have the same size, a training step has two to four runs."""


@torch.compiler.disable()  # otherwise torch would compile a new graph for each batch with other image lengths
def packed_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, segments: Segments) -> Tensor:
    """Return the attention within each image, softmax(q k^T * scale) v: (heads, T, d) -> (heads, T, d).

    The function chooses the fastest kernel for the device, the data type and the packing.
    """
    if len(segments.runs) <= FEW_RUNS:
        return attention_by_run(q, k, v, scale, segments)
    if _has_varlen(q):
        return attention_varlen(q, k, v, scale, segments)
    if q.is_cuda and segments.sequences is not None:
        return attention_in_sequences(q, k, v, scale, segments)
    return attention_by_run(q, k, v, scale, segments)


def _has_varlen(q: Tensor) -> bool:
    """Return True if `varlen_attn` supports the device, the data type and the head width of `q` (heads, T, d)."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, scale: float | None, segments: Segments) -> Tensor:
    """Compute attention within each image with one call of flash attention: (heads, T, d) -> (heads, T, d).

    The kernel requires CUDA and half precision.
    """
    attend = partial(varlen_attn, scale=scale) if VARLEN_TAKES_SCALE else varlen_attn
    if scale is not None and not VARLEN_TAKES_SCALE:
        q = q * (scale * q.shape[-1] ** 0.5)  # varlen_attn multiplies the logits by d ** -0.5
    q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))  # (T, heads, d)
    out = attend(q, k, v, *segments.cumulative_lengths, *segments.longest)
    if not isinstance(out, Tensor):
        raise TypeError(f"varlen_attn returned {type(out).__name__}, not a tensor.")
    return out.transpose(0, 1)


def attention_in_sequences(q: Tensor, k: Tensor, v: Tensor, scale: float | None, segments: Segments) -> Tensor:
    """Compute attention within each image, on padded sequences of images: (heads, T, d) -> (heads, T, d).

    An attention mask separates the images of a sequence, as in NaViT.
    """
    queries, tokens = segments.padded

    def spread(x: Tensor, padded: PaddedSequences) -> Tensor:
        zeros = x.new_zeros(len(x), padded.image_ids.numel(), x.shape[-1])
        return zeros.index_copy(1, padded.positions, x).unflatten(1, padded.image_ids.shape).transpose(0, 1)

    q, k, v = spread(q, queries), spread(k, tokens), spread(v, tokens)  # (S, heads, L, d)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=segments.attention_mask, scale=scale)
    return out.transpose(0, 1).flatten(1, 2).index_select(1, queries.positions)


def attention_by_run(q: Tensor, k: Tensor, v: Tensor, scale: float | None, segments: Segments) -> Tensor:
    """Compute attention within each image: (heads, T, d) -> (heads, T, d).

    Each run of consecutive images with equal numbers of queries and tokens is computed as one batch.
    """
    queries = [images * length for images, length, _ in segments.runs]
    tokens = [images * length for images, _, length in segments.runs]
    parts = zip(*(x.split(size, 1) for x, size in ((q, queries), (k, tokens), (v, tokens))), strict=True)
    batches = (
        [x.unflatten(1, (images, -1)).transpose(0, 1) for x in part]  # three of (images, heads, N, d)
        for part, (images, _, _) in zip(parts, segments.runs, strict=True)
    )
    return _join([dot_product_attention(*batch, scale=scale) for batch in batches])


@torch.compiler.disable()
def self_attention_by_run(qkv: Tensor, scale: float | None, segments: Segments) -> Tensor:
    """Compute `attention_by_run` for queries, keys and values in one tensor: (T, 3, heads, d) -> (heads, T, d).

    The backward pass writes the gradient of `qkv` once. If autograd split `qkv` into runs and then into q, k and v, the
    backward pass would join the gradients twice.
    """
    parts = _SplitRuns.apply(qkv, segments)
    batches = [parts[i : i + 3] for i in range(0, len(parts), 3)]
    return _join([dot_product_attention(*batch, scale=scale) for batch in batches])


def _join(runs: list[Tensor]) -> Tensor:
    """Join the images of all runs: (images, heads, N, d) of each run -> (heads, T, d)."""
    # The fused kernels store their results as (images, N, heads, d), so that `transpose` and `flatten` copy nothing.
    return torch.cat([run.transpose(1, 2).flatten(0, 1) for run in runs]).transpose(0, 1)


class _SplitRuns(torch.autograd.Function):
    """Split (T, 3, heads, d) into queries, keys and values of each run, views of (images, heads, N, d)."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, segments: Segments) -> tuple[Tensor, ...]:
        ctx.segments, ctx.shape = segments, qkv.shape
        return tuple(_views(qkv, segments))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        whole = grad_outputs[0].new_empty(ctx.shape)
        for view, gradient in zip(_views(whole, ctx.segments), grad_outputs, strict=True):
            view.copy_(gradient)
        return whole, None


def _views(qkv: Tensor, segments: Segments) -> list[Tensor]:
    """Return queries, keys and values of each run as views (images, heads, N, d) of (T, 3, heads, d)."""
    runs = qkv.split([images * length for images, _, length in segments.runs])
    return [
        part.unflatten(0, (images, -1)).transpose(1, 2)
        for run, (images, _, _) in zip(runs, segments.runs, strict=True)
        for part in run.unbind(1)
    ]
