"""Load published weights into an encoder. Loading is strict: every tensor must belong to the encoder, or to
a known other part of the model.

A checkpoint is read and unwrapped, its format is recognised, and the `Format` of the encoder's family renames and
resizes the tensors.
"""

import argparse
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from encoders.base import Encoder
from encoders.errors import WeightsError
from encoders.formats import navit, sam_vit, swin, twins, vit
from encoders.formats.report import Report, Source, State, check_names, check_shapes, check_values, listed
from encoders.navit import NaViT
from encoders.sam_vit import SAMViT
from encoders.swin import Swin
from encoders.twins import Twins
from encoders.vit import ViT


class Format(Protocol):
    """Weight files of one family of encoders. A module with these names is a format."""

    NAME: str
    """Name of the family in messages, with an article."""
    ACCEPTS: tuple[str, ...]
    """Names of the families whose weights `fit` takes."""
    DECIDES: dict[str, str]
    """Part of a tensor's name -> setting of the encoder that the tensor depends on."""

    def recognises(self, state: State) -> bool:
        """Return True for weights of this family. At most one format may recognise the same weights."""
        ...

    def fit(self, encoder: Encoder, state: State, source: Source, report: Report) -> State:
        """Return the weights under the encoder's names and with its shapes."""
        ...

    def describe(self, state: State) -> dict[str, Any]:
        """Return arguments of `encoders.build` for an encoder that takes these weights unchanged."""
        ...

    def to_timm(self, encoder: Encoder) -> tuple[str, dict[str, Any], State]:
        """Return the name and options for `timm.create_model`, and the weights under timm's names."""
        ...


FORMATS: dict[type[Encoder], Format] = {ViT: vit, Swin: swin, Twins: twins, NaViT: navit, SAMViT: sam_vit}
"""Class of an encoder -> format of its weights. The order does not matter."""

PLACES = {
    "auto": ("teacher", "student", "model", "state_dict"),
    "ours": (),
    "dino": ("teacher", "student"),
    "mae": ("model",),
    "deit": ("model",),
    "swin": ("model",),
    "twins": ("model",),
    "sam": (),
    "vit_pytorch": (),
    "timm": ("state_dict", "model"),
}
"""Source -> keys of a checkpoint that hold the weights, preferred first. A checkpoint without these keys holds the
weights directly."""

WRAPPERS = {"backbone.": ("head.", "head_dense.", "dino_head.", "ibot_head."), "encoder.": ("decoder.",)}
"""Prefix of the encoder in a method's model -> prefixes of other parts: DINO, EsViT and DINOv2; SimMIM."""


def load_weights(
    encoder: Encoder, path_or_state_dict: str | Path | Mapping[str, Any], source: Source = "auto"
) -> Report:
    """Load published weights, or weights of this project, into `encoder`.

    An encoder whose class is not in `FORMATS` takes only weights with its own names and shapes.

    Args:
        encoder: encoder to fill.
        path_or_state_dict: file, or the content of a file.
        source: project that wrote the file, which decides where the weights are in the file; "auto" tries all sources.
            With "ours", a position table with as many rows as the encoder's table belongs to the encoder's grid.

    Raises:
        WeightsError: the weights do not fit. The encoder is unchanged.
    """
    checkpoint = read(path_or_state_dict) if isinstance(path_or_state_dict, str | Path) else path_or_state_dict
    if source not in get_args(Source):
        raise WeightsError(f"source must be one of {', '.join(get_args(Source))}, not {source!r}.")
    report = Report()
    state, own = unwrap(checkpoint, source, report), encoder.state_dict()
    form = FORMATS.get(type(encoder))
    if form is None:
        check_names(state, own, {})
    else:
        found = recognise(state)
        if found.NAME not in form.ACCEPTS:
            raise WeightsError(f"The file has weights of {found.NAME}, which do not fit {form.NAME}.")
        state = form.fit(encoder, state, source, report)
    check_shapes(state, own, {} if form is None else form.DECIDES)
    check_values(state)
    report.used = list(state)
    encoder.load_state_dict(own | state)
    return report


def recognise(state: State) -> Format:
    """Return the format of these weights.

    Raises:
        WeightsError: no format recognises the weights, or several formats do.
    """
    found = [form for form in FORMATS.values() if form.recognises(state)]
    if not found:
        known = ", ".join(form.NAME for form in FORMATS.values())
        raise WeightsError(f"The format of the weights is not recognised. Known: {known}. Found: {listed(state)}.")
    if len(found) > 1:
        names = " and of ".join(form.NAME for form in found)
        raise WeightsError(f"The format of the weights is ambiguous. They may be weights of {names}.")
    return found[0]


def format_of(encoder: Encoder) -> Format:
    """Return the format of an encoder's weights.

    Raises:
        WeightsError: the class of the encoder is not in `FORMATS`.
    """
    form = FORMATS.get(type(encoder))
    if form is None:
        raise WeightsError(f"{type(encoder).__name__} has no weight format. Add one to encoders.formats.checkpoint.")
    return form


def read(path: str | Path) -> Any:
    """Read a .safetensors file or a torch file. Pickled code is never executed.

    Raises:
        WeightsError: the file is not a weight file, or it holds pickled objects other than plain data.
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
            # torch's own message recommends weights_only=False, which would run pickled code
            reason = "" if "weights_only" in str(error) else f": {error}"
            raise WeightsError(f"{path} is not a .safetensors or torch file of weights{reason}.") from error
        raise WeightsError(
            f"{path} is not read. It holds the pickled object {blocked[1]}, which could run code. "
            "If you trust the file, save its state dict alone as .safetensors."
        ) from error


def unwrap(checkpoint: Any, source: Source, report: Report) -> State:
    """Return the flat state dict of a checkpoint, without the prefixes of wrapper modules.

    Raises:
        WeightsError: the checkpoint is not a dict, or holds no weights for this source.
    """
    _check_dict(checkpoint)
    place = next((name for name in PLACES[source] if isinstance(checkpoint.get(name), Mapping)), None)
    if place is not None:
        report.left_out += [name for name in checkpoint if name != place]
        checkpoint = checkpoint[place]
        _check_dict(checkpoint)
    if not checkpoint or not all(isinstance(value, Tensor) for value in checkpoint.values()):
        raise WeightsError(f"The checkpoint has no weights for source {source!r}. It holds {listed(checkpoint)}.")
    state = {name.removeprefix("module.").replace("_orig_mod.", ""): tensor for name, tensor in checkpoint.items()}
    for wrapper, others in WRAPPERS.items():
        if any(name.startswith(wrapper) for name in state):
            report.left_out += [name for name in state if name.startswith(others)]
            state = {name.removeprefix(wrapper): t for name, t in state.items() if not name.startswith(others)}
    return state


def _check_dict(checkpoint: Any) -> None:
    """Raise `WeightsError` unless `checkpoint` is a dict with names as keys."""
    if not isinstance(checkpoint, Mapping):
        raise WeightsError(
            f"The checkpoint is of type {type(checkpoint).__name__}. It must be a dict of names and tensors: save the "
            "state_dict() of the model."
        )
    other = {type(key).__name__ for key in checkpoint if not isinstance(key, str)}
    if other:
        raise WeightsError(
            f"The checkpoint has keys of type {', '.join(sorted(other))}. The keys must be names of tensors: save the "
            "state_dict() of the model."
        )
