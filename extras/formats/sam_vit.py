"""Weight formats of the SAM-ViT (Segment Anything, timm, this project and plain ViTs), and export to timm.

The letter D in shapes is the width of the blocks.
"""

from typing import Any

from tessera.encoders import sam_vit
from tessera.encoders.base import Encoder
from tessera.encoders.errors import WeightsError
from tessera.encoders.layers import PreNormBlock, modules_of, resize_table
from tessera.encoders.loading import Report, Source, State
from tessera.encoders.sam_vit import SAMViT, resize_relative
from tessera.extras.formats import vit
from tessera.extras.formats.conversion import (
    adapt_channels,
    check_equivalent,
    check_present,
    check_size,
    checked_names,
    depth_of,
    split_off,
)

NAME: str = "a SAM-ViT"
ACCEPTS: tuple[str, ...] = (NAME, vit.NAME)
PREFIX = "image_encoder."
TIMM = {
    "sam_vit_b": "samvit_base_patch16",
    "sam_vit_l": "samvit_large_patch16",
    "sam_vit_h": "samvit_huge_patch16",
}
TIMM_DEFAULTS = {
    "neck_chans": 256,
    "mlp_ratio": 4.0,
    "patch_size": 16,
    "in_chans": 3,
    "window_size": 14,
    "qkv_bias": True,
    "use_rel_pos": True,
    "use_abs_pos": True,
}

DECIDES = {
    "pos_embed": "absolute_positions",
    "rel_pos": "relative_positions",
    "mask_token": "mask_token",
    "qkv.bias": "qkv_bias",
    "mlp.lin": "mlp_ratio",
    "neck.": "out_dim",
}
ELSEWHERE = {"prompt_encoder", "mask_decoder", "pixel_mean", "pixel_std", "head"}
"""Tensors of the full SAM model and of timm's classifiers that do not belong to the encoder. Each entry is a tensor
name up to its first dot."""
LEFT_OF_VIT = {"cls_token", "dist_token", "reg_token", "norm", "fc_norm", "head", "head_dist", "pre_logits"}
"""ViT tensors that have no counterpart in a SAM-ViT. Each entry is a tensor name up to its first dot."""


def converts_for(encoder: Encoder) -> bool:
    """Return True for a SAM-ViT."""
    return type(encoder) is SAMViT


def recognises(state: State) -> bool:
    """Return True if `state` holds weights of a SAM-ViT, either alone or inside the full SAM model."""
    state = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    first = state.get("patch_embed.proj.weight")
    if first is None or first.ndim != 4:
        return False
    return "neck.0.weight" in state or "blocks.0.attn.rel_pos_h" in state


def fit(encoder: SAMViT, state: State, source: Source, report: Report) -> State:
    """Return weights of a SAM-ViT or a ViT, converted to the tensor names of `encoder`.

    Position tables are resized to the grid and the windows of `encoder`.

    A ViT has no relative positions and no neck. If `state` holds weights of a ViT, the relative positions and the neck
    of the encoder keep their initial values.
    """
    grown = not recognises(state)
    if grown:
        state = _of_vit(encoder, state, source, report)
    state = _named(state)
    _check_size(encoder, state)
    first = "patch_embed.proj.weight"
    state[first] = adapt_channels(state[first], encoder.channels, first, report)
    fresh = ("mask_token", "neck.", "rel_pos") if grown else ("mask_token",)
    state = checked_names(encoder, state, report, DECIDES, ELSEWHERE | {"mask_token"}, fresh)
    return _fit_tables(encoder, state, report)


def _named(state: State) -> State:
    """Remove the name prefix of the full SAM model, and rename the MLP layers of other projects to SAM's names."""
    return {name.removeprefix(PREFIX).replace(".mlp.fc", ".mlp.lin"): tensor for name, tensor in state.items()}


