"""Functions that run on several processes of one launch."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def on_processes(
    target: Callable[..., None], port: int, *arguments: Any, count: int = 2, limit: float = 90, group: bool = False
) -> None:
    """Run `target(rank, *arguments)` on the processes of one launch. One that fails or hangs fails the test.

    The processes are forked from a server that has imported the modules of tests/conftest.py, so that only the first
    call waits for that.

    Args:
        group: True makes a process group of gloo before the call, and destroys it afterwards.
    """
    context = multiprocessing.get_context("forkserver")
    started = []
    for rank in range(count):
        launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(context.Process(target=_run, args=(target, rank, launch, group, arguments)))
        started[-1].start()
    for process in started:
        process.join(limit)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert codes == [0] * count, codes


def _run(
    target: Callable[..., None], rank: int, launch: dict[str, object], group: bool, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= {name: str(value) for name, value in launch.items()}
    if group:
        dist.init_process_group("gloo")
    target(rank, *arguments)
    if group:
        dist.destroy_process_group()
