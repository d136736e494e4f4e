"""Attention of one batch of sequences. Torch's kernel is replaced where it is slow: in half precision on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_KEYS = 1024
"""Largest number of keys up to which bf16 attention on the CPU keeps the weights of all pairs of tokens in memory."""
_torchs_kernel = False
"""True in the block of `only_torchs_kernel`."""


@contextmanager
def only_torchs_kernel() -> Iterator[None]:
    """Use torch's kernel in the block, to count on a CPU the memory that attention takes on a GPU."""
    global _torchs_kernel
    before, _torchs_kernel = _torchs_kernel, True
    try:
        yield
    finally:
        _torchs_kernel = before


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Return softmax(q k^T * scale + bias) v: queries (..., N, d), keys and values (..., M, d) -> (..., N, d).

    In bf16 on the CPU, attention is computed as two matrix products and a softmax, because torch's fused kernel takes
    five times as long in bf16, and twice as long in float32 (AMD EPYC with bf16 instructions). Logits and weights are
    rounded to bf16, as in attention without a fused kernel under autocast. In fp16, and for more than `MOST_KEYS` keys,
    attention is computed in float32.

    Args:
        bias: tensor that broadcasts to (..., N, M). A float bias is added to the logits. A bool bias excludes keys
            where it is False.
        scale: factor of the logits. None means d ** -0.5.
    """
    if q.device.type != "cpu" or _torchs_kernel:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else q.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    with torch.autocast("cpu", enabled=False):
        if dtype == torch.bfloat16 and k.shape[-2] <= MOST_KEYS:
            return _by_products(q.to(dtype), k.to(dtype), v.to(dtype), bias, scale).to(v.dtype)
        bias = bias.float() if bias is not None and bias.is_floating_point() else bias
        out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=bias, scale=scale)
        return out.to(v.dtype)


def _by_products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    """Compute attention as two matrix products, in the precision of q, k and v."""
    logits = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
    if bias is not None and bias.is_floating_point():
        logits = logits + bias.to(logits.dtype)
    elif bias is not None:
        # not -inf, which would turn the row of a query without keys into NaN
        logits = logits.masked_fill(~bias, torch.finfo(logits.dtype).min)
    return logits.softmax(-1) @ v
