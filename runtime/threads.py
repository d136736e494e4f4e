"""The number of threads with which torch computes on the CPU.

`accelerate launch` and `torchrun` set OMP_NUM_THREADS to 1 if the user did not set it. Without a GPU, a run would then
compute on one core.
"""

import os
from pathlib import Path

import torch

from tessera.runtime.machine import process_fields

LAUNCHERS = ("accelerate", "torchrun", "torch.distributed", "deepspeed")
"""Beginnings of the names of launchers: of a script, or of the module after `-m`."""
VARIABLE = "OMP_NUM_THREADS"
FLAG = "--num_cpu_threads_per_process"


def set_threads(processes: int) -> None:
    """Let torch compute with all cores that this process may use, if the user did not choose a number of threads.

    The cores of a node are divided by its training processes. A process with more than two cores leaves one of them to
    its loader workers.

    Args:
        processes: number of training processes; of this node, if the launcher sets LOCAL_WORLD_SIZE.
    """
    if VARIABLE in os.environ and not set_by_launcher():
        return
    cores = len(os.sched_getaffinity(0))
    cores = min(cores, int(os.environ.get("SLURM_CPUS_ON_NODE", cores)))
    share = cores // int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    torch.set_num_threads(max(share - 1 if share > 2 else share, 1))


def set_by_launcher() -> bool:
    """Return True if OMP_NUM_THREADS comes from a launcher, and not from the user.

    This is the case if the value is 1 and the nearest ancestor process that started without the variable is a launcher
    to which the user gave no number of threads. Without /proc, that is except on Linux, the result is False.
    """
    if os.environ.get(VARIABLE) != "1":
        return False
    process = os.getppid()
    while process > 1:
        folder = Path("/proc", str(process))
        try:
            started_with = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return False
        if not any(entry.startswith(f"{VARIABLE}=".encode()) for entry in started_with):
            launched = any(Path(word).name.startswith(LAUNCHERS) for word in command[:3])  # python -m NAME
            return launched and not any(word.startswith(FLAG) for word in command)
        process = int((process_fields(process) or ["", "0"])[1])
    return False
