"""Output, exit status and worker processes of the commands that make and check shards."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from tessera.runtime.machine import signal_at_end_of_parent
from tessera.runtime.progress import track
from tessera.runtime.user_error import UserError, printable

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

_work: Callable[[Any], Any]
"""Function that a worker process calls."""


class WorkerError(UserError, RuntimeError):
    """Raised if a worker process was killed."""


def say(name: str, text: str) -> None:
    """Print one line of a report: `name`, padded to a column, and `text`."""
    print(f"{name:<13} {printable(text)}", flush=True)


def run_command(program: str, command: Callable[[], int], resume: str = "") -> int:
    """Call a command and return its exit status. Errors are printed to stderr without a traceback.

    Args:
        program: name of the command in error messages.
        command: function that does the work and returns the exit status.
        resume: advice that is printed if the user interrupts the command or a worker process is killed.
    """
    try:
        return command()
    except WorkerError as error:
        message, status = f"{error} {resume}", 2
    except (UserError, OSError) as error:
        message, status = str(error), 2
    except MemoryError:
        message, status = "out of memory. Use fewer --workers, or a lower --max_pixels.", 2
    except KeyboardInterrupt:
        message, status = f"stopped. {resume}", 130
    print(f"{program}: {message}", file=sys.stderr)
    return status


def spread(work: Callable[[TaskT], ResultT], tasks: Sequence[TaskT], *, workers: int, title: str) -> Iterator[ResultT]:
    """Call `work(task)` for each task in worker processes, and yield the results in order of completion.

    The worker processes are forked. Therefore `work` may be a closure, and the objects that the closure uses are not
    copied. If this process ends for any reason, its worker processes also end.

    Args:
        work: function that takes a task.
        tasks: arguments of the calls.
        workers: number of processes.
        title: name of the work in the progress display.

    Raises:
        WorkerError: a worker process was killed.
        Exception: any exception that `work` raises. The other workers are then killed.
    """
    if not tasks:
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(workers, len(tasks)), fork, _start_worker, (work, os.getpid())) as pool:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a new worker does not ignore Ctrl-C yet
        futures = [pool.submit(_call, task) for task in tasks]  # fork all workers before the display starts a thread
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            for future in track(as_completed(futures), title, total=len(tasks)):
                yield future.result()
        except BrokenProcessPool:
            raise WorkerError(
                "a worker process was killed, by a person or for memory. If memory ran out, use fewer --workers."
            ) from None
        except BaseException:  # includes Ctrl-C, and `GeneratorExit` if the caller stops early
            for worker in multiprocessing.active_children():
                worker.kill()
            pool.shutdown(cancel_futures=True)
            raise


def _start_worker(work: Callable[[Any], Any], parent: int) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, the parent stops the workers
    signal_at_end_of_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    torch.set_num_threads(1)


def _call(task: Any) -> Any:
    return _work(task)
