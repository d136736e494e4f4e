"""Attention of packed images with different numbers of tokens. Three equivalent kernels are available.

`encoders.layers.attention` imports this module only at first use, because `torch.nn.attention.varlen` imports torch's
compiler, which takes seconds.

Letters in shapes: d width of one head; T tokens of all images; S packed sequences, each padded to L tokens.
"""

import inspect
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from encoders.segments import PaddedSequences, Segments

VARLEN_TAKES_SCALE = "scale" in inspect.signature(varlen_attn).parameters

FEW_RUNS = 8
"""Number of runs of images of one size up to which attention is computed run by run, by the kernels for batches. The
crops of a training step without packing of images are two to four runs."""


@torch.compiler.disable()  # otherwise torch would compile a new graph for each batch, because image lengths differ
def packed_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, segments: Segments) -> Tensor:
    """Return the attention within each image, softmax(q k^T * scale) v: (heads, T, d) -> (heads, T, d).

    The function chooses the fastest kernel for the device, the data type and the packing.
    """
    if segments.run_count <= FEW_RUNS:
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

    Consecutive images with the same numbers of queries and tokens are computed as one batch. The crops of a training
    step are a few such runs.
    """
    counts = torch.stack([segments.query_lengths, segments.lengths], 1)  # (B, 2)
    values, images = counts.unique_consecutive(dim=0, return_counts=True)
    totals = (values * images[:, None]).tolist()
    sizes = [[total[part] for total in totals] for part in (0, 1, 1)]
    parts = zip(*(x.split(size, 1) for x, size in zip((q, k, v), sizes, strict=True)), strict=True)
    batches = (
        [x.unflatten(1, (count, -1)).transpose(0, 1) for x in part]  # three of (count, heads, N, d)
        for part, count in zip(parts, images.tolist(), strict=True)
    )
    outs = (F.scaled_dot_product_attention(*batch, scale=scale) for batch in batches)
    # (B, N, heads, d) is the memory layout of the kernels' results, so joining the images in it copies nothing.
    return torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs]).transpose(0, 1)