def _of_vit(encoder: SAMViT, state: State, source: Source, report: Report) -> State:
    """Return the ViT weights that a SAM-ViT can use, with a position table of shape (1, rows, columns, D).

    Raises:
        WeightsError: the ViT has layer scale, gated MLPs, norms of queries or norms of patches, which a SAM-ViT does
            not have.
    """
    state = vit.named(state)
    lacking = {".gamma": "layer scale", ".q_norm": "norms of queries", "patch_embed.norm": "norms of patches"}
    lacking |= {".mlp.w12": "gated MLPs"}
    for part, what in lacking.items():
        strange = [name for name in state if part in name]
        if strange:
            raise WeightsError(f"These ViT weights do not fit a SAM-ViT, which has no {what} ({strange[0]}, ...).")
    decoder = {name.split(".")[0] for name in state if name.startswith("decoder_")}
    # The mask token of an MAE checkpoint belongs to the decoder, not to the encoder.
    elsewhere = LEFT_OF_VIT | decoder | ({"mask_token"} if decoder else set())
    if "pos_embed" in state:
        prefix = sum(token in state for token in ("cls_token", "dist_token"))
        _, patches, grid = vit.split_positions(state, prefix, encoder.table_grid, source)
        state["pos_embed"] = patches.unflatten(1, grid)
    return split_off(state, elsewhere, report)


def _check_size(encoder: SAMViT, state: State):
    """Raise `WeightsError` unless the weights have the encoder's width, depth and patch size."""
    (dim, _, patch_size, _), own = state["patch_embed.proj.weight"].shape, encoder.patch_embed.proj.weight
    check_size((dim, depth_of(state), patch_size), (len(own), len(encoder.blocks), encoder.stride), sam_vit.VARIANTS)


