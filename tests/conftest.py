"""What tests of several folders need."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launched import ROOT, Launched


@pytest.fixture
def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start a run: `launch(["--output", ...], processes=2, engine="zero2")`, the engine being a file of
    configs/accelerate/; `wrapped` by launch/accelerate_launch.py. What still runs at the end of the test is killed."""
    started: list[Launched] = []

    def start(
        arguments: list[str],
        processes: int = 1,
        script: Path = ROOT / "pretrain" / "run.py",
        engine: str | None = None,
        wrapped: bool = False,
        **environment: str,
    ) -> Launched:
        log = tmp_path / f"log-{len(started)}.txt"
        started.append(Launched(arguments, processes, engine, log, environment, script, wrapped))
        return started[-1]

    yield start
    for run in started:
        run.kill()
