"""Functions and scripts that run on the processes of one launch.

The processes are forked from a server that has imported the modules of tests/conftest.py, so that only the first launch
waits for that.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.run as elastic
from accelerate.commands import launch

from tessera.__main__ import main
from tests import collective_order
from tests.launched import ROOT, find_free_port, wait_until


def ranks(count: int, port: int) -> list[dict[str, str]]:
    """Return the environment variables of the processes of a launch."""
    own = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared = {name: str(value) for name, value in own.items()}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def on_processes(
    target: Callable[..., None], port: int, *arguments: Any, count: int = 2, limit: float = 90, group: bool = False
) -> None:
    """Run `target(rank, *arguments)` on the processes of one launch. One that fails or hangs fails the test.

    Args:
        group: True makes a process group of gloo before the call, and destroys it afterwards.
    """
    context = multiprocessing.get_context("forkserver")
    started = []
    for rank, variables in enumerate(ranks(count, port)):
        started.append(context.Process(target=_run, args=(target, rank, variables, group, arguments)))
        started[-1].start()
    for process in started:
        process.join(limit)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert codes == [0] * count, codes


def _run(
    target: Callable[..., None], rank: int, variables: dict[str, str], group: bool, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= variables
    if group:
        dist.init_process_group("gloo")
    target(rank, *arguments)
    if dist.is_initialized():
        dist.barrier()  # process 0 holds the store, which the others may still read
    if group:
        dist.destroy_process_group()


class Script:
    """A script on the processes of one launch, with the environment that `accelerate launch` gives them.

    It takes the place of `accelerate launch` in tests of what a run computes. tests/launched.py has the real command.

    Args:
        words: arguments of the script.
        engine: stem of a file in configs/accelerate/, if any.
        log: file for the output of all processes.
        environment: environment variables to add.
    """

    def __init__(
        self, script: Path, words: list[str], processes: int, engine: str | None, log: Path, environment: dict[str, str]
    ) -> None:
        self.log = log
        self.collectives = log.with_suffix(".collectives")
        self.collectives.mkdir()
        log.touch()
        command = None
        variables: list[dict[str, str]] = [{}]
        if engine or processes > 1:
            command = ["--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"]
            command += ["--dynamo_backend", "no"]
            file = ROOT / "configs" / "accelerate" / f"{engine}.yaml"
            command += ["--config_file", str(file)] if engine else ["--multi_gpu"]
            variables = ranks(processes, find_free_port())
        self.trainers: list[BaseProcess] = []
        for own in variables:
            given = dict(os.environ) | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment | own
            given |= collective_order.RECORDING if own else {}
            arguments = (script, words, command, given, log, self.collectives)
            self.trainers.append(multiprocessing.get_context("forkserver").Process(target=_run_script, args=arguments))
            self.trainers[-1].start()

    def is_running(self) -> bool:
        """Return True until all processes have ended."""
        return any(trainer.exitcode is None for trainer in self.trainers)

    def wait(self, limit: float = 1800) -> str:
        """Wait for the end, which must be a success, and return the output. All processes must have called the same
        collectives."""
        end = time.monotonic() + limit
        while self.is_running() and time.monotonic() < end:
            if any(trainer.exitcode for trainer in self.trainers):
                break
            self.trainers[-1].join(0.1)
            self.trainers[0].join(0.01)
        codes = [trainer.exitcode for trainer in self.trainers]
        self.kill()
        text = self.log.read_text()
        assert codes == [0] * len(codes), f"exit codes {codes}: {text[-5000:]}"
        if len(codes) > 1:
            collective_order.assert_equal(self.collectives)
        return text

    def wait_for_kill(self, limit: float = 1800) -> str:
        """Wait until SIGKILL has ended a process, kill the others, and return the output."""
        wait_until(lambda: any(trainer.exitcode is not None for trainer in self.trainers), limit)
        codes = [trainer.exitcode for trainer in self.trainers]
        self.kill()
        text = self.log.read_text()
        assert -signal.SIGKILL in codes, f"exit codes {codes}: {text[-5000:]}"
        return text

    def kill(self) -> None:
        """Kill the processes and their loader workers."""
        for trainer in self.trainers:
            if trainer.exitcode is None:
                with contextlib.suppress(ProcessLookupError):  # it is yet to make its own process group
                    os.killpg(trainer.pid or 0, signal.SIGKILL)
                trainer.kill()
            trainer.join()


def _run_script(
    script: Path, words: list[str], command: list[str] | None, environment: dict[str, str], log: Path, collectives: Path
) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.path[:0] = [str(script.parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [str(script), *words]
    # `accelerate launch` sets variables, and calls this function to start the processes of which this is one
    elastic.run = lambda _: runpy.run_path(str(script), run_name="__main__")
    try:
        if command is None:
            elastic.run([])
        else:
            launch.launch_command(launch.launch_command_parser().parse_args([*command, str(script), *words]))
    finally:
        if "RANK" in environment:
            collective_order.write(collectives, int(environment["RANK"]))
        atexit._run_exitfuncs()  # as at the end of a program


def run_command(words: list[str], folder: Path, log: Path, paths: list[str]) -> None:
    """Run the command `tessera` in a folder, as if it had been typed there: the target of a process of the server.

    It is here because the process imports the module of its target, and a module of tests needs seconds.

    Args:
        words: the command line, with its first word.
        log: file for the output.
        paths: folders of installed packages.
    """
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"BROWSER": "true", "COLUMNS": "200", "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])}
    sys.path[:0] = paths
    sys.argv = words
    main()
