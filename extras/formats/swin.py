"""Weight formats of the Swin Transformer (Microsoft, timm and this project), and export to timm.

Letters in shapes: R is the number of rows of a bias table or position table, and D is the width of a token.
"""

import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from tessera.encoders import swin
from tessera.encoders.base import Encoder
from tessera.encoders.errors import WeightsError
from tessera.encoders.layers import PreNormBlock, modules_of, resize_table
from tessera.encoders.loading import Report, Source, State
from tessera.encoders.swin import Swin, window_sizes
from tessera.extras.formats.conversion import adapt_channels, check_equivalent, checked_names, refuse_padding
from tessera.extras.formats.vit import grid_of

NAME: str = "a Swin Transformer"
ACCEPTS: tuple[str, ...] = (NAME,)

DECIDES = {
    "absolute_pos_embed": "absolute_positions",
    "patch_embed.norm": "patch_norm",
    "qkv.bias": "qkv_bias",
    "mlp.fc": "mlp_ratio",
    "mask_token": "mask_token",
}

FIRST = "patch_embed.proj.weight"
TABLE = ".attn.relative_position_bias_table"
REBUILT = ("attn_mask", "relative_position_index")
"""Name endings of buffers. Buffers are not loaded, because their values are not trained and can be recomputed."""

USUAL = {"window_size": 7, "patch_size": 4, "channels": 3, "mlp_ratio": 4.0, "qkv_bias": True, "patch_norm": True}
USUAL |= {"absolute_positions": False, "mask_token": False}
OPTIONS = {"dim": "embed_dim", "heads": "num_heads", "channels": "in_chans"}
"""Map from settings of this project to timm's options, for settings that have another name in timm."""
TIMM = {7: 224, 12: 384}
"""Image size of timm's Swin models for each window size. Only base and large models exist with window size 12."""


def converts_for(encoder: Encoder) -> bool:
    """Return True for a Swin Transformer."""
    return type(encoder) is Swin


def recognises(state: State) -> bool:
    """Return True for weights of a Swin Transformer V1, and False for Swin V2, which has no bias table."""
    first = state.get(FIRST)
    return first is not None and first.ndim == 4 and f"layers.0.blocks.0{TABLE}" in state


def fit(encoder: Swin, state: State, source: Source, report: Report) -> State:
    """Return the weights with the encoder's tensor names. Bias and position tables are resized to fit the encoder."""
    report.left_out += [name for name in state if name.endswith(REBUILT)]
    state = _official_names(state)
    if "mask_token" in state:  # SimMIM stores the mask token as (1, 1, D)
        state["mask_token"] = state["mask_token"].reshape(1, -1)
    state[FIRST] = adapt_channels(state[FIRST], encoder.channels, FIRST, report)
    state = checked_names(encoder, state, report, DECIDES, left_out=("head", "mask_token"))
    state = _fit_biases(encoder, state, report)
    return _fit_positions(encoder, state, source, report) if "absolute_pos_embed" in state else state


def describe(state: State) -> dict[str, Any]:
    """Return arguments for `encoders.build` that make the encoder fit the weights without resizing.

    Raises:
        WeightsError: required tensors are missing, or the bias table of a block does not belong to a square window.
    """
    settings = _settings(_official_names(state))
    variant = _nearest(settings, list(swin.VARIANTS))
    usual = USUAL | swin.VARIANTS[variant]
    return {"variant": variant} | {name: value for name, value in settings.items() if value != usual.get(name)}


def to_timm(encoder: Swin) -> tuple[str, dict[str, Any], State]:
    """Return a model name and options for `timm.create_model`, and the encoder's weights with timm's tensor names.

    For images of the encoder's `image_size`, the timm model computes the same features as the encoder. The mask token
    is not exported.

    Raises:
        WeightsError: timm has no equivalent model.
    """
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
    options["drop_path_rate"] = modules_of(encoder.blocks, PreNormBlock)[-1].drop_path.rate
    for name in _tables(state):
        rows = _middle(encoder.window_size, _windows(encoder)[_stage(name)])
        state[name] = state[name].index_select(0, rows.to(state[name].device))
    return f"{variant}_patch4_window{window}_{TIMM[window]}", options, {_timm_name(n): t for n, t in state.items()}


def _official_names(state: State) -> State:
    """Return the weights with Microsoft's tensor names and without buffers.

    In timm, patch merging is the first layer of a stage. In Microsoft's code, patch merging is the last layer of the
    previous stage, so the stage numbers in timm's names are reduced by one.
    """
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
    """Derive the settings of an encoder from the shapes and names of the tensors."""
    dim, channels, patch_size, _ = state[FIRST].shape
    depths, heads = _depths_and_heads(state)
    # The MLP ratio is taken from the last stage, because the widest MLP gives the smallest rounding error.
    last = state.get(f"layers.{len(depths) - 1}.blocks.0.mlp.fc1.weight")
    if last is None:
        raise WeightsError("The checkpoint is incomplete. A stage has no blocks, or the last stage has no mlp.fc1.")
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
    """Return the side in tokens of the square window whose bias table has `rows` rows."""
    side = math.isqrt(rows)
    if side * side != rows or side % 2 == 0:
        raise WeightsError(f"{name} has {rows} rows. No square window has a bias table of this size.")
    return (side + 1) // 2


