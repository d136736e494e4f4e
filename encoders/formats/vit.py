"""Weights of a ViT by DINO, MAE, DeiT, DINOv2, timm or vit-pytorch: their names and shapes, and ours; and into timm.

R rows of a position table, D width, E width of all heads together, P numbers of a patch.
"""

import math
import re
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from encoders import vit
from encoders.base import Encoder
from encoders.formats.report import Report, Source, State, adapt_channels, check_names, listed
from encoders.layers import resize_table
from encoders.vit import Block, NormedPatchEmbed, ViT

NAME = "a ViT"
ACCEPTS = (NAME,)

# part of a tensor's name -> the constructor argument that it depends on
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
    "head": "classes",
    "pre_logits": "representation_size",
}
# vit-pytorch's names, as patterns, and ours
VIT_PYTORCH = {
    r"to_patch_embedding\.1\.": "patch_embed.norm1.",
    r"to_patch_embedding\.2\.": "patch_embed.proj.",
    r"to_patch_embedding\.3\.": "patch_embed.norm2.",
    r"pos_embedding$": "pos_embed",
    r"transformer\.norm\.": "norm.",
    r"transformer\.layers\.(\d+)\.0\.norm\.": r"blocks.\1.norm1.",
    r"transformer\.layers\.(\d+)\.0\.to_qkv\.": r"blocks.\1.attn.qkv.",
    r"transformer\.layers\.(\d+)\.0\.to_out\.0\.": r"blocks.\1.attn.proj.",
    r"transformer\.layers\.(\d+)\.1\.net\.0\.": r"blocks.\1.norm2.",
    r"transformer\.layers\.(\d+)\.1\.net\.1\.": r"blocks.\1.mlp.fc1.",
    r"transformer\.layers\.(\d+)\.1\.net\.4\.": r"blocks.\1.mlp.fc2.",
}
# width, depth and heads -> name in timm, and in timm with a distillation token
TIMM = {
    (192, 12, 3): ("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"),
    (384, 12, 6): ("vit_small_patch16_224", "deit_small_distilled_patch16_224"),
    (768, 12, 12): ("vit_base_patch16_224", "deit_base_distilled_patch16_224"),
    (1024, 24, 16): ("vit_large_patch16_224", ""),
    (1280, 32, 16): ("vit_huge_patch14_224", ""),
}


def recognises(state: State) -> bool:
    """Whether these are weights of a ViT."""
    if _of_vit_pytorch(state):
        return True
    first = state.get("patch_embed.proj.weight")
    if first is None or any(name.startswith("neck.") or ".rel_pos_" in name for name in state):
        return False
    flat = first.ndim == 2 and "pos_embed" in state  # patches with norms; a NaViT's positions have other names
    return (flat or first.ndim == 4) and any(name.startswith("blocks.0.mlp.fc1") for name in state)


def fit(encoder: Encoder, state: State, source: Source, report: Report) -> State:
    """Weights of a ViT under our names, position table on the encoder's grid."""
    assert isinstance(encoder, ViT)
    state = named(state, report)
    _check_size(encoder, state)
    first = "patch_embed.proj.weight"
    if state[first].ndim == 4:
        state[first] = adapt_channels(state[first], encoder.channels, first, report)
    own = encoder.state_dict()
    parts = {name.split(".")[0] for name in state}
    decoder = {part for part in parts if part.startswith("decoder_")}
    renewed = {"head", "head_dist", "pre_logits", "mask_token"}
    elsewhere = decoder | (renewed - {name.split(".")[0] for name in own})
    if decoder:  # MAE's mask token is the decoder's
        elsewhere.add("mask_token")
    if encoder.pool == "mean" and "fc_norm" not in parts:  # MAE's fine-tuning starts a norm for the mean
        elsewhere.add("norm")
        renewed.add("fc_norm")
    renewed -= parts - elsewhere
    report.left_out += [name for name in state if name.split(".")[0] in elsewhere]
    state = {name: tensor for name, tensor in state.items() if name.split(".")[0] not in elsewhere}
    report.fresh += [name for name in own if name.split(".")[0] in renewed]
    check_names(state, [name for name in own if name not in report.fresh], DECIDES)
    return _fit_positions(encoder, state, source, report)


