"""Worker processes of the loader: their number, start and end, and their handling of signals sent to all processes."""

import atexit
import contextlib
import gc
import logging
import mmap
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from tessera.data.shards.errors import ResourceError
from tessera.runtime import preemption
from tessera.runtime.machine import process_fields, return_freed_memory, signal_at_end_of_parent

POLL = 1.0  # seconds between two looks at workers that let their parent wait
STALLED = 30
"""Seconds of waiting for a batch after which the log names the workers, and between two such lines."""
IDLE_LIMIT = 300
"""Seconds of waiting for a batch, although no worker is at work, after which the run ends. A fork of a process with
several threads can leave a child that waits forever for a lock that no thread holds."""
BUSY = 20  # seconds after which a message names a worker that is at work on a batch
STATES = {"T": "is stopped", "t": "is stopped by a debugger", "D": "waits for a disk", "Z": "has ended"}
"""Maps a state of a process in /proc to its description. Other states are normal."""
WAITING, END = object(), object()
"""Results of `_next` without a batch: no batch has come yet, and there are no more batches."""

_workers: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()
log = logging.getLogger(__name__)


def free_cores(processes: int) -> int:
    """Return the number of loader workers for each training process of this node.

    The number is one less than the number of cores per training process, but at least 1 and at most 16.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    cores = len(os.sched_getaffinity(0))
    allocated = int(os.environ.get("SLURM_CPUS_ON_NODE", cores))  # a SLURM job can see more cores than it is given
    return max(1, min(16, min(cores, allocated) // local - 1))


class WorkersError(ResourceError):
    """Raised if the system cannot run loader workers, or if a worker dies or hangs."""


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
        self._numbers = memoryview(mmap.mmap(-1, 16 * max(workers, 1))).cast("q")
        self._workers = workers

    def start(self, worker: int) -> None:
        """Record that a worker process has started. Only this worker may call the method."""
        self._numbers[2 * worker] = os.getpid()

    def working(self, worker: int, is_working: bool) -> None:
        """Record that a worker begins or has finished a batch. Only this worker may call the method."""
        self._numbers[2 * worker + 1] = time.monotonic_ns() if is_working else 0

    def describe(self) -> tuple[str, bool]:
        """Return a text about workers that let their parent wait, and True if no worker is at work or stopped."""
        found, idle = [], True
        for worker in range(self._workers):
            process, began = self._numbers[2 * worker : 2 * worker + 2]
            state = STATES.get((process_fields(process) or [""])[0]) if process else None
            idle = idle and not began and state is None
            spent = (time.monotonic_ns() - began) // 10**9 if began else 0
            if not process:
                found.append(f"worker {worker} has not started")
            elif state or spent >= BUSY:
                found.append(f"worker {worker} (process {process}) {state or f'has worked on a batch for {spent} s'}")
        return ", ".join(found), idle


def receive(loader: DataLoader, states: WorkerStates, *, interruptible: bool) -> Iterator[Any]:
    """Start the workers of a `DataLoader` whose `timeout` is `POLL`, and yield their batches.

    The log names workers that let this process wait. The workers end with this generator.

    Args:
        loader: makes the batches. Its workers write to `states`.
        states: states of the workers.
        interruptible: True to give up a wait if this process was asked to stop.

    Raises:
        WaitInterruptedError: `interruptible` is True, and this process was asked to stop while it waited.
        WorkersError: a worker has died, or no worker has had work for `IDLE_LIMIT` seconds.
    """
    batches, workers = _start(loader)
    try:
        while True:
            since = named = time.monotonic()
            idle = 0.0  # counts polls, because the clock also runs while this process and its workers are stopped
            while (batch := _next(batches, workers)) is WAITING:
                if interruptible:
                    preemption.check_wait(since)
                found, is_idle = states.describe()
                idle = idle + POLL if is_idle else 0.0
                if idle >= IDLE_LIMIT:
                    raise WorkersError(
                        f"A batch is missing, although no loader worker has had work for {IDLE_LIMIT} s ({found}). "
                        "Start again (a run continues with --resume), or use --workers 0."
                    )
                if time.monotonic() - named >= STALLED:
                    named = time.monotonic()
                    message = (
                        "Process %d has waited %.0f s for its loader, and waits on: %s. SIGTERM saves and ends the run."
                    )
                    log.warning(message, os.getpid(), named - since, found or "all workers are at work")
            if batch is END:
                return
            yield batch
    finally:
        for worker in workers:
            if worker.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGCONT)  # DataLoader cannot end a worker that is stopped


def _start(loader: DataLoader) -> tuple[Iterator[Any], list[BaseProcess]]:
    """Start the workers of a `DataLoader`. Return its iterator, and the processes of the workers."""
    if loader.num_workers:
        check_semaphores()
    others = set(multiprocessing.active_children())
    on_child = signal.getsignal(signal.SIGCHLD)
    # Block SIGTERM while the workers are forked, so that no worker receives a SIGTERM before it can handle signals.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, on_child)  # torch's handler would raise an error anywhere when a worker dies
    workers = [process for process in multiprocessing.active_children() if process not in others]
    _workers.update(workers)
    return batches, workers


def _next(batches: Iterator[Any], workers: Sequence[BaseProcess]) -> Any:
    """Return the next batch, `END`, or `WAITING` if no batch has come within `POLL`.

    Raises:
        WorkersError: a worker has died.
    """
    try:
        return next(batches, END)
    except RuntimeError as error:  # DataLoader can be asked again after each `POLL`
        if str(error).startswith("DataLoader timed out after"):
            return WAITING
        if not str(error).startswith("DataLoader worker (pid"):
            raise
    pid, code = next((worker.pid, worker.exitcode) for worker in workers if worker.exitcode is not None)
    how, advice = f"ended with exit code {code}", "The lines above may say why."
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        advice = "The system may be short of memory: use fewer --workers, or lower loader.max_pixels."
    raise WorkersError(f"A loader worker (process {pid}) {how}. {advice} Start again (a run continues with --resume).")


@atexit.register
def _kill_workers() -> None:
    """Kill workers that have not ended. Otherwise, the end of this process would wait for them forever."""
    for worker in _workers:
        worker.kill()


def start_worker(number: int, states: WorkerStates, of_main_thread: bool) -> None:
    """Prepare a worker process.

    A worker ignores signals that the scheduler sends to the job, because the training process handles these signals. A
    worker ends with its parent, also if the parent is killed.

    Args:
        number: number of the worker.
        states: states of the workers of this loader.
        of_main_thread: True if the main thread of the parent forks the worker. Only then the kernel can kill the worker
            with its parent, because the kernel looks at the thread. Other workers end when they have no work.
    """
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(one, signal.SIG_IGN)
    preemption.forget()
    _workers.clear()
    return_freed_memory()  # one large image must not take the memory for good
    states.start(number)
    if of_main_thread:
        signal_at_end_of_parent(signal.SIGKILL)  # ends a stopped process, too
    gc.freeze()  # otherwise, garbage collection would copy memory pages that are shared with the training process
