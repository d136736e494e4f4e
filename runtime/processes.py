"""Set up a process of a command: make the `Accelerator`, with or without a GPU, and exit cleanly on user errors."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState

from tessera.runtime import preemption, watchdog
from tessera.runtime.errors import UserError, without_controls
from tessera.runtime.rendezvous import naming_missing_processes
from tessera.runtime.threads import set_threads

AGAIN = "Start the command again"
_commands: list[ExitStack] = []
"""The block of `exit_on_user_error` that this process runs, if any. It holds the watchdog of the command."""


class LaunchError(UserError, ValueError):
    """The launcher started several processes that cannot form one process group."""


def make_accelerator(**settings: Any) -> Accelerator:
    """Return `Accelerator(**settings)`. The function works without CUDA, with several processes and under DeepSpeed.

    Torch's number of threads is set too; see `set_threads`.

    Raises:
        LaunchError: the environment variables of the launcher do not describe one process group.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without this variable, DeepSpeed warns that it found no device
        try:
            # without CUDA, a plain `Accelerator()` would ignore the other processes of the launch
            with naming_missing_processes():
                PartialState(cpu=True)
        except ValueError as error:
            raise LaunchError(f"The processes cannot find each other ({error}). Use `accelerate launch`.") from error
    # pretrain.engines reads the sizes of the groups itself. Without this line, accelerate refuses groups on the CPU.
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
    wanted, started = settings.get("mixed_precision"), AcceleratorState._shared_state.get("_mixed_precision")
    if wanted and started and wanted != started:
        AcceleratorState._reset_state()  # left by an earlier run in this process, as in a notebook
    with naming_missing_processes():
        accelerator = Accelerator(**settings)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise LaunchError(
            f"WORLD_SIZE is {launched} but accelerate found {accelerator.num_processes} process(es). Start with "
            f"`accelerate launch --multi_gpu --num_processes {launched} ...` (also without a GPU), or unset WORLD_SIZE."
        )
    set_threads(accelerator.num_processes)
    for command in _commands:
        command.enter_context(watchdog.watched(AGAIN))
    return accelerator


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Run the watchdog in the block, from `make_accelerator` on, and destroy the process group at the end of the block.

    SIGTERM to `accelerate launch` also ends this process.

    If the block raises a `UserError`, print its message without a traceback and exit with code 2; with code 130 after
    Ctrl-C. The process group is
    not destroyed in this case. If another process is lost, exit with code 69.
    """
    preemption.end_with_launcher()
    try:
        with ExitStack() as command:
            _commands.append(command)
            try:
                yield
            finally:
                _commands.remove(command)
    except watchdog.LostError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr, flush=True)
        os._exit(watchdog.EXIT_CODE)  # a normal exit would wait for the lost process
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted. Nothing was written", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {without_controls(str(error))}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    if dist.is_initialized():
        dist.destroy_process_group()
