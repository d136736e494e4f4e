"""Build encoders by name, fill them with published weights, save them and load them.

An encoder is saved as two files: `NAME.safetensors` holds the weights, `NAME.json` holds the settings and the
preprocessing.

Another package registers its encoder family by adding one entry per variant to `VARIANTS`. The value of an entry holds
the class of the encoder and the settings that differ from the defaults of the constructor:

    encoders.VARIANTS["my_vit_small"] = {"family": MyViT, "dim": 384, "depth": 12}

`MyViT` derives from `Encoder` and takes all settings as keyword arguments with defaults. To load published weights into
encoders of the new family, also add a module for their file format to `encoders.formats.checkpoint.FORMATS`.
"""

import difflib
import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from encoders import navit, published, sam_vit, swin, twins, vit
from encoders.base import IMAGENET, Encoder, Features, Preprocessing
from encoders.errors import EncoderError, WeightsError
from encoders.formats.checkpoint import load_weights, recognise
from encoders.formats.report import Report
from encoders.navit import NaViT
from encoders.sam_vit import SAMViT
from encoders.swin import Swin
from encoders.twins import Twins
from encoders.vit import ViT
from runtime.files import atomic_write

__all__ = [
    "IMAGENET",
    "VARIANTS",
    "Encoder",
    "EncoderError",
    "Features",
    "Preprocessing",
    "Report",
    "WeightsError",
    "build",
    "describe_published",
    "family",
    "load",
    "load_weights",
    "read_description",
    "read_step",
    "save",
]

WEIGHTS = "encoder.safetensors"
"""Name of the encoder's file in the folder of a run or of a checkpoint."""
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
"""Map from the name of each variant to a dictionary. The entry "family" of the dictionary is the class of the encoder.
All other entries are settings that differ from the defaults of the class."""


def family(variant: str) -> type[Encoder]:
    """Return the encoder class of a variant. The settings of an encoder are the constructor arguments of its class.

    Raises:
        EncoderError: the variant is unknown.
    """
    if variant not in VARIANTS:
        hint = _nearest(variant, VARIANTS)
        raise EncoderError(f"Unknown encoder {variant!r}.{hint} Known encoders: {', '.join(VARIANTS)}.")
    return VARIANTS[variant]["family"]


def build(variant: str, **settings: Any) -> Encoder:
    """Build an encoder with newly initialised weights. `settings` override the settings of the variant.

    The attribute `settings` of the encoder holds the name of the variant and all settings, including defaults.

    Raises:
        EncoderError: the variant or a setting is unknown, or a setting has an invalid value.
    """
    constructor = family(variant)
    known = inspect.signature(constructor).parameters
    for name in settings:
        if name not in known:
            raise EncoderError(f"Unknown setting {name!r} of {variant}.{_nearest(name, known)}")
    defaults = {name: parameter.default for name, parameter in known.items()}
    published = {name: value for name, value in VARIANTS[variant].items() if name != "family"}
    resolved = defaults | published | settings
    try:
        encoder = constructor(**resolved)
    except TypeError as error:
        raise EncoderError(f"A setting of {variant} has a value of the wrong type: {error}.") from error
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in resolved.items()}
    encoder.settings = {"variant": variant, **plain}
    return encoder


def save(encoder: Encoder, path: str | Path, *, step: int | None = None):
    """Write the weights of an encoder to `path` (.safetensors), and its settings to a .json file of the same name.

    The .json file also holds the preprocessing. Each of the two files is written atomically.

    Args:
        encoder: encoder made by `build`.
        path: file to write.
        step: number of optimizer steps after which the encoder has these weights. The .json file then holds the step,
            so that the results of evaluations can name it.

    Raises:
        EncoderError: the encoder was not made by `encoders.build`, or `path` does not end in .safetensors.
    """
    weights, description = _files(path)
    if not hasattr(encoder, "settings"):
        raise EncoderError("The settings of this encoder are unknown. Make the encoder with encoders.build.")
    state = {name: value.detach().cpu().contiguous() for name, value in encoder.state_dict().items()}
    preprocessing = {"mean": list(encoder.preprocessing.mean), "std": list(encoder.preprocessing.std)}
    with atomic_write(weights) as file:
        save_file(state, file)
    described = encoder.settings | {"preprocessing": preprocessing} | ({} if step is None else {"step": step})
    with atomic_write(description) as file:
        file.write_text(json.dumps(described, indent=2) + "\n")


