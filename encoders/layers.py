"""Functions and modules that several encoders use: attention, MLP, drop path, layer scale, position tables.

Letters in shapes: B images; N tokens of an image; T tokens of all packed images; D width of a token; d width of one
head; r x c grid of a position table.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tessera.encoders.dot_product import dot_product_attention
from tessera.encoders.errors import EncoderError
from tessera.encoders.segments import Segments

Interpolation = Literal["dino", "mae", "antialias"]
Init = Literal["trunc_normal", "xavier"]
Recompute = bool | Literal["selective"]
"""Parts of an encoder that the backward pass computes again to save memory: none (False), blocks (True), or norms and
activation functions ("selective")."""
Module = TypeVar("Module", bound=nn.Module)
Scales = Iterator[Tensor | None]
"""Iterator that yields the drop path factors of one block after the other: (2, B), one row for attention and one row
for the MLP. If the iterator yields None, the block draws the factors itself."""


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
        segments: boundaries of packed images in the sequence of all tokens.

    Raises:
        EncoderError: both `bias` and `segments` are given.
    """
    if segments is None:
        return dot_product_attention(q, k, v, bias=bias, scale=scale)
    if bias is not None:
        raise EncoderError("Attention of packed images supports no bias. Pass either bias or segments.")
    if segments.uniform:
        q, k, v = (x.unflatten(1, (len(segments.lengths), -1)).transpose(0, 1) for x in (q, k, v))  # (B, heads, N, d)
        out = dot_product_attention(q, k, v, scale=scale)
        return out.transpose(1, 2).flatten(0, 1).transpose(0, 1)  # the fused kernels' memory layout is (B, N, heads, d)
    # imported here, because the module loads torch's compiler, which takes seconds
    from tessera.encoders.packed_attention import packed_attention

    return packed_attention(q, k, v, scale, segments)


def self_attention(qkv: Tensor, *, scale: float | None = None, segments: Segments | None = None) -> Tensor:
    """Return `attention` for queries, keys and values in one tensor: (..., N, 3, heads, d) -> (..., heads, N, d).

    With `segments`, `qkv` holds the tokens of packed images (T, 3, heads, d).
    """
    if segments is not None and not segments.uniform:
        from tessera.encoders import packed_attention  # see `attention`

        if len(segments.runs) <= packed_attention.FEW_RUNS:
            return packed_attention.self_attention_by_run(qkv, scale, segments)
    # With the three on this axis, the gradient of `unbind` has the layout that the linear layer needs.
    q, k, v = (part.transpose(-3, -2) for part in qkv.unbind(-3))
    return attention(q, k, v, scale=scale, segments=segments)


class MLP(nn.Module):
    """Two linear layers with an exact GELU between them: (..., D) -> (..., D)."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.expand(x))

    def expand(self, x: Tensor) -> Tensor:
        """Return the input of the GELU."""
        return self.fc1(x)

    def contract(self, hidden: Tensor) -> Tensor:
        """Return the output of the MLP, given the input of the GELU."""
        return self.fc2(self.act(hidden))


class LayerScale(nn.Module):
    """Learned factor for each channel of a residual branch (2103.17239): (..., D) -> (..., D).

    With `same_dtype`, the output has the dtype of the input. Otherwise, it is in float32 also for a branch in bf16.
    """

    def __init__(self, dim: int, value: float, *, same_dtype: bool = False):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), value))
        self.same_dtype = same_dtype

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.gamma.to(x.dtype) if self.same_dtype else at_least_float32(self.gamma))


def at_least_float32(parameter: Tensor) -> Tensor:
    """Convert `parameter` to float32 if its precision is lower under autocast, because an engine gathered it in bf16.

    Without autocast, the whole encoder has a lower precision, and so has `parameter`.
    """
    if parameter.dtype not in (torch.bfloat16, torch.float16) or parameter.is_meta:
        return parameter
    return parameter.float() if torch.is_autocast_enabled(parameter.device.type) else parameter


class LayerNorm(nn.LayerNorm):
    """Layer norm: (..., D) -> (..., D). Under autocast, the input may be in float32 if the parameters are in bf16."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype == self.weight.dtype:
            return super().forward(input)
        bias = None if self.bias is None else at_least_float32(self.bias)
        return F.layer_norm(input, self.normalized_shape, at_least_float32(self.weight), bias, self.eps)


