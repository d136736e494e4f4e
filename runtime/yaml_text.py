"""Read YAML files that may be untrusted."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from tessera.runtime.files import read_bounded
from tessera.runtime.user_error import UserError, printable

_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # the others stand for bytes of file names that are no UTF-8
MAX_BYTES = 2**18
"""Largest size of a settings file in bytes."""
MAX_DIGITS = 1000
"""Largest number of characters of a number. PyYAML needs quadratic time for base-60 numbers such as 1:59:59."""
MAX_VALUES = 20_000
"""Largest number of values in a settings file. A value to which several aliases refer counts several times, because a
short file of nested aliases can stand for billions of values."""


class YAMLError(UserError, ValueError):
    """The text is not YAML, or holds values that no setting has."""


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text. Only tags of plain values are allowed, and no code in the text is executed.

    Raises:
        YAMLError: the text is not valid YAML, has too many values, or holds a key or value that no setting has: a key
            that is not text, a date, bytes, or text with a NUL character.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _expanded_size(node, {})
        value = None if node is None else loader.construct_document(node)
    except YAMLError:
        raise
    except yaml.YAMLError as error:
        raise YAMLError(str(error)) from error
    except RecursionError:
        raise YAMLError("the values are nested too deeply") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # for example: !!int ""
        raise YAMLError(f"a value does not fit its type ({error})") from error
    _check(value, "")
    return value


def read_yaml_file(path: str | Path) -> Any:
    """Return the value in a YAML file.

    Raises:
        YAMLError: the content is not YAML or holds values that no setting has.
        OSError: the file cannot be read, is not a regular file, or is larger than `MAX_BYTES`.
    """
    try:
        return parse_yaml(read_bounded(path, MAX_BYTES).decode())
    except UnicodeDecodeError as error:
        raise YAMLError(str(error)) from error


def _expanded_size(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Return the number of values below a node, with every alias replaced by its values.

    Raises:
        YAMLError: there are more than `MAX_VALUES` values, or a value contains itself.
    """
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
        raise YAMLError(f"a number has more than {MAX_DIGITS} characters")
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = MAX_VALUES + 1  # so that a value that contains itself exceeds the limit
        if isinstance(node, yaml.MappingNode):
            _check_names(node)
        children = [one for pair in node.value for one in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_expanded_size(child, known) for child in children)
    if known[id(node)] > MAX_VALUES:
        raise YAMLError(f"it holds more than {MAX_VALUES} values, counting each alias, or a value that contains itself")
    return known[id(node)]


def _check_names(node: yaml.MappingNode) -> None:
    """Raise `YAMLError` if a mapping has a name twice. PyYAML would silently use the last value."""
    names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise YAMLError(f"the name {printable(twice)} is given twice. Remove one of the two.")


def _check(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, one in value.items():
            if not isinstance(key, str):
                raise YAMLError(f"the name {key!r} below '{where}' is not text. Put the name in quotes.")
            name = f"{where}.{key}" if where else key
            if "\0" in key:
                raise YAMLError(f"{printable(name)} has a NUL character. Remove the character.")
            _check(one, printable(name))
    elif isinstance(value, list):
        for one in value:
            _check(one, where)
    elif isinstance(value, str) and "\0" in value:
        raise YAMLError(f"{where} has a NUL character. Remove the character.")
    elif isinstance(value, str) and _SURROGATE.search(value):
        raise YAMLError(f"{where} has half of a surrogate pair, which is no character. Remove it.")
    elif not (value is None or isinstance(value, str | int | float | bool)):
        raise YAMLError(f"{where} is a {type(value).__name__}. Settings cannot have this type. Put text in quotes.")
