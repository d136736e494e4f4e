"""Merge the settings of a run from defaults, a settings file, and a command line or Python values."""

import glob
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from braceexpand import braceexpand

from tessera import encoders
from tessera.pretrain.config import RunConfig, settings_model
from tessera.pretrain.methods import METHODS
from tessera.pretrain.origins import layered
from tessera.runtime.settings import (
    SettingsError,
    flags,
    flattened,
    merge,
    peek,
    read_yaml,
    section_type,
    settings_of,
    suggestion,
    validate,
)
from tessera.runtime.user_error import printable

log = logging.getLogger(__name__)

PRETRAINED = ",pretrained"
"""End of `--encoder timm:NAME,pretrained`, which is short for `--encoder timm:NAME --init_from timm:NAME`."""
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
    if (topic := peek(argv, "help")) in METHODS:
        _ = METHODS[topic]  # import a method of another package, so that `--help METHOD` knows its settings
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
    the config.yaml of the run to resume, the settings file, and `given(model, method)`, where `model` is the settings
    class.

    Args:
        early: the given settings that determine the settings class and its defaults: method, config, output, init_from,
            resume, encoder.variant and data.shards. Other settings are ignored.
        given: function that returns all given settings.
        origin: name of these settings in the plan of a run.
    """
    config, output = early.get("config"), early.get("output")
    shards, encoder = (
        (early.get(section) or {}).get(name) for section, name in (("data", "shards"), ("encoder", "variant"))
    )
    own = Path(output) / "config.yaml" if output and early.get("resume") else None
    # `merge` expands short forms such as `data: SHARDS`
    run = merge(RunConfig, read_yaml(own)) if own and own.exists() else {}
    run = from_folder(run, own.with_name("machine.jsonl")) if own else run
    named_file = merge(RunConfig, read_yaml(settings_file(config))) if config else {}
    if pretrained := str(encoder).endswith(PRETRAINED):
        encoder = _pretrained(str(encoder), early.get("init_from"))
    for saved in (run, named_file):
        if is_saved(saved) and isinstance(saved["optim"], Mapping):
            saved["optim"] = {"encoder_lr_factor": 1.0} | dict(saved["optim"])  # older versions did not store it
    file = merge(RunConfig, *one_length([run, named_file]))
    method = early.get("method") or file.get("method", "dino")
    if not isinstance(method, str) or method not in METHODS:
        shown, known = printable(str(method)[:200]), METHODS.names()
        raise SettingsError(
            f"unknown method '{shown}'{suggestion(shown, known)} (known: {', '.join(known)}). {METHODS.elsewhere}"
        )
    _ = METHODS[method]  # import a method of another package, so that `settings_model` has a section for it
    file_data = file.get("data") or {}
    if config and not shards and "shards" not in file_data:  # `shards: null` means the embedded digits
        raise SettingsError(f"{config} names no data. Give --data SHARDS.")
    digits = PRESETS / f"digits_{method}.yaml"
    use_preset = not (shards or file_data.get("shards")) and digits.exists()
    preset = merge(RunConfig, read_yaml(digits)) if use_preset else {}
    saved = (file.get("encoder") or {}).get("variant")
    preset_variant = preset.get("encoder", {}).get("variant")
    source = encoder if pretrained else early.get("init_from") or file.get("init_from")
    start = started_encoder(source) if isinstance(source, str) and not run else {}  # `validate` refuses other types
    variant = encoder or saved or start.get("variant") or preset_variant or "vit_small"
    trained = (run.get("encoder") or {}).get("variant")
    if trained and variant != trained:
        raise SettingsError(
            f"The run in {output} trains {trained}, not {variant}. Remove the other encoder, or choose another output."
        )
    if variant != preset_variant:  # the preset's encoder settings apply only to the preset's variant
        preset.pop("encoder", None)
    data = {"data": start.pop("data")} if start else {}
    model = settings_model(variant, start if start.pop("variant", None) == variant else None)
    if variant != saved and config and settings_file(config).parent == PRESETS and "encoder" in named_file:
        of_family = settings_of(model)  # the preset has settings of its own encoder
        others = [name for name in named_file["encoder"] if f"encoder.{name}" not in of_family]
        if others and os.environ.get("RANK", "0") == "0":
            log.warning("%s has no settings %s. Those of %s are left out.", variant, ", ".join(others), config)
        named_file["encoder"] = {n: v for n, v in named_file["encoder"].items() if n not in others}
    chosen = {"encoder": {"variant": variant}}
    own_values = given(model, method)
    if pretrained:
        own_values = {**own_values, "init_from": encoder, "encoder": {**own_values["encoder"], "variant": encoder}}
    if not is_saved(named_file):
        check_method(named_file, method, f"{config}: ")
    check_method(own_values, method)
    layers = one_length([preset, data, run, named_file, chosen, own_values])
    refuse_code(file, own_values)
    weights = f"weights {source}"
    named = [
        f"preset {digits.stem}",
        weights,
        f"the run {output}",
        _file_name(config) if config else "",
        weights,
        origin,
    ]
    # `chosen` repeats the variant of another layer, except that of the weights
    order = (4, 0, 1, 2, 3, 5)
    origins = layered([(named[place], layers[place]) for place in order], [*settings_of(model)])
    return without_commands(validate(model, merge(model, *layers)).with_origins(origins), file, own_values)


def _file_name(config: Any) -> str:
    """Return the name of a settings file in the plan of a run: a preset, or another file."""
    path = settings_file(config)
    return f"preset {path.stem}" if path.parent == PRESETS else f"file {config}"


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
    return found


def _exists(shards: str) -> bool:
    """Return True if a file or folder matches a path, which may be a glob or a brace range."""
    try:
        return any(glob.glob(path) for path in [shards, *itertools.islice(braceexpand(shards), 1)])
    except ValueError:  # unbalanced braces
        return False


def _pretrained(encoder: str, init_from: Any) -> str:
    """Return the timm:NAME of `timm:NAME,pretrained`.

    Raises:
        SettingsError: the encoder is no model of timm, or other weights are given too.
    """
    name = encoder.removesuffix(PRETRAINED)
    shown = printable(name[:200])
    if not encoders.backbone(name):
        raise SettingsError(
            f"--encoder {shown}{PRETRAINED}: only models of timm have the ending {PRETRAINED}. Give --encoder {shown} "
            "and --init_from WEIGHTS."
        )
    if init_from:
        raise SettingsError(f"--encoder {shown}{PRETRAINED} loads weights of timm already. Remove --init_from.")
    return name


def refuse_code(file: Mapping[str, Any], own_values: Mapping[str, Any]) -> None:
    """Check that the user, and not only a settings file, names the code of the user that the run imports.

    A settings file may come from an untrusted source, so no code that it names is imported. `own_values` are the values
    of the command line or of Python.

    Raises:
        SettingsError: the settings file names code, and `own_values` do not set the same setting.
    """
    found = [
        (name, printable(" ".join([given] if isinstance(given, str) else map(str, given))))
        for name in CODE
        if (given := (file.get("data") or {}).get(name)) and name not in (own_values.get("data") or {})
    ]
    if found:
        names = [name for name, _ in found]
        raise SettingsError(
            "The settings file names code of yours, which only you may have run: "
            f"{' and '.join(f'data.{name} {shown}' for name, shown in found)}. Give it "
            f"again, as {' '.join(f'--data.{name} module:function' for name in names)} or as "
            f"{', '.join(f'{name}=...' for name in names)} in Python, or give "
            f"{' '.join(f'--data.{name} none' for name in names)}."
        )


def without_commands(config: RunConfig, file: Mapping[str, Any], own_values: Mapping[str, Any]) -> RunConfig:
    """Forbid `pipe:` commands if SHARDS come from a settings file, or for `--dry_run`. Return the new settings.

    A settings file may come from an untrusted source, so only `own_values`, which the user gave, can allow commands.

    Raises:
        SettingsError: the settings file sets `source.commands`.
    """
    if (file.get("source") or {}).get("commands") is not None:
        raise SettingsError("A settings file cannot set source.commands. Give the flag --source.commands.")
    from_file = any(
        (file.get(section) or {}).get(name) is not None and name not in (own_values.get(section) or {})
        for section, name in (("data", "shards"), ("evaluation", "train"), ("evaluation", "val"))
    )
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
    for other in METHODS:
        if other != method and values.get(other):
            name = next(iter(flattened({other: values[other]})))
            raise SettingsError(
                f"{where}{name} is a setting of the method {other}, but this run trains with {method}. "
                f"Remove the setting, or choose --method {other}."
            )


def one_length(layers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the layers of settings without the `steps` and `epochs` that a later layer overrides.

    Both set the length of the run, so `epochs` in one layer also overrides `steps` in an earlier layer.
    """
    kept: list[Mapping[str, Any]] = []
    replaced: set[str] = set()
    for layer in reversed(layers):
        kept.insert(0, {name: value for name, value in layer.items() if name not in replaced})
        if layer.get("steps") is not None or layer.get("epochs") is not None:
            replaced = {"steps", "epochs"}
    return kept


def started_encoder(init_from: str) -> dict[str, Any]:
    """Return the settings of the encoder that `init_from` names.

    The entry "data" contains the number of channels and the normalisation of the images. The result is empty for a
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
    data = {"channels": preprocessing.channels, "mean": preprocessing.mean, "std": preprocessing.std}
    return settings | {"data": data}
