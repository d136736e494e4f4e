"""A loader's worker processes: how many, and how they meet the signals that reach all processes of a job."""

import gc
import os
import signal
import threading


def free_cores(processes: int) -> int:
    """Loader processes for each of a node's processes: its share of the cores, less one for itself, 1 to 8."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    cores = len(os.sched_getaffinity(0))
    allocated = int(os.environ.get("SLURM_CPUS_ON_NODE", cores))  # not every SLURM confines a job to them
    return max(1, min(8, min(cores, allocated) // local - 1))


def start_worker(_number: int) -> None:
    """Outlives the scheduler's signals, which reach all processes of a job: only the training process acts on them."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # else each collection would go through, and copy, all that the training process has imported


def _end_with_parent() -> None:
    """Obeys a SIGTERM that comes from the training process itself, as it does at its end."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
