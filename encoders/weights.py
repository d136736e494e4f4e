"""Published weights into an encoder: every tensor is used or known to belong elsewhere, or nothing is loaded.

A checkpoint is unwrapped, which does not depend on the encoder; then one function for each family of encoders fits
names and shapes. R rows of a position table, D width.
"""

import argparse
import math
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from encoders import vit
from encoders.base import Encoder
from encoders.layers import resize_table
from encoders.vit import ViT

Source = Literal["auto", "ours", "dino", "mae", "deit", "timm"]
State = dict[str, Tensor]

# Where the weights lie in the files of each project, the preferred place first; none of these: the file is flat.
PLACES = {
    "auto": ("teacher", "student", "model", "state_dict"),
    "ours": (),
    "dino": ("teacher", "student"),
    "mae": ("model",),
    "deit": ("model",),
    "timm": ("state_dict", "model"),
}


@dataclass
class Report:
    """What became of a checkpoint; prints as text."""

    used: list[str] = field(default_factory=list)
    """tensors that the encoder took"""
    left_out: list[str] = field(default_factory=list)
    """parts of the checkpoint that the encoder has no place for, and that belong elsewhere"""
    fresh: list[str] = field(default_factory=list)
    """tensors of the encoder that the checkpoint does not have; they keep their initial values"""
    resized: list[str] = field(default_factory=list)
    """a sentence for each tensor that was changed to fit"""

    def __str__(self) -> str:
        lines = [f"{len(self.used)} tensors loaded"]
        lines += [f"left out: {_short(self.left_out)}"] if self.left_out else []
        lines += [f"not in the checkpoint, initial values kept: {_short(self.fresh)}"] if self.fresh else []
        return "\n".join(lines + self.resized)


def load_weights(
    encoder: Encoder, path_or_state_dict: str | Path | Mapping[str, Any], source: Source = "auto"
) -> Report:
    """Fill `encoder` from published weights or ours, a file or what was read from one.

    `source` says whose file it is, and so where in it to look; "auto" finds out. With "ours", a position table that has
    as many rows as the encoder's is one of the encoder's grid, square or not.

    Raises:
        ValueError: the weights do not fit; the encoder is left as it was, and the message says what would fit.
    """
    if isinstance(path_or_state_dict, str | Path):
        path_or_state_dict = read(path_or_state_dict)
    if source not in PLACES:
        raise ValueError(f"source must be one of {', '.join(PLACES)}, not {source!r}")
    report = Report()
    state = _unwrap(path_or_state_dict, source, report)
    fit = next((fit for family, fit in FITS.items() if isinstance(encoder, family)), None)
    if fit is None:
        raise ValueError(f"no published weights are known for {type(encoder).__name__}")
    state = fit(encoder, state, source, report)
    own = encoder.state_dict()
    wrong = [
        f"{name} {tuple(tensor.shape)}, not {tuple(own[name].shape)}"
        for name, tensor in state.items()
        if tensor.shape != own[name].shape
    ]
    if wrong:
        raise ValueError(f"shapes that do not fit the encoder's: {_listed(wrong)}; {_advice(wrong)}")
    report.used = list(state)
    encoder.load_state_dict(own | state)
    return report


def read(path: str | Path) -> Mapping[str, Any]:
    """What a .safetensors or a torch file holds. Pickles are read as plain data, so they cannot run code.

    Raises:
        ValueError: the file holds more than plain data, or something else altogether.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, KeyError, EOFError) as error:
        blocked = re.search(r"GLOBAL ([\w.]+)", str(error))
        if blocked is None:
            raise ValueError(f"{path} is not a .safetensors or torch file of weights: {error}") from error
        raise ValueError(
            f"{path} is not read: besides weights it holds {blocked[1]}, and reading that could run code; "
            "where it is trusted, save its state dict alone as .safetensors"
        ) from error


def _unwrap(checkpoint: Mapping[str, Any], source: Source, report: Report) -> State:
    """The flat state dict in a checkpoint, without the prefixes of wrappers."""
    place = next((name for name in PLACES[source] if isinstance(checkpoint.get(name), Mapping)), None)
    if place is not None:
        report.left_out += [name for name in checkpoint if name != place]
        checkpoint = checkpoint[place]
    if not checkpoint or not all(isinstance(value, Tensor) for value in checkpoint.values()):
        raise ValueError(
            f"no weights found for source {source!r}; the checkpoint holds {_listed(map(str, checkpoint))}"
        )
    state = {name.removeprefix("module."): tensor for name, tensor in checkpoint.items()}
    if any(name.startswith("backbone.") for name in state):
        report.left_out += [name for name in state if name.startswith("head.")]
        state = {name.removeprefix("backbone."): t for name, t in state.items() if not name.startswith("head.")}
    return state


def _fit_vit(encoder: Encoder, state: State, source: Source, report: Report) -> State:
    """Weights of a ViT by DINO, MAE, DeiT, timm or DINOv2 under our names, position table on the encoder's grid."""
    assert isinstance(encoder, ViT)
    state = {name.replace("register_tokens", "reg_token"): tensor for name, tensor in state.items()}
    _check_size(encoder, state)
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
    _check_names(state, [name for name in own if name not in report.fresh])
    return _fit_positions(encoder, state, source, report)