def load(path: str | Path) -> Encoder:
    """Return the encoder that `save` wrote to `path`, a .safetensors file. The returned encoder is in evaluation mode.

    `path` may also be the folder of a run or of a checkpoint, or `timm:NAME` for a pretrained model of timm.

    Raises:
        EncoderError: the .json file next to `path` is missing or does not describe an encoder.
        WeightsError: the weights do not fit the settings, or timm has no weights of this name.
    """
    if published.is_name(path):
        state, preprocessing = published.fetch(path)
        encoder = build(**recognise(state).describe(state))
        load_weights(encoder, state)
        encoder.preprocessing = preprocessing
        return encoder.eval()
    path = Path(path)
    if path.is_dir():
        path = next((place for place in places(path) if place.is_file()), path)
    weights, description = _files(path)
    settings, preprocessing = read_description(description)
    encoder = build(**settings)
    try:
        encoder.load_state_dict(load_file(weights))
    except RuntimeError as error:
        raise WeightsError(f"The weights in {weights} do not fit the settings in {description}: {error}") from error
    encoder.preprocessing = preprocessing
    return encoder.eval()


def places(folder: Path) -> list[Path]:
    """Return the files in which a run folder or the folder of a checkpoint may hold its encoder, best first."""
    return [folder / WEIGHTS, folder / "checkpoints" / "latest" / WEIGHTS]


def read_description(path: str | Path) -> tuple[dict[str, Any], Preprocessing]:
    """Read the .json file of a saved encoder. Return the arguments of `build` and the preprocessing.

    If the file contains no preprocessing, return `IMAGENET` as the preprocessing.

    Raises:
        EncoderError: the file is missing, or does not describe an encoder.
    """
    path = Path(path)
    if not path.is_file():
        raise EncoderError(
            f"{path} is missing. This file holds the settings of the encoder. If you do not have the file, build the "
            "encoder with encoders.build, and load the weights with encoders.load_weights."
        )
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise EncoderError(f"{path} is not a JSON file: {error}.") from error
    if not isinstance(settings, dict) or "variant" not in settings:
        raise EncoderError(f'{path} does not describe an encoder. The file has no key "variant".')
    settings.pop("step", None)
    return settings, _preprocessing(settings.pop("preprocessing", None), path)


def describe_published(name: str) -> tuple[dict[str, Any], Preprocessing]:
    """Return the arguments of `build` and the preprocessing for `timm:NAME`, a pretrained model of timm.

    Raises:
        WeightsError: timm has no weights of this name, or no encoder fits them.
    """
    state, preprocessing = published.fetch(name)
    return recognise(state).describe(state), preprocessing


def read_step(path: str | Path) -> int | None:
    """Return the step of a saved encoder, a .safetensors file, or None if `save` was called without a step."""
    _, description = _files(path)
    return json.loads(description.read_text()).get("step")


def _preprocessing(described: Any, path: Path) -> Preprocessing:
    if described is None:
        return IMAGENET
    try:
        mean, std = (tuple(map(float, described[name])) for name in ("mean", "std"))
    except (KeyError, TypeError, ValueError) as error:
        form = '{"mean": [...], "std": [...]}'
        raise EncoderError(f'"preprocessing" in {path} must be {form}, not {described!r}.') from error
    return Preprocessing(mean, std)


def _files(path: str | Path) -> tuple[Path, Path]:
    path = Path(path)
    if path.suffix != ".safetensors":
        folder = " The folder holds no encoder of a run." if path.is_dir() else ""
        raise EncoderError(f"{path} must end in .safetensors.{folder}")
    return path, path.with_suffix(".json")


def _nearest(unknown: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(unknown, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
