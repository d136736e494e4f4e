"""Published weights into an encoder: every tensor is used or known to belong elsewhere, or nothing is loaded.

A checkpoint is unwrapped, which does not depend on the encoder; then the module of its family in `encoders.formats`
fits names and shapes. Such a module has a `NAME`; `ACCEPTS`, the names of the families whose weights it fits;
`recognises(state)`; `fit(encoder, state, source, report)`; `describe(state)`, the settings of `encoders.build` for an
encoder that takes these weights as they are; and `to_timm(encoder)`, its name, options and weights in timm.
"""

import argparse
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from encoders.base import Encoder
from encoders.formats import navit, sam_vit, swin, twins, vit
from encoders.formats.report import Report, Source, State, check_shapes, listed

# Where the weights lie in the files of each project, the preferred place first; none of these: the file is flat.
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

# The prefix of the encoder where a method's model is saved -> those of its other parts: DINO and EsViT, SimMIM.
WRAPPERS = {"backbone.": ("head.", "head_dense."), "encoder.": ("decoder.",)}

FORMATS: dict[str, ModuleType] = {
    "ViT": vit,
    "Swin": swin,
    "Twins": twins,
    "NaViT": navit,
    "SAMViT": sam_vit,
}
"""class of encoder -> module of its weights"""


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
    if source not in get_args(Source):
        raise ValueError(f"source must be one of {', '.join(get_args(Source))}, not {source!r}")
    report = Report()
    state = unwrap(path_or_state_dict, source, report)
    module = format_of(encoder)
    found = recognise(state)
    if found.NAME not in module.ACCEPTS:
        raise ValueError(f"these are weights of {found.NAME}, which do not fit {module.NAME}")
    state = module.fit(encoder, state, source, report)
    own = encoder.state_dict()
    check_shapes(state, own, module.DECIDES)
    report.used = list(state)
    encoder.load_state_dict(own | state)
    return report


def recognise(state: State) -> ModuleType:
    """The module of `encoders.formats` whose weights these are.

    Raises:
        ValueError: nobody's.
    """
    for module in FORMATS.values():
        if module.recognises(state):
            return module
    known = ", ".join(module.NAME for module in FORMATS.values())
    raise ValueError(f"these are not weights of {known}; found {listed(state)}")


def format_of(encoder: Encoder) -> ModuleType:
    module = FORMATS.get(type(encoder).__name__)
    if module is None:
        raise ValueError(f"no published weights are known for {type(encoder).__name__}")
    return module


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
            # torch's own words advise to read it as code
            reason = "" if "weights_only" in str(error) else f": {error}"
            raise ValueError(f"{path} is not a .safetensors or torch file of weights{reason}") from error
        raise ValueError(
            f"{path} is not read: besides weights it holds {blocked[1]}, and reading that could run code; "
            "where it is trusted, save its state dict alone as .safetensors"
        ) from error


def unwrap(checkpoint: Mapping[str, Any], source: Source, report: Report) -> State:
    """The flat state dict in a checkpoint, without the prefixes of wrappers."""
    place = next((name for name in PLACES[source] if isinstance(checkpoint.get(name), Mapping)), None)
    if place is not None:
        report.left_out += [name for name in checkpoint if name != place]
        checkpoint = checkpoint[place]
    if not checkpoint or not all(isinstance(value, Tensor) for value in checkpoint.values()):
        raise ValueError(f"no weights found for source {source!r}; the checkpoint holds {listed(map(str, checkpoint))}")
    state = {name.removeprefix("module.").replace("_orig_mod.", ""): tensor for name, tensor in checkpoint.items()}
    for wrapper, others in WRAPPERS.items():
        if any(name.startswith(wrapper) for name in state):
            report.left_out += [name for name in state if name.startswith(others)]
            state = {name.removeprefix(wrapper): t for name, t in state.items() if not name.startswith(others)}
    return state
