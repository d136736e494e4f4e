"""Parts that more than one encoder uses: attention, MLP, drop path, layer scale, position tables, initial weights.

B images, N tokens, D width, d width of one head; T tokens of a packed batch, R sequences of L places that they share;
r x c grid of a position table.
"""

from typing import Literal, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

try:  # torch 2.10 and later
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

Interpolation = Literal["dino", "mae"]
Init = Literal["trunc_normal", "xavier"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    sequences: Tensor | None = None,
) -> Tensor:
    """softmax(q kT * scale + bias) v: queries, keys and values (..., heads, N, d) -> (..., heads, N, d).

    With `lengths` the batch is packed: q, k and v are (heads, T, d), image after image, and each image attends to
    itself alone. It goes to the fastest of three equal ways that the device and the numbers have.

    Args:
        scale: of the logits, d ** -0.5 when None.
        bias: broadcasts to (..., heads, N, N); floats are added to the logits, and a False shuts a pair out.
        lengths: (B,) int64 on the CPU, tokens of each image, none of them 0.
        query_lengths: (B,) int64 on the CPU, queries of each image where they are not as many as the keys.
        sequences: (R,) int64 on the CPU, how many images share each sequence; used on GPUs without `varlen_attn`.

    Raises:
        ValueError: a bias for packed images.
    """
    if lengths is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    if bias is not None:
        raise ValueError("packed images take no bias")
    query_lengths = lengths if query_lengths is None else query_lengths
    if bool((lengths == lengths[0]).all() & (query_lengths == query_lengths[0]).all()):
        q, k, v = (x.unflatten(1, (len(lengths), -1)).transpose(0, 1) for x in (q, k, v))  # (B, heads, N, d)
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(0, 1).flatten(1, 2)
    if varlen_attn is not None and q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0:
        return _attention_varlen(q, k, v, scale, query_lengths, lengths)
    if q.is_cuda and sequences is not None:
        return _attention_in_sequences(q, k, v, scale, query_lengths, lengths, sequences)
    return _attention_by_image(q, k, v, scale, query_lengths, lengths)


def _attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, query_lengths: Tensor, lengths: Tensor
) -> Tensor:
    """By flash attention over all images at once: (heads, T, d) on CUDA in half precision."""
    assert varlen_attn is not None
    if scale is not None:  # the kernel's own scale is d ** -0.5, in the oldest version that has it unchangeably
        q = q * (scale * q.shape[-1] ** 0.5)
    starts = [F.pad(n.cumsum(0), (1, 0)).int() for n in (query_lengths, lengths)]
    starts = [n.pin_memory().to(q.device, non_blocking=True) for n in starts]  # (B + 1,) each
    longest = int(query_lengths.max()), int(lengths.max())
    q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))  # (T, heads, d)
    out = varlen_attn(q, k, v, starts[0], starts[1], *longest)
    return cast(Tensor, out).transpose(0, 1)


def _attention_in_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    query_lengths: Tensor,
    lengths: Tensor,
    sequences: Tensor,
) -> Tensor:
    """NaViT's own way: sequences padded to the longest, and a mask that keeps images apart: (heads, T, d)."""
    owner = torch.repeat_interleave(sequences)  # (B,): the sequence of each image
    q_places, q_images = _places(query_lengths, owner, len(sequences))
    k_places, k_images = _places(lengths, owner, len(sequences))
    apart = (q_images[:, :, None] == k_images[:, None, :]).to(q.device)  # (R, L, L'): pairs within an image

    def spread(x: Tensor, places: Tensor, images: Tensor) -> Tensor:
        padded = x.new_zeros(len(x), images.numel(), x.shape[-1]).index_copy(1, places.to(x.device), x)
        return padded.unflatten(1, images.shape).transpose(0, 1)  # (R, heads, L, d)

    out = F.scaled_dot_product_attention(
        spread(q, q_places, q_images),
        spread(k, k_places, k_images),
        spread(v, k_places, k_images),
        attn_mask=apart[:, None],
        scale=scale,
    )
    return out.transpose(0, 1).flatten(1, 2).index_select(1, q_places.to(q.device))


