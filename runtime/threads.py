"""The number of threads with which torch computes on the CPU.

`accelerate launch` and `torchrun` set OMP_NUM_THREADS to 1 if the user did not set it. Without a GPU, a run would then
compute on one core.
"""

import os
from pathlib import Path

import torch

LAUNCHERS = ("accelerate", "torchrun", "torch.distributed", "deepspeed")
"""Words by which the command line of a launcher is known."""
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
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return False
        if not any(entry.startswith(f"{VARIABLE}=".encode()) for entry in started_with):
            return any(word in command for word in LAUNCHERS) and FLAG not in command
        process = parent
    return False
