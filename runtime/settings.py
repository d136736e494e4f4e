"""Settings of a command, which pydantic validates. Flags override a YAML file, and the file overrides the defaults.

A command declares one pydantic model. Every field is a flag (`--section.key value`), a YAML key and a line of the help.

This module parses the flags itself, not with a command-line library, for three reasons. Sections may be made at run
time, for example from the constructor of an encoder. The forms `--flag`, `--no-flag` and `--flag true` must all work.
Shard patterns such as `{a,b}-{0..3}.tar` must not be split at commas.
"""

import difflib
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tessera.runtime.synonyms import LAUNCHER, NOTES, SETTINGS, VALUES
from tessera.runtime.user_error import UserError, printable, without_controls
from tessera.runtime.yaml_text import YAMLError, parse_yaml, read_yaml_file

WIDTH = 120  # characters in a line of the short help


class SettingsError(UserError, ValueError):
    """A setting is unknown, missing or invalid, or a settings file cannot be read."""


class _DerivedMarker:
    """Marks a field whose value the run derives if the user does not set the field."""


T = TypeVar("T")
if TYPE_CHECKING:
    Derived = Annotated[T, _DerivedMarker()]
    """Type of a setting that the run derives from other settings and from the data if it is not given. The value is
    None until `Section.filled` sets it. Code that needs the value runs after that."""
else:

    class Derived:
        def __class_getitem__(cls, kind: Any) -> Any:
            return Annotated[kind | None, _DerivedMarker()]


def derived(**limits: Any) -> Any:
    """Return the default of a field of type `Derived`. `limits` are arguments of pydantic's `Field`, such as `gt=0`."""
    return Field(default=None, **limits)


# This decorator lets pyright accept `class Child(Parent, frozen=True)`.
# Fields of frozen classes are read-only, so a child class may narrow the types of the fields.
@dataclass_transform(kw_only_default=True, field_specifiers=(Field, derived))
class Section(BaseModel):
    """Group of settings. The docstring below a field is the help text of the field. Unknown names raise an error, and
    so do numbers that are not finite."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, frozen=True, allow_inf_nan=False
    )

    short_form: ClassVar[str | None] = None
    """Name of the field that the short forms `--section VALUE` and `section: VALUE` set. None disables short forms."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return cls.expand(value)

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Return the settings of a section. A short form becomes `{short_form: value}`, and None becomes `{}`."""
        field = cls.model_fields.get(cls.short_form or "")
        if value is None and (field is None or types.NoneType not in _kinds(field.annotation)):
            return {}  # an empty section of a YAML file
        if cls.short_form is None or isinstance(value, BaseModel):
            return value
        if isinstance(value, Mapping):
            maybe_short = dict in _kinds(cls.model_fields[cls.short_form].annotation)
            if not maybe_short or not value or cls.model_fields.keys() & value.keys():
                return value
        return {cls.short_form: value}

    @property
    def set_values(self) -> dict[str, Any]:
        """Settings that some layer sets, without those that have the default of the class."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def filled(self, defaults: Mapping[str, Any]) -> Self:
        """Return the settings with `defaults` for settings that were not given or are None.

        Raises:
            TypeError: a setting of type `Derived` still has no value.
        """
        given = {name: value for name, value in self.set_values.items() if value is not None}
        filled = type(self)(**{**defaults, **given})
        for name, field in type(self).model_fields.items():
            if getattr(filled, name) is None and _is_derived(field):
                raise TypeError(f"{type(self).__name__}.{name} has no value. Derive it in `resolve`.")
        return filled