class SameDtypeLayerNorm(LayerNorm):
    """Layer norm whose output has the dtype of its input: (..., D) -> (..., D).

    Autocast would convert an input in bf16 to float32. Means and variances are computed in float32 in any case.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype == torch.float32:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
            return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `function(x)`. Keep only `x` for the backward pass, which computes the rest again.

    A matrix product at the end of `function` is not computed again, because no gradient needs its result.
    """
    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportReturnType]


def in_bf16(x: Tensor) -> Tensor:
    """Convert `x` to bf16 if autocast to bf16 is enabled on its device."""
    device = x.device.type
    enabled = not x.is_meta and torch.is_autocast_enabled(device)
    return x.bfloat16() if enabled and torch.get_autocast_dtype(device) == torch.bfloat16 else x


class DropPath(nn.Module):
    """Stochastic depth (1603.09382): in training, residual branches are dropped at random, one decision per image.

    The input is (B, ..., D), or packed images (T, D) with `segments`. A dropped branch is multiplied by the factor 0.
    Other branches are multiplied by 1 / (1 - rate), so that the expectation does not change. `scale` (B,) holds the
    factor of each image if the encoder has already drawn the factors (see `encoders.randomness`). If `scale` is None,
    the factors are drawn from torch's generator.
    """

    def __init__(self, rate: float):
        super().__init__()
        if not 0 <= rate < 1:
            raise EncoderError(f"drop_path is a probability. It must be at least 0 and less than 1, not {rate}.")
        self.rate = rate

    def forward(self, x: Tensor, segments: Segments | None = None, scale: Tensor | None = None) -> Tensor:
        factors = self._factors(x, segments, scale)
        return x if factors is None else x * factors

    def add(self, x: Tensor, branch: Tensor, segments: Segments | None = None, scale: Tensor | None = None) -> Tensor:
        """Return the sum of `x` and of the branch after drop path. Both have the same shape."""
        factors = self._factors(branch, segments, scale)
        if factors is None:
            return x + branch
        if x.dtype == branch.dtype:
            return torch.addcmul(x, branch, factors)  # in one pass over memory
        return x + branch * factors

    def _factors(self, x: Tensor, segments: Segments | None, scale: Tensor | None) -> Tensor | None:
        """Return the factors of the images, which broadcast to `x`. Return None if no image is dropped."""
        if not self.training or self.rate == 0:
            return None
        shape = (-1, *[1] * (x.ndim - 1))
        if scale is None:
            images = len(x) if segments is None else len(segments.lengths)
            scale = x.new_empty(images).bernoulli_(1 - self.rate) / (1 - self.rate)
        factors = scale.to(x.dtype).view(shape)
        return factors if segments is None else factors.index_select(0, segments.image_ids)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


