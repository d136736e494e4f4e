"""Read weight files, and load the weights into an encoder.

Loading is strict: a missing tensor or an unknown tensor is an error. It has three steps:

1. Read the file, and take the state dict out of the checkpoint.
2. Recognise the weight format by the names and shapes of the tensors.
3. Rename and resize the tensors with the `Format` of the encoder, which also leaves out tensors of other parts of the
   published model, such as the class head.

Without a format for the encoder, the weights must have its tensor names and shapes.
"""

import argparse
import re
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor

from tessera.encoders.base import Encoder
from tessera.encoders.errors import WeightsError
from tessera.encoders.loading import (
    Report,
    Source,
    State,
    check_names,
    check_plain,
    check_shapes,
    check_values,
    listed,
)
from tessera.encoders.registry import BACKBONES, backbone, other_name, unknown_prefix
from tessera.runtime.plugins import Registry
from tessera.runtime.user_error import printable


class Format(Protocol):
    """Weight format of one encoder family, which a module implements. See docs/extending.md."""

    NAME: str
    """Name of the encoder family with an article, such as `a ViT`. Error messages contain this name."""
    ACCEPTS: tuple[str, ...]
    """`NAME` of each weight format that `fit` can convert. Empty if `fit` itself checks the weights."""
    DECIDES: dict[str, str]
    """Map from a substring of tensor names to the encoder settings that determine whether such tensors exist, and their
    shapes."""

    def converts_for(self, encoder: Encoder) -> bool:
        """Return True if `fit` converts weights for `encoder`. For any encoder, at most one format returns True."""
        ...

    def recognises(self, state: State) -> bool:
        """Return True if `state` holds weights of this family. For any weights, at most one format returns True.

        Raises:
            WeightsError: the weights resemble those of this family, but are those of an architecture that no encoder
                has.
        """
        ...

    def fit(self, encoder: Any, state: State, source: Source, report: Report) -> State:
        """Return the weights in `state`, converted to the tensor names and shapes of `encoder`."""
        ...

    def describe(self, state: State) -> dict[str, Any]:
        """Return arguments for `encoders.build` that make the encoder fit the weights without resizing."""
        ...

    def to_timm(self, encoder: Any) -> tuple[str, dict[str, Any], State]:
        """Return a model name and options for `timm.create_model`, and the encoder's weights with timm's names."""
        ...


FORMAT_NAMES = ("NAME", "ACCEPTS", "DECIDES", "converts_for", "recognises", "fit", "describe", "to_timm")
FORMATS: Registry[Format] = Registry(
    "weight format",
    {},
    group="tessera.formats",
    expected="a module with the names of `encoders.weight_files.Format`",
    valid=lambda value: all(hasattr(value, name) for name in FORMAT_NAMES),
)
"""Weight formats of extras and of other packages."""

PLACES = ("teacher", "student", "model", "state_dict")
"""Checkpoint keys that may hold the state dict, in order of preference. A checkpoint that has none of these keys is
itself the state dict."""

WRAPPERS = {"backbone.": ("head.", "head_dense.", "dino_head.", "ibot_head."), "encoder.": ("decoder.",)}
"""Map from the name prefix of the encoder's tensors to the name prefixes of tensors outside of the encoder. The first
entry is for checkpoints of DINO, EsViT, DINOv2 and DINOv3. The second entry is for checkpoints of SimMIM."""


def load_weights(
    encoder: Encoder, path_or_state_dict: str | Path | Mapping[str, Any], source: Source = "auto"
) -> Report:
    """Load published weights, or weights of this project, into `encoder`.

    If `FORMATS` has no format for `encoder`, the weights are not converted: they must have its tensor names and shapes.

    Args:
        encoder: encoder that receives the weights.
        path_or_state_dict: path of a weight file, the content of such a file, or weights of a backbone, such as
            `timm:NAME`.
        source: "auto", or "ours" for weights of this project: a position table that has as many rows as the encoder's
            table then has the encoder's grid.

    Raises:
        WeightsError: the file cannot be read, or the weights do not fit the encoder. In both cases, the encoder keeps
            its previous weights.
    """
    if not isinstance(path_or_state_dict, str | Path):
        checkpoint = path_or_state_dict  # `unwrap` refuses other types by name
    elif origin := backbone(path_or_state_dict):
        checkpoint = origin.fetch(path_or_state_dict, encoder)[0]
    else:
        checkpoint = read(path_or_state_dict)
    if source not in get_args(Source):
        raise WeightsError(f"source must be one of {', '.join(get_args(Source))}, not {source!r}.")
    report = Report()
    state, own = unwrap(checkpoint, report), encoder.state_dict()
    form = _format_of(encoder)
    if form is None:
        _check_own_names(state, own)
    else:
        if form.ACCEPTS and (found := recognise(state).NAME) not in form.ACCEPTS:
            raise WeightsError(f"The file has weights of {found}, which do not fit {form.NAME}.")
        state = form.fit(encoder, state, source, report)
    check_shapes(state, own, {} if form is None else form.DECIDES)
    check_values({name: tensor for name, tensor in state.items() if own[name].is_floating_point()})
    report.used = list(state)
    encoder.load_state_dict(own | state)
    return report


def recognise(state: State) -> Format:
    """Return the weight format that recognises `state`.

    Raises:
        WeightsError: no format recognises the weights, or several formats recognise the weights.
    """
    formats = _formats()
    found = [form for form in formats if form.recognises(state)]
    if not found:
        known = ", ".join(form.NAME for form in formats if form.ACCEPTS) or f"none. {FORMATS.elsewhere}"
        raise WeightsError(
            f"The format of the weights is not recognised. Known formats: {known.rstrip('.')}. Tensors: "
            f"{listed(state)}."
        )
    if len(found) > 1:
        names = " or of ".join(form.NAME for form in found)
        raise WeightsError(f"The format of the weights is ambiguous. The file may hold weights of {names}.")
    return found[0]


