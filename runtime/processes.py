"""Set up a process of a command: make the `Accelerator`, with or without a GPU, and exit cleanly on user errors."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState

from runtime import preemption
from runtime.errors import UserError
from runtime.output import quiet_if_reader_leaves


class LaunchError(UserError, ValueError):
    """The launcher started several processes that cannot form one process group."""


def make_accelerator(**settings: Any) -> Accelerator:
    """Return `Accelerator(**settings)`. The function works without CUDA, with several processes and under DeepSpeed.

    Raises:
        LaunchError: the environment variables of the launcher do not describe one process group.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without this variable, DeepSpeed warns that it found no device
        try:
            # without CUDA, a plain `Accelerator()` would ignore the other processes of the launch
            PartialState(cpu=True)
        except ValueError as error:
            raise LaunchError(f"The processes cannot find each other ({error}). Use `accelerate launch`.") from error
    accelerator = Accelerator(**settings)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise LaunchError(
            f"WORLD_SIZE is {launched} but accelerate found {accelerator.num_processes} process(es). Start with "
            f"`accelerate launch --multi_gpu --num_processes {launched} ...` (also without a GPU), or unset WORLD_SIZE."
        )
    return accelerator


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Destroy the process group at the end of the block. Let SIGTERM to `accelerate launch` also end this process.

    If the block raises a `UserError`, print its message without a traceback and exit with code 2. The process group is
    not destroyed in this case.
    """
    preemption.end_with_launcher()
    try:
        with quiet_if_reader_leaves():
            yield
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    if dist.is_initialized():
        dist.destroy_process_group()
