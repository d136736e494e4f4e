"""Distribution of work over processes, with progress on stderr."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from data.shards.progress import show_progress
from data.tools.command import WorkerError

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")
Advance = Callable[[int], None]
"""Function that adds its argument to the number of finished units. Workers must call this function often, because it
also ends a worker after the command was stopped."""

POLL = 0.2  # seconds

_state: Any = None
"""State of a worker process: the function `work`, the counter of finished units, and the stop event."""


class _Stopped(Exception):  # noqa: N818
    """Raised in a worker process after the command was stopped."""


def spread(
    work: Callable[[TaskT, Advance], ResultT],
    tasks: Sequence[TaskT],
    *,
    workers: int,
    title: str,
    total: int,
    unit: str = "images",
) -> Iterator[ResultT]:
    """Call `work(task, advance)` for each task in worker processes, and yield the results in order of completion.

    The processes are forked. `work` may therefore be a closure, and its objects are not copied. Workers exit
    when this process exits for any reason.

    Args:
        work: function that takes a task and an `Advance`.
        tasks: arguments of `work`.
        workers: number of processes.
        title: name of the work in the progress bar.
        total: expected sum of all arguments of `advance`.
        unit: plural name of the counted units.

    Raises:
        WorkerError: a process was killed.
        Exception: `work` raised this exception. Other workers then stop at their next call of `advance`.
    """
    if not tasks:
        return
    context = multiprocessing.get_context("fork")
    counter, stop = context.Value("q", 0), context.Event()
    shared = (work, counter, stop, os.getpid())
    workers = min(workers, len(tasks))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_initialize, initargs=shared) as pool:
        pending = {pool.submit(_call, task) for task in tasks}
        try:
            with show_progress(title, total, unit) as show:  # after the fork: the bar starts a thread
                while pending:
                    done, pending = wait(pending, timeout=POLL, return_when=FIRST_COMPLETED)
                    show(counter.value)
                    for future in done:
                        yield future.result()
        except BrokenProcessPool:
            raise WorkerError("a worker process was killed. If memory was short, use fewer --workers.") from None
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _initialize(work: Callable[..., Any], counter: Any, stop: Any, parent: int) -> None:
    """Prepare a worker process."""
    global _state
    _state = (work, counter, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C signals all processes, but the parent stops the workers
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: int) -> None:
    """Wait until the parent process has exited, then exit."""
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
