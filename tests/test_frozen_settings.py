"""All settings of all commands, with types and defaults, beside tests/frozen_settings.txt.

So a reviewer sees a changed default as a changed line of that file. `python tests/test_frozen_settings.py` writes it.
A line holds the part of the project that owns the setting, the command, the name, the type and the default.
"""

import argparse
import contextlib
import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from tessera import __main__ as command_line
from tessera.pretrain.methods import METHODS
from tessera.runtime import settings

COMMANDS = command_line.COMMANDS | command_line.installed_commands()
FILE = Path(__file__).with_name("frozen_settings.txt")
EXTRAS = Path(__file__).parents[1] / "extras"
REWRITE = "python tests/test_frozen_settings.py"


class Found(BaseException):
    """A command has asked for its command line to be parsed. The argument is the class of its settings, or a parser."""


def parser_of(module: str, patch: pytest.MonkeyPatch) -> Any:
    """Return the class of settings with which a command parses its command line, or its `ArgumentParser`."""

    def found(parser: Any, *given: Any, **named: Any) -> None:
        raise Found(parser)

    patch.setattr(settings, "help_text", found)
    patch.setattr(argparse.ArgumentParser, "parse_known_args", found)
    patch.setattr(sys, "argv", ["tessera", "--help"])
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(Found) as raised:
        importlib.import_module(module).main()
    return raised.value.args[0]


def owner(module: str) -> str:
    """Return the part of this project that a module belongs to: `core`, `extras.NAME`, or `other` for a package."""
    first, _, rest = module.partition(".")
    if first != "tessera":
        return "other"
    return ".".join(rest.split(".")[:2]) if rest.startswith("extras.") else "core"


def lines_of_settings(model: type[settings.Section], own: str) -> Iterator[tuple[str, str]]:
    """Yield the owner and the text of each setting of a class of settings."""
    for name, field in settings.settings_of(model).items():
        section = METHODS.get(name.partition(".")[0]) if "." in name else None
        text = f"{name}: {settings._type_name(field.annotation)} = {default_of(field)}"
        yield owner(section.__module__) if section else own, text


def default_of(field: FieldInfo) -> str:
    """Return the default of a field as text."""
    if field.is_required():
        return "required"
    if field.default_factory_takes_validated_data:
        return "computed from other settings"
    return repr(field.get_default(call_default_factory=True))


def lines_of_parser(parser: argparse.ArgumentParser, own: str, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the owner and the text of each argument of a parser and of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from lines_of_parser(inner, own, f"{before}{name} ")
        elif not isinstance(action, argparse._HelpAction):
            kind = getattr(action.type, "__name__", None) or type(action).__name__.strip("_").removesuffix("Action")
            if action.choices:
                kind = "|".join(map(str, action.choices))
            flag = " ".join(action.option_strings) or action.dest
            command = flag.removeprefix("--").removesuffix("-flags").replace("-", "_")  # that a job of SLURM runs
            part = owner(COMMANDS[command][0]) if command in COMMANDS else own
            yield part, f"{before}{flag}: {kind} = {action.default!r}"


def current() -> list[str]:
    """Return the lines of all settings of this project, without those of other installed packages."""
    lines, known = [], dict[str, str]()
    for command, (module, _) in COMMANDS.items():
        own = owner(module)
        if own == "other":
            continue
        with pytest.MonkeyPatch.context() as patch:
            parser = parser_of(module, patch)
        described: list[tuple[str, str]] = []
        if isinstance(parser, argparse.ArgumentParser):
            described = list(lines_of_parser(parser, own))
        elif isinstance(parser, type):
            described = list(lines_of_settings(parser, own))
        first = known.setdefault(str([text for _, text in described]), command)
        if described and first != command:
            described = [(own, f"has the settings of {first}")]
        lines += [f"{part} {command} {text}" for part, text in described if part != "other"]
    return sorted(lines)


def deleted(line: str) -> bool:
    """Return True for a setting of an extra whose folder is not there."""
    own, _, name = line.split()[0].partition(".")
    return own == "extras" and not (EXTRAS / name).exists()


def changes(old: list[str], new: list[str]) -> str:
    """Return the lines that only one of two lists has."""
    removed, added = ([line for line in a if line not in b] for a, b in ((old, new), (new, old)))
    return "\n".join([*(f"- {line}" for line in removed), *(f"+ {line}" for line in added)])


@pytest.mark.medium
def test_settings_are_as_frozen() -> None:
    frozen = [line for line in FILE.read_text().splitlines() if not deleted(line)]
    found = current()
    changed = changes(frozen, found)
    assert frozen == found, f"Settings differ from {FILE.name}. If this is intended, run `{REWRITE}`.\n{changed}"


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):  # some commands print their help
        lines = current()
    print(changes(FILE.read_text().splitlines(), lines) or "no setting has changed")
    FILE.write_text("".join(f"{line}\n" for line in lines))