@dataclass_transform(kw_only_default=True, field_specifiers=(Field, derived))
class Settings(Section):
    """Base class for all settings of one command."""

    first_settings: ClassVar[tuple[str, ...]] = ()
    """Dotted names of the settings that `--help` lists without a topic. If empty, `--help` lists all settings."""
    alternatives: ClassVar[tuple[str, ...]] = ()
    """Settings of which only one is given. A layer that sets one of them hides all of them in earlier layers."""

    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _given: "Settings | None" = PrivateAttr(default=None)

    @property
    def origins(self) -> Mapping[str, str]:
        """Origin of each setting that has not its default, such as `flags` or `derived: 2 epochs of 1,000 images`."""
        return self._origins

    @property
    def given(self) -> Self:
        """The settings before `derive`."""
        return self if self._given is None else cast(Self, self._given)

    def derive(self, values: Mapping[str, Any], reasons: Mapping[str, str], otherwise: str = "") -> Self:
        """Return the settings with derived values.

        Args:
            values: derived sections and settings of no section.
            reasons: from what a value is derived, by the dotted name of the setting. `--dry_run` shows it.
            otherwise: reason for all other settings.

        Raises:
            SettingsError: a derived value is invalid.
        """
        found = validate(type(self), {**self.set_values, **values})
        changed = {name for name in settings_of(type(self)) if value_of(found, name) != value_of(self, name)}
        found._origins = {**self._origins, **{name: f"derived: {reasons.get(name, otherwise)}" for name in changed}}
        found._given = self.given
        return found


class _PositionalMarker:
    """Marks a field that is a positional argument of the command line, not a flag."""


Positional = Annotated[T, _PositionalMarker()]
"""Type of a field that is a positional argument of the command line, not a flag. A field with a list type takes all
remaining positional arguments."""

SettingsT = TypeVar("SettingsT", bound=Section)


