"""Weights of a ViT by DINO, MAE, DeiT, DINOv2 or timm: their names and shapes, and ours.

R rows of a position table, D width.
"""

import math

import torch
from torch import Tensor

from encoders import vit
from encoders.base import Encoder
from encoders.formats.report import Report, Source, State, adapt_channels, check_names
from encoders.layers import resize_table
from encoders.vit import ViT

NAME = "a ViT"
ACCEPTS = (NAME,)

# part of a tensor's name -> the constructor argument that it depends on
DECIDES = {
    "cls_token": "class_token",
    "dist_token": "distillation_token",
    "reg_token": "registers",
    "mask_token": "mask_token",
    ".gamma": "layer_scale",
    ".q_norm": "qk_norm",
    ".k_norm": "qk_norm",
    "fc_norm": "pool",
    "qkv.bias": "qkv_bias",
    "mlp.fc": "mlp_ratio",
    "head": "classes",
    "pre_logits": "representation_size",
}


def recognises(state: State) -> bool:
    """Whether these are weights of a ViT."""
    first = state.get("patch_embed.proj.weight")
    if first is None or first.ndim != 4 or any(name.startswith("neck.") or ".rel_pos_" in name for name in state):
        return False
    return any(name.startswith("blocks.0.mlp.fc1") for name in state)


def fit(encoder: Encoder, state: State, source: Source, report: Report) -> State:
    """Weights of a ViT by DINO, MAE, DeiT, timm or DINOv2 under our names, position table on the encoder's grid."""
    assert isinstance(encoder, ViT)
    state = {name.replace("register_tokens", "reg_token"): tensor for name, tensor in state.items()}
    _check_size(encoder, state)
    first = "patch_embed.proj.weight"
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


def _check_size(encoder: ViT, state: State):
    """Whether these are weights of a ViT of the encoder's width, depth and patch."""
    dim, _, patch_size, _ = state["patch_embed.proj.weight"].shape
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
