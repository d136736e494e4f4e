"""Twins-SVT (2104.13840): blocks that attend within windows alternate with blocks that attend to a subsampled grid.

Letters in shapes: B images; C channels, H x W pixels; h x w grid and width D of a stage; d width of one head; windows
of r x c tokens. A stage maps (B, h, w, D) to (B, h, w, D). Parameters have the names of the published weights.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from tessera.encoders.attention import attention
from tessera.encoders.checks import check_counts
from tessera.encoders.errors import EncoderError
from tessera.encoders.images import Images, Mask
from tessera.encoders.layers import MLP, LayerNorm, PreNormBlock, init_linear, learned, modules_of
from tessera.encoders.stages import StagedEncoder

Layout = Literal["meituan", "vit_pytorch"]
Number = TypeVar("Number", int, float)

SMALL, BASE, LARGE = (64, 128, 256, 512), (96, 192, 384, 768), (128, 256, 512, 1024)
MICRO = {"patch_size": 2, "window_size": 4, "image_size": 16}
VIT_PYTORCH = {"layout": "vit_pytorch", "heads": 8, "head_dim": 64, "reductions": 7, "qkv_bias": False}
VARIANTS = {
    "twins_svt_micro": {"dims": (48, 96), "depths": (2, 2), "heads": (2, 4), "reductions": (2, 1), **MICRO},
    "twins_svt_small": {"dims": SMALL, "depths": (2, 2, 10, 4), "heads": (2, 4, 8, 16)},
    "twins_svt_base": {"dims": BASE, "depths": (2, 2, 18, 2), "heads": (3, 6, 12, 24)},
    "twins_svt_large": {"dims": LARGE, "depths": (2, 2, 18, 2), "heads": (4, 8, 16, 32)},
    "twins_svt_vit_pytorch": {"dims": SMALL, "depths": (1, 1, 5, 4), "norm_eps": 1e-5, **VIT_PYTORCH},
}

EMBED_EPS = 1e-5
"""Epsilon of the norms in patch embeddings and after subsampling. It is also a constant in the published code."""


def pad_to(x: Tensor, rows: int, columns: int) -> Tensor:
    """Pad maps (B, h, w, D) with zeros, below and to the right, until `rows` divides h and `columns` divides w."""
    below, right = -x.shape[1] % rows, -x.shape[2] % columns
    return F.pad(x, (0, 0, 0, right, 0, below)) if below or right else x


def convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Pad maps to multiples of the convolution's stride, and convolve them: (B, h, w, D) -> (B, h', w', D')."""
    x = pad_to(x, layer.stride[0], layer.stride[1])
    return layer(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def real_keys(grid: tuple[int, int], window: tuple[int, int], heads: int, device: torch.device) -> Tensor:
    """Return a mask over the keys of each window, False for padding: (1, windows * heads, 1, r * c) bool."""
    with torch.inference_mode(False):  # autograd would reject cached inference tensors in later training steps
        rows, columns = (
            torch.arange(math.ceil(side / step) * step, device=device) < side
            for side, step in zip(grid, window, strict=True)
        )
        inside = rows[:, None] & columns
        return repeat(inside, "(h r) (w c) -> 1 (h w heads) 1 (r c)", r=window[0], c=window[1], heads=heads)


cached_keys = lru_cache(maxsize=32)(real_keys)


class PatchEmbed(nn.Module):
    """Linear projection of each patch, then a norm: (B, h, w, C) -> (B, ceil(h / patch), ceil(w / patch), D)."""

    def __init__(self, channels: int, dim: int, patch_size: int):
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)
        self.norm = LayerNorm(dim, eps=EMBED_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(convolve(self.proj, x))


class NormedPatchEmbed(nn.Module):
    """`PatchEmbed` with an additional norm before the projection, as in vit-pytorch. Shapes are as in `PatchEmbed`."""

    def __init__(self, channels: int, dim: int, patch_size: int):
        super().__init__()
        self.patch_size = patch_size
        self.pixel_norm = LayerNorm(channels * patch_size**2, eps=EMBED_EPS)
        self.proj = nn.Linear(channels * patch_size**2, dim)
        self.norm = LayerNorm(dim, eps=EMBED_EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = pad_to(x, self.patch_size, self.patch_size)
        x = rearrange(x, "b (h p1) (w p2) c -> b h w (c p1 p2)", p1=self.patch_size, p2=self.patch_size)
        return self.norm(self.proj(self.pixel_norm(x)))


class LocalAttention(nn.Module):
    """Self-attention in windows: (B, h, w, D) -> (B, h, w, D).

    The grid is padded to whole windows, below and to the right. Tokens do not attend to padding.
    """

    def __init__(self, dim: int, *, heads: int, head_dim: int, scale: float, qkv_bias: bool, window_size: int):
        super().__init__()
        self.heads, self.scale, self.window_size = heads, scale, window_size
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=qkv_bias)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        rows, columns = min(self.window_size, height), min(self.window_size, width)
        x = pad_to(x, rows, columns)
        keys = None
        if x.shape[1:3] != (height, width):
            keys_of = real_keys if torch.compiler.is_compiling() else cached_keys  # torch cannot compile lru_cache
            keys = keys_of((height, width), (rows, columns), self.heads, x.device)
        down = x.shape[1] // rows
        # Windows are part of the head axis, so that one mask fits all images: (B, windows * heads, r * c, d).
        split = "b (h r) (w c) (three heads d) -> three b (h w heads) (r c) d"
        q, k, v = rearrange(self.qkv(x), split, three=3, heads=self.heads, r=rows, c=columns)
        x = attention(q, k, v, scale=self.scale, bias=keys)
        join = "b (h w heads) (r c) d -> b (h r) (w c) (heads d)"
        x = rearrange(x, join, h=down, heads=self.heads, r=rows, c=columns)
        return self.proj(x[:, :height, :width])


class GlobalAttention(nn.Module):
    """Attention of each token to a coarser grid, subsampled by `reduction`: (B, h, w, D) -> (B, h, w, D).

    By default, a strided convolution and a norm subsample the grid, and a linear layer then computes keys and values.
    With `strided`, as in vit-pytorch, one strided convolution computes keys and values from the full grid. The grid is
    padded with zeros to multiples of `reduction`.
    """

    def __init__(
        self, dim: int, *, heads: int, head_dim: int, scale: float, qkv_bias: bool, reduction: int, strided: bool
    ):
        super().__init__()
        self.heads, self.scale = heads, scale
        width = heads * head_dim
        self.q = nn.Linear(dim, width, bias=qkv_bias)
        if strided:
            self.kv = nn.Conv2d(dim, 2 * width, kernel_size=reduction, stride=reduction, bias=qkv_bias)
        else:
            self.kv = nn.Linear(dim, 2 * width, bias=qkv_bias)
        subsampled = reduction > 1 and not strided
        self.sr = nn.Conv2d(dim, dim, kernel_size=reduction, stride=reduction) if subsampled else None
        self.norm = LayerNorm(dim, eps=EMBED_EPS) if subsampled else nn.Identity()
        self.proj = nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        q = rearrange(self.q(x), "b h w (heads d) -> b heads (h w) d", heads=self.heads)
        reduced = x if self.sr is None else self.norm(convolve(self.sr, x))
        kv = convolve(self.kv, reduced) if isinstance(self.kv, nn.Conv2d) else self.kv(reduced)
        k, v = rearrange(kv, "b h w (two heads d) -> two b heads (h w) d", two=2, heads=self.heads)
        out = attention(q, k, v, scale=self.scale)
        return self.proj(rearrange(out, "b heads (h w) d -> b h w (heads d)", h=x.shape[1]))


class Stage(nn.ModuleList):
    """Blocks of a stage. `compile` compiles each block separately."""

    def compile(self, *args, **kwargs):
        for block in self:
            block.compile(*args, **kwargs)


class PositionGenerator(nn.Module):
    """Conditional positions (2102.10882): input plus depth-wise 3 x 3 convolution, (B, h, w, D) -> (B, h, w, D)."""

    def __init__(self, dim: int):
        super().__init__()
        self.proj = nn.Sequential(nn.Conv2d(dim, dim, kernel_size=3, padding=1, groups=dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class Twins(StagedEncoder):
    """Twins-SVT for images of any size. Images and grids are padded with zeros, below and to the right.

    Images are padded to whole patches. Grids are padded to even sides, to whole windows and to multiples of the
    subsampling factor. Tokens do not attend to the padding of windows. Without padding, the result equals that of the
    published code. Where this class pads, the published code either crops or attends to padding. Each stage after the
    first halves the grid. `Features.tokens` are the tokens of the last stage.

    `layout="meituan"` is the published model. Blocks with local and global attention alternate, positions are added
    after the first block of each stage, and a norm follows the last stage. `layout="vit_pytorch"` is the model of
    twins_svt.py in vit-pytorch. Its stages have one pair of a local and a global block, then positions, then `depths`
    more pairs. Its last stage has a global block in place of each pair. Strided convolutions compute keys and values of
    global blocks, patches are normed before and after their projection, and there is no final norm.

    A setting that may differ between stages, such as `reductions`, is one number or a list with one number per stage.

    Args:
        dims: width of each stage.
        depths: number of blocks of each stage.
        heads: number of attention heads of each stage.
        head_dim: width of a head. None means the width of the stage divided by its number of heads.
        window_size: side of a window in tokens, for each stage.
        reductions: factor by which global attention subsamples each side of the grid, for each stage.
        patch_size: side of a patch of the first stage in pixels.
        mlp_ratios: hidden width of the MLP divided by the width of the stage.
        qkv_bias: add a bias to queries, keys and values.
        qk_scale: factor of the attention logits. None means 1 / sqrt(width of a head).
        channels: number of channels of an image.
        image_size: image size in pixels for evaluation and exports to timm, one side or (height, width).
        norm_eps: epsilon of the norms in blocks and of the final norm. All other norms have an epsilon of 1e-5.
        drop_path: drop path rate of the last block. The rate rises linearly from 0 at the first block.
        mask_token: add a learned token that replaces hidden patches.
        checkpoint_activations: recompute each block in the backward pass to save memory.
        layout: arrangement of the modules, as in the published models ("meituan") or in vit-pytorch ("vit_pytorch").
    """

    no_weight_decay = ("pos_block.",)

    def __init__(
        self,
        *,
        dims: tuple[int, ...] = SMALL,
        depths: tuple[int, ...] = (2, 2, 10, 4),
        heads: int | tuple[int, ...] = (2, 4, 8, 16),
        head_dim: int | None = None,
        window_size: int | tuple[int, ...] = 7,
        reductions: int | tuple[int, ...] = (8, 4, 2, 1),
        patch_size: int = 4,
        mlp_ratios: float | tuple[float, ...] = 4.0,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        channels: int = 3,
        image_size: int | tuple[int, int] = 224,
        norm_eps: float = 1e-6,
        drop_path: float = 0.0,
        mask_token: bool = False,
        checkpoint_activations: bool = False,
        layout: Layout = "meituan",
    ):
        super().__init__()
        self.dims, stages = tuple(dims), len(dims)
        self.depths, self.heads = _each("depths", depths, stages), _each("heads", heads, stages)
        self.window_size = _each("window_size", window_size, stages)
        self.reductions = _each("reductions", reductions, stages)
        self.mlp_ratios = _each("mlp_ratios", mlp_ratios, stages)
        check_counts(dims=self.dims, depths=self.depths, heads=self.heads, reductions=self.reductions)
        check_counts(window_size=self.window_size, patch_size=patch_size, channels=channels, image_size=image_size)
        check_counts(head_dim=1 if head_dim is None else head_dim)
        self.dim, self.stride = self.dims[-1], patch_size * 2 ** (stages - 1)
        self.channels, self.patch_size, self.image_size = channels, patch_size, image_size
        self.layout: Layout = layout
        self.head_dim, self.qkv_bias, self.qk_scale, self.norm_eps = head_dim, qkv_bias, qk_scale, norm_eps
        self.checkpoint_activations = checkpoint_activations

        embed = PatchEmbed if layout == "meituan" else NormedPatchEmbed
        self.patch_embeds = nn.ModuleList(
            embed(before, dim, patch_size if stage == 0 else 2)
            for stage, (before, dim) in enumerate(zip((channels, *self.dims), self.dims, strict=False))
        )
        self.blocks = nn.ModuleList(self._stages(drop_path))
        self.pos_block = nn.ModuleList(PositionGenerator(dim) for dim in self.dims)
        self.norm = LayerNorm(self.dim, eps=norm_eps) if layout == "meituan" else nn.Identity()
        self.mask_token = learned(1, self.dims[0]) if mask_token else None
        if layout == "meituan":  # vit-pytorch uses torch's default initialisation
            self.apply(_init)

    def _stages(self, drop_path: float) -> Iterator[Stage]:
        kinds = _kinds(self.layout, self.depths)
        number, total = 0, sum(len(stage) for stage in kinds)
        for stage, (dim, heads) in enumerate(zip(self.dims, self.heads, strict=True)):
            if self.head_dim is None and dim % heads:
                raise EncoderError(f"The width (dims) {dim} does not split into {heads} heads. Set head_dim.")
            head_dim = dim // heads if self.head_dim is None else self.head_dim
            scale = head_dim**-0.5 if self.qk_scale is None else self.qk_scale
            heads_of = {"heads": heads, "head_dim": head_dim, "scale": scale, "qkv_bias": self.qkv_bias}
            local = partial(LocalAttention, dim, **heads_of, window_size=self.window_size[stage])
            strided = self.layout == "vit_pytorch"
            across = partial(GlobalAttention, dim, **heads_of, reduction=self.reductions[stage], strided=strided)
            blocks = Stage()
            for is_local in kinds[stage]:
                rate = drop_path * number / max(total - 1, 1)
                attn, mlp = (local if is_local else across)(), MLP(dim, int(dim * self.mlp_ratios[stage]))
                blocks.append(PreNormBlock(dim, attn, mlp, norm_eps=self.norm_eps, drop_path=rate))
                number += 1
            yield blocks

    def _final_blocks(self) -> int:
        return len(modules_of(self.blocks, Stage)[-1])

    def _outputs(self, images: Images, mask: Mask | None = None, drop: bool = False) -> Iterator[tuple[int, Tensor]]:
        images = self.checked(images, mask, drop=drop)
        x = images.permute(0, 2, 3, 1)  # (B, H, W, C)
        scales = self.draw_drop_path(x.shape[0], x.device)
        blocks_of_stages, kinds_of_stages = modules_of(self.blocks, Stage), _kinds(self.layout, self.depths)
        stages = zip(self.patch_embeds, blocks_of_stages, self.pos_block, kinds_of_stages, strict=True)
        for stage, (embed, blocks, positions, kinds) in enumerate(stages):
            x = embed(x)  # (B, h, w, D)
            if stage == 0 and mask is not None:
                x = self._hide(x, mask, self.grid(*images.shape[-2:]))
            before = 1 if self.layout == "meituan" else 1 + any(kinds)  # number of blocks before positions
            for number, block in enumerate(blocks, start=1):
                x = self.run_block(block, x, None, next(scales))
                x = positions(x) if number == before else x
                yield stage, x


def _kinds(layout: Layout, depths: Sequence[int]) -> list[list[bool]]:
    """Return one list per stage with one entry per block: True for local attention, False for global attention."""
    if layout == "meituan":
        return [[number % 2 == 0 for number in range(depth)] for depth in depths]
    return [[True, False] * (1 + depth) for depth in depths[:-1]] + [[False] * (1 + depths[-1])]


def _init(layer: nn.Module):
    """Initialise a layer as in Meituan-AutoML/Twins (gvt.py). The weights of convolutions have variance 2 / fan-out."""
    init_linear(layer, "trunc_normal")
    if isinstance(layer, nn.Conv2d):
        fan_out = math.prod(layer.kernel_size) * layer.out_channels // layer.groups
        nn.init.normal_(layer.weight, std=math.sqrt(2 / fan_out))
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def _each(name: str, value: Number | Sequence[Number], stages: int) -> tuple[Number, ...]:
    """Return a tuple with one value for each stage. A single number is repeated for all stages."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    values = values * stages if len(values) == 1 else values  # a command-line flag with one number is parsed as a list
    if len(values) != stages:
        raise EncoderError(
            f"{name} has {len(values)} entries, but dims defines {stages} stages. Give one entry per stage."
        )
    return values
