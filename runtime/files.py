"""Writing of files that other processes may read at the same time."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: str | Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` when the block ends without an exception.

    A reader sees the old file or the new one, never a partial file. The temporary file is removed if the block raises.
    The result has the permissions of a file made by `open`, whatever permissions the temporary file has.

    Args:
        path: file to create or replace; its folder must exist.
        sync: flush the file to the disk before the rename, so that it survives a power cut.

    Raises:
        OSError: the file cannot be written or renamed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        if sync:
            fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def fsync(path: str | Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