def branch_scales(scales: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split the drop path factors (2, B) of a block into the factors of its attention and the factors of its MLP."""
    return (None, None) if scales is None else (scales[0], scales[1])


def sincos_table(rows: int, columns: int, dim: int) -> Tensor:
    """Return the fixed 2-d sine-cosine position table of MAE (2111.06377), row by row: (r * c, D) float32.

    The first half of the channels encodes the column, and the second half encodes the row. Each half holds first the
    sines, then the cosines.

    Raises:
        EncoderError: `dim` is not a multiple of 4.
    """
    if dim % 4:
        raise EncoderError(f"A sine-cosine position table needs a width (dim) that is a multiple of 4, not {dim}.")
    rates = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))  # (D / 4,)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [index.flatten()[:, None] * rates for index in (column, row)]  # two of (r * c, D / 4)
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1).float()


def resize_table(table: Tensor, old: tuple[int, int], new: tuple[int, int], interpolation: Interpolation) -> Tensor:
    """Resize a position table from the grid `old` to the grid `new`: (1, old r * c, D) -> (1, new r * c, D).

    The interpolation is bicubic. The rule "mae" uses the scale factor new / old, without antialiasing. The rule
    "antialias" uses the same factor with antialiasing, as in timm and in DINOv2's models with registers. The rule
    "dino" uses the scale factor (new + 0.1) / old without antialiasing, as the published DINO models and DINOv2's
    models without registers do. With "dino", the table changes even if the old grid and the new grid are equal.
    """
    maps = rearrange(table.float(), "1 (r c) d -> 1 d r c", r=old[0], c=old[1])
    if interpolation == "dino":
        scale = [(after + 0.1) / before for before, after in zip(old, new, strict=True)]
        maps = F.interpolate(maps, scale_factor=scale, mode="bicubic", align_corners=False)
    else:
        antialias = interpolation == "antialias"
        maps = F.interpolate(maps, size=new, mode="bicubic", align_corners=False, antialias=antialias)
    return rearrange(maps, "1 d r c -> 1 (r c) d").to(table.dtype)


def init_linear(layer: nn.Module, init: Init) -> None:
    """Initialise the weight and bias of `layer` if `layer` is an `nn.Linear`. Pass this function to `Module.apply`."""
    if isinstance(layer, nn.Linear):
        if init == "xavier":
            nn.init.xavier_uniform_(layer.weight)
        else:
            nn.init.trunc_normal_(layer.weight, std=0.02)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def learned(*shape: int) -> nn.Parameter:
    """Return a new parameter, initialised from a truncated normal distribution with standard deviation 0.02."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))


def table_grid(image_size: int | tuple[int, int], patch_size: int) -> tuple[int, int]:
    """Return the number of rows and columns of a position table for images of `image_size` pixels.

    `image_size` is one integer for square images, or (height, width).

    Raises:
        EncoderError: `image_size` is not one integer or two integers, or is smaller than a patch.
    """
    sides = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise EncoderError(f"image_size must be one side or (height, width), in pixels, not {image_size!r}.")
    height, width = sides
    if min(height, width) < patch_size:
        raise EncoderError(
            f"An image_size of {height} x {width} pixels is smaller than a patch of {patch_size} x {patch_size} pixels."
        )
    return height // patch_size, width // patch_size


def modules_of(container: nn.ModuleList, kind: type[Module]) -> list[Module]:
    """Return a list of the modules of `container` that are instances of `kind`."""
    return [module for module in container if isinstance(module, kind)]


def check_choices(**choices: tuple[str, object]):
    """Raise `EncoderError` if a setting has a value that its `Literal` type does not include.

    Each keyword argument has the name of a setting, and is a pair of the setting's value and its `Literal` type.
    """
    for name, (value, known) in choices.items():
        if value not in get_args(known):
            raise EncoderError(f"{name} must be one of {', '.join(get_args(known))}, not {value!r}.")


def check_counts(**counts: int | Sequence[int]):
    """Raise `EncoderError` if a number is less than 1, or if a sequence is empty or contains a number less than 1."""
    for name, value in counts.items():
        values = value if isinstance(value, Sequence) else (value,)
        if not values or min(values) < 1:
            raise EncoderError(f"{name} must be at least 1, not {', '.join(map(str, values)) or 'empty'}.")


def check_heads(dim: int, heads: int, head_dim: int | None = None) -> None:
    """Raise `EncoderError` if a number is less than 1, or if `head_dim` is None and `heads` does not divide `dim`."""
    check_counts(dim=dim, heads=heads, head_dim=1 if head_dim is None else head_dim)
    if head_dim is None and dim % heads:
        raise EncoderError(
            f"A width (dim) of {dim} does not split into {heads} heads. Change dim or heads, or set head_dim."
        )


def check_block_count(count: int, available: int) -> None:
    """Raise `EncoderError` unless `count`, the number of requested blocks, is from 1 to `available`."""
    if not 1 <= count <= available:
        raise EncoderError(f"Features of {count} blocks were requested. The number must be from 1 to {available}.")
