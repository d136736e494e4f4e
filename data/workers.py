"""Start, watch and end the worker processes of the loader. Workers ignore signals that a scheduler sends to the job."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from tessera.data.failures import ResourceError
from tessera.runtime import preemption
from tessera.runtime.machine import cores, process_fields, return_freed_memory, signal_at_end_of_parent, trim_memory

POLL = 1.0  # seconds between two checks of the workers while their parent waits for a batch
STALLED = 30
"""Number of seconds between two log messages that describe the workers, while the parent waits for a batch."""
START_LIMIT = 30
"""Maximum number of seconds that the parent waits for all workers to start. Then the parent kills all workers and forks
them again. A worker can hang at its start: if a thread of the parent holds a lock during the fork, the worker
waits forever for this lock."""
ATTEMPTS = 3  # number of times that workers are forked before an error
IDLE_LIMIT = 300
"""Number of seconds after which the run ends if the parent waits for a batch while all workers are idle."""
BUSY = 20  # number of seconds of work on one batch after which a log message names the worker
STATES = {"T": "is stopped", "t": "is stopped by a debugger", "D": "waits for a disk", "Z": "has ended"}
"""Description of each abnormal state of a process in /proc."""
WAITING, END = object(), object()
"""Results of `_next` in place of a batch: no batch has arrived yet, or there are no more batches."""

_workers: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()
log = logging.getLogger(__name__)


def free_cores(processes: int) -> int:
    """Return the number of loader workers for each training process of this node.

    The number is one less than the number of cores per training process, but at least 1 and at most 16. It is 0 in a
    daemonic process, such as a worker of `multiprocessing.Pool`, which Python forbids to start other processes.
    """
    if multiprocessing.current_process().daemon:
        return 0
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    available = cores()
    # A SLURM job may see cores of the node that are not allocated to the job.
    allocated = int(os.environ.get("SLURM_CPUS_ON_NODE", available))
    return max(1, min(16, min(available, allocated) // local - 1))


class WorkersError(ResourceError):
    """Raised if the system cannot run loader workers, or if a worker dies or hangs."""


def check_semaphores() -> None:
    """Raise `WorkersError` if the system refuses semaphores, for example because /dev/shm is not mounted, or if Python
    forbids this process to start other processes."""
    if multiprocessing.current_process().daemon:
        raise WorkersError(
            "This process is daemonic, as the workers of multiprocessing.Pool are, and may not start loader workers. "
            "Use --workers 0, or start it with concurrent.futures.ProcessPoolExecutor."
        )
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
        # Anonymous memory needs no /dev/shm. Each worker has two entries: its process id, and a time in nanoseconds.
        self._numbers = memoryview(mmap.mmap(-1, 16 * max(workers, 1))).cast("q")
        self._workers = workers

    def start(self, worker: int) -> None:
        """Record that a worker process has started. Only this worker may call the method."""
        self._numbers[2 * worker] = os.getpid()

    def working(self, worker: int, is_working: bool) -> None:
        """Record that a worker begins or has finished a batch. Only this worker may call the method."""
        self._numbers[2 * worker + 1] = time.monotonic_ns() if is_working else 0

    def wait(self, workers: Sequence[BaseProcess]) -> bool:
        """Wait until all workers have started or one has died. Return False if `START_LIMIT` seconds pass before."""
        # Count attempts, because a clock would include time in which the processes are suspended.
        for _ in range(100 * START_LIMIT):
            has_died = any(worker.exitcode is not None for worker in workers)
            if has_died or all(self._numbers[: 2 * self._workers : 2]):
                return True
            time.sleep(0.01)
        return False

    def describe(self) -> tuple[str, bool]:
        """Return a description of the workers that delay their parent, and a bool that is True if all workers are idle.

        A worker is idle if it works on no batch and its process is in a normal state.
        """
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


def receive(make: Callable[[WorkerStates], DataLoader], count: int, *, interruptible: bool) -> Iterator[Any]:
    """Start the workers of a `DataLoader`, and yield their batches.

    The log describes the workers while this process waits for a batch. The workers end when this generator ends.

    Args:
        make: returns a `DataLoader` whose `timeout` is `POLL`, and whose workers write to the given states.
        count: number of workers.
        interruptible: True to stop waiting for a batch if this process was asked to stop.

    Raises:
        WaitInterruptedError: `interruptible` is True, and this process was asked to stop while it waited.
        WorkersError: workers do not start, a worker has died, or all workers have been idle for `IDLE_LIMIT` seconds.
    """
    if count:
        check_semaphores()
    batches, workers, states = _start(make, count)
    try:
        while True:
            since = named = time.monotonic()
            idle = 0.0  # a sum of polls; a clock would also count time in which the processes are suspended
            while (batch := _next(batches, workers)) is WAITING:
                if interruptible:
                    preemption.check_wait(since)
                found, is_idle = states.describe()
                idle = idle + POLL if is_idle else 0.0
                if idle >= IDLE_LIMIT:
                    raise WorkersError(
                        f"A batch is missing, but all loader workers have been idle for {IDLE_LIMIT} s. "
                        "Start again (a run continues with --resume), or use --workers 0."
                    )
                if time.monotonic() - named >= STALLED:
                    named = time.monotonic()
                    message = (
                        "Process %d has waited %.0f s for a batch of its loader: %s. SIGTERM makes the run save a "
                        "checkpoint and end."
                    )
                    log.warning(message, os.getpid(), named - since, found or "all workers are at work")
            if batch is END:
                return
            yield batch
    except Exception:
        _kill_workers(workers)  # the error keeps torch's iterator alive, which would later wait 10 s for its workers
        raise
    finally:
        for worker in workers:
            if worker.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGCONT)  # DataLoader cannot end a suspended worker


def _start(
    make: Callable[[WorkerStates], DataLoader], count: int
) -> tuple[Iterator[Any], list[BaseProcess], WorkerStates]:
    """Fork the workers, again if some hang. Return the iterator of the `DataLoader`, the workers and their states.

    Raises:
        WorkersError: in each of `ATTEMPTS` attempts, some workers hung at their start.
    """
    for _ in range(ATTEMPTS):
        states = WorkerStates(count)
        batches, workers = _fork(make(states))
        if states.wait(workers):  # `_next` reports a worker that has died
            return batches, workers, states
        found, _ = states.describe()
        log.warning("The loader workers of process %d are killed and forked again: %s.", os.getpid(), found)
        _kill_workers(workers)
        del batches
    raise WorkersError(
        "The loader workers do not start. Start again (a run continues with --resume), or use --workers 0."
    )


def _fork(loader: DataLoader) -> tuple[Iterator[Any], list[BaseProcess]]:
    """Fork the workers of a `DataLoader`. Return its iterator, and the processes of the workers."""
    others = set(multiprocessing.active_children())
    on_child = signal.getsignal(signal.SIGCHLD)
    trim_memory()
    # Block SIGTERM while the workers are forked, so that no worker receives a SIGTERM before it can handle signals.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if threading.current_thread() is threading.main_thread():
        # torch's handler would raise an error at an arbitrary point of the main thread when a worker dies.
        signal.signal(signal.SIGCHLD, on_child)
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
    except RuntimeError as error:  # after a timeout of `POLL`, the next call waits for the same batch
        if str(error).startswith("DataLoader timed out after"):
            return WAITING
        if not str(error).startswith("DataLoader worker (pid"):
            raise
    pid, code = next((worker.pid, worker.exitcode) for worker in workers if worker.exitcode is not None)
    how, advice = f"ended with exit code {code}", "The output above may state the reason."
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        advice = (
            "A person killed it, or the system is short of memory (`dmesg -T` names the processes that it kills). "
            "For less memory, use fewer --workers, or lower loader.max_pixels."
        )
    raise WorkersError(f"A loader worker (process {pid}) {how}. {advice} Start again (a run continues with --resume).")


def _kill_workers(workers: Iterable[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


# Otherwise, the exit of this process would wait forever for workers that hang.
atexit.register(_kill_workers, _workers)


def start_worker(number: int, states: WorkerStates, of_main_thread: bool) -> None:
    """Prepare a worker process.

    A worker ignores signals that the scheduler sends to the job, because the training process handles these signals. A
    worker ends with its parent, even if the parent is killed.

    Args:
        number: index of the worker.
        states: states of the workers of this loader.
        of_main_thread: True if the main thread of the parent forks the worker. Only then can the kernel kill the worker
            with the parent, because the kernel acts at the end of the forking thread. A worker of another thread ends
            when it waits for work and notices that the parent has ended.
    """
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(one, signal.SIG_IGN)
    preemption.forget()
    _workers.clear()
    return_freed_memory()  # otherwise, the worker would keep the memory that its largest image needed
    states.start(number)
    if of_main_thread:
        signal_at_end_of_parent(signal.SIGKILL)  # unlike SIGTERM, SIGKILL also ends a suspended process
    gc.freeze()  # otherwise, garbage collection would copy memory pages that are shared with the training process
    gc.enable()  # training turns it off (`pretrain.loop.no_automatic_collection`)
