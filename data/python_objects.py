"""Names for the objects that a Python program passes as settings, such as data sets.

Settings are stored as text, for example in config.yaml, so an object gets a name such as `python:CIFAR10`. The name is
valid while the function that received the object runs. No name leads to an import, and a settings file cannot bring
back an object: the program passes the object again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PREFIX = "python:"
"""Beginning of the name of an object."""

_objects: dict[str, Any] = {}


@contextmanager
def naming() -> Iterator[Callable[[Any], str]]:
    """Yield a function that returns the name of an object. The names end with the context.

    An object that already has a name keeps it. Names are made from the name of the function or type, and are numbered
    from the second object on, so equal programs give equal names.
    """
    own: list[str] = []

    def name(thing: Any) -> str:
        for known, other in _objects.items():
            if other is thing:
                return known
        first = PREFIX + kind(thing)
        names = (first if number == 1 else f"{first}-{number}" for number in range(1, len(_objects) + 2))
        own.append(next(one for one in names if one not in _objects))
        _objects[own[-1]] = thing
        return own[-1]

    try:
        yield name
    finally:
        for one in own:
            del _objects[one]


def is_name(text: str) -> bool:
    """Return True if a text has the form of the name of an object."""
    return text.startswith(PREFIX)


def named_object(name: str) -> Any:
    """Return the object of a name.

    Raises:
        KeyError: no object has this name now.
    """
    return _objects[name]


def kind(thing: Any) -> str:
    """Return the name of a function, or the name of the type of another object."""
    function = getattr(thing, "func", getattr(thing, "f", thing))  # the function of a `partial` or a webdataset stage
    return getattr(function, "__name__", type(thing).__name__)
