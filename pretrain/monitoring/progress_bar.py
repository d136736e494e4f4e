"""Progress of a run on the terminal or in a log."""

import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from tessera.pretrain.monitoring.slowest_rank import LAG

ACCURACIES = {"knn_top1": "k-NN", "linear_top1": "linear", "val_top1": "top-1", "view_retrieval": "view retrieval"}
"""Names under which the progress shows accuracies, by metric."""


WIDE = 120
"""Smallest width of a terminal, in characters, that has room for a wide bar."""
FIRST = 10
"""Number of steps after which a log file gets its first line, in runs of more than ten times as many steps."""
REST = 50
"""Number of characters that a progress bar needs beside its numbers, in a terminal that is not wide."""


class Progress:
    """Progress of a run on stderr: a bar on a terminal and in a notebook, and one line per record in a log file."""

    def __init__(self, steps: int, done: int, *, enabled: bool) -> None:
        """Set up the progress of a run. `steps` is the length of the run, and `done` the number of completed steps."""
        console = Console(stderr=True)
        self.enabled, self.bar = enabled, enabled and (console.is_terminal or console.is_jupyter)
        # rich shows nothing in a notebook without the package ipywidgets, but tqdm does
        self.notebook = _notebook_bar(steps, done) if enabled and console.is_jupyter else None
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(40 if console.width >= WIDE else 10),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self.progress = RichProgress(*columns, console=console, disable=not self.bar or console.is_jupyter)
        self.task = self.progress.add_task("", total=steps, completed=done, numbers="")
        self.steps, self.first, self.started = steps, done, 0.0
        self.accuracy = ""  # newest accuracies as text
        self.data_wait: float | None = None  # newest `data_wait` of several processes

    def __enter__(self) -> "Progress":
        self.started = time.perf_counter()
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.notebook is not None:
            self.notebook.close()

    def update(self, step: int, loss: float, images_per_second: float, data_wait: float) -> None:
        """Move the progress bar to `step`, and show the given numbers and the newest accuracies next to the bar."""
        accuracies = self.accuracy.split("  ")  # the first one is the most important
        parts = [f"loss {loss:.4f}", accuracies[0], speed(images_per_second), *accuracies[1:]]
        shown, room = "", self.progress.console.width - (REST if self.progress.console.width < WIDE else REST + 30)
        waits = data_wait if self.data_wait is None else self.data_wait
        for part in filter(None, [*parts, f"data wait {100 * waits:.0f} %"]):
            if shown and len(shown) + 2 + len(part) > room:
                break
            shown += f"  {part}" if shown else part
        self.progress.update(self.task, completed=step, numbers=shown)
        if self.notebook is not None:
            self.notebook.set_postfix_str(shown, refresh=False)
            self.notebook.update(step - self.notebook.n)
        if step == self.first + FIRST and self.steps > self.first + 10 * FIRST and self.enabled and not self.bar:
            self._print(f"step {step}/{self.steps}  {speed(images_per_second)}  {self._left(step)}")

    def scored(self, record: Mapping[str, Any]) -> None:
        """Read the accuracies (0 to 1) from `record`, to show them in later progress output.

        If `record` has no accuracy, the output still shows the earlier accuracies. If there are several processes, the
        bar shows the `data_wait` of the record, which is that of the slowest one.
        """
        if "slowest_rank" in record:
            self.data_wait = record["data_wait"]
        found = [f"{name} {100 * record[metric]:.1f} %  " for metric, name in ACCURACIES.items() if metric in record]
        if found:
            self.accuracy = "".join(found).rstrip() + (f" (step {record['step']})  " if "step" in record else "  ")

    def line(self, record: dict[str, Any]) -> None:
        """Print a record of metrics as one line, unless a progress bar is shown."""
        if not self.enabled or self.bar:
            return
        slow = ""
        if record.get("slowest_rank_lag", 0.0) >= LAG:
            slow = f"slowest {record['slowest_rank']} ({record['slowest_rank_lag']:.1f} x the median)  "
        self._print(
            f"step {record['step']}/{self.steps}  epoch {record['epoch']:.1f}  loss {record['loss']:.4f}  "
            f"{self.accuracy}lr {record['lr']:.2e}  {speed(record['images_per_second'])}  "
            f"data wait {100 * record['data_wait']:.0f} %  {slow}{self._left(record['step'])}"
        )

    def _left(self, step: int) -> str:
        """Return a forecast of the remaining time, such as `45 s left`."""
        seconds = (time.perf_counter() - self.started) / max(step - self.first, 1) * (self.steps - step)
        return f"{duration(seconds)} left"

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _notebook_bar(steps: int, done: int) -> Any:
    """Return tqdm's bar for notebooks, which is made of text if the package ipywidgets is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm recommends ipywidgets
        from tqdm.auto import tqdm
    return tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True)


def speed(images_per_second: float) -> str:
    """Format a throughput, such as `1234 images/s`. Below 10, show two significant digits, such as `0.38 images/s`."""
    return f"{images_per_second:.0f} images/s" if images_per_second >= 10 else f"{images_per_second:.2g} images/s"


def duration(seconds: float) -> str:
    """Format a duration in at most two units, such as `45 s`, `12 min`, `3 h 05 min` or `2 d 4 h`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"
