"""Distribution of work over worker processes, with a progress display on stderr."""

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

from tessera.data.shards.progress import show_progress
from tessera.data.tools.command import WorkerError

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")
Advance = Callable[[int], None]
"""Function that adds its argument to the number of finished units. Workers must call this function often, because only
this function ends their work after the command was stopped."""

POLL = 0.2  # seconds between two checks of the workers, or of the parent process

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

    The worker processes are forked. Therefore `work` may be a closure, and the objects that it uses are not copied. If
    this process exits for any reason, its worker processes also exit.

    Args:
        work: function that takes a task and an `Advance`.
        tasks: the tasks, one for each call of `work`.
        workers: number of processes.
        title: name of the work in the progress display.
        total: expected sum of the arguments of all calls of `advance`.
        unit: name of the counted units in the plural.

    Raises:
        WorkerError: a worker process was killed.
        Exception: `work` raised this exception. The other workers stop at their next call of `advance`.
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
            # Show the bar only after the fork, because the bar starts a thread.
            with show_progress(title, total, unit) as show:
                while pending:
                    done, pending = wait(pending, timeout=POLL, return_when=FIRST_COMPLETED)
                    show(counter.value)
                    for future in done:
                        yield future.result()
        except BrokenProcessPool:
            raise WorkerError("a worker process was killed. If memory ran out, use fewer --workers.") from None
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _initialize(work: Callable[..., Any], counter: Any, stop: Any, parent: int) -> None:
    """Prepare a new worker process."""
    global _state
    _state = (work, counter, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C, because the parent stops the workers
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: int) -> None:
    """Wait until the parent process has exited, then exit this process."""
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
