"""Work spread over processes, with a bar on stderr: one call, results as they come."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")
Advance = Callable[[int], None]
"""counts what was dealt with; call it often: it is also where a worker ends when the command is stopped"""

POLL = 0.2  # seconds
LINE = 30.0  # seconds between lines where stderr is no terminal

_state: Any = None  # of a worker: work, counter, stop


class WorkerError(RuntimeError):
    """A process that was killed from outside. The message is meant for the user."""


class _Stopped(Exception):  # noqa: N818
    """The command was stopped."""


class _Rate(ProgressColumn):
    """Done and total, and how many a second since the start."""

    def __init__(self, unit: str):
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        rate = task.completed / task.elapsed if task.elapsed else 0
        return Text(_progress(task.completed, task.total or 0, rate, self.unit))


def _progress(done: float, total: float, rate: float, unit: str) -> str:
    if unit == "bytes":
        return f"{decimal(int(done))} of {decimal(int(total))}, {decimal(int(rate))}/s"
    return f"{done:,.0f} of {total:,.0f} {unit}, {rate:,.0f}/s"


def spread(
    work: Callable[[TaskT, Advance], ResultT],
    tasks: Sequence[TaskT],
    *,
    workers: int,
    title: str,
    total: int,
    unit: str = "images",
) -> Iterator[ResultT]:
    """`work(task, advance)` for each task in `workers` processes, in no certain order of results.

    Processes are forked: `work` may be a closure, and what it refers to is not copied. They end when this one does, in
    whatever way. `total` is how far `advance` will count, in `unit`.

    Raises:
        WorkerError: a process was killed.
        Exception: what `work` raised; the other processes then stop at their next `advance`.
    """
    if not tasks:
        return
    context = multiprocessing.get_context("fork")
    counter, stop = context.Value("q", 0), context.Event()
    shared = (work, counter, stop, os.getpid())
    workers = min(workers, len(tasks))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=shared) as pool:
        pending = {pool.submit(_call, task) for task in tasks}
        try:
            with ExitStack() as stack:
                show = _bar(stack, title, total, unit)  # after the fork: it has a thread
                while pending:
                    done, pending = wait(pending, timeout=POLL, return_when=FIRST_COMPLETED)
                    show(counter.value)
                    for future in done:
                        yield future.result()
        except BrokenProcessPool:
            raise WorkerError("a worker process was killed; if memory was short, take fewer --workers") from None
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _begin(work: Callable[..., Any], counter: Any, stop: Any, parent: int) -> None:
    """Prepares a worker."""
    global _state
    _state = (work, counter, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one tells the others
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    os._exit(1)


def _call(task: Any) -> Any:
    return _state[0](task, _advance)


def _advance(count: int) -> None:
    _, counter, stop = _state
    with counter.get_lock():
        counter.value += count
    if stop.is_set():
        raise _Stopped


def _bar(stack: ExitStack, title: str, total: int, unit: str) -> Callable[[int], None]:
    """What shows a count: a bar on a terminal, else a line now and then."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn(title), BarColumn(), _Rate(unit), TimeRemainingColumn())
        bar = stack.enter_context(Progress(*columns, console=console, transient=True))
        task = bar.add_task(title, total=total)
        return lambda count: bar.update(task, completed=count)
    start = shown = time.monotonic()

    def line(count: int) -> None:
        nonlocal shown
        if (now := time.monotonic()) - shown < LINE or not count:
            return
        shown, rate = now, count / (now - start)
        left = (total - count) / rate / 60
        print(f"{title}: {_progress(count, total, rate, unit)}, {left:,.0f} minutes left", file=sys.stderr)

    return line
