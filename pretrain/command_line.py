"""Merge the settings of a run from defaults, a settings file, and a command line or Python values."""

import glob
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from braceexpand import braceexpand

from tessera import encoders
from tessera.pretrain.config import RECOMPUTE, RunConfig, settings_model, with_older_defaults
from tessera.pretrain.methods import METHODS
from tessera.runtime.settings import (
    Layer,
    Layers,
    SettingsError,
    flags,
    flattened,
    merge,
    peek,
    read_yaml,
    section_type,
    settings_of,
    suggestion,
)
from tessera.runtime.user_error import printable

log = logging.getLogger(__name__)

CODE = ("augment", "stages")
"""Settings of section `data` that name code of the user."""
SHARDS = {"data": ("shards",), "evaluation": ("train", "val", "maps_train", "maps_val")}
"""Settings that hold SHARDS, by section."""
PRESETS = Path(__file__).parent.parent / "configs"


def load(argv: Sequence[str]) -> RunConfig:
    """Return the settings of a run from its command line and its settings file.

    If no shards are given, the preset of the embedded digits supplies the defaults. `--resume` reads the run's own
    config.yaml; a file that --config names overrides only the settings that it has.

    Raises:
        SettingsError: a name is unknown, a value is out of range, or the run would ignore a setting.
    """
    argv = expand_resume(argv)
    early: dict[str, Any] = {name: peek(argv, name) for name in ("method", "config", "output", "init_from")}
    early["encoder"] = {"variant": peek(argv, "encoder") or peek(argv, "encoder.variant")}
    early["data"] = {"shards": peek(argv, "data") or peek(argv, "data.shards")}
    early["resume"] = "--resume" in argv
    if (topic := peek(argv, "help")) and topic in METHODS:
        _ = METHODS[topic]  # a broken package raises here
    return _complete(early, lambda model, method: flags(model, argv, Path(sys.argv[0]).name, method), "flags")


def from_values(values: Mapping[str, Any]) -> RunConfig:
    """Return the settings of a run from nested dictionaries, with the same defaults as `load`.

    Raises:
        SettingsError: a name is unknown, a value is out of range, or the run would ignore a setting.
    """
    if isinstance(run := values.get("resume"), (str, os.PathLike)):
        check_one_folder(os.fspath(run), values.get("output"))
        values = {**values, "resume": True, "output": os.fspath(run)}
    return _complete(merge(RunConfig, values), lambda model, _: merge(model, values), "Python")


def settings_file(config: str) -> Path:
    """Return the settings file that `--config` names: a path, or a preset by its name, such as cifar10_dino.

    Raises:
        SettingsError: there is neither a file nor a preset of this name.
    """
    path, presets = Path(config), [file.stem for file in sorted(PRESETS.glob("*.yaml"))]
    if path.exists():
        return path
    if config in presets:
        return PRESETS / f"{config}.yaml"
    hint = suggestion(path.stem, presets)
    known = "" if hint else f" (presets: {', '.join(presets)})"
    raise SettingsError(
        f"cannot read the settings file {printable(config[:200])}: there is neither a file nor a preset of this name"
        f"{hint or '.'}{known}"
    )


def expand_resume(argv: Sequence[str]) -> list[str]:
    """Return a command line in which `--resume RUN` is written as `--resume --output RUN`.

    Raises:
        SettingsError: `--output` names another folder.
    """
    words: list[str] = []
    for word in argv:
        if word.startswith("--resume=") and word.partition("=")[2].lower() not in ("true", "false"):
            run = word.partition("=")[2]
            words += ["--resume", "--output", run]
        elif words[-1:] == ["--resume"] and not word.startswith("--") and word.lower() not in ("true", "false"):
            run = word
            words += ["--output", run]
        else:
            words.append(word)
            continue
        check_one_folder(run, peek(argv, "output"))
    return words


def check_one_folder(run: str, output: object) -> None:
    """Check that `output`, if it is given, is the folder of the run to continue.

    Raises:
        SettingsError: it is another folder.
    """
    if not isinstance(output, (str, os.PathLike)) or _absolute(output) == _absolute(run):
        return
    shown, other = printable(run), printable(os.fspath(output))
    raise SettingsError(
        f"--output={other} contradicts the run to continue, {shown}. To continue it, leave --output out. To start "
        f"a new run from its weights, give --init_from={shown} and --output={other} without --resume; --config="
        f"{shown}/config.yaml gives it the same settings."
    )


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().resolve()