def _of_vit_pytorch(state: State) -> bool:
    return {"pos_embedding", "to_patch_embedding.3.weight", "transformer.layers.0.0.to_qkv.weight"} <= set(state)


def named(state: State, report: Report) -> State:
    """Under our names, if they are another's. Of vit-pytorch, its class head is left out.

    Where vit-pytorch has no map after attention, for one head as wide as the tokens, ours is the identity.
    """
    if not _of_vit_pytorch(state):
        return {name.replace("register_tokens", "reg_token"): tensor for name, tensor in state.items()}
    report.left_out += [name for name in state if name.startswith("mlp_head.")]
    theirs, state = {name: tensor for name, tensor in state.items() if not name.startswith("mlp_head.")}, {}
    for name, tensor in theirs.items():
        for pattern, ours in VIT_PYTORCH.items():
            name = re.sub(f"^{pattern}", ours, name)
        state[name] = tensor
    for name in ("cls_token", "pos_embed"):  # (rows, D), before version 1.16.1 (1, rows, D)
        if name in state:
            state[name] = state[name].reshape(1, -1, state[name].shape[-1])
    if not state.get("cls_token", torch.empty(1)).numel():  # with the mean of all tokens, since version 1.16.0
        del state["cls_token"]
    for name in [name for name in state if name.endswith("attn.qkv.weight")]:
        proj, dim = name.replace("qkv", "proj"), state[name].shape[1]
        if proj not in state and state[name].shape[0] == 3 * dim:
            identity = torch.eye(dim).to(state[name])
            state |= {proj: identity, proj.replace("weight", "bias"): torch.zeros_like(identity[0])}
            report.resized.append(f"{proj} is the identity, vit-pytorch has no map there")
    return state


