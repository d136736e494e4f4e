"""Progress of long loops: a bar on a terminal, and lines in a log file."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.progress import track as bar

T = TypeVar("T")
FIRST, EVERY = 10.0, 60.0
"""Seconds until the first line is printed, and seconds between two lines."""


def track(items: Iterable[T], description: str, *, total: int, shown: bool = True) -> Iterator[T]:
    """Yield the items of a loop, and show the progress of the loop.

    Args:
        items: items of the loop.
        description: name of the loop, shown beside the bar or at the start of each line.
        total: number of items.
        shown: False to show nothing, for processes other than the main process.
    """
    if not shown:
        yield from items
        return
    if sys.stdout.isatty():
        yield from bar(items, description, total=total)
        return
    started = time.monotonic()
    due = started + FIRST
    for done, item in enumerate(items):
        if done and time.monotonic() >= due:
            due = time.monotonic() + EVERY
            left = (time.monotonic() - started) / done * (total - done)
            print(f"{description}: {done} of {total}, about {left / 60:.1f} min left", file=sys.stderr, flush=True)
        yield item
