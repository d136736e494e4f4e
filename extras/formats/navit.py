"""Weight format of the NaViT, which is that of this project.

Letters in shapes: D is the width of a token, and R is the number of rows of a position table.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tessera.encoders.base import Encoder
from tessera.encoders.errors import WeightsError
from tessera.encoders.loading import Report, Source, State
from tessera.encoders.navit import NaViT
from tessera.extras.formats.conversion import checked_names

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
    """Return the weights, with position tables of the sizes of `encoder`."""
    del source
    own = encoder.state_dict()
    state = checked_names(encoder, state, report, DECIDES, left_out=("attn_pool", "mask_token"))
    for name in ("pos_embed_rows", "pos_embed_columns"):
        state[name] = _fit_table(state[name], len(own[name]), name, report)
    return state


def describe(state: State) -> dict[str, Any]:
    """Raise `WeightsError`, because the tensors tell neither the side of a patch nor the number of channels."""
    raise WeightsError("Weights of a NaViT do not tell their settings. Keep the .json file beside the weights.")


def to_timm(encoder: NaViT) -> tuple[str, dict[str, Any], State]:
    """Raise `WeightsError`, because timm has no NaViT."""
    raise WeightsError(
        "timm has no NaViT, and timm's models for packed images have other architectures. Export the encoder with "
        "--to ours, or try --to onnx."
    )


def _fit_table(table: Tensor, entries: int, name: str, report: Report) -> Tensor:
    """Resize a position table (R, D) to `entries` rows by linear interpolation."""
    if len(table) == entries:
        return table
    report.resized.append(f"{name} resized from {len(table)} to {entries} by linear interpolation")
    resized = F.interpolate(table.float().T[None], size=entries, mode="linear")  # (1, D, entries)
    return resized[0].T.to(table.dtype)
