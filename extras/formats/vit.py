"""Weight formats of the ViT (DINO, MAE, DeiT, DINOv2, timm, transformers and this project), and export to timm.

Letters in shapes: R is the number of rows of a position table, D is the width of a token, and P is the number of values
in a patch.
"""

import math
import re
from typing import Any

import torch
from torch import Tensor

from tessera.encoders import vit
from tessera.encoders.base import Encoder
from tessera.encoders.blocks import Block
from tessera.encoders.errors import WeightsError
from tessera.encoders.layers import modules_of, resize_table, sincos_table
from tessera.encoders.loading import Report, Source, State, check_names
from tessera.encoders.vit import ViT
from tessera.extras.formats.conversion import (
    adapt_channels,
    check_equivalent,
    check_present,
    check_size,
    depth_of,
    split_off,
)
from tessera.extras.formats.names import (
    from_dinov2,
    from_transformers,
    of_eva,
    of_other_architecture,
    of_transformers,
)

NAME: str = "a ViT"
ACCEPTS: tuple[str, ...] = (NAME,)

FIRST = "patch_embed.proj.weight"
DECIDES = {
    "cls_token": "class_token",
    "patch_embed.norm": "patch_norm",
    "dist_token": "distillation_token",
    "reg_token": "registers",
    "mask_token": "mask_token",
    ".gamma": "layer_scale",
    ".q_norm": "qk_norm",
    ".k_norm": "qk_norm",
    "fc_norm": "pool",
    "qkv.bias": "qkv_bias",
    "qkv.weight": "head_dim",
    "mlp.fc": "mlp_ratio",
    "mlp.w": "mlp",
    "head": "classes",
    "pre_logits": "representation_size",
}
TIMM = {
    (192, 12, 3): ("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"),
    (384, 12, 6): ("vit_small_patch16_224", "deit_small_distilled_patch16_224"),
    (768, 12, 12): ("vit_base_patch16_224", "deit_base_distilled_patch16_224"),
    (1024, 24, 16): ("vit_large_patch16_224", ""),
    (1280, 32, 16): ("vit_huge_patch14_224", ""),
}
"""Map from (width, depth, heads) to the names of two timm models. The second model has a distillation token. An empty
name stands for a model that timm does not have."""
SWIGLU = "vit_giant_patch14_dinov2"
"""Name of the timm model whose MLPs are gated (SwiGLU)."""
VARIANTS = {name: settings for name, settings in vit.VARIANTS.items() if settings.get("positions") != "rope"}
"""Variants with position tables."""


def converts_for(encoder: Encoder) -> bool:
    """Return True for a ViT without rotary positions."""
    return type(encoder) is ViT and encoder.rope_embed is None


def recognises(state: State) -> bool:
    """Return True if `state` holds weights of a ViT, and False for weights of a RoPE-ViT, a SAM-ViT or a NaViT.

    Raises:
        WeightsError: the weights are those of a known architecture that no encoder of this project has.
    """
    if other := of_other_architecture(state):
        raise WeightsError(
            f"The weights are those of {other}, and no encoder of this project has this architecture. "
            "If timm has the model, use timm's own: --encoder timm:NAME."
        )
    if of_transformers(state):
        return "embeddings.position_embeddings" in state
    first = state.get(FIRST)
    others = ("neck.", "rope_embed.", "storage_tokens")
    if first is None or of_eva(state) or any(name.startswith(others) or ".rel_pos_" in name for name in state):
        return False
    flat = (
        first.ndim == 2 and "pos_embed" in state
    )  # NaViT weights also store the filters as a matrix, but have no `pos_embed`
    return (flat or first.ndim == 4) and any(re.match(r"blocks\.0\.(0\.)?mlp\.(fc1|w12)\.", name) for name in state)