def _complete(
    early: Mapping[str, Any], given: Callable[[type[RunConfig], str], Mapping[str, Any]], origin: str
) -> RunConfig:
    """Return validated settings.

    Each layer overrides the earlier ones: the defaults, the preset of the embedded digits if the run has no other data,
    the description of the encoder that `init_from` names, the config.yaml of the run to resume, the settings file, and
    `given(model, method)`, where `model` is the settings class.

    Args:
        early: the given settings that determine the settings class and its defaults: method, config, output, init_from,
            resume, encoder.variant and data.shards. Other settings are ignored.
        given: function that returns all given settings.
        origin: name of these settings in the plan of a run.
    """
    early_layer, config = Layer(origin, early), early.get("config")
    encoder, shards = early_layer.get("encoder.variant"), early_layer.get("data.shards")
    run, file = _run_layer(early), _file_layer(config)
    files = Layers(RunConfig, run, file)
    method = _chosen_method(early.get("method") or files.get("method", "dino"))
    if config and not shards and files.layer_of("data.shards") is None:  # `shards: null` means the embedded digits
        raise SettingsError(f"{config} names no data. Give --data SHARDS.")
    preset = _digits_layer(method, used=not (shards or files.get("data.shards")))
    source = early.get("init_from") or files.get("init_from")
    # `validate` refuses other types
    start = started_encoder(source) if isinstance(source, str) and not run.values else {}
    described = {"data": start.pop("data"), "encoder": {"variant": start["variant"]}} if start else {}
    weights = Layer(f"weights {source}", described)
    saved = files.get("encoder.variant")
    variant = encoder or saved or start.get("variant") or preset.get("encoder.variant") or "vit_small"
    if (trained := run.get("encoder.variant")) and variant != trained:
        raise SettingsError(
            f"The run in {early['output']} trains {trained}, not {variant}. Remove the other encoder, or choose "
            "another output."
        )
    model = settings_model(variant, start if start.pop("variant", None) == variant else None)
    if variant != preset.get("encoder.variant"):  # the preset's encoder settings apply only to the preset's variant
        preset = replace(preset, values={name: value for name, value in preset.values.items() if name != "encoder"})
    if variant != saved and config and settings_file(config).parent == PRESETS:
        file = replace(file, values=_without_others(file.values, model, variant, config))
    own = given(model, method)
    if not is_saved(file.values):
        check_method(file.values, method, f"{config}: ")
    check_method(own, method)
    layers = Layers(model, preset, weights, run, file, Layer(origin, own, own=True))
    refuse_code(layers)
    return without_commands(layers)


def _run_layer(early: Mapping[str, Any]) -> Layer:
    """Return the settings in the config.yaml of the run to resume. They are empty if there is none."""
    output = early.get("output")
    file = Path(output) / "config.yaml" if output and early.get("resume") else None
    values = from_folder(_read(file), file.with_name("machine.jsonl")) if file and file.exists() else {}
    return Layer(f"the run {output}", values)


def _file_layer(config: Any) -> Layer:
    """Return the settings in the file that `--config` names."""
    if not config:
        return Layer("", {})
    path = settings_file(config)
    return Layer(f"preset {path.stem}" if path.parent == PRESETS else f"file {config}", _read(path))


def _digits_layer(method: str, *, used: bool) -> Layer:
    """Return the preset of the embedded digits. It is empty if the method has none, or the run does not use it."""
    file = PRESETS / f"digits_{method}.yaml"
    return Layer(f"preset {file.stem}", _read(file) if used and file.exists() else {})


def _read(file: Path) -> dict[str, Any]:
    """Return the settings in a file, without short forms."""
    values = merge(RunConfig, read_yaml(file))
    return with_older_defaults(values) if is_saved(values) else values


def _chosen_method(method: Any) -> str:
    """Return the name of the method, which is imported, so that `settings_model` has a section for it.

    Raises:
        SettingsError: there is no such method.
    """
    if not isinstance(method, str) or method not in METHODS:
        shown, known = printable(str(method)[:200]), METHODS.names()
        raise SettingsError(
            f"unknown method '{shown}'{suggestion(shown, known)} (known: {', '.join(known)}). {METHODS.elsewhere}"
        )
    _ = METHODS[method]
    return method


def _without_others(values: Mapping[str, Any], model: type[RunConfig], variant: str, preset: str) -> dict[str, Any]:
    """Return the settings of a preset without those of its own encoder that `variant` does not have."""
    encoder, known = values.get("encoder", {}), settings_of(model)
    others = [name for name in encoder if f"encoder.{name}" not in known]
    if others and os.environ.get("RANK", "0") == "0":
        log.warning("%s has no settings %s. Those of %s are left out.", variant, ", ".join(others), preset)
    return {**values, "encoder": {name: value for name, value in encoder.items() if name not in others}}


def from_folder(file: Mapping[str, Any], machine: Path) -> dict[str, Any]:
    """Return the settings of a run, whose relative SHARDS are found from other folders, too.

    Relative SHARDS that do not exist here become absolute, if they exist in the folder in which the run was started.

    Args:
        file: settings of the run's config.yaml.
        machine: machine.jsonl of the run, whose last line holds this folder.
    """
    try:
        folder = json.loads(machine.read_text().splitlines()[-1])["folder"]
    except (OSError, ValueError, LookupError, TypeError):
        return dict(file)  # a run of an older version, or one that did not start

    def absolute(shards: Any) -> Any:
        if isinstance(shards, list):
            return [absolute(one) for one in shards]
        if isinstance(shards, Mapping):
            return {absolute(one): weight for one, weight in shards.items()}
        if not isinstance(shards, str) or os.path.isabs(shards) or _exists(shards):
            return shards
        there = os.path.join(folder, shards)
        return there if _exists(there) else shards

    found = dict(file)
    if "labels" in file:
        found["labels"] = absolute(file["labels"])
    for section, names in SHARDS.items():
        if isinstance(given := file.get(section), Mapping):
            found[section] = {name: absolute(value) if name in names else value for name, value in given.items()}
    if isinstance(data := found.get("data"), dict) and isinstance(given := data.get("exclude"), str):
        names, colon, flags = given.partition(":")  # the flags of a .parquet
        data["exclude"] = absolute(names) + colon + flags
    return found


