"""Weight format of the NaViT, which is that of this project.

Letters in shapes: D is the width of a token, P is the number of values in a patch of p1 x p2 pixels with c channels,
and R is the number of rows of a position table.
"""

import math
from typing import Any

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from tessera.encoders import navit
from tessera.encoders.base import Encoder
from tessera.encoders.errors import WeightsError
from tessera.encoders.loading import Report, Source, State
from tessera.encoders.navit import NaViT
from tessera.extras.formats.conversion import adapt_channels, check_present, check_size, checked_names, depth_of

NAME: str = "a NaViT"
ACCEPTS: tuple[str, ...] = (NAME,)

DECIDES = {
    "q_norm": "heads, head_dim",
    "k_norm": "heads, head_dim",
    "mlp.fc": "mlp_ratio",
    "mask_token": "mask_token",
    "attn_pool": "pool",
}


def converts_for(encoder: Encoder) -> bool:
    """Return True for a NaViT."""
    return type(encoder) is NaViT


def recognises(state: State) -> bool:
    """Return True if `state` holds weights of a NaViT, which has separate position tables for rows and columns."""
    return {"pos_embed_rows", "pos_embed_columns", "patch_embed.proj.weight"} <= set(state)


def fit(encoder: NaViT, state: State, source: Source, report: Report) -> State:
    """Return the weights, converted to the number of channels and the position table sizes of `encoder`."""
    del source
    _check_size(encoder, state)
    own = encoder.state_dict()
    state = checked_names(encoder, state, report, DECIDES, left_out=("attn_pool", "mask_token"))
    state = _fit_channels(encoder, state, report)
    for name in ("pos_embed_rows", "pos_embed_columns"):
        state[name] = _fit_table(state[name], len(own[name]), name, report)
    return state


def describe(state: State) -> dict[str, Any]:
    """Return arguments for `encoders.build` that make the encoder fit the weights without resizing.

    The weights determine the number P of values in a patch, but neither the side of a patch nor its number of channels.
    If P / 3 is a square number, the patch is assumed to have three channels. Otherwise, the patch is assumed to have
    the smallest number of channels C for which P / C is a square number.

    Raises:
        WeightsError: required tensors are missing.
    """
    check_present(state, ("blocks.0.attn.q_norm.gamma", "blocks.0.mlp.fc1.weight"))
    dim, values = state["patch_embed.proj.weight"].shape
    depth, (patch_size, channels) = depth_of(state), _patch(values)
    heads, _, head_dim = state["blocks.0.attn.q_norm.gamma"].shape
    variants = {(settings["dim"], settings["depth"]): name for name, settings in navit.VARIANTS.items()}
    return {
        "variant": variants.get((dim, depth), "navit_small"),
        "dim": dim,
        "depth": depth,
        "heads": heads,
        "head_dim": head_dim,
        "mlp_ratio": len(state["blocks.0.mlp.fc1.weight"]) / dim,
        "patch_size": patch_size,
        "image_size": tuple(len(state[name]) * patch_size for name in ("pos_embed_rows", "pos_embed_columns")),
        "channels": channels,
        "pool": "attention" if "attn_pool.query" in state else "mean",
        "mask_token": "mask_token" in state,
    }


def to_timm(encoder: NaViT) -> tuple[str, dict[str, Any], State]:
    """Raise `WeightsError`, because timm has no NaViT."""
    raise WeightsError(
        "timm has no NaViT, and timm's models for packed images have other architectures. Export the encoder with "
        "--to ours, or try --to onnx."
    )


def _patch(values: int) -> tuple[int, int]:
    """Return the side in pixels and the number of channels of a patch, given its number of values."""
    side = math.isqrt(values // 3)
    if values != 3 * side**2:
        side = max(side for side in range(1, math.isqrt(values) + 1) if values % side**2 == 0)
    return side, values // side**2


def _check_size(encoder: NaViT, state: State):
    dim, values = state["patch_embed.proj.weight"].shape
    same = values == encoder.patch_embed.proj.in_features
    patch_size = encoder.stride if same else _patch(values)[0]
    own = (encoder.dim, len(encoder.blocks), encoder.stride)
    check_size((dim, depth_of(state), patch_size), own, navit.VARIANTS)


def _fit_channels(encoder: NaViT, state: State, report: Report) -> State:
    """Adapt the patch embedding, and the norm that precedes it, to the encoder's number of image channels."""
    name, norm = "patch_embed.proj.weight", "patch_embed.norm1.weight"
    before = state[name].shape[1] // encoder.stride**2
    if before == encoder.channels:
        return state
    maps = rearrange(state[name], "d (pixels c) -> d c pixels", c=before)
    maps = adapt_channels(maps, encoder.channels, name, report)
    report.resized.append(f"{norm} repeated cyclically from {before} to {encoder.channels} channels")
    gains = rearrange(state[norm], "(pixels c) -> pixels c", c=before)
    gains = gains[:, [i % before for i in range(encoder.channels)]]
    return state | {name: rearrange(maps, "d c pixels -> d (pixels c)"), norm: gains.flatten()}


def _fit_table(table: Tensor, entries: int, name: str, report: Report) -> Tensor:
    """Resize a position table (R, D) to `entries` rows by linear interpolation."""
    if len(table) == entries:
        return table
    report.resized.append(f"{name} resized from {len(table)} to {entries} by linear interpolation")
    resized = F.interpolate(table.float().T[None], size=entries, mode="linear")  # (1, D, entries)
    return resized[0].T.to(table.dtype)