def fit(encoder: ViT, state: State, source: Source, report: Report) -> State:
    """Return the weights with the encoder's tensor names, and with the position table resized to the encoder's grid."""
    state = named(state)
    dim, patch_size = _first_shape(state, encoder.channels)
    check_size((dim, depth_of(state), patch_size), (encoder.dim, len(encoder.blocks), encoder.stride), VARIANTS)
    if state[FIRST].ndim == 4:
        state[FIRST] = adapt_channels(state[FIRST], encoder.channels, FIRST, report)
    own = encoder.state_dict()
    parts = {name.split(".")[0] for name in state}
    decoder = {part for part in parts if part.startswith("decoder_")}
    renewed = {"head", "head_dist", "pre_logits", "mask_token"}
    # The pooling head of SigLIP reads the tokens, which are the features here.
    elsewhere = decoder | {"attn_pool"} | (renewed - {name.split(".")[0] for name in own})
    if decoder:  # in an MAE checkpoint, the mask token belongs to the decoder
        elsewhere.add("mask_token")
    if encoder.pool == "mean" and "fc_norm" not in parts:  # MAE's fine-tuning replaces `norm` by a new `fc_norm`
        elsewhere.add("norm")
        renewed.add("fc_norm")
    renewed -= parts - elsewhere
    state = split_off(state, elsewhere, report)
    report.fresh += [name for name in own if name.split(".")[0] in renewed]
    check_names(state, own, DECIDES, report.fresh)
    return _fit_positions(encoder, state, source, report)


def named(state: State) -> State:
    """Return the weights with the tensor names of this project."""
    return from_transformers(state) if of_transformers(state) else from_dinov2(state)


