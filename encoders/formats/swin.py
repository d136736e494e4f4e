"""Weights of a Swin Transformer by Microsoft or timm: their names and shapes, and ours.

R rows of a table of biases or positions, D width.
"""

import math
import re
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from encoders import swin
from encoders.base import Encoder
from encoders.formats.report import Report, Source, State, adapt_channels, check_names
from encoders.layers import resize_table
from encoders.swin import Block, Swin, window_sizes

NAME = "a Swin Transformer"
ACCEPTS = (NAME,)

# part of a tensor's name -> the constructor argument that it depends on
DECIDES = {
    "absolute_pos_embed": "absolute_positions",
    "patch_embed.norm": "patch_norm",
    "qkv.bias": "qkv_bias",
    "mlp.fc": "mlp_ratio",
    "mask_token": "mask_token",
}

FIRST = "patch_embed.proj.weight"
TABLE = ".attn.relative_position_bias_table"
REBUILT = ("attn_mask", "relative_position_index")  # from the size of an image

USUAL = {"window_size": 7, "patch_size": 4, "channels": 3, "mlp_ratio": 4.0, "qkv_bias": True, "patch_norm": True}
USUAL |= {"absolute_positions": False, "mask_token": False}
OPTIONS = {"dim": "embed_dim", "heads": "num_heads", "channels": "in_chans"}  # where timm has another name
TIMM = {7: 224, 12: 384}  # window_size -> image_size of timm's models, the latter of the two larger variants only


def recognises(state: State) -> bool:
    """Whether these are weights of a Swin Transformer (not of its version 2, which has no table of biases)."""
    first = state.get(FIRST)
    return first is not None and first.ndim == 4 and f"layers.0.blocks.0{TABLE}" in state


def fit(encoder: Encoder, state: State, source: Source, report: Report) -> State:
    """Weights of a Swin Transformer by Microsoft or timm under our names, tables for the encoder's windows and grid."""
    assert isinstance(encoder, Swin)
    own = encoder.state_dict()
    elsewhere = [name for name in state if name.startswith("head.") or name.endswith(REBUILT)]
    if "mask_token" in state and "mask_token" not in own:
        elsewhere.append("mask_token")
    report.left_out += elsewhere
    state = _official_names({name: tensor for name, tensor in state.items() if name not in elsewhere})
    if "mask_token" in state:  # SimMIM's is (1, 1, D)
        state["mask_token"] = state["mask_token"].reshape(1, -1)
    _check_size(encoder, state)
    state[FIRST] = adapt_channels(state[FIRST], encoder.channels, FIRST, report)
    report.fresh += [name for name in ("mask_token",) if name in own and name not in state]
    check_names(state, [name for name in own if name not in report.fresh], DECIDES)
    state = _fit_biases(encoder, state, report)
    return _fit_positions(encoder, state, source, report) if "absolute_pos_embed" in state else state


def describe(state: State) -> dict[str, Any]:
    """Settings of `encoders.build` for an encoder that takes these weights as they are.

    Raises:
        ValueError: the weights are not whole, or belong to windows that are not square.
    """
    settings = _settings(_official_names(state))
    variant = _nearest(settings, list(swin.VARIANTS))
    usual = USUAL | swin.VARIANTS[variant]
    return {"variant": variant} | {name: value for name, value in settings.items() if value != usual.get(name)}


def to_timm(encoder: Encoder) -> tuple[str, dict[str, Any], State]:
    """Name and options for `timm.create_model`, and the weights under timm's names: the same features there.

    They make a model for images of the encoder's `image_size`, which has no mask token.

    Raises:
        ValueError: timm has no such model.
    """
    assert isinstance(encoder, Swin)
    _check_timm(encoder)
    state = {name: tensor for name, tensor in encoder.state_dict().items() if name != "mask_token"}
    settings = _settings(state)
    variant = _nearest(settings, ["swin_tiny", "swin_small", "swin_base", "swin_large"])
    large = variant in ("swin_base", "swin_large") and encoder.window_size == 12
    window = 12 if large else 7
    usual = USUAL | swin.VARIANTS[variant] | {"window_size": window}
    unlike = [name for name in usual if settings[name] != usual[name] and name != "mask_token"]
    options: dict[str, Any] = {OPTIONS.get(name, name): settings[name] for name in unlike}
    height, width = encoder.image_size
    options |= {"num_classes": 0, "img_size": height if height == width else (height, width)}
    options["drop_path_rate"] = cast(Block, encoder.blocks[-1]).drop_path.rate
    for name in _tables(state):
        places = _middle(encoder.window_size, _windows(encoder)[_stage(name)])
        state[name] = state[name].index_select(0, places.to(state[name].device))
    return f"{variant}_patch4_window{window}_{TIMM[window]}", options, {_timm_name(n): t for n, t in state.items()}


