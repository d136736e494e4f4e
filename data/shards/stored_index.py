"""Format of the indices in the cache. Processes map an index into memory instead of reading it.

The content is a header, the notes, and the arrays `ends`, `images`, `labels`, `maps`, `pages` and `keys`, as they are
in memory. The header has 9 numbers: `summary`, the lengths of `keys`, `ends`, `maps` and `notes`, a hash of the
samples, and the length of `pages`.
Mapping an index takes about 0.03 ms, whatever its size, and all processes of a node share its memory. Therefore a
process keeps few indices, and maps an index again when it is needed again.
"""

import hashlib
import mmap
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tessera.data.shards.notes import LARGEST_NOTES, Note, parse_notes
from tessera.data.shards.tar_index import Index

_HEADER = 9 * 8  # size in bytes of the header


class Header(NamedTuple):
    """Facts about an index that are read without its arrays."""

    summary: np.ndarray
    """`Index.summary`."""
    digest: int
    """Hash of the names of the samples, the sizes of their images, and their labels: a signed integer of 64 bits."""
    notes: list[Note]
    """Notes on what is left out of the shard."""


def header_of(index: Index) -> Header:
    """Return the facts about an index."""
    return Header(index.summary, _digest(index), parse_notes(index.notes.tobytes()))


def _digest(index: Index) -> int:
    found = hashlib.blake2b(digest_size=8)
    for array in (index.keys, index.ends, index.images[:, 1], index.labels):
        found.update(np.ascontiguousarray(array).data)
    return int.from_bytes(found.digest(), "little", signed=True)


def packed(index: Index) -> Iterator[bytes]:
    """Yield the parts of the content of an index."""
    lengths = [len(index.keys), len(index.ends), len(index.maps), len(index.notes)]
    yield np.array([*index.summary, *lengths, _digest(index), len(index.pages)], dtype=np.int64).tobytes()
    yield index.notes.tobytes() + bytes(-len(index.notes) % 8)  # the arrays that follow stay aligned
    for array in (index.ends, index.images, index.labels, index.maps, index.pages):
        yield array.astype(np.int64, copy=False).tobytes()
    yield index.keys.tobytes()


def map_index(descriptor: int) -> Index:
    """Return the index in a file. Its arrays can only be read, and stay usable if the file is closed or removed.

    Raises:
        OSError: the file cannot be mapped.
        ValueError: the file is too short.
    """
    memory = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
    header = np.frombuffer(memory, dtype=np.int64, count=_HEADER // 8)
    samples, _, _, letters, names, maps, texts, _, numbered = header.tolist()
    place = _HEADER + texts + -texts % 8

    def pairs(count: int) -> np.ndarray:
        nonlocal place
        found = np.frombuffer(memory, dtype=np.int64, count=2 * count, offset=place).reshape(count, 2)
        place += found.nbytes
        return found

    ends = np.frombuffer(memory, dtype=np.int64, count=names, offset=place)
    place += ends.nbytes
    images, labels, segmentation = pairs(samples), pairs(samples), pairs(maps)
    pages = np.frombuffer(memory, dtype=np.int64, count=numbered, offset=place)
    keys = np.frombuffer(memory, dtype=np.uint8, count=letters, offset=place + pages.nbytes)
    notes = np.frombuffer(memory, dtype=np.uint8, count=texts, offset=_HEADER)
    return Index(keys, ends, images, labels, header[:3], segmentation, notes, pages)


def read_header(descriptor: int) -> Header | None:
    """Return the facts about the index in a file, without its arrays. Return None if the file is damaged."""
    header = np.frombuffer(os.pread(descriptor, _HEADER, 0), dtype=np.int64)
    if len(header) < _HEADER // 8 or header[0] <= 0 or not 0 <= header[6] <= LARGEST_NOTES:
        return None
    notes = os.pread(descriptor, int(header[6]), _HEADER) if header[6] else b""
    return Header(header[:3], int(header[7]), parse_notes(notes))
