"""Load published weights into an encoder.

Loading is strict: a missing tensor or an unknown tensor is an error. Tensors of known other parts of the published
model, such as the class head, are left out.

Loading has three steps. The checkpoint is read and unwrapped. The format of the weights is recognised. The `Format` of
the encoder's family renames and resizes the tensors.
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
    """Weight format of one encoder family. Modules such as `encoders.formats.vit` implement this protocol."""

    NAME: str
    """Name of the encoder family with its article, for error messages: `a ViT`."""
    ACCEPTS: tuple[str, ...]
    """Names of the encoder families whose weights `fit` accepts."""
    DECIDES: dict[str, str]
    """Part of a tensor name -> encoder setting that determines the shape or the existence of the tensor."""

    def recognises(self, state: State) -> bool:
        """Return True for weights of this family. At most one format may return True for the same weights."""
        ...

    def fit(self, encoder: Encoder, state: State, source: Source, report: Report) -> State:
        """Return the weights with the tensor names and shapes of `encoder`."""
        ...

    def describe(self, state: State) -> dict[str, Any]:
        """Return arguments of `encoders.build`. The encoder built with them fits these weights without any resizing."""
        ...

    def to_timm(self, encoder: Encoder) -> tuple[str, dict[str, Any], State]:
        """Return the model name and options for `timm.create_model`, and the weights with timm's tensor names."""
        ...


FORMATS: dict[type[Encoder], Format] = {ViT: vit, Swin: swin, Twins: twins, NaViT: navit, SAMViT: sam_vit}
"""Encoder class -> weight format of the class. The order of the entries does not matter."""

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
"""Source -> checkpoint keys under which the source stores weights, in order of preference. A checkpoint without any of
these keys is itself the state dict."""

WRAPPERS = {"backbone.": ("head.", "head_dense.", "dino_head.", "ibot_head."), "encoder.": ("decoder.",)}
"""Prefix of the encoder's tensor names -> prefixes of tensor names that do not belong to the encoder. The first entry
is for models of DINO, EsViT and DINOv2, the second for models of SimMIM."""


def load_weights(
    encoder: Encoder, path_or_state_dict: str | Path | Mapping[str, Any], source: Source = "auto"
) -> Report:
    """Load published weights, or weights of this project, into `encoder`.

    If the class of `encoder` is not in `FORMATS`, the weights must have the tensor names and shapes of `encoder`.

    Args:
        encoder: encoder that receives the weights.
        path_or_state_dict: path of a weight file, or the content of such a file.
        source: project that wrote the file. The source determines the key under which the file stores the weights;
            "auto" tries the keys of all sources. With "ours", a position table that has as many rows as the encoder's
            table is assumed to have the encoder's grid.

    Raises:
        WeightsError: the weights do not fit the encoder. The encoder then keeps its previous weights.
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
    """Return the weight format that recognises `state`.

    Raises:
        WeightsError: no format recognises the weights, or several formats recognise the weights.
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
    """Return the weight format for the class of `encoder`.

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
            # Leave out a message of torch that recommends weights_only=False, because this option runs pickled code.
            reason = "" if "weights_only" in str(error) else f": {error}"
            raise WeightsError(f"{path} is not a .safetensors or torch file of weights{reason}.") from error
        raise WeightsError(
            f"{path} is not read. It holds the pickled object {blocked[1]}, which could run code. "
            "If you trust the file, save its state dict alone as .safetensors."
        ) from error


def unwrap(checkpoint: Any, source: Source, report: Report) -> State:
    """Return the flat state dict of a checkpoint, without the prefixes of wrapper modules.

    Raises:
        WeightsError: the checkpoint is not a dict, or no state dict is found in the checkpoint for `source`.
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
    """Raise `WeightsError` unless `checkpoint` is a dict whose keys are strings."""
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
