"""Worker processes of the loader: their number, and their handling of signals sent to all processes of a job."""

import contextlib
import gc
import logging
import mmap
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tessera.runtime import preemption
from tessera.runtime.errors import UserError
from tessera.runtime.machine import process_fields, return_freed_memory, signal_at_end_of_parent

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


class IdleWorkersError(Exception):
    """Raised if no loader worker has anything to do, and the batch that their parent waits for does not come."""


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

    A worker writes its process id when it starts, the time at which it began its current batch, and the number of
    batches that it has made.
    """

    def __init__(self, workers: int) -> None:
        # anonymous memory, which needs no /dev/shm; three numbers for each worker: process id, time in nanoseconds, and
        # number of batches
        self._numbers = memoryview(mmap.mmap(-1, 24 * max(workers, 1))).cast("q")
        self._workers = workers

    def start(self, worker: int) -> None:
        """Record that a worker process has started. Only this worker may call the method."""
        self._numbers[3 * worker] = os.getpid()

    def working(self, worker: int, is_working: bool) -> None:
        """Record that a worker begins or has finished a batch. Only this worker may call the method."""
        self._numbers[3 * worker + 1] = time.monotonic_ns() if is_working else 0
        self._numbers[3 * worker + 2] += not is_working

    def describe(self) -> str:
        """Return a text about the workers that are stopped, waiting for a disk, or long at work on a batch."""
        found = []
        for worker in range(self._workers):
            process, began, _ = self._of(worker)
            state = STATES.get((process_fields(process) or [""])[0])
            if state is None and began and (spent := (time.monotonic_ns() - began) // 10**9) >= BUSY:
                state = f"has worked on a batch for {spent} s"
            if state is not None:
                found.append(f"worker {worker} (process {process}) {state}")
        return ", ".join(found)

    def describe_idle(self) -> str:
        """Return how many batches each worker has made if no worker is at work, stopped or waiting for a disk.

        The text is empty if any worker is.
        """
        found = []
        for worker in range(self._workers):
            process, began, made = self._of(worker)
            if began:
                return ""
            text = f"worker {worker} (process {process}) has made {made} batches"
            found.append(text if process else f"worker {worker} has not started")
        return "" if self.describe() else ", ".join(found)

    def _of(self, worker: int) -> tuple[int, int, int]:
        """Return the process id of a worker, the time at which it began its batch (0 without one), and its batches."""
        process, began, made = self._numbers[3 * worker : 3 * worker + 3]
        return process, began, made


def receive(batches: Iterator[Any], states: WorkerStates, *, interruptible: bool) -> Iterator[Any]:
    """Yield the batches of a `DataLoader` whose `timeout` is `POLL`. Name workers that let this process wait.

    The workers end with this generator, except after `WaitInterruptedError`.

    Args:
        batches: iterator of the `DataLoader`.
        states: states of its workers.
        interruptible: True to give up a wait if this process was asked to stop.

    Raises:
        WaitInterruptedError: `interruptible` is True, and this process was asked to stop while it waited.
        IdleWorkersError: for `STALLED` seconds, no worker had anything to do. A fork of a process with several threads
            can leave a child that waits forever for a lock that no thread holds.
    """
    try:
        while True:
            since = named = time.monotonic()
            idle = 0.0  # counts polls, because the clock also runs while this process and its workers are stopped
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
                made = states.describe_idle()
                idle = idle + POLL if made else 0.0
                if idle >= STALLED:
                    raise IdleWorkersError(made)
                if time.monotonic() - named >= STALLED:
                    named = time.monotonic()
                    message = (
                        "Process %d has waited %.0f s for its loader, and waits on: %s. SIGTERM saves and ends the run."
                    )
                    log.warning(message, os.getpid(), named - since, states.describe() or "all workers are at work")
            yield batch
    except IdleWorkersError:
        _abandon(batches)
        raise
    except preemption.WaitInterruptedError:
        raise  # without ending the workers, because a stopped worker would delay the checkpoint that follows
    except BaseException:
        # At once: when the iterator of DataLoader is garbage of a cycle, Python closes its queues first, and waits in
        # vain for each worker for 5 s.
        if isinstance(batches, _MultiProcessingDataLoaderIter):
            batches._shutdown_workers()
        raise


def _abandon(batches: Iterator[Any]) -> None:
    """End the workers of a `DataLoader` without the locks that they share with this process.

    A worker gets SIGABRT. Where Python's `faulthandler` is on, the worker then prints what its threads wait for.
    """
    assert isinstance(batches, _MultiProcessingDataLoaderIter)
    batches._shutdown = True  # otherwise, its finaliser would take the locks
    if batches._worker_pids_set:  # otherwise, the end of a worker would raise an error in this process
        _utils.signal_handling._remove_worker_pids(id(batches))  # pyright: ignore[reportPrivateImportUsage]
        batches._worker_pids_set = False
    if hasattr(batches, "_pin_memory_thread"):
        batches._pin_memory_thread_done_event.set()
    for worker in batches._workers:
        if worker.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                if sys.platform == "linux":
                    resource.prlimit(worker.pid, resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
                os.kill(worker.pid, signal.SIGABRT)
        worker.join(POLL)
        worker.kill()
    for queue in batches._index_queues:
        queue.cancel_join_thread()
        queue.close()


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
    return_freed_memory()  # one large image must not take the memory for good
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
