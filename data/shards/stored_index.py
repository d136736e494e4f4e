"""Format of the indices in the cache. Processes map an index into memory instead of reading it.

The content is `summary`, the lengths of `keys`, `ends` and `maps`, and the arrays `ends`, `images`, `labels`, `maps`
and `keys`, as they are in memory. Mapping an index takes about 0.03 ms, whatever its size, and all processes of a node
share its memory. Therefore a process keeps few indices, and maps an index again when it is needed again.
"""

import mmap
import os
from collections.abc import Iterator

import numpy as np

from tessera.data.shards.tar import Index

_HEADER = 6 * 8  # size in bytes of `summary` and of the three lengths


def packed(index: Index) -> Iterator[bytes]:
    """Yield the parts of the content of an index."""
    lengths = [len(index.keys), len(index.ends), len(index.maps)]
    yield np.array([*index.summary, *lengths], dtype=np.int64).tobytes()
    for array in (index.ends, index.images, index.labels, index.maps):
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
    place, (samples, _, _, letters, names, maps) = _HEADER, header.tolist()

    def pairs(count: int) -> np.ndarray:
        nonlocal place
        found = np.frombuffer(memory, dtype=np.int64, count=2 * count, offset=place).reshape(count, 2)
        place += found.nbytes
        return found

    ends = np.frombuffer(memory, dtype=np.int64, count=names, offset=place)
    place += ends.nbytes
    images, labels, segmentation = pairs(samples), pairs(samples), pairs(maps)
    keys = np.frombuffer(memory, dtype=np.uint8, count=letters, offset=place)
    return Index(keys, ends, images, labels, header[:3], segmentation)


def read_summary(descriptor: int) -> np.ndarray | None:
    """Return `Index.summary` of the index in a file, without its other content. Return None if the file is damaged."""
    header = np.frombuffer(os.pread(descriptor, _HEADER, 0), dtype=np.int64)
    return header[:3] if len(header) == _HEADER // 8 and header[0] > 0 else None
