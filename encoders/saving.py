"""Save encoders to files, and load them.

An encoder is saved as two files: `NAME.safetensors` holds the weights, `NAME.json` holds the settings and the
preprocessing.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tessera.encoders.base import IMAGENET, Encoder, Preprocessing
from tessera.encoders.checks import check_finite, check_settings
from tessera.encoders.errors import EncoderError, WeightsError
from tessera.encoders.loading import Report, check_names, check_shapes, check_values
from tessera.encoders.registry import backbone, build, family, unknown_prefix
from tessera.encoders.weight_files import load_weights, read, recognise, unwrap
from tessera.runtime.files import atomic_write, read_bounded
from tessera.runtime.isolation import own_modes
from tessera.runtime.user_error import printable

DESCRIPTION_BYTES = 2**20
"""Largest size in bytes of the .json file of an encoder."""
WEIGHTS = "encoder.safetensors"
"""Name of the weight file of the encoder in the folder of a run or of a checkpoint."""


def save(encoder: Encoder, path: str | Path, *, step: int | None = None):
    """Write the weights of an encoder to `path` (.safetensors), and its settings to a .json file of the same name.

    The .json file also holds the preprocessing. Each of the two files is written atomically.

    Args:
        encoder: encoder made by `build`.
        path: file to write.
        step: number of completed optimizer steps. The .json file stores this number, so that evaluations can report it.

    Raises:
        EncoderError: the encoder was not made by `encoders.build`, or `path` does not end in .safetensors.
    """
    weights, description = _files(path)
    if not hasattr(encoder, "settings"):
        raise EncoderError("The settings of this encoder are unknown. Make the encoder with encoders.build.")
    state = {name: value.detach().cpu().contiguous() for name, value in encoder.saved_state().items()}
    preprocessing = described_preprocessing(encoder.preprocessing)
    with atomic_write(weights) as file:
        save_file(state, file)
    described = encoder.settings | {"preprocessing": preprocessing} | ({} if step is None else {"step": step})
    with atomic_write(description) as file:
        file.write_text(json.dumps(described, indent=2) + "\n")


def described_preprocessing(preprocessing: Preprocessing) -> dict[str, Any]:
    """Return a preprocessing as JSON values: mean and std, and for images other than uint8 from 0 to 255 all fields."""
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(preprocessing).items()}
    usual = Preprocessing(preprocessing.mean, preprocessing.std)
    return {name: found[name] for name in ("mean", "std")} if preprocessing == usual else found


def as_saved(encoder: Encoder) -> Encoder:
    """Return the encoder that `load` would return for the files of `save`: `encoder` itself, or one without additions.

    An addition is a parameter that `encoders.build` does not make, such as a low-rank update.
    """
    state = encoder.saved_state()
    if state.keys() == encoder.state_dict().keys():
        return encoder
    with torch.device("meta"):
        plain = build(**encoder.settings)
    plain.load_state_dict(state, assign=True)
    plain.preprocessing = encoder.preprocessing
    return plain.eval()


@own_modes()
def load(path: str | Path) -> Encoder:
    """Return the encoder that `save` wrote to `path`, a .safetensors file. The returned encoder is in evaluation mode.

    `path` may also be the folder of a run or of a checkpoint, or weights of a backbone, such as `timm:NAME`. The files
    may be untrusted: no code in them is executed, and memory is allocated only if the settings fit the weights.

    Raises:
        EncoderError: the .json file next to `path` is missing or does not describe an encoder.
        WeightsError: the weights do not fit the settings, or are not finite floating-point numbers, or there are no
            weights of this name.
    """
    if origin := backbone(path):
        state, preprocessing = origin.fetch(path)
        encoder = build(**origin.settings(path, state))
        load_weights(encoder, state)
        encoder.preprocessing = preprocessing
        return encoder.eval()
    path = Path(path)
    if path.is_dir():
        path = next((place for place in places(path) if place.is_file()), path)
    weights, description = _files(path)
    settings, preprocessing = read_description(description)
    state = read(weights)
    try:
        with torch.device("meta"):
            own = build(**settings).state_dict()
    except RuntimeError as error:  # a tensor size overflows torch's integers
        raise EncoderError(f"{description} describes an encoder that is too large: {error}.") from error
    try:
        check_names(state, own, {})
        check_shapes(state, own, {})
        check_values({name: tensor for name, tensor in state.items() if own[name].is_floating_point()})
    except WeightsError as error:
        raise WeightsError(f"The weights in {weights} do not fit the settings in {description}. {error}") from error
    encoder = build(**settings)
    encoder.load_state_dict(state)
    encoder.preprocessing = preprocessing
    return encoder.eval()


def fitting(source: Path, variant: str | None, settings: dict[str, Any]) -> tuple[Encoder, Report]:
    """Build an encoder that fits the weights in `source`, and load the weights. Return the encoder and a report.

    Args:
        source: weight file, or folder of a run.
        variant: name of the encoder variant. None means the variant that fits the weights.
        settings: settings of the encoder, which override those of the weights.

    Raises:
        EncoderError: a setting is unknown or has an invalid value.
        WeightsError: the format is not recognised, or the weights do not fit.
    """
    source = source / "encoder.safetensors" if source.is_dir() else source
    description = source.with_suffix(".json")
    known: dict[str, Any] = {"variant": variant}
    preprocessing = IMAGENET
    origin = backbone(source)
    if origin is not None:
        checkpoint, preprocessing = origin.fetch(source)
        known = origin.settings(source, checkpoint) if variant is None else known
    else:
        checkpoint = read(source)
    if source.suffix == ".safetensors" and description.is_file():
        described, preprocessing = read_description(description)
        known = described if variant is None else known
    elif variant is None and origin is None:
        state = unwrap(checkpoint, Report())
        known = recognise(state).describe(state)
    encoder = build(**(known | settings))
    encoder.preprocessing = preprocessing
    return encoder, load_weights(encoder, checkpoint)


def places(folder: Path) -> list[Path]:
    """Return the paths at which a run folder or checkpoint folder may hold its encoder, in order of preference."""
    checkpoints = folder / "checkpoints"
    found = {int(path.name[5:]): path for path in checkpoints.glob("step-*") if path.name[5:].isdecimal()}
    newest, steps = max(found, default=0), [found[step] for step in sorted(found, reverse=True)]
    # On a disk without symlinks, `latest` does not exist.
    own, saved = folder / WEIGHTS, [place / WEIGHTS for place in (checkpoints / "latest", *steps)]
    # A run that is continued with more steps keeps the encoder of its earlier end until it ends again.
    step = read_step(own) if own.is_file() and own.with_suffix(".json").is_file() else None
    return [own, *saved] if step is None or step >= newest else [*saved, own]


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
    settings = _read_json(path)
    if "variant" not in settings:
        raise EncoderError(f'{path} does not describe an encoder. The file has no key "variant".')
    del settings["step"]
    preprocessing = _preprocessing(settings.pop("preprocessing", None), path)
    try:
        check_settings(settings["variant"], settings, family(settings["variant"]))
    except EncoderError as error:
        raise EncoderError(f"{path} does not describe an encoder. {error}") from error
    return settings, preprocessing


def read_step(path: str | Path) -> int | None:
    """Return the step of the encoder saved in `path` (.safetensors), or None if `save` was called without a step."""
    _, description = _files(path)
    return _read_json(description)["step"]


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of the .json file of an encoder. The entry "step" is a number, or None if it is missing."""
    try:
        described = json.loads(read_bounded(path, DESCRIPTION_BYTES))
    except (ValueError, RecursionError) as error:
        raise EncoderError(f"{path} is not a JSON file: {error}.") from error
    except OSError as error:
        raise EncoderError(f"{path} cannot be read: {error.strerror}.") from error
    if not isinstance(described, dict):
        raise EncoderError(f"{path} does not describe an encoder. The file must contain a JSON object.")
    step = described.setdefault("step", None)
    if step is not None and (not isinstance(step, int) or not 0 <= step < 2**53):
        raise EncoderError(f'"step" in {path} must be a number of optimizer steps, not {printable(repr(step)[:100])}.')
    return described


