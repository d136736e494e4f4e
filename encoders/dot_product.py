"""Attention of one batch of sequences. Torch's kernel is replaced where it is slow: in half precision on the CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST = 1024
"""Largest number of keys up to which bf16 attention on the CPU keeps the weights of all pairs of tokens in memory."""


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Return softmax(q k^T * scale + bias) v: queries (..., N, d), keys and values (..., M, d) -> (..., N, d).

    On a CPU in bf16, torch's kernel takes five times as long as the two matrix products, and one that computes in
    float32 twice as long. The products round the logits to bf16, as attention without a fused kernel does under
    autocast; the softmax is computed in float32.

    Args:
        bias: tensor that broadcasts to (..., N, M). A float bias is added to the logits. A bool bias excludes keys
            where it is False.
        scale: factor of the logits. None means d ** -0.5.
    """
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else q.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    with torch.autocast("cpu", enabled=False):
        if dtype == torch.bfloat16 and k.shape[-2] <= LONGEST:
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
        # the smallest number, because a row of -inf, which a window of padding alone would have, becomes NaN
        logits = logits.masked_fill(~bias, torch.finfo(logits.dtype).min)
    return logits.softmax(-1) @ v
