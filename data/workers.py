"""Worker processes of the loader: their number, and their handling of signals sent to all processes of a job."""

import gc
import logging
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from runtime import preemption
from runtime.errors import UserError
from runtime.machine import process_fields, signal_at_end_of_parent

POLL = 1.0  # seconds between two checks whether the parent has ended
STALLED = 30
"""Seconds of waiting for a batch after which the log names the workers, and between two such lines."""
BUSY = 20  # seconds after which a message names a worker that is at work on a batch
STATES = {"T": "is stopped", "t": "is stopped by a debugger", "D": "waits for a disk", "Z": "has ended"}
"""Maps a state of a process in /proc to its description. Other states are normal."""

log = logging.getLogger(__name__)


def free_cores(processes: int) -> int:
    """Return the number of loader workers for each training process of this node.

    The number is one less than the number of cores per training process, but at least 1 and at most 16.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    cores = len(os.sched_getaffinity(0))
    allocated = int(os.environ.get("SLURM_CPUS_ON_NODE", cores))  # a SLURM job can see more cores than it is given
    return max(1, min(16, min(cores, allocated) // local - 1))


class WorkersError(UserError, RuntimeError):
    """Raised if the system cannot run loader workers."""


def check_semaphores() -> None:
    """Raise `WorkersError` if the system has no semaphores, which loader workers need, for example without /dev/shm."""
    try:
        multiprocessing.get_context("fork").Lock()
    except (OSError, ImportError) as error:
        raise WorkersError(
            f"Loader workers need semaphores, which this system refuses ({error}). Mount /dev/shm, or use --workers 0."
        ) from error


class WorkerStates:
    """State of each loader worker, in memory that the workers share with their parent.

    A worker writes its process id when it starts, and the time at which it began its current batch.
    """

    def __init__(self, workers: int) -> None:
        # anonymous memory, which needs no /dev/shm; two numbers for each worker: process id, and time in nanoseconds
        self._numbers = memoryview(mmap.mmap(-1, max(16 * workers, 1))).cast("q") if workers else None
        self._workers = workers

    def start(self, worker: int) -> None:
        """Record that a worker process has started. Only this worker may call the method."""
        if self._numbers is not None:
            self._numbers[2 * worker] = os.getpid()

    def working(self, worker: int, is_working: bool) -> None:
        """Record that a worker begins or has finished a batch. Only this worker may call the method."""
        if self._numbers is not None:
            self._numbers[2 * worker + 1] = time.monotonic_ns() if is_working else 0

    def describe(self) -> str:
        """Return a text about the workers that are stopped, waiting for a disk, or long at work on a batch."""
        found = []
        for worker in range(self._workers):
            process, began = self._numbers[2 * worker : 2 * worker + 2] if self._numbers is not None else (0, 0)
            state = STATES.get((process_fields(process) or [""])[0])
            if state is None and began and (spent := (time.monotonic_ns() - began) // 10**9) >= BUSY:
                state = f"has worked on a batch for {spent} s"
            if state is not None:
                found.append(f"worker {worker} (process {process}) {state}")
        return ", ".join(found) or "all workers are waiting"


def receive(batches: Iterator[Any], states: WorkerStates, *, interruptible: bool) -> Iterator[Any]:
    """Yield the batches of a `DataLoader` whose `timeout` is `POLL`. Name workers that let this process wait.

    The workers end with this generator, except after `WaitInterruptedError`.

    Args:
        batches: iterator of the `DataLoader`.
        states: states of its workers.
        interruptible: True to give up a wait if this process was asked to stop.

    Raises:
        WaitInterruptedError: `interruptible` is True, and this process was asked to stop while it waited.
    """
    try:
        while True:
            since = named = time.monotonic()
            while True:
                try:
                    batch = next(batches)
                    break
                except StopIteration:
                    return
                except RuntimeError as error:  # DataLoader raises this error after each `POLL`, and can be asked again
                    if not str(error).startswith("DataLoader timed out after"):
                        raise
                if interruptible:
                    preemption.check_wait(since)
                if time.monotonic() - named >= STALLED:
                    named = time.monotonic()
                    message = (
                        "Process %d has waited %.0f s for its loader, and waits on: %s. SIGTERM saves and ends the run."
                    )
                    log.warning(message, os.getpid(), named - since, states.describe())
            yield batch
    except preemption.WaitInterruptedError:
        raise  # without ending the workers, because a stopped worker would delay the checkpoint that follows
    except BaseException:
        # At once: when the iterator of DataLoader is garbage of a cycle, Python closes its queues first, and waits in
        # vain for each worker for 5 s.
        if isinstance(batches, _MultiProcessingDataLoaderIter):
            batches._shutdown_workers()
        raise


def start_worker(number: int, states: WorkerStates, parent: int, of_main_thread: bool) -> None:
    """Prepare a worker process.

    A worker ignores signals that the scheduler sends to the job, because the training process handles these signals. A
    worker ends with its parent, also if the parent is killed.

    Args:
        number: number of the worker.
        states: states of the workers of this loader.
        parent: process id of the parent.
        of_main_thread: True if the main thread of the parent forks the worker. Only then the kernel can kill the worker
            with its parent, because the kernel looks at the thread.
    """
    for one in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    preemption.forget()
    states.start(number)
    if of_main_thread:
        signal_at_end_of_parent(signal.SIGKILL)  # ends a stopped process, too
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    gc.freeze()  # otherwise, garbage collection would copy memory pages that are shared with the training process


def _end_with_parent(parent: int) -> None:
    """Exit on the SIGTERM that the training process sends when it ends, or when it has ended without one.

    A SIGTERM from other processes is ignored.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, POLL)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
