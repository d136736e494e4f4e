"""Twins-SVT (2104.13840): attention within windows in turn with global attention to a sub-sampled grid.

B images, C channels, H x W pixels; h x w grid of a stage, D its width, heads of width d; windows of r x c tokens. What
goes through a stage is a map, (B, h, w, D). Parameters have the names of the published code (Meituan-AutoML/Twins).
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from encoders.base import Encoder, Features
from encoders.images import Images, Mask
from encoders.layers import MLP, DropPath, attention, check_choices, init_linear, learned

Layout = Literal["meituan", "vit_pytorch"]
Number = TypeVar("Number", int, float)

SMALL, BASE, LARGE = (64, 128, 256, 512), (96, 192, 384, 768), (128, 256, 512, 1024)
MICRO = {"patch_size": 2, "window_size": 4, "image_size": 16}
VIT_PYTORCH = {
    "layout": "vit_pytorch",
    "heads": 8,
    "head_dim": 64,
    "reductions": 7,
    "qkv_bias": False,
    "norm_eps": 1e-5,
}
VARIANTS = {
    "twins_svt_micro": {"dims": (48, 96), "depths": (2, 2), "heads": (2, 4), "reductions": (2, 1), **MICRO},
    "twins_svt_small": {"dims": SMALL, "depths": (2, 2, 10, 4), "heads": (2, 4, 8, 16)},
    "twins_svt_base": {"dims": BASE, "depths": (2, 2, 18, 2), "heads": (3, 6, 12, 24)},
    "twins_svt_large": {"dims": LARGE, "depths": (2, 2, 18, 2), "heads": (4, 8, 16, 32)},
    "twins_svt_vit_pytorch": {"dims": SMALL, "depths": (1, 1, 5, 4), **VIT_PYTORCH},
}

EMBED_EPS = 1e-5  # of the norms in patch embeddings and after the sub-sampling, whatever norm_eps is (gvt.py)


def pad_to(x: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros below and to the right of maps (B, h, w, D), until h is a multiple of `rows` and w of `columns`."""
    below, right = -x.shape[1] % rows, -x.shape[2] % columns
    return F.pad(x, (0, 0, 0, right, 0, below)) if below or right else x


def convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Maps through a convolution whose stride cuts nothing off: (B, h, w, D) -> (B, h', w', D')."""
    x = pad_to(x, layer.stride[0], layer.stride[1])
    return layer(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def real_keys(grid: tuple[int, int], window: tuple[int, int], heads: int, device: torch.device) -> Tensor:
    """Which keys of a grid padded to whole windows are tokens: (1, windows * heads, 1, r * c) bool."""
    with torch.inference_mode(False):  # what an evaluation puts in the cache, a training may have to keep for backward
        rows, columns = (
            torch.arange(math.ceil(side / step) * step, device=device) < side
            for side, step in zip(grid, window, strict=True)
        )
        inside = rows[:, None] & columns
        return repeat(inside, "(h r) (w c) -> 1 (h w heads) 1 (r c)", r=window[0], c=window[1], heads=heads)


cached_keys = lru_cache(maxsize=32)(real_keys)


class PatchEmbed(nn.Module):
    """A linear map of each patch and a norm: (B, h, w, C) -> (B, h / patch, w / patch, D), rounded up."""

    def __init__(self, channels: int, dim: int, patch_size: int):
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)
        self.norm = nn.LayerNorm(dim, eps=EMBED_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(convolve(self.proj, x))


class NormedPatchEmbed(nn.Module):
    """vit-pytorch's, with a norm of the pixels too: (B, h, w, C) -> (B, h / patch, w / patch, D), rounded up."""

    def __init__(self, channels: int, dim: int, patch_size: int):
        super().__init__()
        self.patch_size = patch_size
        self.pixel_norm = nn.LayerNorm(channels * patch_size**2, eps=EMBED_EPS)
        self.proj = nn.Linear(channels * patch_size**2, dim)
        self.norm = nn.LayerNorm(dim, eps=EMBED_EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = pad_to(x, self.patch_size, self.patch_size)
        x = rearrange(x, "b (h p1) (w p2) c -> b h w (c p1 p2)", p1=self.patch_size, p2=self.patch_size)
        return self.norm(self.proj(self.pixel_norm(x)))


class LocalAttention(nn.Module):
    """Attention of each token to those of its window: (B, h, w, D) -> (B, h, w, D).

    The grid is padded to whole windows, right and below; the padding is no key of any token.
    """

    def __init__(self, dim: int, *, heads: int, head_dim: int, scale: float, qkv_bias: bool, window_size: int):
        super().__init__()
        self.heads, self.scale, self.window_size = heads, scale, window_size
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=qkv_bias)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        # a window beyond the grid would be padding alone, which nobody sees
        rows, columns = min(self.window_size, height), min(self.window_size, width)
        x = pad_to(x, rows, columns)
        keys = None
        if x.shape[1:3] != (height, width):
            keys_of = real_keys if torch.compiler.is_compiling() else cached_keys  # a compiler looks through a cache
            keys = keys_of((height, width), (rows, columns), self.heads, x.device)
        down = x.shape[1] // rows
        # windows count as heads, so that one mask serves all images: (B, windows * heads, r * c, d) each
        split = "b (h r) (w c) (three heads d) -> three b (h w heads) (r c) d"
        q, k, v = rearrange(self.qkv(x), split, three=3, heads=self.heads, r=rows, c=columns)
        x = attention(q, k, v, scale=self.scale, bias=keys)
        join = "b (h w heads) (r c) d -> b (h r) (w c) (heads d)"
        x = rearrange(x, join, h=down, heads=self.heads, r=rows, c=columns)
        return self.proj(x[:, :height, :width])


class GlobalAttention(nn.Module):
    """Attention of each token to summaries of `reduction` x `reduction` tokens: (B, h, w, D) -> (B, h, w, D).

    The summaries are a convolution and a norm in front of the keys and values; `strided`, as in vit-pytorch, makes the
    keys and values by the convolution itself. It meets zeros where the grid is no multiple of `reduction`.
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
        summed = reduction > 1 and not strided
        self.sr = nn.Conv2d(dim, dim, kernel_size=reduction, stride=reduction) if summed else None
        self.norm = nn.LayerNorm(dim, eps=EMBED_EPS) if summed else nn.Identity()
        self.proj = nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        q = rearrange(self.q(x), "b h w (heads d) -> b heads (h w) d", heads=self.heads)
        summary = x if self.sr is None else self.norm(convolve(self.sr, x))
        kv = convolve(self.kv, summary) if isinstance(self.kv, nn.Conv2d) else self.kv(summary)
        k, v = rearrange(kv, "b h w (two heads d) -> two b heads (h w) d", two=2, heads=self.heads)
        out = attention(q, k, v, scale=self.scale)
        return self.proj(rearrange(out, "b heads (h w) d -> b h w (heads d)", h=x.shape[1]))


class Block(nn.Module):
    """Attention and MLP, each a residual branch with its norm in front: (B, h, w, D) -> (B, h, w, D)."""

    def __init__(self, attn: nn.Module, dim: int, *, mlp_ratio: float, norm_eps: float, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = MLP(dim, int(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Stage(nn.ModuleList):
    """The blocks of a stage; compiling it compiles them, one by one."""

    def compile(self, *args, **kwargs):
        for block in self:
            block.compile(*args, **kwargs)


class PositionGenerator(nn.Module):
    """What a token's place does to it, by a 3 x 3 convolution of each channel (2102.10882): maps of the same shape."""

    def __init__(self, dim: int):
        super().__init__()
        self.proj = nn.Sequential(nn.Conv2d(dim, dim, kernel_size=3, padding=1, groups=dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + convolve(cast(nn.Conv2d, self.proj[0]), x)


class Twins(Encoder):
    """Twins-SVT for images of any size: what does not divide is padded with zeros, right and below.

    Pixels are padded to whole patches, a grid to whole 2 x 2 patches of the next stage, to whole windows (of which the
    padding is no key) and to whole summaries. The published code gives the same where nothing needs padding, and cuts
    off or attends to padding elsewhere. A stage halves the grid of the one before; the encoder's tokens are the last's.

    With `layout="meituan"`, that of the published models, blocks of local and global attention take turns in a stage,
    the positions come after its first block, and a norm follows the last. `layout="vit_pytorch"` is the model of that
    name in the vit-pytorch package (twins_svt.py), whose weights are its own: `depths` count pairs of a local and a
    global block, after one more pair and the positions; the last stage has global blocks only; keys and values of the
    global ones come from a strided convolution; patches are normalised twice; and no norm follows.

    A setting of several stages is one number for all of them or a list with one for each.

    Args:
        dims: width of the tokens in each stage.
        depths: blocks of each stage.
        heads: attention heads of a block, in each stage.
        head_dim: width of a head, the width of the stage over its heads when None.
        window_size: tokens of a side of a window, in each stage.
        reductions: tokens of a side of what one key of the global attention stands for, in each stage.
        patch_size: side of a patch of the first stage in pixels.
        mlp_ratios: hidden width of the MLP over the width of the stage.
        qkv_bias: have a bias in the queries, keys and values.
        qk_scale: factor on the attention logits, 1 / sqrt(width of a head) when None.
        channels: channels of an image.
        image_size: pixels, one side or (rows, columns), that evaluation crops to; nothing in the encoder depends on it.
        norm_eps: epsilon of the norms in blocks and of the last; those of patches and summaries have 1e-5.
        drop_path: share of residual branches left out in training at the last block, rising linearly from 0.
        mask_token: have a learned token to put in place of hidden patches.
        checkpoint_activations: recompute each block in the backward pass, which saves memory.
        layout: whose arrangement of the parts, that of the published models or that of vit-pytorch.
    """

    undecayed = ("pos_block.",)

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
        check_choices(layout=(layout, Layout))
        self.dims, stages = tuple(dims), len(dims)
        self.depths, self.heads = _each("depths", depths, stages), _each("heads", heads, stages)
        self.window_size = _each("window_size", window_size, stages)
        self.reductions = _each("reductions", reductions, stages)
        self.mlp_ratios = _each("mlp_ratios", mlp_ratios, stages)
        _check_counts(dims=self.dims, depths=self.depths, heads=self.heads, reductions=self.reductions)
        _check_counts(window_size=self.window_size, patch_size=[patch_size], channels=[channels])
        sides = image_size if isinstance(image_size, Sequence) else [image_size]
        _check_counts(head_dim=[1 if head_dim is None else head_dim], image_size=sides)
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
        self.norm = nn.LayerNorm(self.dim, eps=norm_eps) if layout == "meituan" else nn.Identity()
        self.mask_token = learned(1, self.dims[0]) if mask_token else None
        if layout == "meituan":  # vit-pytorch keeps the layers' own initial values
            self.apply(_init)

    def _stages(self, drop_path: float) -> Iterator[Stage]:
        kinds = _kinds(self.layout, self.depths)
        number, total = 0, sum(len(stage) for stage in kinds)
        for stage, (dim, heads) in enumerate(zip(self.dims, self.heads, strict=True)):
            if self.head_dim is None and dim % heads:
                raise ValueError(f"a width (dims) of {dim} does not split into {heads} heads: say their head_dim")
            head_dim = dim // heads if self.head_dim is None else self.head_dim
            scale = head_dim**-0.5 if self.qk_scale is None else self.qk_scale
            heads_of = {"heads": heads, "head_dim": head_dim, "scale": scale, "qkv_bias": self.qkv_bias}
            local = partial(LocalAttention, dim, **heads_of, window_size=self.window_size[stage])
            strided = self.layout == "vit_pytorch"
            across = partial(GlobalAttention, dim, **heads_of, reduction=self.reductions[stage], strided=strided)
            block = partial(Block, dim=dim, mlp_ratio=self.mlp_ratios[stage], norm_eps=self.norm_eps)
            blocks = Stage()
            for is_local in kinds[stage]:
                rate = drop_path * number / max(total - 1, 1)
                blocks.append(block(local() if is_local else across(), drop_path=rate))
                number += 1
            yield blocks

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return math.ceil(height / self.stride), math.ceil(width / self.stride)

    def forward(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> Features:
        """Encode `images` (B, C, H, W), normalised floats, of any size.

        With `mask`, the patches of the first stage that lie in hidden tokens are replaced by the mask token.

        Raises:
            ValueError: the images or the mask do not fit the encoder, or `drop`, which windows do not allow.
        """
        self.check(images, mask, drop=drop)
        (features,) = self._last(1, images, mask)
        return features

    def intermediate(self, images: Images, blocks: int = 1) -> list[Features]:
        """Features after each of the last `blocks` blocks of the last stage, the positions and the final norm applied.

        Raises:
            ValueError: the last stage has fewer blocks.
        """
        most = len(cast(Stage, self.blocks[-1]))
        if not 1 <= blocks <= most:
            raise ValueError(f"{blocks} blocks asked of an encoder that has {most} in its last stage")
        self.check(images)
        return self._last(blocks, images)

    def pyramid(self, images: Tensor) -> list[Tensor]:
        """Output of each stage, the last after the final norm: (B, C, H, W) -> each (B, D, h, w)."""
        self.check(images)
        maps = dict(self._outputs(images))  # the last block of each stage
        last = len(self.dims) - 1
        return [(self.norm(x) if stage == last else x).permute(0, 3, 1, 2) for stage, x in maps.items()]

    def _last(self, count: int, images: Images, mask: Mask | None = None) -> list[Features]:
        """Features after each of the last `count` blocks."""
        outputs = deque(self._outputs(images, mask), maxlen=count)
        maps = [self.norm(x).flatten(1, 2) for _, x in outputs]  # (B, h * w, D) each
        return [Features(x.mean(1), x.flatten(0, 1), self.grids(images)) for x in maps]

    def _outputs(self, images: Images, mask: Mask | None = None) -> Iterator[tuple[int, Tensor]]:
        """Stage and output (B, h, w, D) of each block in turn."""
        assert isinstance(images, Tensor)
        x = images.permute(0, 2, 3, 1)  # (B, H, W, C)
        stages = zip(self.patch_embeds, self.blocks, self.pos_block, _kinds(self.layout, self.depths), strict=True)
        for stage, (embed, blocks, positions, kinds) in enumerate(stages):
            x = embed(x)  # (B, h, w, D)
            if stage == 0 and mask is not None:
                x = self._hide(x, mask, self.grid(*images.shape[-2:]))
            before = 1 if self.layout == "meituan" else 1 + any(kinds)  # blocks in front of the positions
            for number, block in enumerate(cast(Stage, blocks), start=1):
                recompute = self.checkpoint_activations and self.training
                x = cast(Tensor, checkpoint(block, x, use_reentrant=False)) if recompute else block(x)
                x = positions(x) if number == before else x
                yield stage, x

    def _hide(self, x: Tensor, mask: Mask, grid: tuple[int, int]) -> Tensor:
        """The mask token in place of the patches (B, h, w, D) of the first stage that lie in hidden tokens."""
        assert self.mask_token is not None
        side = self.stride // self.patch_size
        hidden = mask.hidden.view(len(x), *grid)
        hidden = repeat(hidden, "b h w -> b (h i) (w j) 1", i=side, j=side)
        return torch.where(hidden[:, : x.shape[1], : x.shape[2]], self.mask_token.to(x.dtype), x)


def _kinds(layout: Layout, depths: Sequence[int]) -> list[list[bool]]:
    """Whether each block of each stage is a local one."""
    if layout == "meituan":
        return [[number % 2 == 0 for number in range(depth)] for depth in depths]
    return [[True, False] * (1 + depth) for depth in depths[:-1]] + [[False] * (1 + depths[-1])]


def _init(layer: nn.Module):
    """Initial values of Meituan-AutoML/Twins (gvt.py): convolutions normal, of variance 2 / fan-out."""
    init_linear(layer, "trunc_normal")
    if isinstance(layer, nn.Conv2d):
        fan_out = math.prod(layer.kernel_size) * layer.out_channels // layer.groups
        nn.init.normal_(layer.weight, std=math.sqrt(2 / fan_out))
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def _each(name: str, value: Number | Sequence[Number], stages: int) -> tuple[Number, ...]:
    """A value for each stage."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    values = values * stages if len(values) == 1 else values  # the command line reads a number as a list of one
    if len(values) != stages:
        raise ValueError(f"{name} must have one entry for each of the {stages} stages (dims), not {len(values)}")
    return values


def _check_counts(**counts: Sequence[int]):
    for name, values in counts.items():
        if not values or min(values) < 1:
            raise ValueError(f"{name} must be at least 1, not {', '.join(map(str, values)) or 'empty'}")
