"""Output of commands."""

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

READER_LEFT = 141
"""Exit code of a command whose output is no longer read: that of a program that SIGPIPE ends."""


@contextmanager
def quiet_if_reader_leaves() -> Iterator[None]:
    """End without a message if the reader of stdout or stderr ends first, as in `COMMAND | head`.

    A `BrokenPipeError` of another pipe is raised.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        left = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream.fileno())]
        if not left:
            raise
        for stream in left:  # Python writes the rest of the output when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise SystemExit(READER_LEFT) from None


def _has_no_reader(descriptor: int) -> bool:
    """Return True if `descriptor` is a pipe whose reading end is closed."""
    poll = select.poll()
    poll.register(descriptor, 0)  # POLLERR is always reported
    return any(event & select.POLLERR for _, event in poll.poll(0))
