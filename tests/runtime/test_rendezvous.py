"""Processes that wait for each other at the start name the one that is missing, and end if one is lost."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tessera.runtime import rendezvous, watchdog

CHILD = """
import os, sys, time
from tessera.runtime import rendezvous, watchdog
watchdog.TIMING = watchdog.Timing(interval=0.1, timeout=1.5)
rendezvous.FIRST_NOTICE = 1.0
print("imported", flush=True)
{before}
with rendezvous.naming_missing_processes():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    {inside}
print("together", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a process of a launch of two. The store runs in this process, as it does in the launcher's."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []

    def process(rank: int, before: str = "", inside: str = "", port: int | None = None) -> subprocess.Popen:
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(port or store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        code = CHILD.format(before=before, inside=inside)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes))
        return started[-1]

    yield process
    for one in started:
        one.kill()
        one.wait(20)


@pytest.mark.medium
def test_a_process_that_does_not_start_is_named_and_waited_for(start) -> None:
    waiting = start(0)
    late = start(1, before="time.sleep(6)")
    line = waiting.stderr.readline()
    assert line.startswith(f"process 0 on {socket.gethostname()} has waited for ")
    assert "Of 2 processes, these have not started: 1. Look at the logs" in line
    assert "together" in waiting.communicate(timeout=60)[0]
    assert "together" in late.communicate(timeout=60)[0]
    assert waiting.returncode == late.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_is_lost_while_it_waits_ends_the_other(start, lost: int, how: signal.Signals) -> None:
    # both send heartbeats, and neither goes on
    processes = [start(rank, inside="time.sleep(100)") for rank in range(2)]
    for process in processes:
        assert process.stdout.readline() == "imported\n"
    time.sleep(5)
    assert [process.poll() for process in processes] == [None, None]
    os.kill(processes[lost].pid, how)
    began = time.monotonic()
    other = processes[1 - lost]
    said = other.communicate(timeout=30)[1]
    assert time.monotonic() - began < 15
    assert other.returncode == watchdog.EXIT_CODE
    assert f"ends, because process {lost} on {socket.gethostname()} was lost while the processes were starting" in said


@pytest.mark.medium
def test_a_store_that_does_not_answer_is_named(start, free_port: int) -> None:
    waiting = start(1, port=free_port)
    lines = [waiting.stderr.readline() for _ in range(1)]
    while "does not answer" not in lines[-1] and lines[-1]:
        lines.append(waiting.stderr.readline())
    assert f"The store at 127.0.0.1:{free_port} does not answer" in lines[-1]


def test_one_process_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(rendezvous, "_watch", lambda *_: pytest.fail("a thread was started"))
    with rendezvous.naming_missing_processes():
        pass
