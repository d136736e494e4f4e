"""Parts that more than one encoder uses: attention, MLP, drop path, layer scale, position tables, initial weights.

B images, N tokens, D width, d width of one head; r x c grid of a position table.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

Interpolation = Literal["dino", "mae"]
Init = Literal["trunc_normal", "xavier"]


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, bias: Tensor | None = None) -> Tensor:
    """softmax(q kT * scale + bias) v: queries, keys and values (..., heads, N, d) -> (..., heads, N, d).

    Args:
        scale: of the logits, d ** -0.5 when None.
        bias: broadcasts to (..., heads, N, N); floats are added to the logits, and a False shuts a pair out.
    """
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


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