def _places(lengths: Tensor, owner: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
    """Where each token lies when sequences are padded to the longest (T,), and whose it is there (R, L); -1 is padding,
    which pairs with itself so that no row of a softmax is empty."""
    images = torch.repeat_interleave(lengths)  # (T,): the image of each token
    rows = owner[images]  # (T,): its sequence
    counts = torch.bincount(rows, minlength=sequences)
    first = F.pad(counts.cumsum(0), (1, 0))[:-1]
    longest = int(counts.max())
    places = rows * longest + torch.arange(len(rows)) - first[rows]
    whose = torch.full((sequences * longest,), -1).index_copy(0, places, images)
    return places, whose.unflatten(0, (sequences, longest))


def _attention_by_image(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, query_lengths: Tensor, lengths: Tensor
) -> Tensor:
    """Image by image: (heads, T, d)."""
    pieces = zip(q.split(query_lengths.tolist(), 1), *(x.split(lengths.tolist(), 1) for x in (k, v)), strict=True)
    # as batches of one: kernels want four dimensions
    outs = [F.scaled_dot_product_attention(*(x[None] for x in piece), scale=scale)[0] for piece in pieces]
    return torch.cat(outs, 1)


class MLP(nn.Module):
    """Two linear layers with an exact GELU between them: (..., D) -> (..., D)."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class LayerScale(nn.Module):
    """A learned factor for each channel of a residual branch (2103.17239): (..., D) -> (..., D)."""

    def __init__(self, dim: int, value: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth (1603.09382): in training a residual branch is left out for a sample, along the first dimension.

    What remains is scaled up so that the expectation does not change.
    """

    def __init__(self, rate: float):
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop_path is the share of branches left out, 0 <= drop_path < 1, not {rate}")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = x.new_empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * (kept / (1 - self.rate))

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


def sincos_table(rows: int, columns: int, dim: int) -> Tensor:
    """Fixed 2-d sine-cosine positions of MAE (2111.06377), row by row: (r * c, D) float32.

    The first half of the channels belongs to the column, the second to the row; each half is sines, then cosines.

    Raises:
        ValueError: `dim` is not a multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"a sine-cosine table needs a width that is a multiple of 4, not {dim}")
    rates = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))  # (D / 4,)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [place.flatten()[:, None] * rates for place in (column, row)]  # two of (r * c, D / 4)
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1).float()


def resize_table(table: Tensor, old: tuple[int, int], new: tuple[int, int], interpolation: Interpolation) -> Tensor:
    """A position table for another grid, bicubic without antialiasing: (1, old r * c, D) -> (1, new r * c, D).

    "mae" stretches the old grid over the new one. "dino" samples it at the scale (new + 0.1) / old, as the published
    DINO models were trained: at equal sizes it is not the identity.
    """
    maps = rearrange(table.float(), "1 (r c) d -> 1 d r c", r=old[0], c=old[1])
    if interpolation == "dino":
        scale = [(after + 0.1) / before for before, after in zip(old, new, strict=True)]
        maps = F.interpolate(maps, scale_factor=scale, mode="bicubic", align_corners=False)
    else:
        maps = F.interpolate(maps, size=new, mode="bicubic", align_corners=False)
    return rearrange(maps, "1 d r c -> 1 (r c) d").to(table.dtype)


def init_linear(layer: nn.Module, init: Init) -> None:
    """Initial values of `layer` if it is a linear one; for `nn.Module.apply`."""
    if isinstance(layer, nn.Linear):
        if init == "xavier":
            nn.init.xavier_uniform_(layer.weight)
        else:
            nn.init.trunc_normal_(layer.weight, std=0.02)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