def _official_names(state: State) -> State:
    """Without what is rebuilt; timm has the merging at the start of the next stage."""
    state = {name: tensor for name, tensor in state.items() if not name.endswith(REBUILT)}
    if "layers.0.downsample.reduction.weight" in state:
        return state
    earlier = re.compile(r"layers\.(\d+)\.downsample")
    return {earlier.sub(lambda m: f"layers.{int(m[1]) - 1}.downsample", name): t for name, t in state.items()}


def _timm_name(name: str) -> str:
    return re.sub(r"layers\.(\d+)\.downsample", lambda m: f"layers.{int(m[1]) + 1}.downsample", name)


def _tables(state: State) -> list[str]:
    return [name for name in state if re.fullmatch(r"layers\.\d+\.blocks\.\d+" + re.escape(TABLE), name)]


def _stage(name: str) -> int:
    return int(name.split(".")[1])


def _settings(state: State) -> dict[str, Any]:
    """The settings that shapes and names tell."""
    dim, channels, patch_size, _ = state[FIRST].shape
    depths, heads = _depths_and_heads(state)
    last = state.get(f"layers.{len(depths) - 1}.blocks.0.mlp.fc1.weight")  # the widest: here the ratio is least rounded
    if last is None:
        raise ValueError("the weights are not whole: a stage has no blocks, or the last one no mlp.fc1")
    settings = {
        "dim": dim,
        "depths": depths,
        "heads": heads,
        "window_size": max(_window(len(state[name]), name) for name in _tables(state)),
        "patch_size": patch_size,
        "channels": channels,
        "mlp_ratio": last.shape[0] / last.shape[1],
        "qkv_bias": "layers.0.blocks.0.attn.qkv.bias" in state,
        "patch_norm": "patch_embed.norm.weight" in state,
        "absolute_positions": "absolute_pos_embed" in state,
        "mask_token": "mask_token" in state,
    }
    if settings["absolute_positions"]:
        settings["image_size"] = patch_size * math.isqrt(state["absolute_pos_embed"].shape[1])
    return settings


def _depths_and_heads(state: State) -> tuple[tuple[int, ...], tuple[int, ...]]:
    heads: dict[int, list[int]] = {}
    for name in _tables(state):
        heads.setdefault(_stage(name), []).append(state[name].shape[1])
    return tuple(len(heads[stage]) for stage in sorted(heads)), tuple(heads[stage][0] for stage in sorted(heads))


def _window(rows: int, name: str) -> int:
    """Tokens of a side of the square windows that a table with so many rows is for."""
    side = math.isqrt(rows)
    if side * side != rows or side % 2 == 0:
        raise ValueError(f"{name} has {rows} rows, which do not belong to square windows")
    return (side + 1) // 2


def _nearest(settings: dict[str, Any], variants: list[str]) -> str:
    """The variant that has most of width, depths and heads; a small one for tests only if it has all."""

    def alike(variant: str) -> int:
        return sum(settings[name] == swin.VARIANTS[variant][name] for name in ("dim", "depths", "heads"))

    return max(variants, key=lambda variant: (alike(variant) == 3, "micro" not in variant, alike(variant)))


def _check_size(encoder: Swin, state: State):
    """Whether these are weights of an encoder of the same width, depths, heads and patch."""
    (dim, _, patch_size, _), (depths, heads) = state[FIRST].shape, _depths_and_heads(state)
    own = encoder.patch_embed.proj.out_channels
    if (dim, depths, heads, patch_size) != (own, encoder.depths, encoder.heads, encoder.patch_size):
        names = {(v["dim"], v["depths"], v["heads"]): name for name, v in swin.VARIANTS.items()}
        fitting = names.get((dim, depths, heads), f"an encoder with dim={dim}, depths={depths}, heads={heads}")
        raise ValueError(
            f"the checkpoint is {dim} wide with depths {depths}, heads {heads} and patches of {patch_size} pixels, "
            f"this encoder {own} wide with depths {encoder.depths}, heads {encoder.heads} and patches of "
            f"{encoder.patch_size} pixels: build {fitting} with patch_size={patch_size}"
        )