def _first_shape(state: State, channels: int) -> tuple[int, int]:
    """Width and side of a patch in pixels, from the filters (D, C, p, p), or (D, P) for images of so many channels."""
    weight = state["patch_embed.proj.weight"]
    return weight.shape[0], weight.shape[2] if weight.ndim == 4 else math.isqrt(weight.shape[1] // channels)


def _check_size(encoder: ViT, state: State):
    """Whether these are weights of a ViT of the encoder's width, depth and patch."""
    dim, patch_size = _first_shape(state, encoder.channels)
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    if (dim, depth, patch_size) != (encoder.dim, len(encoder.blocks), encoder.stride):
        names = {(settings["dim"], settings["depth"]): name for name, settings in vit.VARIANTS.items()}
        fitting = names.get((dim, depth), f"an encoder with dim={dim}, depth={depth}")
        raise ValueError(
            f"the checkpoint is {dim} wide with {depth} blocks and patches of {patch_size} pixels, this encoder "
            f"{encoder.dim} wide with {len(encoder.blocks)} blocks and patches of {encoder.stride} pixels: "
            f"build {fitting} with patch_size={patch_size}"
        )


def _fit_positions(encoder: ViT, state: State, source: Source, report: Report) -> State:
    """Give the table (1, R, D) a row for the class and the distillation token each, none for registers, and our grid.

    What a table lacks is a position of zero; what it has too much is added to the register itself.
    """
    special, patches, grid = split_positions(state, encoder.placed, encoder.table_grid, source)
    state = dict(state)
    if special.shape[1] > encoder.placed:
        state["reg_token"] = state["reg_token"] + special[:, encoder.placed :]
        special = special[:, : encoder.placed]
    elif special.shape[1] < encoder.placed:
        special = torch.zeros_like(patches[:, :1]).expand(-1, encoder.placed, -1)
    if grid != encoder.table_grid:
        patches = resize_table(patches, grid, encoder.table_grid, encoder.interpolation)
        report.resized.append(
            f"pos_embed resized from {grid[0]} x {grid[1]} to {encoder.table_grid[0]} x {encoder.table_grid[1]} "
            f"by the rule of {encoder.interpolation}"
        )
    return state | {"pos_embed": torch.cat([special, patches], 1)}


def split_positions(
    state: State, placed: int, own: tuple[int, int], source: Source
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """The rows of `pos_embed` (1, R, D) for special tokens, those for patches, and the grid of the latter.

    Published tables have rows for the special tokens that have a position, timm's may have none or one for registers as
    well. The grid is square, as all published ones are, or the encoder's `own`.

    Args:
        placed: class and distillation tokens.

    Raises:
        ValueError: the grid is not known.
    """
    table = state["pos_embed"]
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    for front in (placed, 0, placed + registers):
        grid = _grid_of(table.shape[1] - front, own, source)
        if grid:
            return table[:, :front], table[:, front:], grid
    raise ValueError(f"the rows and columns of a position table of {table.shape[1]} rows are not known")


def _grid_of(count: int, own: tuple[int, int], source: Source) -> tuple[int, int] | None:
    """Rows and columns of a table for `count` patches."""
    rows, columns = own
    side = math.isqrt(max(count, 0))
    square = count > 0 and side * side == count
    if count == rows * columns and square and rows != columns and source != "ours":
        raise ValueError(
            f"a position table of {count} patches may be {side} x {side} or the encoder's {rows} x {columns}: "
            'say source="ours" if it is the latter, or build the encoder for a square image_size'
        )
    if count == rows * columns:
        return own
    return (side, side) if square else None


def describe(state: State) -> dict[str, Any]:
    """Settings of `encoders.build`, `variant` among them, for an encoder that takes these weights as they are.

    What cannot be seen is as published: heads of the variant of this size, or 64 wide (vit-pytorch's default too); the
    class token for the image where there is one and no `fc_norm`; epsilon 1e-5 for vit-pytorch, else 1e-6; patches with
    norms have three channels.

    Raises:
        ValueError: tensors are missing, or heads or the grid of the positions are not known.
    """
    eps = 1e-5 if _of_vit_pytorch(state) else 1e-6
    state = named(state, Report())
    check_present(state, ("pos_embed", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"))
    weight, fc1 = state["patch_embed.proj.weight"], state["blocks.0.mlp.fc1.weight"]
    channels = weight.shape[1] if weight.ndim == 4 else 3
    dim, patch_size = _first_shape(state, channels)
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    inner = len(state["blocks.0.attn.qkv.weight"]) // 3
    variants = [n for n, s in vit.VARIANTS.items() if (s["dim"], s["depth"]) == (dim, depth) and inner == dim]
    head_dim = dim // vit.VARIANTS[variants[0]]["heads"] if variants else 64
    if "blocks.0.attn.q_norm.weight" in state:
        head_dim = len(state["blocks.0.attn.q_norm.weight"])
    if inner % head_dim:
        raise ValueError(f"these weights do not tell how many heads share {inner} channels")
    placed = sum(name in state for name in ("cls_token", "dist_token"))
    _, _, grid = split_positions(state, placed, (0, 0), "auto")
    decoder = any(name.startswith("decoder_") for name in state)
    return {
        "variant": variants[0] if variants else "vit_small",
        "dim": dim,
        "depth": depth,
        "heads": inner // head_dim,
        "head_dim": None if inner == dim else head_dim,
        "mlp_ratio": len(fc1) / dim,
        "patch_size": patch_size,
        "image_size": grid[0] * patch_size,
        "patch_norm": weight.ndim == 2,
        "channels": channels,
        "class_token": "cls_token" in state,
        "registers": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "distillation_token": "dist_token" in state,
        "mask_token": "mask_token" in state and not decoder,
        "pool": "mean" if "fc_norm.weight" in state else "class" if "cls_token" in state else "all",
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "norm_eps": eps,
        "qk_norm": "blocks.0.attn.q_norm.weight" in state,
        "layer_scale": 1.0 if "blocks.0.ls1.gamma" in state else None,
    }


def check_present(state: State, needed: Iterable[str]):
    """Whether the tensors that tell what an encoder is are there.

    Raises:
        ValueError: lists those that are not.
    """
    missing = sorted(set(needed) - set(state))
    if missing:
        raise ValueError(f"missing from the checkpoint: {listed(missing)}")


def to_timm(encoder: Encoder) -> tuple[str, dict[str, Any], State]:
    """Its name in timm, the options of `timm.create_model` and the weights: same features at the encoder's image size.

    timm's model takes images of that size only. The mask token is left out, timm has none. With a distillation token,
    timm's pooled features without classes are the mean of both tokens, not the class token.

    Raises:
        ValueError: timm has no equal.
    """
    assert isinstance(encoder, ViT)
    blocks = cast(list[Block], list(encoder.blocks))
    state = encoder.state_dict()
    state.pop("mask_token", None)
    _check_timm(encoder, state)
    dim, depth, heads = encoder.dim, len(blocks), blocks[0].attn.heads
    names = TIMM.get((dim, depth, heads), ("", ""))
    size = {"embed_dim": dim, "depth": depth, "num_heads": heads}
    distilled = encoder.dist_token is not None
    name = names[distilled] or ("deit_small_distilled_patch16_224" if distilled else "vit_small_patch16_224")
    height, width = (n * encoder.stride for n in encoder.table_grid)
    options: dict[str, Any] = {} if names[distilled] else size
    options |= {"img_size": height if height == width else (height, width), "patch_size": encoder.stride}
    options |= {"num_classes": 0 if encoder.head is None else encoder.head.out_features}
    options |= {"in_chans": encoder.channels, "mlp_ratio": len(state["blocks.0.mlp.fc1.weight"]) / dim}
    options |= {"qkv_bias": "blocks.0.attn.qkv.bias" in state, "qk_norm": "blocks.0.attn.q_norm.weight" in state}
    if "blocks.0.ls1.gamma" in state:
        options["init_values"] = 1.0  # all of them come from the weights
    if encoder.cls_token is None:
        options["class_token"] = False
    if encoder.reg_token is not None:  # in timm's table registers have positions as well: ours are zero
        options["reg_tokens"] = encoder.reg_token.shape[1]
        placed, patches = state["pos_embed"].tensor_split([encoder.placed], dim=1)
        state["pos_embed"] = torch.cat([placed, torch.zeros_like(encoder.reg_token), patches], 1)
    if encoder.pool == "mean":
        options["global_pool"] = "avg"
    if encoder.pool == "all":
        options |= {"global_pool": "avg", "fc_norm": False, "pool_include_prefix": True}
    return name, options, state


def _check_timm(encoder: ViT, state: State):
    block = cast(Block, encoder.blocks[0])
    eps, head_dim = block.norm1.eps, len(state["blocks.0.attn.qkv.weight"]) // 3 // block.attn.heads
    reasons = {
        f"norms with an epsilon of 1e-6, not {eps:g} (norm_eps)": eps != 1e-6,
        "no norms of patches (patch_norm)": isinstance(encoder.patch_embed, NormedPatchEmbed),
        "heads that are the width over their number (head_dim)": head_dim * block.attn.heads != encoder.dim,
        "one factor on the logits, 1 / sqrt(width of a head) (qk_scale)": block.attn.scale != head_dim**-0.5,
        "no layer before the class head (representation_size)": len(encoder.pre_logits) > 0,
        "a distillation token only with the class token for the image and without registers": (
            encoder.dist_token is not None and (encoder.pool != "class" or encoder.reg_token is not None)
        ),
    }
    for what, differs in reasons.items():
        if differs:
            raise ValueError(f"timm has no equal of this encoder: its ViT has {what}")
