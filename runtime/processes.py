"""One set-up for all jobs, with or without a GPU, alone or among many processes; and what these tell each other."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from torch import Tensor

from runtime.errors import UserError


class EvaluationError(UserError, ValueError):
    """An evaluation that cannot be done as asked. The message is meant for the user."""


def accelerator(**settings: Any) -> Accelerator:
    """An `Accelerator(**settings)` that also works where there is no CUDA, with several processes and under DeepSpeed.

    Raises:
        EvaluationError: the launcher started several processes that do not know of each other, or cannot meet.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it found none
        try:
            PartialState(cpu=True)  # plain `Accelerator()` would believe in each process that it is alone
        except ValueError as error:
            raise EvaluationError(f"the processes cannot find each other, use `accelerate launch`: {error}") from error
    made = Accelerator(**settings)
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if made.num_processes != launched:
        raise EvaluationError(
            f"WORLD_SIZE says {launched} processes but accelerate sees {made.num_processes}: start with "
            f"`accelerate launch --multi_gpu --num_processes {launched} ...` (also without a GPU), or unset WORLD_SIZE"
        )
    return made


@contextmanager
def messages() -> Iterator[None]:
    """Errors that are meant for the user, printed without a traceback; the program exits with 2."""
    try:
        yield
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    if dist.is_initialized():
        dist.destroy_process_group()


def all_gather(x: Tensor, accelerator: Accelerator | None) -> list[Tensor]:
    """`x` (n, ...) of each process in turn, on `x`'s device. n may differ. Called on all processes together."""
    if accelerator is None or accelerator.num_processes == 1:
        return [x]
    own = x.to(accelerator.device)
    counts = [torch.zeros((), dtype=torch.int64, device=own.device) for _ in range(accelerator.num_processes)]
    dist.all_gather(counts, torch.tensor(len(own), device=own.device))
    lengths = [int(count) for count in counts]
    padded = own.new_zeros(max(lengths), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [part[:length].to(x.device) for part, length in zip(parts, lengths, strict=True)]


def all_sum(x: Tensor, accelerator: Accelerator | None) -> Tensor:
    """Sum of `x` over processes, on `x`'s device. Called on all processes together."""
    if accelerator is None or accelerator.num_processes == 1:
        return x
    total = x.to(accelerator.device, copy=True)
    dist.all_reduce(total)
    return total.to(x.device)