def _check_size(encoder: ViT, state: State):
    """Whether these are weights of a ViT of the encoder's width, depth, patch and channels."""
    for mark, family in MARKS.items():
        if any(mark in name for name in state):
            raise ValueError(f"these are weights of {family}, which do not fit a ViT")
    first = state.get("patch_embed.proj.weight")
    if first is None or first.ndim != 4:
        raise ValueError(f"these are not weights of a ViT, which has patch_embed.proj.weight; found {_listed(state)}")
    dim, channels, patch_size, _ = first.shape
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    if (dim, depth, patch_size) != (encoder.dim, len(encoder.blocks), encoder.stride):
        names = {(settings["dim"], settings["depth"]): name for name, settings in vit.VARIANTS.items()}
        fitting = names.get((dim, depth), f"an encoder with dim={dim}, depth={depth}")
        raise ValueError(
            f"the checkpoint is {dim} wide with {depth} blocks and patches of {patch_size} pixels, this encoder "
            f"{encoder.dim} wide with {len(encoder.blocks)} blocks and patches of {encoder.stride} pixels: "
            f"build {fitting} with patch_size={patch_size}"
        )
    if channels != encoder.channels:
        raise ValueError(
            f"the checkpoint is for images of {channels} channels, this encoder for {encoder.channels}: "
            f"build it with channels={channels}"
        )


def _check_names(state: Iterable[str], expected: Iterable[str]):
    """Whether the checkpoint has the tensors that the encoder needs, and no others."""
    missing, unexpected = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint does not fit the encoder; missing from the checkpoint: {_listed(missing)}; "
            f"unknown to the encoder: {_listed(unexpected)}; {_advice(missing + unexpected)}"
        )


def _fit_positions(encoder: ViT, state: State, source: Source, report: Report) -> State:
    """Give the table (1, R, D) a row for the class and the distillation token each, none for registers, and our grid.

    Published tables have rows for the special tokens that have a position, timm's may have none or one for registers as
    well. What a table lacks is a position of zero; what it has too much is added to the register itself.
    """
    state, table = dict(state), state["pos_embed"]
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    for front in (encoder.placed, 0, encoder.placed + registers):
        grid = _grid_of(table.shape[1] - front, encoder, source)
        if grid:
            break
    else:
        raise ValueError(f"the rows and columns of a position table of {table.shape[1]} rows are not known")
    special, patches = table[:, :front], table[:, front:]
    if front > encoder.placed:
        state["reg_token"] = state["reg_token"] + special[:, encoder.placed :]
        special = special[:, : encoder.placed]
    elif front < encoder.placed:
        special = torch.zeros_like(table[:, :1]).expand(-1, encoder.placed, -1)
    if grid != encoder.grid:
        patches = resize_table(patches, grid, encoder.grid, encoder.interpolation)
        report.resized.append(
            f"pos_embed resized from {grid[0]} x {grid[1]} to {encoder.grid[0]} x {encoder.grid[1]} "
            f"by the rule of {encoder.interpolation}"
        )
    return state | {"pos_embed": torch.cat([special, patches], 1)}


def _grid_of(count: int, encoder: ViT, source: Source) -> tuple[int, int] | None:
    """Rows and columns of a table for `count` patches: square, as all published ones are, or the encoder's own."""
    rows, columns = encoder.grid
    side = math.isqrt(max(count, 0))
    square = count > 0 and side * side == count
    if count == rows * columns and square and rows != columns and source != "ours":
        raise ValueError(
            f"a position table of {count} patches may be {side} x {side} or the encoder's {rows} x {columns}: "
            'say source="ours" if it is the latter, or build the encoder for a square image_size'
        )
    if count == rows * columns:
        return encoder.grid
    return (side, side) if square else None


def _advice(names: Iterable[str]) -> str:
    """Which settings decide about these tensors."""
    settings = sorted({setting for part, setting in DECIDES.items() if any(part in name for name in names)})
    return f"settings to look at: {', '.join(settings)}" if settings else "no setting of the encoder changes this"


def _listed(names: Iterable[str], most: int = 12) -> str:
    names = list(names)
    return (", ".join(names[:most]) or "nothing") + (f" and {len(names) - most} more" if len(names) > most else "")


def _short(names: Iterable[str]) -> str:
    """Names by their first part, with a count: `head.* (2)`."""
    groups: dict[str, int] = {}
    for name in names:
        first, dot, _ = name.partition(".")
        groups[first + ".*" * bool(dot)] = groups.get(first + ".*" * bool(dot), 0) + 1
    return ", ".join(name if count == 1 and "*" not in name else f"{name} ({count})" for name, count in groups.items())


FITS: dict[type[Encoder], Callable[[Encoder, State, Source, Report], State]] = {ViT: _fit_vit}

MARKS = {
    "relative_position_bias_table": "a Swin",
    "patch_embeds.": "a Twins",
    "image_encoder.": "SAM",
    "to_patch_embedding": "a model of vit-pytorch",
}

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
