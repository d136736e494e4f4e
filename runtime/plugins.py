"""Registries: values by name, which other packages can add to.

A package adds a value in one of two ways. A program calls `Registry.register`. An installed package declares an entry
point, which is imported when its name is used for the first time. A name in a settings file or in a checkpoint is only
looked up here: no file can name a module to import.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Generic, TypeVar, cast

from tessera.runtime.user_error import UserError, printable

T = TypeVar("T")


class PluginError(UserError, ValueError):
    """A name is unknown or taken, or the package that provides it is broken."""


class Registry(dict[str, T], Generic[T]):
    """Dictionary of values by name, with the values of installed packages.

    A value of an installed package counts as an entry (`name in registry`, `registry[name]`). The dictionary iterates
    over the values that are loaded, and `names` returns all names.

    Args:
        kind: noun for error messages, such as "method".
        values: values of this package.
        group: group of entry points in which installed packages declare values.
        expected: description of a valid value for error messages, such as "a subclass of Method".
        valid: returns True if a value is valid.
    """

    def __init__(
        self, kind: str, values: dict[str, T], *, group: str, expected: str, valid: Callable[[Any], bool]
    ) -> None:
        super().__init__(values)
        self.kind, self.group, self.expected, self.valid = kind, group, expected, valid
        self._built_in = frozenset(values)

    def register(self, name: str, value: T | None = None) -> Any:
        """Add a value, and return it. Without `value`, return a decorator that adds a class.

        Raises:
            PluginError: the name has another value, or the value is not valid.
        """
        if value is None:
            return lambda decorated: self.register(name, decorated)
        if not self.valid(value):
            raise PluginError(f"The {self.kind} '{name}' must be {self.expected}, not {value!r}.")
        point = self._entry_points().get(name)
        if super().__contains__(name):
            taken = self[name] is not value
        else:  # a module may register the value of its own entry point while it is imported
            taken = point is not None and point.module not in sys.modules
        if taken:
            origin = f" in the installed package {_package(point)}" if point is not None else ""
            raise PluginError(f"There is a {self.kind} '{name}' already{origin}. Choose another name.")
        self[name] = value
        return value

    def names(self) -> list[str]:
        """Return the names of all values: those of this package, registered ones, and those of installed packages.

        Raises:
            PluginError: a name is taken twice.
        """
        others = self._entry_points()
        return [*(name for name in self if name not in others), *sorted(others)]

    def working(self) -> dict[str, T]:
        """Load all values, and return them by name. Those that cannot be loaded are left out, so that a broken package
        stops only those who name its value."""
        found = dict[str, T]()
        for name in self.names():
            with suppress(PluginError):
                found[name] = self[name]
        return found

    @property
    def elsewhere(self) -> str:
        """Sentence for a message about an unknown name, which says where other names come from."""
        return f"If another package provides the {self.kind}, install that package in this environment."

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._entry_points()

    def __missing__(self, name: str) -> T:
        """Load a value of an installed package."""
        point = self._entry_points().get(name)
        if point is None:
            shown, known = printable(str(name)[:200]), ", ".join(self.names()) or "none"
            raise PluginError(f"unknown {self.kind} '{shown}' (known: {known}). {self.elsewhere}")
        return self._load(point)

    def _load(self, point: importlib.metadata.EntryPoint) -> T:
        origin = f"The {self.kind} '{point.name}' of the installed package {_package(point)}"
        try:
            value = point.load()
        except Exception as error:
            raise PluginError(
                f"{origin} cannot be imported from {point.value}: {type(error).__name__}: {error}. Repair or uninstall "
                "the package."
            ) from error
        if not self.valid(value):
            raise PluginError(f"{origin} must be {self.expected}, but {point.value} is {value!r}.")
        self[point.name] = value
        return cast(T, value)

    def _entry_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        found: dict[str, importlib.metadata.EntryPoint] = {}
        for point in entry_points(self.group):
            other = f"the package {_package(found[point.name])}" if point.name in found else "Tessera"
            if point.name in found or point.name in self._built_in:
                raise PluginError(
                    f"The installed package {_package(point)} provides a {self.kind} '{point.name}', and so does "
                    f"{other}. Uninstall {_package(point)}, or rename its entry point."
                )
            found[point.name] = point
        return found


def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
    """Return the entry points of a group, without those of folders that were deleted from extras/."""
    return _entry_points(group, tuple(sys.path))


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> list[importlib.metadata.EntryPoint]:
    """Return the entry points of a group. `path` is `sys.path`, on which the result depends."""
    del path
    return [point for point in importlib.metadata.entry_points(group=group) if not _is_deleted(point.module)]


def _is_deleted(module: str) -> bool:
    extra = ".".join(module.split(".")[:3])
    return extra.startswith("tessera.extras.") and importlib.util.find_spec(extra) is None


def _package(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "without a name"
