"""Runs of the real command that are small enough for a test."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEASURED = {"images_per_second", "data_wait", "slowest_rank", "slowest_rank_lag", "mfu", "tokens_per_second"}
"""Metrics that depend on the speed of the machine."""
# the embedded digits and an encoder of two narrow blocks: a dozen steps take seconds
TINY = [
    "--method", "dino", "--steps", "12", "--batch_size", "16", "--record_every", "1", "--checkpoint_every", "4",
    "--workers", "1", "--encoder.depth", "2", "--encoder.dim", "24", "--encoder.heads", "2", "--dino.hidden_dim", "32",
    "--dino.bottleneck_dim", "16", "--dino.prototypes", "64", "--evaluation.pictures", "2",
]  # fmt: skip


def find_free_port() -> int:
    """Return a TCP port that no process listens on.

    It is below 32768, where Linux takes no port for a connection or for port 0, so that it stays free until it is used.
    """
    source = random.SystemRandom()  # tests may seed the global generator
    while True:
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("", source.randrange(10_000, 20_000)))
            return s.getsockname()[1]


class Launched:
    """A running pretrain/run.py or another script, in a process group of its own.

    One process without an engine is started by `python SCRIPT`, because `accelerate launch` would take seconds more.

    Args:
        arguments: flags of the script.
        processes: number of trainers.
        engine: stem of a file in configs/accelerate/, if any.
        log: file for the output of all processes.
        environment: environment variables to add.
        script: Python file to run.
        wrapped: start with launch/accelerate_launch.py instead of `accelerate launch`.
        direct: False starts also one process with `accelerate launch`.
    """

    def __init__(
        self,
        arguments: list[str],
        processes: int,
        engine: str | None,
        log: Path,
        environment: dict[str, str],
        script: Path,
        wrapped: bool,
        direct: bool = True,
    ) -> None:
        command = [sys.executable]
        if wrapped or engine or processes > 1 or not direct:
            own = [str(ROOT / "launch" / "accelerate_launch.py")]
            command += [*(own if wrapped else ["-m", "accelerate.commands.launch"]), "--num_processes", str(processes)]
            command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        if engine:
            command += ["--config_file", str(ROOT / "configs" / "accelerate" / f"{engine}.yaml")]
        elif processes > 1:
            command += ["--multi_gpu"]
        if engine or processes > 1:
            command += ["--main_process_port", "0"]
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, str(script), *arguments],
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment,
            )  # fmt: skip

    def wait(self, timeout: float = 240) -> str:
        """Wait for the end and return the output."""
        self.process.wait(timeout)
        return self.log.read_text()

    def kill(self) -> None:
        """Kill the launcher, the trainers and their loader workers."""
        if self.process.poll() is None:
            for group in {
                self.process.pid,
                *map(os.getpgid, self.children()),
            }:  # each of several trainers has its own
                os.killpg(group, signal.SIGKILL)
        self.process.wait(60)

    def children(self) -> list[int]:
        """Return the child processes of the launcher: the trainers, in rank order, if there are several."""
        return [
            int(child)
            for thread in Path(f"/proc/{self.process.pid}/task").glob("*/children")
            for child in thread.read_text().split()
        ]

    def wait_for(self, condition: Callable[[], object], timeout: float = 120) -> None:
        """Wait until the condition holds. Fail if the run ends or the time is over before."""
        end = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)


def timeless(output: Path) -> list[dict]:
    """Return the records without the values that depend on the machine's speed."""
    return [{k: v for k, v in r.items() if k not in MEASURED} for r in records(output)]


def records(output: Path) -> list[dict]:
    """Return the lines of metrics.jsonl, or an empty list if the run has not begun."""
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest_step(output: Path) -> int:
    """Return the step of the newest checkpoint of a run. A run that was stopped may not have linked `latest` to it."""
    return max(int(folder.name.removeprefix("step-")) for folder in (output / "checkpoints").glob("step-*"))


def same_encoder(output: Path, other: Path) -> bool:
    """Return True if two runs have ended with the same weights of the encoder, bit for bit."""
    import torch  # imported here, because conftest.py sets the number of threads before torch is imported

    from tessera import encoders

    ours, theirs = (encoders.load(folder / "encoder.safetensors").state_dict() for folder in (output, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def wait_until(condition: Callable[[], object], timeout: float = 20) -> float:
    """Wait until the condition holds, and return the seconds that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + timeout
        time.sleep(0.01)
    return time.monotonic() - start