def _preprocessing(described: Any, path: Path) -> Preprocessing:
    if described is None:
        return IMAGENET
    try:
        mean, std = (check_finite(name, described[name]) for name in ("mean", "std"))
        if len(mean) != len(std) or min(std) <= 0:
            raise ValueError("std must have as many values as mean, all greater than 0")
        low, high = (
            None if described.get(name) is None else check_finite(name, described[name]) for name in ("low", "high")
        )
        nodata = described.get("nodata")
        nodata = nodata if nodata in (None, "auto") else float(nodata)
        fewer = described.get("fewer_channels", False)
        return Preprocessing(mean, std, described.get("pixel_type", "uint8"), low, high, nodata, fewer is True)
    except (KeyError, TypeError, ValueError) as error:
        form, given = '{"mean": [...], "std": [...]}', printable(repr(described)[:100])
        raise EncoderError(f'"preprocessing" in {path} must be {form}, not {given} ({error}).') from error


def _files(path: str | Path) -> tuple[Path, Path]:
    path = Path(path)
    if path.suffix != ".safetensors":
        folder = " The folder holds no encoder, because it contains no encoder.safetensors." if path.is_dir() else ""
        raise EncoderError(f"{path} must end in .safetensors.{folder}{unknown_prefix(path)}")
    return path, path.with_suffix(".json")
