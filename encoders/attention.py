"""Attention for batches of sequences and for packed images.

Letters in shapes: N tokens of an image; T tokens of all packed images; d width of one head.
"""

from torch import Tensor

from tessera.encoders.dot_product import dot_product_attention
from tessera.encoders.segments import Segments


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    segments: Segments | None = None,
) -> Tensor:
    """Return attention, softmax(q k^T * scale + bias) v: q, k and v (..., heads, N, d) -> (..., heads, N, d).

    With `segments`, q, k and v hold the tokens of packed images (heads, T, d), and tokens attend only to tokens of the
    same image. If all images have the same number of tokens, attention is computed for all images as one batch.

    Args:
        scale: factor of the logits. None means d ** -0.5.
        bias: tensor that broadcasts to (..., heads, N, N). A float bias is added to the logits. A bool bias excludes
            keys where the bias is False.
        segments: boundaries of packed images in the sequence of all tokens. These take no bias.
    """
    if segments is None:
        return dot_product_attention(q, k, v, bias=bias, scale=scale)
    if segments.uniform:
        q, k, v = (x.unflatten(1, (len(segments.lengths), -1)).transpose(0, 1) for x in (q, k, v))  # (B, heads, N, d)
        out = dot_product_attention(q, k, v, scale=scale)
        # The fused kernels store the result as (B, N, heads, d), so that `flatten` copies nothing.
        return out.transpose(1, 2).flatten(0, 1).transpose(0, 1)
    from tessera.encoders import packed_attention  # imported here, because this import takes seconds

    return packed_attention.packed_attention(q, k, v, scale, segments)


def self_attention(qkv: Tensor, *, scale: float | None = None, segments: Segments | None = None) -> Tensor:
    """Return `attention` for queries, keys and values in one tensor: (..., N, 3, heads, d) -> (..., heads, N, d).

    With `segments`, `qkv` holds the tokens of packed images (T, 3, heads, d).
    """
    if segments is not None and not segments.uniform:
        from tessera.encoders import packed_attention  # imported here for the same reason as in `attention`

        if len(segments.runs) <= packed_attention.FEW_RUNS:
            return packed_attention.self_attention_by_run(qkv, scale, segments)
    # `unbind` along this axis gives the gradient of `qkv` the memory layout that the linear layer needs.
    q, k, v = (part.transpose(-3, -2) for part in qkv.unbind(-3))
    return attention(q, k, v, scale=scale, segments=segments)