def _fit_tables(encoder: SAMViT, state: State, report: Report) -> State:
    """Resize the absolute and relative position tables to the encoder's grid and windows."""
    state, own = dict(state), encoder.state_dict()
    if "pos_embed" in state:
        table, new = state["pos_embed"], encoder.table_grid
        old = (table.shape[1], table.shape[2])
        if old != new:
            state["pos_embed"] = resize_table(table.flatten(1, 2), old, new, "mae").unflatten(1, new)
            report.resized.append(
                f"pos_embed resized from {old[0]} x {old[1]} to {new[0]} x {new[1]} by the rule of MAE, "
                "because no rule is published for SAM"
            )
    for name in [name for name in state if "rel_pos" in name and state[name].ndim == 2]:
        before, length = len(state[name]), len(own[name])
        if before != length:
            state[name] = resize_relative(state[name], (length + 1) // 2)
            report.resized.append(f"{name} resized from {before} to {length} rows, linearly as published")
    return state


def describe(state: State) -> dict[str, Any]:
    """Return arguments for `encoders.build` that make the encoder fit the weights without resizing.

    The weights determine neither the epsilon of the norms nor the drop path rate. Both settings keep their defaults.

    Raises:
        WeightsError: required tensors are missing, or the windows of the blocks are unknown because the weights have no
            relative positions.
    """
    state = _named(state)
    check_present(state, ("neck.0.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.lin1.weight"))
    if "blocks.0.attn.rel_pos_h" in state:
        check_present(state, [f"blocks.{i}.attn.rel_pos_{side}" for i in range(depth_of(state)) for side in "hw"])
    dim, channels, patch_size, _ = state["patch_embed.proj.weight"].shape
    variant, windows = _variant(dim, depth_of(state)), _windows(state)
    height, width = (n * patch_size for n in windows.pop("grid"))
    return {
        "variant": variant or "sam_vit_b",
        "dim": dim,
        "depth": depth_of(state),
        "out_dim": len(state["neck.0.weight"]),
        "mlp_ratio": len(state["blocks.0.mlp.lin1.weight"]) / dim,
        "patch_size": patch_size,
        "image_size": height if height == width else (height, width),
        "channels": channels,
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "relative_positions": "blocks.0.attn.rel_pos_h" in state,
        "absolute_positions": "pos_embed" in state,
        "mask_token": "mask_token" in state,
        **windows,
    }


def _windows(state: State) -> dict[str, Any]:
    """Return the token grid, number of heads, window size and global blocks that the weights were trained with.

    If the position tables have the same shapes as in the variant of the same width and depth, the values are those of
    this variant. Otherwise, the values are derived from the shapes of the relative position tables.
    """
    dim, depth = state["patch_embed.proj.weight"].shape[0], depth_of(state)
    grid = tuple(state["pos_embed"].shape[1:3]) if "pos_embed" in state else None
    tables = [[state.get(f"blocks.{i}.attn.rel_pos_{side}") for side in "hw"] for i in range(depth)]
    sizes = [tuple((len(table) + 1) // 2 for table in pair if table is not None) for pair in tables]
    first, variant = tables[0][0], _variant(dim, depth)
    if variant is not None:
        published: dict[str, Any] = {"window_size": 14, **sam_vit.VARIANTS[variant]}
        window, global_blocks = published["window_size"], published["global_blocks"]
        grid = grid or (sizes[global_blocks[0]] if first is not None else None)
        windows = {name: published[name] for name in ("heads", "window_size", "global_blocks")}
        if first is None and grid is not None:
            return {"grid": grid, **windows}
        if sizes == [grid if i in global_blocks else (window, window) for i in range(depth)]:
            return {"grid": grid, **windows, "heads": dim // state["blocks.0.attn.rel_pos_h"].shape[1]}
    if first is None:
        raise WeightsError(
            "Heads, windows and global blocks are unknown, because the weights have no relative positions. "
            "Build the encoder with heads, window_size and global_blocks, and load the weights with load_weights."
        )
    grid = grid or max(sizes)
    windows = {size[0] for size in sizes if size != grid} or {0}
    return {
        "grid": grid,
        "heads": dim // first.shape[1],
        "window_size": max(windows),
        "global_blocks": tuple(i for i, size in enumerate(sizes) if size == grid),
    }


def to_timm(encoder: SAMViT) -> tuple[str, dict[str, Any], State]:
    """Return a model name and options for `timm.create_model`, and the encoder's weights with timm's tensor names.

    At the encoder's image size, the timm model computes the same features as the encoder. At other sizes, the features
    differ, because timm resizes absolute positions by another rule. The mask token is not exported.

    Raises:
        WeightsError: timm has no equivalent model.
    """
    blocks = modules_of(encoder.blocks, PreNormBlock)
    state = {name.replace(".mlp.lin", ".mlp.fc"): tensor for name, tensor in encoder.state_dict().items()}
    state.pop("mask_token", None)
    eps, dim = blocks[0].norm1.eps, len(blocks[0].norm1.weight)
    check_equivalent({f"norm_eps is {eps:g}, not 1e-6 or 1e-5": eps not in (1e-6, 1e-5)}, "timm")
    ours = {
        "embed_dim": dim,
        "depth": len(blocks),
        "num_heads": blocks[0].attn.heads,
        "neck_chans": encoder.dim,
        "mlp_ratio": len(state["blocks.0.mlp.fc1.weight"]) / dim,
        "patch_size": encoder.stride,
        "in_chans": encoder.channels,
        "window_size": max(block.attn.window for block in blocks),
        "global_attn_indexes": [i for i, block in enumerate(blocks) if not block.attn.window],
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "use_rel_pos": "blocks.0.attn.rel_pos_h" in state,
        "use_abs_pos": "pos_embed" in state,
    }
    variant = _variant(dim, len(blocks))
    if variant not in TIMM:
        variant = "sam_vit_b"
    settings = sam_vit.VARIANTS[variant]
    theirs = {"embed_dim": settings["dim"], "depth": settings["depth"], "num_heads": settings["heads"]}
    theirs |= {"global_attn_indexes": list(settings["global_blocks"]), **TIMM_DEFAULTS}
    options = {name: value for name, value in ours.items() if value != theirs[name]}
    height, width = (n * encoder.stride for n in encoder.table_grid)
    options |= {"num_classes": 0, "img_size": height if height == width else (height, width)}
    if eps == 1e-6:
        options["norm_layer"] = ""  # an empty norm_layer selects the epsilon 1e-6 of SAM; timm's default is 1e-5
    return TIMM[variant], options, state


def _variant(dim: int, depth: int) -> str | None:
    """Return the name of the variant with this width and depth, or None if no variant has them."""
    return next((n for n, s in sam_vit.VARIANTS.items() if (s["dim"], s["depth"]) == (dim, depth)), None)
