"""Copies of byte ranges of remote shards in the cache: their checksums, and the version of the shard they belong to."""

import os
import zlib

from tessera.data.shards.cache import Cache

CHECKSUM = 4  # size in bytes of the CRC-32 at the end of the cached copy of a byte range
MOST_INTACT = 2**16  # maximum number of cached files that a process remembers as intact

_intact: set[tuple[str, int]] = set()
"""Name and inode number of cached files whose checksum this process has compared."""
_versions: dict[str, str] = {}
"""Maps the name of the cache entry of a version to the version that this process has seen."""


def checksum(data: bytes | memoryview) -> bytes:
    """Return the CRC-32 of data."""
    return zlib.crc32(data).to_bytes(CHECKSUM, "big")


def is_intact(descriptor: int, name: str, size: int) -> bool:
    """Return True if the first `size` bytes of a cached file have the checksum that follows them.

    Each process checks a file once, because a power cut or a faulty disk damages files that are not in use.
    """
    file = (name, os.fstat(descriptor).st_ino)
    if file in _intact:
        return True
    data = os.pread(descriptor, size + CHECKSUM, 0)
    if checksum(memoryview(data)[:size]) != data[size:]:
        return False
    if len(_intact) >= MOST_INTACT:
        _intact.clear()
    _intact.add(file)
    return True


def first_version(cache: Cache, name: str, version: str) -> str:
    """Return the version in the cache entry `name`. If the entry does not exist, it is made with `version`."""
    if name not in _versions:
        with os.fdopen(cache.open(name, lambda sink: sink.write(version.encode())), "rb") as file:
            _versions[name] = os.pread(file.fileno(), 2**16, 0).decode(errors="replace")
    return _versions[name]