def _windows(encoder: Swin) -> list[tuple[int, int]]:
    """Rows and columns of the windows of each stage, for images of `image_size`."""
    grids = [encoder.stage_grid(stage, *encoder.image_size) for stage in range(len(encoder.depths))]
    return [window_sizes(grid, encoder.window_size) for grid in grids]


def _middle(window: int, size: tuple[int, int]) -> Tensor:
    """Rows of a table for square windows that a window of `size` takes: those of its relative positions."""
    rows = torch.arange((2 * window - 1) ** 2).unflatten(0, (2 * window - 1, -1))
    return rows[window - size[0] : window + size[0] - 1, window - size[1] : window + size[1] - 1].flatten()


def _fit_biases(encoder: Swin, state: State, report: Report) -> State:
    """Give each table (R, heads) a row for each relative position in the encoder's windows.

    Official code and timm make the table of a stage smaller where its grid is smaller than a window. Such a table holds
    the middle of ours; beyond it the outermost biases are repeated, which images of that size do not use. Tables of
    another window are stretched.
    """
    state, window, expected = dict(state), encoder.window_size, _windows(encoder)
    counts = {name: len(state[name]) for name in _tables(state)}
    cut_short = {name: (2 * expected[_stage(name)][0] - 1) * (2 * expected[_stage(name)][1] - 1) for name in counts}
    same_window = max(counts.values()) == (2 * window - 1) ** 2 or counts == cut_short
    for name, count in counts.items():
        if count == (2 * window - 1) ** 2:
            continue
        if same_window and count == cut_short[name]:
            r, c = expected[_stage(name)]
        else:
            r = c = _window(count, name)
        if same_window:
            table = rearrange(state[name], "(r c) heads -> 1 heads r c", r=2 * r - 1)
            table = F.pad(table, (window - c, window - c, window - r, window - r), mode="replicate")
            state[name] = rearrange(table, "1 heads r c -> (r c) heads")
            report.resized.append(f"{name} of windows of {r} x {c} put in the middle of one of {window} x {window}")
        else:
            old, new = (2 * r - 1, 2 * c - 1), (2 * window - 1, 2 * window - 1)
            state[name] = resize_table(state[name][None], old, new, "mae")[0]
            report.resized.append(f"{name} resized from windows of {r} x {c} to {window} x {window}")
    return state


def _fit_positions(encoder: Swin, state: State, source: Source, report: Report) -> State:
    """Give the table of positions (1, R, D) the encoder's grid; it is square, as all published ones are, or ours."""
    table, own = state["absolute_pos_embed"], encoder.table_grid
    count = table.shape[1]
    side = math.isqrt(count)
    if count == own[0] * own[1]:
        if own[0] != own[1] and side * side == count and source != "ours":
            raise ValueError(
                f"a position table of {count} patches may be {side} x {side} or the encoder's {own[0]} x {own[1]}: "
                'say source="ours" if it is the latter, or build the encoder for a square image_size'
            )
        return state
    if side * side != count:
        raise ValueError(f"the rows and columns of a position table of {count} rows are not known")
    report.resized.append(f"absolute_pos_embed resized from {side} x {side} to {own[0]} x {own[1]}")
    return state | {"absolute_pos_embed": resize_table(table, (side, side), own, "mae")}


def _check_timm(encoder: Swin):
    """Whether timm has such a model."""
    attention, (height, width) = cast(Block, encoder.blocks[0]).attn, encoder.image_size
    grids = [encoder.stage_grid(stage, height, width) for stage in range(len(encoder.depths))]
    sides = [side for grid in grids for side in grid if side > encoder.window_size]
    reason = None
    if encoder.absolute_pos_embed is not None:
        reason = "no absolute positions"
    elif not isinstance(encoder.patch_embed.norm, torch.nn.LayerNorm):
        reason = "no patch embedding without a norm"
    elif encoder.norm.eps != 1e-5:
        reason = f"no norms with an epsilon of {encoder.norm.eps}"
    elif attention.scale != (encoder.patch_embed.proj.out_channels // encoder.heads[0]) ** -0.5:
        reason = "no qk_scale"
    elif height % encoder.patch_size or width % encoder.patch_size:
        reason = f"no images of {height} x {width} pixels for patches of {encoder.patch_size}: build another image_size"
    elif any(side % encoder.window_size for side in sides):
        reason = (
            f"no mask for padding, which images of {height} x {width} pixels need in windows of {encoder.window_size}: "
            "build the encoder with an image_size whose grids the windows divide"
        )
    if reason:
        raise ValueError(f"timm's Swin Transformer has {reason}")
