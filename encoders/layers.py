"""Parts that more than one encoder uses: attention, MLP, drop path, layer scale, position tables, initial weights, and
what their settings have in common.

B images, N tokens, D width, d width of one head; T tokens of a packed batch, R sequences of L places that they share;
r x c grid of a position table.
"""

import inspect
from functools import partial
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from encoders.images import Layout, Padded

try:  # torch 2.10 and later
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None
VARLEN_TAKES_SCALE = varlen_attn is not None and "scale" in inspect.signature(varlen_attn).parameters

Interpolation = Literal["dino", "mae"]
Init = Literal["trunc_normal", "xavier"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    packed: Layout | None = None,
) -> Tensor:
    """softmax(q kT * scale + bias) v: queries, keys and values (..., heads, N, d) -> (..., heads, N, d).

    With `packed`, q, k and v are (heads, T, d), image after image, and each image attends to itself alone. Where images
    have as many tokens, they are a batch of them; else it goes to the fastest of three equal ways that the device and
    the numbers have.

    Args:
        scale: of the logits, d ** -0.5 when None.
        bias: broadcasts to (..., heads, N, N); floats are added to the logits, and a False shuts a pair out.
        packed: which tokens are whose; its `sequences` serve on GPUs without `varlen_attn`.

    Raises:
        ValueError: a bias for packed images.
    """
    if packed is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    if bias is not None:
        raise ValueError("packed images take no bias")
    if packed.uniform:
        q, k, v = (x.unflatten(1, (len(packed.lengths), -1)).transpose(0, 1) for x in (q, k, v))  # (B, heads, N, d)
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(0, 1).flatten(1, 2)
    return _attention_packed(q, k, v, scale, packed)


@torch.compiler.disable()  # what depends on the lengths of this batch would be compiled anew for each
def _attention_packed(q: Tensor, k: Tensor, v: Tensor, scale: float | None, packed: Layout) -> Tensor:
    if _has_varlen(q):
        return _attention_varlen(q, k, v, scale, packed)
    if q.is_cuda and packed.sequences is not None:
        return _attention_in_sequences(q, k, v, scale, packed)
    return _attention_by_image(q, k, v, scale, packed)


def _has_varlen(q: Tensor) -> bool:
    """Whether flash attention takes such queries (heads, T, d)."""
    return (
        varlen_attn is not None
        and q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _attention_varlen(q: Tensor, k: Tensor, v: Tensor, scale: float | None, packed: Layout) -> Tensor:
    """By flash attention over all images at once: (heads, T, d) on CUDA in half precision."""
    assert varlen_attn is not None
    attend = partial(varlen_attn, scale=scale) if VARLEN_TAKES_SCALE else varlen_attn
    if scale is not None and not VARLEN_TAKES_SCALE:
        q = q * (scale * q.shape[-1] ** 0.5)  # over the kernel's own d ** -0.5; exact where it is a power of two
    q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))  # (T, heads, d)
    out = attend(q, k, v, *packed.starts, *packed.longest)
    return cast(Tensor, out).transpose(0, 1)


def _attention_in_sequences(q: Tensor, k: Tensor, v: Tensor, scale: float | None, packed: Layout) -> Tensor:
    """NaViT's own way: sequences padded to the longest, and a mask that keeps images apart: (heads, T, d)."""
    queries, tokens = packed.padded

    def spread(x: Tensor, padded: Padded) -> Tensor:
        zeros = x.new_zeros(len(x), padded.images.numel(), x.shape[-1])
        return zeros.index_copy(1, padded.places, x).unflatten(1, padded.images.shape).transpose(0, 1)

    q, k, v = spread(q, queries), spread(k, tokens), spread(v, tokens)  # (R, heads, L, d)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=packed.pairs, scale=scale)
    return out.transpose(0, 1).flatten(1, 2).index_select(1, queries.places)


def _attention_by_image(q: Tensor, k: Tensor, v: Tensor, scale: float | None, packed: Layout) -> Tensor:
    """Image by image: (heads, T, d)."""
    counts = packed.lengths.tolist()
    pieces = zip(q.split(packed.query_lengths.tolist(), 1), k.split(counts, 1), v.split(counts, 1), strict=True)
    batches = ((a[None], b[None], c[None]) for a, b, c in pieces)  # of one: kernels want four dimensions
    return torch.cat([F.scaled_dot_product_attention(a, b, c, scale=scale)[0] for a, b, c in batches], 1)


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
    """Stochastic depth (1603.09382): in training a residual branch is left out for a sample, along the first dimension,
    or for all tokens of an image if they are packed: (B, ..., D) or (T, D) -> the same shape.

    What remains is scaled up so that the expectation does not change.
    """

    def __init__(self, rate: float):
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop_path is the share of branches left out, 0 <= drop_path < 1, not {rate}")
        self.rate = rate

    def forward(self, x: Tensor, packed: Layout | None = None) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        samples = len(x) if packed is None else len(packed.lengths)
        kept = x.new_empty(samples, *[1] * (x.ndim - 1)).bernoulli_(1 - self.rate)
        factors = kept / (1 - self.rate)
        return x * (factors if packed is None else factors.index_select(0, packed.owner))

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


def learned(*shape: int) -> nn.Parameter:
    """A token or a table, truncated normal of 0.02 at the start."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))


def table_grid(image_size: int | tuple[int, int], patch_size: int) -> tuple[int, int]:
    """Rows and columns of a position table for images of `image_size` pixels, one side or (rows, columns).

    Raises:
        ValueError: they have less than one patch.
    """
    sides = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise ValueError(f"image_size is one side in pixels, or (rows, columns), not {image_size!r}")
    height, width = sides
    if min(height, width) < patch_size:
        raise ValueError(
            f"an image_size of {height} x {width} pixels is smaller than a patch of {patch_size} pixels a side"
        )
    return height // patch_size, width // patch_size


def check_choices(**choices: tuple[str, object]):
    """Whether settings have one of the values of their `Literal`: name=(value, literal).

    Raises:
        ValueError: one has another.
    """
    for name, (value, known) in choices.items():
        if value not in get_args(known):
            raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, not {value!r}")


def check_counts(**counts: int):
    """Whether settings are at least 1.

    Raises:
        ValueError: one is less.
    """
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