def _nearest(settings: dict[str, Any], variants: list[str]) -> str:
    """Return the variant whose `dim`, `depths` and `heads` have the most values in common with `settings`.

    A micro variant is returned only if it agrees in all three values.
    """

    def alike(variant: str) -> int:
        return sum(settings[name] == swin.VARIANTS[variant][name] for name in ("dim", "depths", "heads"))

    return max(variants, key=lambda variant: (alike(variant) == 3, "micro" not in variant, alike(variant)))


def _windows(encoder: Swin) -> list[tuple[int, int]]:
    """Return the window size (rows, columns) of each stage, for images of the encoder's `image_size`."""
    grids = [encoder.stage_grid(stage, *encoder.image_size) for stage in range(len(encoder.depths))]
    return [window_sizes(grid, encoder.window_size) for grid in grids]


def _middle(window: int, size: tuple[int, int]) -> Tensor:
    """Return the rows of a square window's bias table that belong to a smaller window, as a 1-d tensor of indices.

    Args:
        window: side of the square window.
        size: rows and columns of the smaller window.
    """
    rows = torch.arange((2 * window - 1) ** 2).unflatten(0, (2 * window - 1, -1))
    return rows[window - size[0] : window + size[0] - 1, window - size[1] : window + size[1] - 1].flatten()


def _fit_biases(encoder: Swin, state: State, report: Report) -> State:
    """Resize each bias table (R, heads) to the encoder's windows.

    In Microsoft's code and in timm, a stage has a smaller bias table if the grid of the stage is smaller than a window.
    Such a table is copied to the middle of the encoder's table, where the rows stand for the same relative positions.
    The rows around the middle repeat the outermost biases. Images of the original size do not use the repeated rows.
    Tables for another `window_size` are resized by bicubic interpolation, as in Microsoft's code.
    """
    state, window, windows = dict(state), encoder.window_size, _windows(encoder)
    counts = {name: len(state[name]) for name in _tables(state)}
    shortened = {name: (2 * r - 1) * (2 * c - 1) for name in counts for r, c in [windows[_stage(name)]]}
    full = max(counts.values())
    same_window = full == (2 * window - 1) ** 2 or counts == shortened
    for name, count in counts.items():
        if count == (2 * window - 1) ** 2:
            continue
        expected = windows[_stage(name)]
        known = count == shortened[name] and (same_window or count < full)
        side = window if known else _window(count, name)
        size = expected if known else (side, side)
        target = size if same_window else expected if count < full else (window, window)
        if target != size:
            old, new = ((2 * r - 1, 2 * c - 1) for r, c in (size, target))
            state[name] = resize_table(state[name][None], old, new, "mae")[0]
            report.resized.append(f"{name} resized from windows of {_by(size)} to {_by(target)}")
        if target != (window, window):
            r, c = target
            table = rearrange(state[name], "(r c) heads -> 1 heads r c", r=2 * r - 1)
            table = F.pad(table, (window - c, window - c, window - r, window - r), mode="replicate")
            state[name] = rearrange(table, "1 heads r c -> (r c) heads")
            report.resized.append(f"{name} copied from windows of {_by(target)} to the middle of {window} x {window}")
    return state


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _fit_positions(encoder: Swin, state: State, source: Source, report: Report) -> State:
    """Resize the position table (1, R, D) to the encoder's grid.

    Raises:
        WeightsError: the number of rows R fits neither a square grid nor the encoder's grid.
    """
    table, own = state["absolute_pos_embed"], encoder.table_grid
    grid = grid_of(table.shape[1], own, source)
    if grid is None:
        raise WeightsError(
            f"The grid of a position table of {table.shape[1]} rows is unknown. The table fits neither a square grid "
            "nor the encoder's grid."
        )
    if grid == own:
        return state
    report.resized.append(f"absolute_pos_embed resized from {_by(grid)} to {_by(own)}")
    return state | {"absolute_pos_embed": resize_table(table, grid, own, "mae")}


def _check_timm(encoder: Swin):
    """Raise `WeightsError` if timm has no model equivalent to `encoder`."""
    block, (height, width) = modules_of(encoder.blocks, PreNormBlock)[0], encoder.image_size
    patch, window = encoder.patch_size, encoder.window_size
    grids = [encoder.stage_grid(stage, height, width) for stage in range(len(encoder.depths))]
    check_equivalent({f"norm_eps is {block.norm1.eps:g}, not 1e-5": block.norm1.eps != 1e-5}, "timm")
    multiple = patch * window * 2 ** (len(grids) - 1)
    if height % patch or width % patch:
        refuse_padding((height, width), f"fill patches of {patch}", multiple)
    if any(side > window and side % window for grid in grids for side in grid):
        refuse_padding((height, width), f"fill windows of {window}", multiple)