def section_type(field: FieldInfo | None) -> type[Section] | None:
    """Return the class of a section if the type of `field` is a section, else None."""
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def settings_of(model: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Return the fields of a settings class and of its nested sections, as a dictionary from dotted name to field."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        section = section_type(field)
        found |= settings_of(section, f"{prefix}{name}.") if section else {prefix + name: field}
    return found


def value_of(settings: BaseModel, name: str) -> Any:
    """Return the value of the setting with a dotted name."""
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


def names_of(model: type[Section]) -> list[str]:
    """Return the names that a user may give: sections with a short form, and all settings that are no positional."""
    short = (n for n, field in model.model_fields.items() if getattr(section_type(field), "short_form", None))
    return [*short, *(name for name, field in settings_of(model).items() if not _is_positional(field))]


def suggestion(unknown: str, known: Iterable[str], section: str = "") -> str:
    """Return `; did you mean 'x'?` for the known name that an unknown one stands for, or an empty string.

    Candidates are, in this order: the name here of a name of another project (`runtime.synonyms`), the same name in a
    section, and the nearest name. If a known name has the section of the unknown one, such as `optim.`, only names of
    this section are suggested. The comparison ignores case.

    Args:
        unknown: the unknown name. Flags begin with dashes.
        known: the known names, with dashes if they are flags.
        section: section that comes first if several have the setting, such as that of the chosen method.
    """
    wanted = unknown.lstrip("-").lower()
    own, dot, last = wanted.rpartition(".")
    last = last.replace("-", "_")
    names = {name.lstrip("-").lower(): name for name in known}
    inside = {name: given for name, given in names.items() if dot and name.startswith(f"{own}.")}
    preferred = {name: given for name, given in names.items() if section and name.startswith(f"{section}.")}
    if VALUES.get(wanted) in names:
        return f"; did you mean '{names[VALUES[wanted]]}'?"
    for group in (inside, preferred, names):
        for target in (*SETTINGS.get(last, "").split(), last):
            name, _, value = target.removeprefix("*.").partition("=")
            if found := next((given for one, given in group.items() if one == name or one.endswith(f".{name}")), None):
                separator = " " if found.startswith("-") else ": "
                note = f" {NOTES[last]}" if last in NOTES and found.lstrip("-") != wanted else ""
                return f"; did you mean '{f'{found}{separator}{value}' if value else found}'?{note}"
    if last in LAUNCHER:
        return f"; did you mean 'tessera {LAUNCHER[last]} COMMAND'?{f' {NOTES[last]}' if last in NOTES else ''}"
    names = inside or names
    ends = {name.rpartition(".")[2]: given for name, given in reversed((names | preferred).items())}
    close = difflib.get_close_matches(wanted, ends | names, n=1, cutoff=0.65)
    return f"; did you mean '{(ends | names)[close[0]]}'?" if close else ""


def merge(model: type[Section], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested dictionaries of settings. Later dictionaries override earlier ones.

    Only sections are merged key by key. A setting whose value is a mapping is replaced as a unit. None in a setting of
    type `Derived` means that the setting is not given, so it overrides nothing.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            section = section_type(model.model_fields.get(name))
            value = section.expand(value) if section else value
            if value is None and name in merged and _is_derived(model.model_fields.get(name)):
                continue
            old = merged.get(name, {})
            if section and isinstance(value, Mapping) and isinstance(old, Mapping):
                value = merge(section, old, value)
            merged[name] = value
    return merged


def _is_derived(field: FieldInfo | None) -> bool:
    return field is not None and any(isinstance(mark, _DerivedMarker) for mark in field.metadata)


@dataclass(frozen=True)
class Layer:
    """Settings of one origin: a preset, a checkpoint, a file or the user."""

    origin: str
    """Name of the origin in the plan of a run, such as `flags` or `preset cifar10_dino`."""
    values: Mapping[str, Any]
    """Nested settings, without short forms."""
    own: bool = False
    """True if the user gives the settings for this start, as flags or in Python. All other layers may come from
    somebody else, so they must not name code or commands."""

    def has(self, name: str) -> bool:
        """Return True if the layer has a setting, given by its dotted name."""
        section, _, last = name.rpartition(".")
        values = self.values.get(section) if section else self.values
        return isinstance(values, Mapping) and last in values

    def get(self, name: str) -> Any:
        """Return the value of a setting, or None if the layer does not have the setting."""
        section, _, last = name.rpartition(".")
        return (self.values[section] if section else self.values)[last] if self.has(name) else None


class Layers:
    """Ordered layers of settings, of which later ones override earlier ones. They know where a setting comes from."""

    def __init__(self, model: type[Settings], *layers: Layer) -> None:
        self.model, self.fields, self.layers = model, settings_of(model), list[Layer]()
        hidden: tuple[str, ...] = ()
        for layer in reversed(layers):
            values = {name: value for name, value in layer.values.items() if name not in hidden}
            self.layers.insert(0, replace(layer, values=values))
            if any(layer.values.get(name) is not None for name in model.alternatives):
                hidden = model.alternatives

    def layer_of(self, name: str) -> Layer | None:
        """Return the layer whose value of a setting holds, or None if no layer has the setting."""
        having = [layer for layer in self.layers if layer.has(name)]
        if _is_derived(self.fields.get(name)):  # None means that the setting is not given
            having = [layer for layer in having if layer.get(name) is not None] or having
        return having[-1] if having else None

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting, or `default` if no layer has the setting."""
        layer = self.layer_of(name)
        return default if layer is None else layer.get(name)

    def of_others(self, name: str) -> Any:
        """Return the value of a setting if it is not the user who gives it for this start, or else None."""
        layer = self.layer_of(name)
        return None if layer is None or layer.own else layer.get(name)

    def validated(self) -> Settings:
        """Return typed settings with their origins. Raise the errors of `validate`."""
        found = validate(self.model, merge(self.model, *(layer.values for layer in self.layers)))
        found._origins = {name: layer.origin for name in self.fields if (layer := self.layer_of(name))}
        return found


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one dictionary with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the settings in a YAML file.

    Raises:
        SettingsError: the file cannot be read, or does not contain a mapping.
    """
    shown = printable(str(path))
    try:
        values = read_yaml_file(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"cannot read the settings file {shown}: {reason}") from error
    if not isinstance(values or {}, dict):
        raise SettingsError(f"the settings file {shown} must hold `name: value` lines, not a {type(values).__name__}")
    return values or {}


def peek(argv: Sequence[str], name: str) -> str | None:
    """Return the value of the last `--name` on a command line, or None. No other flag is parsed or checked."""
    found = None
    for word, following in zip(argv, [*argv[1:], None], strict=False):
        flag, equals, value = word.partition("=")
        if flag == f"--{name}":
            found = value if equals else following
    return found


def flags(model: type[Section], argv: Sequence[str], program: str, first_section: str = "") -> dict[str, Any]:
    """Return the settings of a command line as nested dictionaries. For `--help [TOPIC]`, print the help and exit.

    A flag for one or several strings, such as `--data SHARDS`, takes all words up to the next flag, because a shell
    expands `--data shards/*.tar` to several words. If the command has positional arguments, such a flag takes one word.
    Suggestions for an unknown flag prefer settings of `first_section`.

    Raises:
        SettingsError: a flag or a topic of the help is unknown, a flag has no value, or a positional argument is not
            expected. For an unknown flag or topic, the message suggests the nearest known one.
    """
    known = settings_of(model)
    positional = [name for name, field in known.items() if _is_positional(field)]
    words: dict[str, list[str]] = {}
    rest = list(argv)
    listed: str | None = None  # name of the flag that also takes the next word
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            print(help_text(model, program, rest[0] if rest and not rest[0].startswith("-") else None))
            raise SystemExit(0)
        if word.startswith("--"):
            name, value = _flag(model, known, word[2:], rest, first_section)
            listed = name if not positional and {str, list} <= _kinds(known[name].annotation) else None
        elif listed and not re.fullmatch("-[A-Za-z]", word):
            name, value = listed, word
        else:
            open_names = (n for n in positional if n not in words or list in _kinds(known[n].annotation))
            name, value = next(open_names, None), word
            if name is None:
                raise SettingsError(_unexpected(word, names_of(model), first_section))
        words.setdefault(name, []).append(value)
    values: dict[str, Any] = {}
    for name, given in words.items():
        value: Any = _typed(name, known[name], given)
        for part in reversed(name.split(".")):
            value = {part: value}
        values = merge(model, values, value)
    return values


def _flag(
    model: type[Section], known: Mapping[str, FieldInfo], flag: str, rest: list[str], first_section: str
) -> tuple[str, str]:
    """Return the dotted name and the value of the setting that a flag sets.

    `flag` has no leading dashes. `rest` holds the words after the flag. If the first of these words is the value, it is
    removed from `rest`. Suggestions for an unknown flag prefer settings of `first_section`.
    """
    flag, equals, value = flag.partition("=")
    section = section_type(model.model_fields.get(flag))
    name = f"{flag}.{section.short_form}" if section and section.short_form else flag
    switched_off = flag.removeprefix("no-")
    if name not in known and switched_off in known and _is_switch(known[switched_off]):
        return switched_off, "false"
    if name not in known or _is_positional(known[name]):
        hint = suggestion(f"--{flag}", [f"--{n}" for n in names_of(model)], first_section)
        raise SettingsError(f"unknown flag --{printable(flag)}{hint}")
    if equals:
        return name, value
    if _is_switch(known[name]):
        words = {"true", "false"} | _kinds(known[name].annotation)
        return name, rest.pop(0) if rest and rest[0].lower() in words else "true"
    if not rest or rest[0].startswith("--"):
        raise SettingsError(f"--{flag} expects a value")
    return name, rest.pop(0)


def _unexpected(word: str, names: Sequence[str], first_section: str) -> str:
    """Return the error message for an argument that is no flag, such as `data=photos` or `-b`."""
    name, _, value = word.lstrip("-").partition("=")
    hint = ""
    if name in names and value:  # Hydra, lightly-train and others write settings so
        hint = f"; did you mean '--{name} {value}'?"
    elif value or word.startswith("-"):
        hint = suggestion(f"--{name}", [f"--{n}" for n in names], first_section)
    return f"unexpected argument '{printable(word)}'{printable(hint) or '.'} Give settings as --name VALUE."


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that an annotation allows: the members of a union, the values of a `Literal`, or one type.

    A generic type is returned without its parameters, for example `list` for `list[str]`.
    """
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return {kind for member in get_args(annotation) for kind in _kinds(member)}
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {get_origin(annotation) or annotation}


def _is_switch(field: FieldInfo) -> bool:
    return {kind for kind in _kinds(field.annotation) if not isinstance(kind, str)} - {types.NoneType} == {bool}


def _is_positional(field: FieldInfo) -> bool:
    return any(isinstance(mark, _PositionalMarker) for mark in field.metadata)


def _typed(name: str, field: FieldInfo, words: list[str]) -> Any:
    """Convert all words that were given for one flag to a value that pydantic can validate.

    A single word stays a string, because pydantic converts strings to numbers.
    """
    kinds = _kinds(field.annotation)
    if types.NoneType in kinds and words[-1] in ("None", "none", "null"):
        return None
    structured = kinds & {list, tuple, dict}
    if structured and _is_positional(field):
        return words
    # Shard patterns contain braces and commas, so parse a word only if it starts like a JSON list or mapping.
    if structured and str in kinds:
        values = [_yaml(name, word) if word.startswith(('["', '{"')) else word for word in words]
        return values[0] if len(values) == 1 else values
    if not structured:
        return words[-1]
    text = ",".join(words)
    if text.startswith(("[", "{")):
        return _yaml(name, text)
    if text in kinds or (kinds & {int, float} and "," not in text):
        return text  # the setting accepts a single value, and `text` is one
    return [part.strip() for part in text.split(",")]


def _yaml(name: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except YAMLError as error:
        raise SettingsError(f"the value of --{name} is neither JSON nor YAML: {error}") from error


def help_text(model: type[Section], program: str, topic: str | None = None) -> str:
    """Return the help text of a command. It lists the flag, type, meaning and default of each setting.

    Args:
        topic: `all` for all settings, the name of a section for its settings, or the name of one setting. None stands
            for `Settings.first_settings`, in lines of at most `WIDTH` characters.

    Raises:
        SettingsError: the topic is unknown.
    """
    known = settings_of(model)
    sections = list(dict.fromkeys(name.rpartition(".")[0] for name in known if "." in name))
    listed = [name for name in known if topic in (None, "all", name) or name.startswith(f"{topic}.")]
    if not listed:
        hint = suggestion(topic or "", [*sections, "all", *known])
        raise SettingsError(
            f"--help has no topic '{printable(topic or '')}'{hint} (topics: all, {', '.join(sections)})"
        )
    usage = " ".join(
        [program, *(name.upper() for name, field in known.items() if _is_positional(field)), "[--SETTING VALUE ...]"]
    )
    lines = [f"usage: {usage}", "", *inspect.cleandoc(model.__doc__ or "").splitlines()]
    fields = {name: section_type(field) for name, field in model.model_fields.items()}
    short = {f"{start}.{one.short_form}": start for start, one in fields.items() if one and one.short_form}
    first: tuple[str, ...] = getattr(model, "first_settings", ()) if topic is None else ()
    if first:
        lines.append("")
        for name in first:
            flag, meaning = _described(short.get(name, name), known[name])
            lines += _wrapped(flag, meaning.removesuffix(" (default: false)"))
        more = f"--help all lists all {len(known)} settings, and --help SECTION lists a section: {', '.join(sections)}."
        return "\n".join([*lines, "", *textwrap.wrap(more, WIDTH)])
    title = None
    for name in sorted(listed, key=lambda name: "." in name):  # settings of no section first
        group = name.rpartition(".")[0]
        if group != title:
            lines += ["", f"{group}:" if group else "settings:"]
            title = group
        flag, meaning = _described(name, known[name])
        also = f" (short form: --{short[name]})" if name in short else ""
        lines.append(f"  {flag:<44} {meaning}{also}".rstrip())
    return "\n".join(lines)


def _described(name: str, field: FieldInfo) -> tuple[str, str]:
    """Return the flag of a setting with the type of its value, and the meaning of the setting with its default."""
    positional, kind = _is_positional(field), _type_name(field.annotation)
    flag = name.upper() if positional else f"--{name}"
    flag = flag if kind == "bool" else f"{flag} {kind}"
    no_default = field.default_factory or positional or field.default in (None, PydanticUndefined)
    default = "" if no_default else f" (default: {_shown(field.default)})"
    return flag, f"{' '.join((field.description or '').split())}{default}"


def _wrapped(flag: str, meaning: str) -> list[str]:
    """Return the lines of one setting in the short help: the flag on the left, and the meaning on the right."""
    left = 33
    lines = [" " * left + line for line in textwrap.wrap(meaning, WIDTH - left)]
    if len(flag) + 3 > left:
        return [f"  {flag}", *lines]
    return [f"  {flag}".ljust(left) + lines[0].lstrip(), *lines[1:]]


def _shown(value: Any) -> str:
    """Return a default value in the form that a user would type on a command line."""
    if isinstance(value, (tuple, list)):
        return ",".join(_shown(v) for v in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type_name(annotation: Any) -> str:
    """Return a short name of a type for the help text, for example `int`, `float,float` or `auto|bf16`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return "|".join(dict.fromkeys(_type_name(kind) for kind in arguments if kind is not types.NoneType))
    if origin in (list, tuple):
        return ",".join("..." if kind is ... else _type_name(kind) for kind in arguments) + ",..." * (origin is list)
    if origin is dict:
        return "{" + ": ".join(map(_type_name, arguments)) + "}"
    return "path" if annotation is Path else getattr(annotation, "__name__", str(annotation))


def validate(model: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """Return typed settings from nested dictionaries.

    Raises:
        SettingsError: a setting is unknown, missing or invalid. The message has one line for each such setting. For an
            unknown setting, the line suggests the nearest known name.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        known, names = settings_of(model), names_of(model)
        lines: dict[str, None] = {}
        for problem in error.errors():
            parts = [str(part) for part in problem["loc"]]
            prefixes = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
            name = printable(next((one for one in prefixes if one in known), prefixes[0] if prefixes else "settings"))
            if problem["type"] == "extra_forbidden" and name in names and len(parts) == 1:  # a key with a dot
                section, _, last = name.rpartition(".")
                lines[f"'{name}' is a setting of the section {section}: give {section}={{'{last}': ...}}"] = None
            elif problem["type"] == "extra_forbidden":
                lines[f"unknown setting '{name}'{suggestion(name, names, str(values.get('method', '')))}"] = None
            elif name in known and ("uple" in problem["msg"] or (problem["type"] == "missing" and name != prefixes[0])):
                # a tuple of another length: pydantic reports its missing values one by one
                wanted, given = _type_name(known[name].annotation), _shown(problem["input"])[:200]
                lines[f"{name} takes {wanted} (got {given})"] = None
            elif problem["type"] == "missing":
                lines[f"{name} is required"] = None
            else:
                lines[_invalid(name, dict(problem))] = None
        raise SettingsError("\n".join(lines)) from None


def _invalid(name: str, problem: Mapping[str, Any]) -> str:
    """Return the line for a value that is not valid. `problem` is one of pydantic's errors."""
    message, given = problem["msg"].removeprefix("Value error, "), problem["input"]
    if isinstance(given, (Mapping, BaseModel)):  # a check of several settings, whose message names them
        return message if not problem["loc"] else f"{name}: {message}"
    hint = ""
    if problem["type"] == "literal_error":
        hint = suggestion(str(given), re.findall(r"'([^']*)'", problem["ctx"]["expected"]))
    return f"{name}: {message} (got {repr(given)[:200]}){hint}"


def parse(model: type[SettingsT], argv: Sequence[str] | None = None) -> SettingsT:
    """Return the settings of a command from its flags. If a setting is wrong, print the error and exit with code 2."""
    program = Path(sys.argv[0]).name
    try:
        return validate(model, flags(model, sys.argv[1:] if argv is None else argv, program))
    except SettingsError as error:
        print(f"{program}: {without_controls(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
