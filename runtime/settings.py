"""Settings of a command: defaults, then a YAML file, then flags, checked and typed by pydantic.

A command declares one pydantic model; every field is a flag (`--section.key value`), a YAML key and a line of `--help`.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as UnreadableValue

from runtime.errors import UserError


class Section(BaseModel):
    """A group of settings. The docstring below a field is its help text; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, frozen=True)


class Settings(BaseSettings):
    """The settings of one command. Reads nothing from the environment: what a run did is in its files and flags."""

    model_config = SettingsConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # else a variable STEPS or SEED of the shell would be a setting


SettingsT = TypeVar("SettingsT", bound=BaseSettings)


class SettingsError(UserError, ValueError):
    """A setting that is unknown or out of range. The message is meant for the user."""


class _Parser(argparse.ArgumentParser):
    """Refuses by exception, so that the caller can add what it knows."""

    def error(self, message: str):
        raise SettingsError(message)


def names(model: type[BaseModel], prefix: str = "", only: Any = None) -> list[str]:
    """Dotted names of all settings of a model, or of those of one type, also where that may be None; `list[str]` finds
    what may also be a string."""
    found = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += names(field.annotation, f"{prefix}{name}.", only)
            continue
        types = set(get_args(field.annotation))
        if only is None or field.annotation is only or {str, only} <= types or {NoneType, only} == types:
            found.append(prefix + name)
    return found


def suggestion(unknown: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` or nothing."""
    close = difflib.get_close_matches(unknown, known, n=1, cutoff=0.5)
    if not close:  # perhaps the section was forgotten: `lr` for `optim.lr`
        close = [name for name in known if name.rpartition(".")[2] == unknown.rpartition(".")[2]][:1]
    return f"; did you mean '{close[0]}'?" if close else ""


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries, later ones winning."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = merged.get(key)
            merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file.

    Raises:
        SettingsError: the file is missing or is not a mapping.
    """
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read the settings file {path}: {error}") from error
    if not isinstance(values or {}, dict):
        raise SettingsError(f"the settings file {path} must hold `name: value` lines, not a {type(values).__name__}")
    return values or {}


def _switches(model: type[BaseModel], argv: Sequence[str]) -> list[str]:
    """Allows `--name true` and `--name=false` where argparse knows `--name` and `--no-name`."""
    known = set(names(model, only=bool))
    plain: list[str] = []
    rest = list(argv)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag.removeprefix("--") in known:
            if not equals and rest and rest[0].lower() in ("true", "false"):
                value = rest.pop(0)
            off = value.lower() == "false"
            plain.append(
                f"--no-{flag[2:]}" if off else f"{flag}" if value.lower() in ("", "true") else f"{flag}={value}"
            )
        else:
            plain.append(flag + equals + value)
    return plain


def _lists(model: type[BaseModel], argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Settings that are a string or a list of strings, and the other arguments.

    A string stays as it is, so that the commas and braces of `{a,b}-{0..3}.tar` split nothing; a list is the flag
    again and again, or JSON.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in names(model, only=list[str]):
        parser.add_argument(f"--{name}", action="append")
    taken, rest = parser.parse_known_args(argv)
    found: dict[str, Any] = {}
    for name, strings in vars(taken).items():
        try:
            values = [json.loads(s) if s.startswith(('["', '{"')) else s for s in strings]
        except json.JSONDecodeError as error:
            raise SettingsError(f"--{name} is no JSON: {error}") from error
        value: Any = values[0] if len(values) == 1 else values
        for part in reversed(name.split(".")):
            value = {part: value}
        found = merge(found, value)
    return found, rest


def _singles(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes what the parser makes of one number where a number or several can stand: `8` of the list `[8]`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        field = model.model_fields.get(name)
        kind = field and field.annotation
        if isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, BaseModel):
            value = _singles(kind, value)
        elif isinstance(value, list) and len(value) == 1 and get_origin(kind) in (Union, UnionType):
            value = value[0] if {int, float} & set(get_args(kind)) else value
        found[name] = value
    return found


def flags(model: type[SettingsT], argv: Sequence[str], program: str) -> dict[str, Any]:
    """What the command line sets, as nested dictionaries. Handles `--help`.

    Raises:
        SettingsError: an unknown flag, with the nearest known one.
    """
    parser = _Parser(prog=program, description=model.__doc__, allow_abbrev=False)
    known = names(model)
    try:
        lists, rest = _lists(model, argv)
        values = merge(CliSettingsSource(model, root_parser=parser, cli_parse_args=_switches(model, rest))(), lists)
        return _singles(model, values)
    except UnreadableValue as error:  # a list or mapping that is not JSON
        raise SettingsError(f"{str(error).splitlines()[0]}: {error.__cause__ or error}") from error
    except SettingsError as error:
        first = next((a for a in str(error).split() if a.startswith("--")), "")
        unknown = first.lstrip("-").rstrip(":").split("=")[0]
        hint = suggestion(unknown, known) if unknown and unknown not in known else ""
        raise SettingsError(f"{error}{hint.replace(chr(39), chr(39) + '--', 1)}") from error


def validate(model: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """Typed settings from nested dictionaries.

    Raises:
        SettingsError: one line for each setting that is unknown (with the nearest known one) or out of range.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"] if not str(part).endswith("]"))
            if problem["type"] == "extra_forbidden":
                lines.append(f"unknown setting '{name}'{suggestion(name, names(model))}")
            else:
                lines.append(f"{name or 'settings'}: {problem['msg']} (got {problem['input']!r})")
        raise SettingsError("\n".join(lines)) from None


def parse(model: type[SettingsT], argv: Sequence[str] | None = None) -> SettingsT:
    """Settings of a simple command from its flags; prints what is wrong and exits with 2."""
    program = Path(sys.argv[0]).name
    try:
        return validate(model, flags(model, sys.argv[1:] if argv is None else argv, program))
    except SettingsError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
