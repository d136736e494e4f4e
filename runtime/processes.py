"""Set up a process of a command: make the `Accelerator`, with or without a GPU, and exit cleanly on user errors."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs

from tessera.runtime import preemption, watchdog
from tessera.runtime.isolation import own_warnings
from tessera.runtime.machine import (
    command_line,
    cores,
    is_launcher,
    keep_freed_memory,
    limit_kernel_caches,
    set_environment,
)
from tessera.runtime.user_error import UserError, without_controls

AGAIN = "Start the command again."


class LaunchError(UserError, ValueError):
    """The launcher started several processes that cannot form one process group."""


def make_accelerator(timeout: float | None = None, **settings: Any) -> Accelerator:
    """Return `Accelerator(**settings)`. The function works without CUDA, with several processes and under DeepSpeed.

    Torch is set up for the device, in training and in evaluations alike: its allocators, its attention kernels and its
    number of threads (`set_threads`).

    Args:
        timeout: minutes for which a process waits for the others in a collective operation. None keeps the time of
            PyTorch, which depends on the backend.
        settings: arguments of `Accelerator`.

    Raises:
        LaunchError: the environment variables of the launcher do not describe one process group.
    """
    set_environment()  # before CUDA is initialized
    # cuDNN's attention makes a plan for each new shape, and masks and images at native sizes change shapes at every
    # step. Without it, PyTorch takes flash attention.
    torch.backends.cuda.enable_cudnn_sdp(False)
    wait = {} if timeout is None else {"timeout": timedelta(minutes=timeout)}
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without this variable, DeepSpeed warns that it found no device
        try:
            PartialState(cpu=True, **wait)  # a plain `Accelerator()` would ignore the other processes of the launch
        except ValueError as error:
            raise LaunchError(
                f"The processes cannot find each other ({error}). Start them with `accelerate launch`."
            ) from error
    # pretrain.engines reads the sizes of parallelism groups itself, and accelerate refuses this variable on a CPU.
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
    wanted, started = settings.get("mixed_precision"), AcceleratorState._shared_state.get("_mixed_precision")
    if wanted and started and wanted != started:
        AcceleratorState._reset_state()  # an earlier run in this process, as in a notebook, left its state
    if wait:
        settings["kwargs_handlers"] = [*settings.get("kwargs_handlers", ()), InitProcessGroupKwargs(**wait)]
    accelerator = Accelerator(**settings)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise LaunchError(
            f"WORLD_SIZE is {launched} but accelerate found {accelerator.num_processes} process(es). Start with "
            f"`accelerate launch --multi_gpu --num_processes {launched} ...` (also without a GPU), or unset WORLD_SIZE."
        )
    set_threads(accelerator.num_processes)
    if accelerator.device.type == "cpu":
        limit_kernel_caches()
        keep_freed_memory()  # each batch allocates tensors of the same sizes, and can reuse the freed memory
    return accelerator


def set_threads(processes: int) -> None:
    """Let torch compute with all cores that this process may use, if the user did not choose a number of threads.

    `accelerate launch` and `torchrun` set OMP_NUM_THREADS to 1 if the user did not set it. Without a GPU, a run would
    then compute on one core. The cores of a node are divided among its training processes. A process with more than two
    cores leaves one of them to its loader workers.

    Args:
        processes: number of training processes. It is used only if the launcher does not set LOCAL_WORLD_SIZE.
    """
    if "OMP_NUM_THREADS" in os.environ and not _launcher_set_threads():
        return
    available = cores()
    available = min(available, int(os.environ.get("SLURM_CPUS_ON_NODE", available)))
    share = available // int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    torch.set_num_threads(max(share - 1 if share > 2 else share, 1))


def _launcher_set_threads() -> bool:
    """Return True if OMP_NUM_THREADS comes from the launcher, and not from the user.

    This is the case if the value is 1, and the launcher was started without this variable and without a flag for the
    number of threads. Without /proc, as on other systems than Linux, the result is False.
    """
    parent = os.getppid()
    command = command_line(parent)
    try:
        variables = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    given = any(word.startswith("--num_cpu_threads_per_process") for word in command)
    given = given or any(entry.startswith(b"OMP_NUM_THREADS=") for entry in variables)
    return os.environ["OMP_NUM_THREADS"] == "1" and is_launcher(command) and not given


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Run the watchdog within the context, and destroy the process group when the context ends.

    SIGTERM to `accelerate launch` also ends this process.

    After a `UserError`, print its message without a traceback and exit with code 2. After Ctrl-C, exit with code 130.
    If another process is lost, exit with code 69. In these cases, the process group is not destroyed.
    """
    preemption.end_with_launcher()
    try:
        with watchdog.watched(AGAIN), own_warnings():
            yield
    except watchdog.LostError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr, flush=True)
        os._exit(watchdog.EXIT_CODE)  # a normal exit would wait for the lost process
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted. Nothing was written.", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {without_controls(str(error))}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    if dist.is_initialized():
        dist.destroy_process_group()
