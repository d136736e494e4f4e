"""Write files atomically, flush them to the disk, and read files of limited size."""

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tessera.runtime.machine import is_running, machine_id


@contextmanager
def atomic_write(path: str | Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` when the block ends without an exception.

    Other processes see the old file or the new file, never a partial file. If the block raises an exception, the
    temporary file is removed. The function also removes temporary files that killed processes of this machine have
    left. The new file always has the permissions that `open` gives to a new file.

    Args:
        path: file to create or replace; its folder must exist.
        sync: flush the file to the disk before the rename, so that a power cut cannot leave an incomplete file.

    Raises:
        OSError: the file cannot be written or renamed.
    """
    path = Path(path)
    start = f".{path.name}.{machine_id()}-"
    _remove_left_over(path.parent, start)
    temporary = path.with_name(f"{start}{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
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


def _remove_left_over(folder: Path, start: str) -> None:
    """Remove the temporary files in `folder` whose names begin with `start` and whose processes have ended."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith(start) and name.endswith(".tmp")]
    except OSError:  # the folder is writable, but not readable
        return
    for name in names:
        pid = name.removeprefix(start).partition("-")[0]
        if pid.isdecimal() and len(pid) < 12 and not is_running(int(pid), None):
            with suppress(OSError):
                (folder / name).unlink()


def read_bounded(path: str | Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Use this function for untrusted files. A path may lead to a pipe or a device whose content never ends.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is too large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than the limit of {most} bytes", str(path))
    return content


def fsync(path: str | Path) -> None:
    """Flush a file to the disk. For a folder, flush the list of its entries, not the files in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
