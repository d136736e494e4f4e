"""Sources of data that other code adds: the registry `SOURCES`, group `tessera.sources` (docs/own_data.md).

A source is a subclass of `Shard` with the class method `at`. Its name says which addresses it opens. A name that begins
with a dot is the ending of local files, such as `.parquet`. Any other name is a scheme: `lance` opens `lance:ADDRESS`.
The scheme `python` opens the data sets that a program passes as objects (`data.python_objects`).
"""

import os

from tessera.data.python_objects import PREFIX
from tessera.data.shards.shard import Shard
from tessera.runtime.plugins import Registry

OBJECTS = PREFIX.removesuffix(":")
"""Name of the source that opens objects of Python."""

SOURCES: Registry[type[Shard]] = Registry(
    "source of data",
    {},
    group="tessera.sources",
    expected="a subclass of Shard",
    valid=lambda value: isinstance(value, type) and issubclass(value, Shard),
)


def endings() -> tuple[str, ...]:
    """Return the file name endings that sources of the registry open."""
    return tuple(name for name in SOURCES.names() if name.startswith("."))


def scheme_of(address: str) -> str | None:
    """Return the scheme of an address, if the registry has a source for it."""
    scheme, colon, _ = address.partition(":")
    if address.startswith(PREFIX):
        return OBJECTS
    return scheme if colon and not scheme.startswith(".") and scheme in SOURCES else None


def source_of(address: str) -> type[Shard] | None:
    """Return the source that opens an address; None if the address is a tar, a folder of images or a manifest.

    Raises:
        PluginError: the address is the name of an object, but no source opens objects; or a source cannot be imported.
    """
    name = scheme_of(address)
    if name is None:
        ending = os.path.splitext(address)[1]
        name = ending if ending in SOURCES and os.path.exists(address) and not os.path.isdir(address) else None
    return None if name is None else SOURCES[name]