def _exists(shards: str) -> bool:
    """Return True if a file or folder matches a path, which may be a glob or a brace range."""
    try:
        return any(glob.glob(path) for path in [shards, *itertools.islice(braceexpand(shards), 1)])
    except ValueError:  # unbalanced braces
        return False


def refuse_code(layers: Layers) -> None:
    """Check that the user, and not only a settings file, names the code of the user that the run imports.

    A settings file may come from an untrusted source, so no code that it names is imported.

    Raises:
        SettingsError: the value of a setting that names code comes from a settings file.
    """
    found = {name: given for name in CODE if (given := layers.of_others(f"data.{name}"))}
    if found:
        shown = {
            name: printable(given if isinstance(given, str) else " ".join(map(str, given)))
            for name, given in found.items()
        }
        raise SettingsError(
            "The settings file names code of yours, which only you may have run: "
            f"{' and '.join(f'data.{name} {words}' for name, words in shown.items())}. Give it "
            f"again, as {' '.join(f'--data.{name} module:function' for name in found)} or as "
            f"{', '.join(f'{name}=...' for name in found)} in Python, or give "
            f"{' '.join(f'--data.{name} none' for name in found)}."
        )


def without_commands(layers: Layers) -> RunConfig:
    """Return the settings. They forbid `pipe:` commands if SHARDS come from a settings file, or for `--dry_run`.

    A settings file may come from an untrusted source, so only the user can allow commands.

    Raises:
        SettingsError: a setting is invalid, or a settings file sets `source.commands`.
    """
    config = cast(RunConfig, layers.validated())
    if any(layer.get("source.commands") is not None for layer in layers.layers if not layer.own):
        raise SettingsError("A settings file cannot set source.commands. Give the flag --source.commands.")
    from_file = any(layers.of_others(f"{section}.{name}") for section, names in SHARDS.items() for name in names)
    if config.dry_run or (from_file and config.source.commands is None):
        return config.model_copy(update={"source": config.source.model_copy(update={"commands": False})})
    return config


def is_saved(file: Mapping[str, Any]) -> bool:
    """Return True if a settings file has all sections, as the config.yaml that a run writes does."""
    return all(name in file for name, field in RunConfig.model_fields.items() if section_type(field))


def check_method(values: Mapping[str, Any], method: str, where: str = "") -> None:
    """Check that the settings have no section of a method other than `method`, because the run would ignore it.

    Args:
        values: settings as nested dictionaries.
        method: method of the run.
        where: start of the error message, such as the name of the settings file.

    Raises:
        SettingsError: the settings have a section of another method.
    """
    for other in METHODS.names():
        if other != method and values.get(other):
            name = next(iter(flattened({other: values[other]})))
            raise SettingsError(
                f"{where}{name} is a setting of the method {other}, but this run trains with {method}. "
                f"Remove the setting, or choose --method {other}."
            )


def started_encoder(init_from: str) -> dict[str, Any]:
    """Return the settings of the encoder that `init_from` names.

    The entry "data" contains the number of channels and the normalisation of the images, and their type and range if
    the weights have a range. The result is empty for a
    weight file that neither this project nor timm wrote, because such a file does not describe its encoder.

    Raises:
        SettingsError: the folder `init_from` contains no encoder, the description of the encoder cannot be read, or
            timm has no weights of this name.
    """
    # imported here, because the import takes seconds, and --help does not need it
    from tessera.evaluation.features import resolve_checkpoint

    try:
        if origin := encoders.backbone(init_from):
            state, preprocessing = origin.fetch(init_from)
            settings = origin.settings(init_from, state)
        else:
            file = resolve_checkpoint(init_from) if Path(init_from).is_dir() else Path(init_from)
            description = file.with_suffix(".json")
            if file.suffix != ".safetensors" or not description.is_file():
                return {}
            settings, preprocessing = encoders.read_description(description)
    except (ValueError, OSError) as error:
        raise SettingsError(f"init_from: {error}") from error
    settings.pop("channels", None)  # data.channels sets the number of channels
    settings.pop(RECOMPUTE, None)  # follows from the device
    data: dict[str, Any] = {"channels": preprocessing.channels, "mean": preprocessing.mean, "std": preprocessing.std}
    data |= {"fewer_channels": True} if preprocessing.fewer_channels else {}
    if preprocessing.low is not None and preprocessing.high is not None:
        data |= {"pixel_type": preprocessing.pixel_type, "nodata": preprocessing.nodata}
        data["range"] = tuple(itertools.chain.from_iterable(zip(preprocessing.low, preprocessing.high, strict=True)))
    return settings | {"data": data}
