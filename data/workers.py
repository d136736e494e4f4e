"""Worker processes of the loader: their number, and their handling of signals sent to all processes of a job."""

import gc
import os
import signal
import threading


def free_cores(processes: int) -> int:
    """Return the number of loader workers for each training process of this node.

    The number is one less than the number of cores per training process, but at least 1 and at most 16.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    cores = len(os.sched_getaffinity(0))
    allocated = int(os.environ.get("SLURM_CPUS_ON_NODE", cores))  # a SLURM job can see more cores than it is given
    return max(1, min(16, min(cores, allocated) // local - 1))


def start_worker(_number: int) -> None:
    """Prepare a worker process.

    A worker ignores signals that the scheduler sends to the job, because the training process handles these signals.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # otherwise, garbage collection would copy memory pages that are shared with the training process


def _end_with_parent() -> None:
    """Exit on the SIGTERM that the training process sends when it ends. Ignore a SIGTERM from other processes."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
