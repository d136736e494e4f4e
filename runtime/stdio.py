"""Standard streams that a command can always write to.

A stream may be closed when the command starts, and the reader of a pipe or a terminal may go away while the command
runs. A run must not end in either case.
"""

import contextlib
import errno
import io
import os
import sys
from typing import Any

GONE = (errno.EPIPE, errno.EIO)
"""Error numbers that the system returns for a write to a pipe without a reader, or to a closed terminal."""


class _Lasting(io.FileIO):
    """A stream that drops its output instead of raising an error if its reader has gone or its disk is full."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in GONE:
                _point_to_null(self.fileno())
            elif error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EBADF):
                raise
            return len(memoryview(data).cast("B"))


def protect() -> None:
    """Open the standard streams that are closed, and make the others ignore the loss of their readers.

    Call this function before any other file is opened. A file would otherwise get the descriptor of a closed stream,
    and messages would be written into the file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            _point_to_null(number)
    sys.stdout, sys.stderr = (_lasting(number, old) for number, old in ((1, sys.stdout), (2, sys.stderr)))


def tell(message: str) -> None:
    """Write a message to stderr without Python's locks and buffers. An error of the stream is ignored."""
    with contextlib.suppress(OSError):
        os.write(2, message.encode(errors="backslashreplace"))


def _lasting(number: int, old: Any) -> io.TextIOWrapper:
    """Return a text stream for a file descriptor. Characters that are not in the encoding are escaped."""
    if old is not None:
        with contextlib.suppress(OSError, ValueError):
            old.flush()
    buffer = io.BufferedWriter(_Lasting(number, "w", closefd=False))
    encoding = getattr(old, "encoding", None) or "utf-8"
    lines = number == 2 or os.isatty(number)
    return io.TextIOWrapper(buffer, encoding, errors="backslashreplace", line_buffering=lines)


def _point_to_null(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == number:
        os.set_inheritable(number, True)  # child processes inherit the stream, as after `dup2`
    else:
        os.dup2(null, number)
        os.close(null)
