"""Load published weights into an encoder.

Loading is strict: a missing tensor or an unknown tensor is an error. Tensors that are known to belong to other parts of
the published model, such as the class head, are left out.

Loading has three steps:

1. Read the file, and take the state dict out of the checkpoint.
2. Recognise the weight format by the names and shapes of the tensors.
3. Rename and resize the tensors with the `Format` of the encoder's family.
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

from tessera.encoders import published
from tessera.encoders.base import Encoder
from tessera.encoders.errors import WeightsError
from tessera.encoders.formats import module, navit, rope_vit, sam_vit, swin, twins, vit
from tessera.encoders.formats.loading import (
    Report,
    Source,
    State,
    check_names,
    check_plain,
    check_shapes,
    check_values,
    listed,
)
from tessera.encoders.formats.names import of_other_architecture
from tessera.encoders.module import ModuleEncoder
from tessera.encoders.navit import NaViT
from tessera.encoders.sam_vit import SAMViT
from tessera.encoders.swin import Swin
from tessera.encoders.timm_models import is_variant, other_name
from tessera.encoders.twins import Twins
from tessera.encoders.vit import ViT
from tessera.runtime.user_error import printable


class Format(Protocol):
    """Weight format of one encoder family. Modules such as `encoders.formats.vit` implement this protocol."""

    NAME: str
    """Name of the encoder family with an article, such as `a ViT`. Error messages contain this name."""
    ACCEPTS: tuple[str, ...]
    """`NAME` of each weight format that `fit` can convert. Empty if `fit` itself checks the weights."""
    DECIDES: dict[str, str]
    """Map from a substring of tensor names to the encoder settings that determine whether such tensors exist, and their
    shapes."""

    def recognises(self, state: State) -> bool:
        """Return True if `state` holds weights of this family. For any weights, at most one format returns True."""
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


FORMATS: dict[type[Encoder], Format] = {
    ViT: vit,
    Swin: swin,
    Twins: twins,
    NaViT: navit,
    SAMViT: sam_vit,
}
"""Weight format of each encoder class, in any order. A ViT with rotary positions has the format `rope_vit` instead, and
wrapped modules have the format `module`."""

PLACES = {
    "auto": ("teacher", "student", "model", "state_dict"),
    "ours": (),
    "dino": ("teacher", "student"),
    "mae": ("model",),
    "dinov2": ("teacher", "student", "model"),
    "dinov3": ("teacher", "student", "model"),
    "deit": ("model",),
    "swin": ("model",),
    "twins": ("model",),
    "sam": (),
    "vit_pytorch": (),
    "timm": ("state_dict", "model"),
    "transformers": (),
}
"""Map from each source to the checkpoint keys that may hold the state dict, in order of preference. A checkpoint that
has none of these keys is itself the state dict."""

WRAPPERS = {"backbone.": ("head.", "head_dense.", "dino_head.", "ibot_head."), "encoder.": ("decoder.",)}
"""Map from the name prefix of the encoder's tensors to the name prefixes of tensors outside of the encoder. The first
entry is for checkpoints of DINO, EsViT, DINOv2 and DINOv3. The second entry is for checkpoints of SimMIM."""


def load_weights(
    encoder: Encoder, path_or_state_dict: str | Path | Mapping[str, Any], source: Source = "auto"
) -> Report:
    """Load published weights, or weights of this project, into `encoder`.

    If the class of `encoder` is not in `FORMATS`, the weights are not converted: they must have the tensor names and
    shapes of `encoder`.

    Args:
        encoder: encoder that receives the weights.
        path_or_state_dict: path of a weight file, the content of such a file, or `timm:NAME` for a pretrained model of
            timm.
        source: project that wrote the file. The source determines the key under which the file stores the weights.
            "auto" tries the keys of all sources. With "ours", a position table that has as many rows as the encoder's
            table is assumed to have the encoder's grid.

    Raises:
        WeightsError: the file cannot be read, or the weights do not fit the encoder. In both cases, the encoder keeps
            its previous weights.
    """
    if not isinstance(path_or_state_dict, str | Path):
        checkpoint = path_or_state_dict  # `unwrap` refuses other types by name
    elif isinstance(encoder, ModuleEncoder) and is_variant(encoder.label) and published.is_name(path_or_state_dict):
        checkpoint = module.pretrained(encoder, str(path_or_state_dict))
    else:
        checkpoint = read(path_or_state_dict)
    if source not in get_args(Source):
        raise WeightsError(f"source must be one of {', '.join(get_args(Source))}, not {source!r}.")
    report = Report()
    state, own = unwrap(checkpoint, source, report), encoder.state_dict()
    form = _format_of(encoder)
    if form is None:
        check_names(state, own, {})
    else:
        found = recognise(state) if form.ACCEPTS else form
        if found.NAME not in (*form.ACCEPTS, module.NAME):
            raise WeightsError(f"The file has weights of {found.NAME}, which do not fit {form.NAME}.")
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
    if other := of_other_architecture(state):
        raise WeightsError(
            f"The weights are those of {other}, and no encoder of this project has this architecture. "
            "If timm has the model, use timm's own: --encoder timm:NAME."
        )
    formats: list[Format] = [*FORMATS.values(), rope_vit]
    found = [form for form in formats if form.recognises(state)]
    if not found:
        known = ", ".join(form.NAME for form in formats)
        raise WeightsError(
            f"The format of the weights is not recognised. Known formats: {known}. Tensors: {listed(state)}."
        )
    if len(found) > 1:
        names = " or of ".join(form.NAME for form in found)
        raise WeightsError(f"The format of the weights is ambiguous. The file may hold weights of {names}.")
    return found[0]


def format_of(encoder: Encoder) -> Format:
    """Return the weight format for the class of `encoder`.

    Raises:
        WeightsError: the class of the encoder is not in `FORMATS`.
    """
    form = _format_of(encoder)
    if form is None:
        raise WeightsError(
            f"{type(encoder).__name__} has no weight format of another library. Export it with --to ours, and "
            "load it from a file of this project."
        )
    return form


def _format_of(encoder: Encoder) -> Format | None:
    if isinstance(encoder, ModuleEncoder):
        return module
    rotary = type(encoder) is ViT and encoder.rope_embed is not None
    return rope_vit if rotary else FORMATS.get(type(encoder))


def read(path: str | Path) -> Any:
    """Read a .safetensors file, a file written by `torch.save`, or weights of timm named `timm:NAME`.

    Pickled code of a file is never executed.

    Raises:
        WeightsError: the file is not a weight file, it holds pickled objects other than plain data, or timm has no
            weights of this name.
    """
    if published.is_name(path):
        return published.fetch(path)[0]
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
        cure = f"Did you mean {meant[1]}?" if meant and meant[1] else "Give the path of a weight file, or timm:NAME."
        raise WeightsError(f"There is no file {printable(str(path))}. {cure}")
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


def unwrap(checkpoint: Any, source: Source, report: Report) -> State:
    """Return the flat state dict of a checkpoint. The names of wrapper modules are removed from tensor names.

    Raises:
        WeightsError: the checkpoint is not a dict with string keys, or it has no state dict where `source` stores it.
    """
    _check_dict(checkpoint)
    place = next((name for name in PLACES[source] if isinstance(checkpoint.get(name), Mapping)), None)
    if place is not None:
        report.left_out += [name for name in checkpoint if name != place]
        checkpoint = checkpoint[place]
        _check_dict(checkpoint)
    if not checkpoint or not all(isinstance(value, Tensor) for value in checkpoint.values()):
        raise WeightsError(
            f"The checkpoint has no state dict where source {source!r} stores it. The checkpoint holds "
            f"{listed(checkpoint)}. Pass the state dict itself, or another source."
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
