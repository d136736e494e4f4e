"""Report about the loading of weights, and checks of weights against an encoder."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tessera.encoders.errors import WeightsError
from tessera.runtime.user_error import printable

SMALLEST = 1e-6
"""Threshold for weights near zero. Trained and newly initialised encoders have far larger weights."""
Source = Literal["auto", "ours"]
State = dict[str, Tensor]


@dataclass
class Report:
    """Tensors that were loaded, left out, missing or resized. `str(report)` is a summary for the user."""

    used: list[str] = field(default_factory=list)
    """Names of the tensors that were loaded."""
    left_out: list[str] = field(default_factory=list)
    """Names of checkpoint entries that were left out because they do not belong to the encoder."""
    fresh: list[str] = field(default_factory=list)
    """Names of encoder tensors that are not in the checkpoint and therefore keep their initial values."""
    resized: list[str] = field(default_factory=list)
    """Messages about tensors that were changed to fit the encoder, one message per tensor."""

    def __str__(self) -> str:
        lines = [f"{len(self.used)} tensors loaded"]
        lines += [f"left out: {_short(self.left_out)}"] if self.left_out else []
        lines += [f"not in the checkpoint, initial values kept: {_short(self.fresh)}"] if self.fresh else []
        return "\n".join(lines + self.resized)


def check_names(
    state: Iterable[str], own: Iterable[str], decides: Mapping[str, str], fresh: Iterable[str] = ()
) -> None:
    """Check that the tensor names in `state` are those of the encoder.

    Args:
        state: tensor names of the checkpoint.
        own: tensor names of the encoder.
        decides: map from a substring of tensor names to the encoder settings that determine whether such tensors exist,
            and their shapes.
        fresh: tensor names of the encoder that the checkpoint does not have.

    Raises:
        WeightsError: tensors are missing from the checkpoint or unknown to the encoder. The message lists these tensors
            and the settings that determine them.
    """
    expected = set(own) - set(fresh)
    missing, unexpected = sorted(expected - set(state)), sorted(set(state) - expected)
    if missing or unexpected:
        raise WeightsError(
            f"The checkpoint does not fit the encoder. Missing from the checkpoint: {listed(missing)}. "
            f"Unknown to the encoder: {listed(unexpected)}. {advice(missing + unexpected, decides)}"
        )


def check_shapes(state: State, own: State, decides: Mapping[str, str]) -> None:
    """Check that each tensor of `state` has the shape of the encoder tensor with the same name in `own`.

    Raises:
        WeightsError: the shape of a tensor differs from that of the encoder's tensor. The message lists such tensors.
    """
    wrong = [
        f"{name} {tuple(tensor.shape)}, not {tuple(own[name].shape)}"
        for name, tensor in state.items()
        if tensor.shape != own[name].shape
    ]
    if wrong:
        raise WeightsError(
            f"Shapes of these tensors differ from those of the encoder: {listed(wrong)}. {advice(wrong, decides)}"
        )


def check_plain(state: Mapping[str, Tensor]) -> None:
    """Check that each tensor stores a separate value for each of its elements.

    A small file can describe a huge tensor whose elements share one stored value. Operations on the tensor would
    allocate its full size.

    Raises:
        WeightsError: a tensor is sparse or quantised, or repeats its values.
    """
    for name, tensor in state.items():
        plain = tensor.layout == torch.strided and not tensor.is_quantized
        wanted = 0 if tensor.is_meta else tensor.numel() * tensor.element_size()
        if not plain or wanted > tensor.untyped_storage().nbytes():
            raise WeightsError(
                f"{printable(name)} is sparse, quantised or repeats stored values. Save a dense tensor with a value "
                "for each element."
            )


def check_values(state: State) -> None:
    """Check that all tensors are floating point and finite, and that not all of them are near zero.

    Raises:
        WeightsError: a tensor has no values, holds integers or bools, or has NaN or infinite values, or all matrices
            are below `SMALLEST`. The message lists the invalid tensors.
    """
    empty = [name for name, tensor in state.items() if tensor.is_meta]
    if empty:
        raise WeightsError(f"These tensors are on the meta device, without values: {listed(empty)}.")
    integers = [f"{name} ({tensor.dtype})" for name, tensor in state.items() if not tensor.is_floating_point()]
    if integers:
        raise WeightsError(f"Weights must be floating point. These tensors are not: {listed(integers)}.")
    state = {name: tensor.float() if tensor.itemsize == 1 else tensor for name, tensor in state.items()}  # float8
    bad = {name: tensor.numel() - int(tensor.isfinite().sum()) for name, tensor in state.items()}
    names = [f"{name} ({count:,} of {state[name].numel():,})" for name, count in bad.items() if count]
    if names:
        raise WeightsError(
            f"The checkpoint has NaN or infinite values: {listed(names)}. The training diverged, or the file is "
            "damaged. Use an earlier checkpoint."
        )
    matrices = [tensor for tensor in state.values() if tensor.ndim > 1 and tensor.numel()]
    if matrices and all(float(tensor.abs().max()) < SMALLEST for tensor in matrices):
        raise WeightsError(f"All weights are near zero (below {SMALLEST}). The file does not hold a trained encoder.")


def advice(names: Iterable[str], decides: Mapping[str, str]) -> str:
    """Return a sentence for error messages. It lists the encoder settings that determine the tensors in `names`."""
    settings = sorted({setting for part, setting in decides.items() if any(part in name for name in names)})
    if not settings:
        return "No setting of the encoder changes these tensors."
    return f"Check these encoder settings: {', '.join(settings)}."


def listed(names: Iterable[str], most: int = 12) -> str:
    """Join the first `most` names with commas, and append the number of the remaining names."""
    names = list(names)
    if not names:
        return "nothing"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(printable(str(name)[:200]) for name in names[:most]) + more


def _short(names: Iterable[str]) -> str:
    """Join names with commas. Names with the same part before the first dot become one entry, such as `head.* (2)`."""
    groups: dict[str, int] = {}
    for name in names:
        first, dot, _ = name.partition(".")
        group = f"{first}.*" if dot else first
        groups[group] = groups.get(group, 0) + 1
    return ", ".join(name if count == 1 and "*" not in name else f"{name} ({count})" for name, count in groups.items())
