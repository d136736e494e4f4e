"""What processes do together with files: an error of one is an error of all, and none waits for another in vain."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from runtime.errors import UserError

SIGHT = 35.0
"""seconds until a shared disk shows one node what another has made there: NFS looks again after at most 30"""
T = TypeVar("T")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written or does not fit. The message is meant for the user."""


def gather(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each process has, on all of them."""
    if not dist.is_initialized():
        return [own]
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def together(do: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What `do` gives on this process, once it is done on all of them.

    Raises:
        CheckpointError: it failed on one or more; says the first failure, the same on all.
    """
    given, problem = None, ""
    try:
        given = do()
    except (Exception, CheckpointException) as error:  # what torch.distributed.checkpoint raises is no Exception
        if isinstance(error, CheckpointException) and any(
            isinstance(failure, KeyboardInterrupt) for failure, _ in error.failures.values()
        ):
            raise KeyboardInterrupt from error
        problem = _in_words(error)
    problem = next(filter(None, gather(problem, group)), None)
    if problem:
        raise CheckpointError(problem)
    return given  # pyright: ignore[reportReturnType]


def see(path: Path) -> None:
    """Wait for what another process has made.

    Raises:
        CheckpointError: it is not there.
    """
    end = time.monotonic() + SIGHT * dist.is_initialized()
    while not (path.parent.is_dir() and path.name in os.listdir(path.parent)):  # a listing looks at the disk again
        if time.monotonic() > end:
            raise CheckpointError(
                f"{path} is not there on {socket.gethostname()}: --output must be on a disk that all nodes share"
            )
        time.sleep(0.1)


def _in_words(error: BaseException) -> str:
    several = dist.is_initialized() and dist.get_world_size() > 1
    rank = dist.get_rank() if several else 0
    if isinstance(error, CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
    if isinstance(error, OSError) and error.strerror:
        said = error.strerror + f": {error.filename}" * (error.filename is not None)
    else:
        said = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")
        meant = isinstance(error, CheckpointError | ValueError)
        said = said if said and meant else f"{type(error).__name__}: {said}"
    return f"process {rank}: " * several + said
