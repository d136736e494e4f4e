"""Encoders by name: build one, fill it from published weights, save it and load it again.

An encoder is saved as two files, `NAME.safetensors` with the weights and `NAME.json` with the settings that build it.
"""

import difflib
import inspect
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from encoders import navit, sam_vit, swin, twins, vit
from encoders.base import Encoder, Features
from encoders.formats.checkpoint import load_weights
from encoders.formats.report import Report
from encoders.navit import NaViT
from encoders.sam_vit import SAMViT
from encoders.swin import Swin
from encoders.twins import Twins
from encoders.vit import ViT

__all__ = ["VARIANTS", "Encoder", "Features", "Report", "build", "family", "load", "load_weights", "save"]

VARIANTS: dict[str, dict[str, Any]] = {
    name: {"family": family, **settings}
    for family, variants in (
        (ViT, vit.VARIANTS),
        (Swin, swin.VARIANTS),
        (NaViT, navit.VARIANTS),
        (SAMViT, sam_vit.VARIANTS),
        (Twins, twins.VARIANTS),
    )
    for name, settings in variants.items()
}


def family(variant: str) -> type[Encoder]:
    """The class that builds a variant; its constructor arguments are the variant's settings.

    Raises:
        ValueError: there is no such variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown encoder {variant!r}{_nearest(variant, VARIANTS)}; known are {', '.join(VARIANTS)}")
    return VARIANTS[variant]["family"]


def build(variant: str, **settings: Any) -> Encoder:
    """A freshly initialised encoder: the variant's settings, changed by `settings`. `.settings` keeps all of them.

    Raises:
        ValueError: the variant or a setting is unknown, or a value is out of range.
    """
    constructor = family(variant)
    known = inspect.signature(constructor).parameters
    for name in settings:
        if name not in known:
            raise ValueError(f"unknown setting {name!r} of {variant}{_nearest(name, known)}")
    defaults = {name: parameter.default for name, parameter in known.items()}
    published = {name: value for name, value in VARIANTS[variant].items() if name != "family"}
    resolved = defaults | published | settings
    try:
        encoder = constructor(**resolved)
    except TypeError as error:
        raise ValueError(f"a setting of {variant} has a value of the wrong kind: {error}") from error
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in resolved.items()}
    encoder.settings = {"variant": variant, **plain}
    return encoder


def save(encoder: Encoder, path: str | Path):
    """Write the weights to `path` (.safetensors) and the settings beside it. A reader never meets half a file.

    Raises:
        ValueError: the encoder was not made by `build`, or `path` has another ending.
    """
    weights, description = _files(path)
    if not hasattr(encoder, "settings"):
        raise ValueError("the settings of this encoder are not known: make it with encoders.build")
    state = {name: value.detach().cpu().contiguous() for name, value in encoder.state_dict().items()}
    _replace(weights, lambda file: save_file(state, file))
    _replace(description, lambda file: file.write_text(json.dumps(encoder.settings, indent=2) + "\n"))


def load(path: str | Path) -> Encoder:
    """The encoder that `save` wrote to `path` (.safetensors), in evaluation mode.

    Raises:
        ValueError: `path` is not such a file, or its settings are not beside it or do not fit.
    """
    weights, description = _files(path)
    if not description.is_file():
        raise ValueError(
            f"{description} is missing, which says how to build the encoder; "
            "without it, make one with encoders.build and fill it with encoders.load_weights"
        )
    settings = json.loads(description.read_text())
    if "variant" not in settings:
        raise ValueError(f"{description} does not describe an encoder: it names no variant")
    encoder = build(**settings)
    try:
        encoder.load_state_dict(load_file(weights))
    except RuntimeError as error:
        raise ValueError(f"{weights} does not belong to the settings in {description}: {error}") from error
    return encoder.eval()


def _files(path: str | Path) -> tuple[Path, Path]:
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"an encoder is a .safetensors file with its .json beside it, not {path}")
    return path, path.with_suffix(".json")


def _replace(path: Path, write: Callable[[Path], Any]):
    """Have `write` fill a file beside `path`, then put it in its place at once."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.touch()
        mode = beside.stat().st_mode
        write(beside)
        beside.chmod(mode)  # save_file lets nobody else read
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _nearest(unknown: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(unknown, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