def _first_shape(state: State, channels: int) -> tuple[int, int]:
    """Return the width D of a token and the side of a patch in pixels, computed from the filters of the first layer.

    The filters have the shape (D, C, p, p) or, if they are flat, (D, P). For flat filters, the side is computed with
    the given number of `channels`.
    """
    weight = state[FIRST]
    return weight.shape[0], weight.shape[2] if weight.ndim == 4 else math.isqrt(weight.shape[1] // channels)


def _fit_positions(encoder: ViT, state: State, source: Source, report: Report) -> State:
    """Convert the position table (1, R, D) to the encoder's prefix tokens and grid.

    If the table has no rows for prefix tokens, these rows are set to zero. If the table has rows for registers, these
    rows are added to the register tokens.
    """
    prefix, patches, grid = split_positions(state, encoder.num_positioned, encoder.table_grid, source)
    state = dict(state)
    if prefix.shape[1] > encoder.num_positioned:
        state["reg_token"] = state["reg_token"] + prefix[:, encoder.num_positioned :]
        prefix = prefix[:, : encoder.num_positioned]
    elif prefix.shape[1] < encoder.num_positioned:
        prefix = torch.zeros_like(patches[:, :1]).expand(-1, encoder.num_positioned, -1)
    if grid != encoder.table_grid:
        patches = resize_table(patches, grid, encoder.table_grid, encoder.interpolation)
        report.resized.append(
            f"pos_embed resized from {grid[0]} x {grid[1]} to {encoder.table_grid[0]} x {encoder.table_grid[1]} "
            f"by the rule of {encoder.interpolation}"
        )
    return state | {"pos_embed": torch.cat([prefix, patches], 1)}


def split_positions(
    state: State, prefix: int, own: tuple[int, int], source: Source
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Split the position table `pos_embed` (1, R, D) into rows for prefix tokens and rows for patches.

    Return the rows for prefix tokens, the rows for patches, and the grid of the patches. Published tables have rows for
    the class and distillation tokens. timm's tables may lack these rows, or may have additional rows for registers. The
    grid of the patches must be square, as in all published tables, or equal to the encoder's grid.

    Args:
        state: weights that include `pos_embed`.
        prefix: number of class and distillation tokens.
        own: rows and columns of the encoder's position table.
        source: source of the weights. With "ours", the encoder's grid is preferred to a square grid.

    Raises:
        WeightsError: no grid fits the number of rows, or two grids fit and `source` is not "ours".
    """
    table = state["pos_embed"]
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    for front in (prefix, 0, prefix + registers):
        grid = grid_of(table.shape[1] - front, own, source)
        if grid:
            return table[:, :front], table[:, front:], grid
    raise WeightsError(
        f"The grid of a position table of {table.shape[1]} rows is unknown. The table fits neither a square grid nor "
        "the encoder's grid."
    )


def grid_of(count: int, own: tuple[int, int], source: Source) -> tuple[int, int] | None:
    """Return the rows and columns of a position table for `count` patches: the encoder's grid `own`, or a square grid.

    Return None if neither of the two grids has `count` patches.

    Raises:
        WeightsError: both grids have `count` patches, and `source` is not "ours".
    """
    rows, columns = own
    side = math.isqrt(max(count, 0))
    square = count > 0 and side * side == count
    if count == rows * columns and square and rows != columns and source != "ours":
        raise WeightsError(
            f"A position table of {count} patches fits both a grid of {side} x {side} and the encoder's grid of "
            f"{rows} x {columns}. "
            'Pass source="ours" for the encoder\'s grid, or build the encoder with a square image_size.'
        )
    if count == rows * columns:
        return own
    return (side, side) if square else None


def describe(state: State) -> dict[str, Any]:
    """Return arguments for `encoders.build` that make the encoder fit the weights without resizing.

    Settings that the weights do not determine are taken from published models. The number of heads is that of the
    variant with the same width and depth. Without such a variant, each head is assumed to be 64 wide. The pooled
    feature is the class token if the weights have a class token and no `fc_norm`. The epsilon of the norms is 1e-6. A
    patch embedding with norms is assumed to have three image channels. `interpolation` is "mae" for weights of MAE, and
    "antialias", timm's rule, for weights with registers, a class head or the pooling head of SigLIP.

    Raises:
        WeightsError: required tensors are missing, or the number of heads or the grid of the position table is unknown.
    """
    state = named(state)
    antialias = any(name in state for name in ("reg_token", "head.weight", "attn_pool.latent"))
    gated = "blocks.0.mlp.w12.weight" in state
    second = f"blocks.0.mlp.{'w3' if gated else 'fc2'}.weight"
    check_present(state, ("pos_embed", "blocks.0.attn.qkv.weight", second))
    weight, hidden = state[FIRST], state[second].shape[1]
    channels = weight.shape[1] if weight.ndim == 4 else 3
    dim, patch_size = _first_shape(state, channels)
    depth = depth_of(state)
    inner = len(state["blocks.0.attn.qkv.weight"]) // 3
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    scaled = "blocks.0.ls1.gamma" in state
    variants = _variants(dim, depth, registers if scaled and patch_size == 14 else None) if inner == dim else []
    head_dim = _head_dim(state, inner, dim // VARIANTS[variants[0]]["heads"] if variants else 64)
    prefix = sum(name in state for name in ("cls_token", "dist_token"))
    _, patches, grid = split_positions(state, prefix, (0, 0), "auto")
    decoder = any(name.startswith("decoder_") for name in state)
    fixed = decoder or _has_fixed_positions(patches, grid)
    variant = variants[0] if variants else "vit_small"
    published = VARIANTS[variant]
    return {
        "variant": variant,
        "dim": dim,
        "depth": depth,
        "heads": inner // head_dim,
        "head_dim": None if inner == dim else head_dim,
        "mlp": "swiglu" if gated else "gelu",
        "mlp_ratio": (1.5 if gated else 1) * hidden / dim,
        "patch_size": patch_size,
        "image_size": grid[0] * patch_size,
        "patch_norm": weight.ndim == 2,
        "channels": channels,
        "class_token": "cls_token" in state,
        "registers": registers,
        "distillation_token": "dist_token" in state,
        "mask_token": "mask_token" in state and not decoder,
        "pool": "mean" if "fc_norm.weight" in state else "class" if "cls_token" in state else "all",
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "norm_eps": 1e-6,
        "qk_norm": "blocks.0.attn.q_norm.weight" in state,
        "layer_scale": published.get("layer_scale", 1.0) if scaled else None,
        "interpolation": "mae" if fixed else "antialias" if antialias else published.get("interpolation", "dino"),
    }


def _head_dim(state: State, inner: int, usual: int) -> int:
    """Return the width of a head: the width of the query norms, or `usual` if the weights have no such norms.

    `inner` is the number of channels of all heads.

    Raises:
        WeightsError: the width of a head does not divide `inner`.
    """
    norm = state.get("blocks.0.attn.q_norm.weight")
    width = usual if norm is None else len(norm)
    if inner % width:
        raise WeightsError(
            f"The number of heads is unknown for attention with {inner} channels. Give the encoder with its width, "
            "depth and heads, such as --encoder vit_small --set dim=D depth=B heads=N."
        )
    return width


def _variants(dim: int, depth: int, dinov2: int | None) -> list[str]:
    """Return the variants with this width and depth.

    `dinov2` is the number of registers if the weights are those of DINOv2, with layer scale and patches of 14 pixels.
    Otherwise it is None, and the variants of DINOv2 are left out.
    """
    same = {name: s for name, s in VARIANTS.items() if (s["dim"], s["depth"]) == (dim, depth)}
    kinds = {name: s.get("registers", 0) if "dinov2" in name else None for name, s in same.items()}
    return [name for name, kind in kinds.items() if kind == dinov2]


def _has_fixed_positions(patches: Tensor, grid: tuple[int, int]) -> bool:
    """Return True if `patches` (1, N, D) are the fixed sine-cosine positions of MAE."""
    dim = patches.shape[-1]
    if patches.is_meta or dim % 4:
        return False
    return bool(torch.allclose(patches[0].float().cpu(), sincos_table(*grid, dim), atol=1e-2))


def to_timm(encoder: ViT) -> tuple[str, dict[str, Any], State]:
    """Return a model name and options for `timm.create_model`, and the encoder's weights with timm's tensor names.

    The timm model accepts only images of the encoder's image size, and computes the same features as the encoder. The
    mask token is not exported. If the encoder has a distillation token and no class head, the pooled features of the
    timm model are the mean of the class token and the distillation token.

    Raises:
        WeightsError: timm has no equivalent model.
    """
    blocks = modules_of(encoder.blocks, Block)
    state = encoder.state_dict()
    state.pop("mask_token", None)
    eps = blocks[0].norm1.eps
    check_equivalent({f"norm_eps is {eps:g}, not 1e-6": eps != 1e-6}, "timm")
    dim, depth, heads = encoder.dim, len(blocks), blocks[0].attn.heads
    names = TIMM.get((dim, depth, heads), ("", ""))
    size = {"embed_dim": dim, "depth": depth, "num_heads": heads}
    distilled = encoder.dist_token is not None
    name = names[distilled] or ("deit_small_distilled_patch16_224" if distilled else "vit_small_patch16_224")
    height, width = (n * encoder.stride for n in encoder.table_grid)
    options: dict[str, Any] = {} if names[distilled] else size
    options |= {"img_size": height if height == width else (height, width), "patch_size": encoder.stride}
    options |= {"num_classes": 0 if encoder.head is None else encoder.head.out_features}
    options |= {"in_chans": encoder.channels}
    if "blocks.0.mlp.w3.weight" in state:  # timm's hidden width counts the gate and the value
        name, options = (
            SWIGLU,
            options | size | {"mlp_ratio": (2 * state["blocks.0.mlp.w3.weight"].shape[1] + 0.5) / dim},
        )
        options["init_values"] = None
        state = {n.replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2."): t for n, t in state.items()}
    else:
        options["mlp_ratio"] = len(state["blocks.0.mlp.fc1.weight"]) / dim
    options |= {"qkv_bias": "blocks.0.attn.qkv.bias" in state, "qk_norm": "blocks.0.attn.q_norm.weight" in state}
    if "blocks.0.ls1.gamma" in state:
        options["init_values"] = 1.0  # any value makes timm add layer scale, whose weights are loaded later
    if encoder.cls_token is None:
        options["class_token"] = False
    if encoder.reg_token is not None:  # timm's position table also has rows for registers; these rows are zero here
        options["reg_tokens"] = encoder.reg_token.shape[1]
        prefix, patches = state["pos_embed"].tensor_split([encoder.num_positioned], dim=1)
        state["pos_embed"] = torch.cat([prefix, torch.zeros_like(encoder.reg_token), patches], 1)
    if encoder.pool == "mean":
        options["global_pool"] = "avg"
    if encoder.pool == "all":
        options |= {"global_pool": "avg", "fc_norm": False, "pool_include_prefix": True}
    return name, options, state
