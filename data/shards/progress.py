"""Progress display of long commands: a bar if stderr is a terminal, otherwise one line every 30 seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

DELAY = 1.0  # Seconds until a progress bar appears. Work that takes less time shows no bar.
LINE = 30.0  # Seconds between two progress lines if stderr is not a terminal.


@contextmanager
def show_progress(title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of finished units and displays the progress on stderr.

    Args:
        title: name of the work, for example "writing".
        total: number of units when the work is complete.
        unit: name of the units in the plural, for example "images". Numbers of "bytes" are shown in kB, MB or GB.
    """
    console = Console(stderr=True)
    start = shown = time.monotonic()
    bar: Progress | None = None

    def show(count: int) -> None:
        nonlocal shown, bar
        now = time.monotonic()
        rate = count / max(now - start, 1e-9)
        if not console.is_terminal:
            if now - shown >= LINE and count:
                shown = now
                minutes = (total - count) / rate / 60
                print(f"{title}: {_text(count, total, rate, unit)}, {minutes:,.0f} minutes left", file=sys.stderr)
            return
        if bar is None and now - start >= DELAY:
            columns = (TextColumn(title), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
            bar = stack.enter_context(Progress(*columns, console=console, transient=True))
            bar.add_task(title, total=total, text="")
        if bar is not None:
            bar.update(bar.task_ids[0], completed=count, text=_text(count, total, rate, unit))

    with ExitStack() as stack:
        yield show


def _text(done: int, total: int, rate: float, unit: str) -> str:
    if unit == "bytes":
        return f"{decimal(done)} of {decimal(total)}, {decimal(int(rate))}/s"
    return f"{done:,} of {total:,} {unit}, {rate:,.0f}/s"
