"""The settings of a run that differ from their defaults, and where their values come from."""

import textwrap
from collections.abc import Mapping
from typing import Any

from tessera.pretrain.config import ONLY_FOR_THIS_START, RunConfig
from tessera.pretrain.methods import METHODS
from tessera.runtime.settings import settings_of, value_of
from tessera.runtime.user_error import printable


def differing(config: RunConfig) -> dict[str, tuple[Any, str]]:
    """Return the settings of a run that differ from their defaults: name -> (value, origin)."""
    default = type(config)()
    found: dict[str, tuple[Any, str]] = {}
    for name in settings_of(type(config)):
        section = name.partition(".")[0]
        if section in ONLY_FOR_THIS_START or (section in METHODS.names() and section != config.method):
            continue
        if name == "source.commands":  # a dry run runs no commands
            continue
        value = value_of(config, name)
        usual = value_of(RunConfig() if name == "encoder.variant" else default, name)
        if value == usual or _is_usual(config, name):
            continue
        found[name] = value, config.origins.get(name, f"derived: follows from other settings of {section}")
    return found


def _is_usual(config: RunConfig, name: str) -> bool:
    """Return True for pixels as in most runs: uint8, normalised with the values of ImageNet."""
    if name == "data.pixel_type":
        return config.data.pixel_type == "uint8" and config.given.data.pixel_type == "auto"
    measured = config.given.data.needs_statistics or config.data.range is not None
    return name in ("data.mean", "data.std") and not measured


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
