"""The settings of a run that differ from their defaults, and where their values come from."""

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from tessera.pretrain.config import ONLY_FOR_THIS_START, RunConfig
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.method import RunSize
from tessera.runtime.settings import settings_of
from tessera.runtime.user_error import printable

SIZES = {
    "images": "the number of images",
    "batch_size": "the batch size",
    "steps": "the number of steps",
    "classes": "the number of classes",
    "accumulate": "accumulate",
}
"""Attributes of `RunSize` from which a method derives settings, in words."""


def layered(layers: Sequence[tuple[str, Mapping[str, Any]]], names: Sequence[str]) -> dict[str, str]:
    """Return the origin of each given setting: the name of the last layer that has it.

    Args:
        layers: name and nested settings of each layer. Later layers override earlier ones.
        names: dotted names of all settings.
    """
    found: dict[str, str] = {}
    for name in names:
        for origin, layer in layers:
            section, _, last = name.rpartition(".")
            values = layer.get(section) if section else layer
            if isinstance(values, Mapping) and last in values:
                found[name] = origin
    return found


def differing(given: RunConfig, config: RunConfig, images: int) -> dict[str, tuple[Any, str]]:
    """Return the settings of a run that differ from their defaults: name -> (value, origin).

    Args:
        given: the settings before values were derived.
        config: the settings of the run.
        images: number of training images.
    """
    default = type(config)()
    why = _reasons(given, config, images)
    found: dict[str, tuple[Any, str]] = {}
    for name in settings_of(type(config)):
        section = name.partition(".")[0]
        if section in ONLY_FOR_THIS_START or (section in METHODS.names() and section != config.method):
            continue
        if name == "source.commands":  # a dry run runs no commands
            continue
        value = _value(config, name)
        usual = _value(RunConfig() if name == "encoder.variant" else default, name)
        if value == usual or (name in ("data.mean", "data.std") and not given.data.needs_statistics):
            continue
        if value == _value(given, name):
            found[name] = value, given.origins.get(name, f"derived: follows from other settings of {section}")
        else:
            found[name] = value, f"derived: {why.get(name, f'default of {config.method}')}"
    return found


def _value(config: BaseModel, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _reasons(given: RunConfig, config: RunConfig, images: int) -> dict[str, str]:
    """Return why the run derives the values of settings that were not given."""
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        precision = "that of the launcher"
    elif config.gpu is not None:
        precision = "faster on the named GPU"
    else:
        precision = "faster on this device" if config.precision == "bf16" else "bf16 is not faster on this device"
    reasons = {
        "batch_size": f"a 64th of {images:,} images, as a power of two from 64 to 512",
        "steps": f"{given.epochs or 100:g} epochs of {images:,} images",
        "record_every": "a tenth of the steps, at most 50",
        "precision": precision,
        "evaluate_every": "one epoch",
        "data.mean": "measured on the images",
        "data.std": "measured on the images",
        "encoder.channels": "data.channels",
        "encoder.bf16_residuals": "precision bf16 on a GPU",
        "evaluation.train": "the embedded digits",
        "evaluation.val": "the embedded digits",
        "stream.growth": "shards were added",
    }
    assert config.batch_size is not None
    assert config.steps is not None
    classes = getattr(config.method_config, "classes", None)
    size = RunSize(images, config.batch_size, config.steps, classes, config.accumulate, config.init_from is not None)
    own, depends = _resolved(given, size), dict[str, list[str]]()
    for attribute, words in SIZES.items():
        try:
            other = _resolved(given, replace(size, **{attribute: 4 * (getattr(size, attribute) or 1)}))
        except ValueError:
            continue  # the method does not support this size
        for name, value in own.items():
            if other[name] != value:
                depends.setdefault(name, []).append(words)
    return reasons | {name: " and ".join(words) for name, words in depends.items()}


def _resolved(given: RunConfig, size: RunSize) -> dict[str, Any]:
    """Return the settings of the method and of the optimizer for a size of the run, by their dotted names."""
    method, optim = METHODS[given.method].resolve(given.method_config, given.optim, size)
    return {f"{given.method}.{name}": value for name, value in method} | {f"optim.{n}": value for n, value in optim}


def described(found: Mapping[str, tuple[Any, str]], most: int | None = None, width: int = 118) -> list[str]:
    """Return lines that state settings, grouped by their origin.

    Args:
        found: result of `differing`.
        most: largest number of lines. If there are more, the last line counts the settings that are left out.
        width: largest number of characters of a line.
    """
    groups: dict[str, list[str]] = {}
    for name, (value, origin) in found.items():
        groups.setdefault(origin, []).append(f"{name} {printable(_shown(value))}")
    lines: list[str] = []
    for origin, names in sorted(groups.items(), key=lambda group: group[0].startswith("derived")):
        # no break inside a setting
        text = ", ".join(one.replace(" ", "\N{NO-BREAK SPACE}") for one in names)
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        wrapped = textwrap.wrap(f"{printable(origin)}: {text}", width, subsequent_indent="    ", **options)
        lines += [f"  {line}".replace("\N{NO-BREAK SPACE}", " ") for line in wrapped]
    if most is not None and len(lines) > most:
        left = sum(line.count(", ") + 1 for line in lines[most - 1 :])
        lines = [*lines[: most - 1], f"  and about {left} more: --dry_run full"]
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ",".join(map(_shown, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