def format_of(encoder: Encoder) -> Format:
    """Return the weight format for the class of `encoder`.

    Raises:
        WeightsError: `FORMATS` has no format for the encoder.
    """
    form = _format_of(encoder)
    if form is None:
        raise WeightsError(
            f"{type(encoder).__name__} has no weight format of another library. Export it with --to ours, and "
            f"load it from a file of this project. {FORMATS.elsewhere}"
        )
    return form


def _format_of(encoder: Encoder) -> Format | None:
    return next((form for form in _formats() if form.converts_for(encoder)), None)


def _formats() -> list[Format]:
    return [FORMATS[name] for name in sorted(FORMATS.names())]


def _check_own_names(state: State, own: State) -> None:
    """Raise `WeightsError` if the tensor names of the weights differ from those of an encoder without a format."""
    try:
        check_names(state, own, {})
    except WeightsError as error:
        raise WeightsError(f"{error} No weight format converts weights for this encoder. {FORMATS.elsewhere}") from None


def read(path: str | Path) -> Any:
    """Read a .safetensors file, a file written by `torch.save`, or weights of a backbone, such as `timm:NAME`.

    Pickled code of a file is never executed.

    Raises:
        WeightsError: the file is not a weight file, it holds pickled objects other than plain data, or there are no
            weights of this name.
    """
    if origin := backbone(path):
        return origin.fetch(path)[0]
    path = Path(path)
    _check_file(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of almost any class for a damaged file
        blocked = re.search(r"GLOBAL ([\w.]+)", str(error))
        if blocked is None:
            # Do not print torch's advice to set weights_only=False, because this option runs pickled code.
            reason = "" if "weights_only" in str(error) else f": {printable(str(error)[:500])}"
            raise WeightsError(f"{path} is neither a .safetensors file nor a torch file of weights{reason}.") from error
        raise WeightsError(
            f"{path} was not loaded, because it holds the pickled object {blocked[1]}, which could run code. "
            "If you trust the file, save only its state dict as .safetensors."
        ) from error


def _check_file(path: Path) -> None:
    """Check that a file is regular and is not a compressed archive, which may expand to any size.

    torch does not compress the archives that it writes.

    Raises:
        WeightsError: the file does not exist, is not regular, or is a compressed archive.
    """
    if not path.exists():
        meant = other_name(str(path))
        names = "".join(f", or {name}:NAME" for name in BACKBONES.names())
        cure = f"Did you mean {meant[1]}?" if meant and meant[1] else f"Give the path of a weight file{names}."
        raise WeightsError(f"There is no file {printable(str(path))}. {cure}{unknown_prefix(path)}")
    if not stat.S_ISREG(path.stat().st_mode):
        raise WeightsError(f"{path} is not a file. Give the path of a weight file.")
    if path.suffix == ".safetensors":
        return
    try:
        if not zipfile.is_zipfile(path):  # raises BadZipFile for some damaged archives
            return
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise WeightsError(f"{path} is a damaged archive: {error}. Copy the file again.") from error
    if size > path.stat().st_size:
        raise WeightsError(
            f"{path} is a compressed archive, which could expand to {size} bytes. Save the weights with "
            "torch.save, which does not compress."
        )


def unwrap(checkpoint: Any, report: Report) -> State:
    """Return the flat state dict of a checkpoint. The names of wrapper modules are removed from tensor names.

    Raises:
        WeightsError: the checkpoint is not a dict with string keys, or it has no state dict.
    """
    _check_dict(checkpoint)
    place = next((name for name in PLACES if isinstance(checkpoint.get(name), Mapping)), None)
    if place is not None:
        report.left_out += [name for name in checkpoint if name != place]
        checkpoint = checkpoint[place]
        _check_dict(checkpoint)
    if not checkpoint or not all(isinstance(value, Tensor) for value in checkpoint.values()):
        raise WeightsError(
            f"The checkpoint has no state dict under {', '.join(PLACES)}. The checkpoint holds {listed(checkpoint)}. "
            "Pass the state dict itself."
        )
    check_plain(checkpoint)
    state = {name.removeprefix("module."): tensor for name, tensor in checkpoint.items()}
    for inserted in ("_orig_mod.", "_checkpoint_wrapped_module."):
        state = {name.replace(inserted, ""): tensor for name, tensor in state.items()}
    for network in ("teacher.", "student."):  # DINOv2 and DINOv3 save both networks in one state dict
        if any(name.startswith(f"{network}backbone.") for name in state):
            report.left_out += [name for name in state if not name.startswith(network)]
            state = {name.removeprefix(network): t for name, t in state.items() if name.startswith(network)}
    for wrapper, others in WRAPPERS.items():
        if any(name.startswith(wrapper) for name in state):
            report.left_out += [name for name in state if name.startswith(others)]
            state = {name.removeprefix(wrapper): t for name, t in state.items() if not name.startswith(others)}
    return state


def _check_dict(checkpoint: Any) -> None:
    """Raise `WeightsError` unless `checkpoint` is a dict whose keys are strings."""
    if not isinstance(checkpoint, Mapping):
        raise WeightsError(
            f"The checkpoint is of type {type(checkpoint).__name__}. It must be a dict that maps names to tensors. "
            "Save the state_dict() of the model."
        )
    other = {type(key).__name__ for key in checkpoint if not isinstance(key, str)}
    if other:
        raise WeightsError(
            f"The checkpoint has keys of type {', '.join(sorted(other))}. The keys must be tensor names. "
            "Save the state_dict() of the model."
        )
