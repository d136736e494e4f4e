"""Weights of a Swin Transformer by Microsoft or timm: their names and shapes, and ours.

R rows of a table of biases or positions, D width.
"""

import math
import re
from typing import Any

import torch
from torch import Tensor

from encoders import swin
from encoders.base import Encoder
from encoders.formats.report import Report, Source, State, adapt_channels, check_names
from encoders.layers import resize_table
from encoders.swin import Swin, window_sizes

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
REBUILT = ("attn_mask", "relative_position_index")

# what timm has weights of: (window_size, image_size) by variant, the general one first
TIMM = {
    "swin_tiny": ((7, 224),),
    "swin_small": ((7, 224),),
    "swin_base": ((7, 224), (12, 384)),
    "swin_large": ((7, 224), (12, 384)),
}


def recognises(state: State) -> bool:
    """Whether these are weights of a Swin Transformer (not of its version 2, which has no table of biases)."""
    return FIRST in state and f"layers.0.blocks.0{TABLE}" in state


def fit(encoder: Encoder, state: State, source: Source, report: Report) -> State:
    """Weights of a Swin Transformer by Microsoft or timm under our names, tables for the encoder's windows and grid.

    Masks and indices of windows are left out: they follow from the size of an image.
    """
    assert isinstance(encoder, Swin)
    own = encoder.state_dict()
    elsewhere = [name for name in state if name.startswith("head.") or name.endswith(REBUILT)]
    if "mask_token" not in own and "mask_token" in state:
        elsewhere.append("mask_token")
    report.left_out += elsewhere
    state = _official_names({name: tensor for name, tensor in state.items() if name not in elsewhere})
    _check_size(encoder, state)
    state[FIRST] = adapt_channels(state[FIRST], encoder.channels, FIRST, report)
    report.fresh += [name for name in ("mask_token",) if name in own and name not in state]
    check_names(state, [name for name in own if name not in report.fresh], DECIDES)
    state = _fit_biases(encoder, state, report)
    return _fit_positions(encoder, state, source, report) if "absolute_pos_embed" in state else state


def describe(state: State) -> dict[str, Any]:
    """Settings of `encoders.build` for an encoder that takes these weights as they are."""
    state = _official_names(state)
    depths, heads = _stages(state)
    dim, channels, patch_size, _ = state[FIRST].shape
    windows = [_window(state[f"layers.{stage}.blocks.0{TABLE}"]) for stage in range(len(depths))]
    variant = _nearest(dim, depths, heads)
    settings: dict[str, Any] = {"dim": dim, "depths": depths, "heads": heads, "window_size": max(windows)}
    settings |= {"patch_size": patch_size, "channels": channels}
    settings |= {"mlp_ratio": len(state["layers.0.blocks.0.mlp.fc1.weight"]) / dim}
    settings |= {"qkv_bias": "layers.0.blocks.0.attn.qkv.bias" in state, "patch_norm": "patch_embed.norm.weight" in state}
    settings |= {"absolute_positions": "absolute_pos_embed" in state, "mask_token": "mask_token" in state}
    if settings["absolute_positions"]:
        settings["image_size"] = patch_size * math.isqrt(state["absolute_pos_embed"].shape[1])
    elif min(windows) < max(windows):  # the windows of a late stage have the length of its grid
        stage = next(stage for stage, window in enumerate(windows) if window < max(windows))
        settings["image_size"] = patch_size * 2**stage * windows[stage]
    usual = {"window_size": 7, "patch_size": 4, "channels": 3, "mlp_ratio": 4.0, "qkv_bias": True, "patch_norm": True}
    usual |= {"absolute_positions": False, "mask_token": False} | swin.VARIANTS[variant]
    return {"variant": variant} | {key: value for key, value in settings.items() if value != usual.get(key)}


def to_timm(encoder: Encoder) -> tuple[str, dict[str, Any], State]:
    """Name and options for `timm.create_model`, and the weights under timm's names: the same features there.

    It is a model for images of the encoder's image_size, without the mask token.

    Raises:
        ValueError: timm has no such model.
    """
    assert isinstance(encoder, Swin)
    _check_timm(encoder)
    attention, (height, width) = encoder.stages[0].blocks.get_submodule("0.attn"), encoder.image_size
    first = encoder.patch_embed.proj
    options = {"embed_dim": first.out_channels, "depths": encoder.depths, "num_heads": encoder.heads}
    options |= {"patch_size": encoder.patch_size, "window_size": encoder.window_size, "in_chans": encoder.channels}
    hidden = encoder.state_dict()["layers.0.blocks.0.mlp.fc1.weight"]
    options |= {"mlp_ratio": len(hidden) / hidden.shape[1], "qkv_bias": attention.qkv.bias is not None}
    variant = _nearest(first.out_channels, encoder.depths, encoder.heads)
    known = TIMM[variant]
    window, size = (encoder.window_size, height) if (encoder.window_size, height) in known else known[0]
    settings = swin.VARIANTS[variant]
    usual = {"embed_dim": settings["dim"], "depths": settings["depths"], "num_heads": settings["heads"]}
    usual |= {"patch_size": 4, "window_size": window, "in_chans": 3, "mlp_ratio": 4.0, "qkv_bias": True}
    options = {key: value for key, value in options.items() if value != usual[key]}
    options |= {"num_classes": 0, "img_size": height if height == width else (height, width)}
    options["drop_path_rate"] = encoder.drop_path
    state = {name: tensor for name, tensor in encoder.state_dict().items() if name != "mask_token"}
    for name in [name for name in state if name.endswith(TABLE)]:
        rows, columns = _sides(_stage_windows(encoder)[int(name.split(".")[1])])
        state[name] = state[name].index_select(0, _middle(encoder.window_size, rows, columns).to(state[name].device))
    return f"{variant}_patch4_window{window}_{size}", options, {_timm_name(n): t for n, t in state.items()}
