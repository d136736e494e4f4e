"""If a process is lost, the others exit with a message. A busy process is not lost."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from tessera.runtime import watchdog
from tessera.runtime.collectives import all_reduce_sum
from tessera.runtime.machine import is_running
from tessera.runtime.processes import make_accelerator
from tessera.runtime.watchdog import Timing, Watch, watched
from tests.launched import TINY, newest_step, records, wait_until
from tests.ranks import on_processes

TIMING = Timing(interval=0.05, timeout=1.0, exit_delay=0.6)


class Room:
    """A store and the watches of one run, all in this process. `said` holds the message of each rank that gave up."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.said: dict[int, str] = {}

    def enter(self, rank: int, processes: int) -> Watch:
        def give_up(message: str) -> None:
            assert rank not in self.said
            self.said[rank] = message

        return Watch(rank, processes, ("127.0.0.1", self.store.port), "run", give_up, TIMING)


@pytest.fixture
def room() -> Room:
    return Room()


def _freeze(watch: Watch) -> None:
    """Stop the heartbeats without signing off, as SIGKILL does."""
    watch._leave = lambda store: None
    watch.close()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_silent_process_ends_all_others(room: Room, lost: int) -> None:
    watches = [room.enter(rank, 4) for rank in range(4)]
    wait_until(lambda: all(watch._peer.beats > 3 for watch in watches))
    _freeze(watches[lost])
    silent_for = wait_until(lambda: len(room.said) == 3)
    assert TIMING.timeout - 2 * TIMING.interval < silent_for < TIMING.timeout + 2
    host = os.uname().nodename
    for rank, message in room.said.items():
        assert message.startswith(f"process {rank}: process {lost} on {host} was last heard at ")
        assert re.search(r"at \d\d:\d\d:\d\d \(now: \d\d:\d\d:\d\d\)", message)
        assert message.endswith("or its machine failed")
    assert lost not in room.said


def test_the_work_of_a_process_does_not_grow_with_the_processes() -> None:
    """Process 0 and another one talk to a store that counts requests."""
    requests = []
    for processes in (8, 4096):
        for rank in (0, processes // 2):
            store = CountingStore()
            watch = Watch.__new__(Watch)
            watch._rank, watch._processes, watch._next, watch._peer = rank, processes, rank + 1, watchdog._Peer()
            watch._told, watch._awake = "", 0.0
            for _ in range(3):
                watch._exchange(store)  # pyright: ignore[reportArgumentType]
            requests.append(store.requests)
    assert requests == [requests[0]] * 4
    assert requests[0] <= 3 * 4


def test_processes_that_have_not_started_are_found_in_few_requests() -> None:
    store, absent = CountingStore(), [0, 5, 700, 701, 4095]
    store.kept = {f"host/{rank}": "" for rank in range(4096) if rank not in absent}
    assert watchdog._absent(store, 0, 4096, 8) == absent  # pyright: ignore[reportArgumentType]
    assert store.requests <= 2 * 12 * len(absent) + 1
    assert watchdog._absent(store, 0, 4096, 2) == [0, 5]  # pyright: ignore[reportArgumentType]


class CountingStore:
    """A store that counts the requests."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.requests = 0

    def add(self, key: str, amount: int) -> int:
        self.requests += 1
        self.kept[key] = str(int(self.kept.get(key, "0")) + amount)
        return int(self.kept[key])

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return all(key in self.kept for key in keys)


def test_the_next_process_is_watched_after_one_signs_off(room: Room) -> None:
    watches = [room.enter(rank, 4) for rank in range(4)]
    wait_until(lambda: all(watch._peer.beats > 3 for watch in watches))
    watches[1].close()
    wait_until(lambda: watches[0]._next == 2 and watches[0]._peer.beats > 0)
    _freeze(watches[2])
    wait_until(lambda: len(room.said) == 2)
    assert all("process 2 on " in message for message in room.said.values())


def test_a_process_that_signs_off_is_not_lost(room: Room) -> None:
    watches = [room.enter(rank, 3) for rank in range(3)]
    for watch in reversed(watches[1:]):
        watch.close()
    time.sleep(2 * TIMING.timeout)
    assert not room.said
    watches[0].close()
    again = [Watch(r, 2, watches[0]._address, "run 2", lambda _: None, TIMING) for r in range(2)]
    assert all(not watch.close() for watch in again), "the next run in these processes knows nothing of the one before"


def test_other_processes_exit_some_seconds_after_a_failure(room: Room) -> None:
    watches = [room.enter(rank, 3) for rank in range(3)]
    watches[1].close(failure="OSError: disk on fire")
    wait_until(lambda: watches[0]._told)
    known = watches[0].close(failure="RuntimeError: Connection closed by peer")
    assert "process 1 on " in known
    assert "failed: OSError: disk on fire" in known
    waited = wait_until(lambda: 2 in room.said)
    assert waited > TIMING.exit_delay / 2
    assert "process 1" in room.said[2], "the first failure is the one to tell"
    assert list(room.said) == [2]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])  # stopped: no answers, as from a lost machine
def test_a_lost_store_is_reported(how: signal.Signals) -> None:
    code = "from torch.distributed import TCPStore as S; import time; s = S('127.0.0.1', 0, is_master=True, "
    code += "wait_for_workers=False); print(s.port, flush=True); time.sleep(99)"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        address = ("127.0.0.1", int(server.stdout.readline()))
        said: list[str] = []
        watches = [Watch(r, 2, address, "x", said.append, TIMING) for r in range(2)]
        wait_until(lambda: all(watch._peer.beats > 3 for watch in watches))
        server.send_signal(how)
        wait_until(lambda: len(said) == 2)
        assert all(f"the store at 127.0.0.1:{address[1]}, which carries" in message for message in said)
    finally:
        server.kill()
        server.wait()


def _hold_the_interpreter(seconds: float) -> None:
    """Keep all other threads of this process from running, as the import of a large library does."""
    import ctypes

    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))


def _be_process(rank: int, port: int, block: str, done) -> None:
    watch = Watch(rank, 2, ("127.0.0.1", port), block, watchdog._exit, Timing(0.1, 4.0))
    if rank == 1:
        {"sleep": time.sleep, "hold": lambda s: _hold_the_interpreter(s / 4), "freeze": time.sleep}[block](9)
    done.wait()
    watch.close()


@pytest.mark.slow
def test_a_busy_process_is_not_lost(room: Room) -> None:
    """Three runs of two processes at once: in one a process sleeps, in one it holds the interpreter's lock, and one run
    is suspended as a whole, so that no process could hear another."""
    context = multiprocessing.get_context("fork")
    done = context.Event()
    runs = {
        block: [
            context.Process(target=_be_process, args=(rank, room.store.port, block, done), daemon=True)
            for rank in range(2)
        ]
        for block in ("sleep", "hold", "freeze")
    }
    processes = [process for run in runs.values() for process in run]
    for process in processes:
        process.start()
    time.sleep(1)
    for signal_, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 6)):
        for process in runs["freeze"]:
            assert process.pid
            os.kill(process.pid, signal_)
        time.sleep(seconds)
    assert [process.exitcode for process in processes] == [None] * 6
    done.set()
    for process in processes:
        process.join(10)
    assert {process.exitcode for process in processes} == {0}


def test_one_process_is_not_watched() -> None:
    threads = threading.active_count()
    with watched():
        assert threading.active_count() == threads


def test_errors_for_a_lost_process() -> None:
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:907. GLHF!")
    nccl = dist.DistBackendError(
        "NCCL error in: x.cpp\nncclRemoteError: remote process exited or there was a network e"
    )
    wrapped = ValueError("outer")
    wrapped.__cause__ = gloo
    assert all(watchdog._is_broken_collective(error) for error in (gloo, nccl, wrapped))
    others = [ValueError("Connection closed by peer"), dist.DistBackendError("NCCL error: invalid usage"), OSError(5)]
    assert not any(watchdog._is_broken_collective(error) for error in [*others, RuntimeError("shapes differ")])


@pytest.mark.parametrize("name", [None, "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_the_record_of_the_last_collectives_is_named(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], room: Room
) -> None:
    """NCCL writes the record to the run folder, or where the user wants it, and then ends the process."""
    for variable in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(variable, raising=False)
    if name:
        monkeypatch.setenv(name, str(tmp_path / "own-"))
    file = tmp_path / ("own-0" if name else "nccl_trace_rank_0")
    file.write_text("of an earlier run")
    os.utime(file, (1, 1))
    monkeypatch.setattr(watchdog, "_record", Path())
    watchdog.record_collectives(tmp_path)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0" == str(file)
    assert watchdog.new_record() == ""
    file.write_text("of this run")
    command = f"`torchfrtrace --prefix {file.name[:-1]} {tmp_path}`"
    assert watchdog.new_record().startswith(f" The last collectives of NCCL are in {file}. {command} compares")
    watch, said = room.enter(0, 2), []
    wait_until(lambda: said.append(capfd.readouterr().err) or "did not end in time" in "".join(said))
    watch.close()
    assert re.search(f"process 0 on .*: a collective did not end in time. The last .* {file}", "".join(said))


def _sum_after(seconds: float) -> None:
    with watched():
        make_accelerator(0.02)
        time.sleep(seconds)
        all_reduce_sum(torch.ones(1))


def _wait_for_a_slow_process(rank: int, folder: str) -> None:
    with pytest.raises(watchdog.LostError) as told:
        _sum_after(4 * rank)
    Path(folder, f"{rank}.txt").write_text(str(told.value))
    dist.destroy_process_group()  # it is broken: no barrier of `on_processes` at the end


@pytest.mark.slow
def test_a_collective_that_takes_too_long_names_the_setting(tmp_path: Path, free_port: int) -> None:
    """A process waits 1.2 s for one that needs 4 s. By default, it would wait for 30 minutes."""
    on_processes(_wait_for_a_slow_process, free_port, str(tmp_path))
    said = (tmp_path / "0.txt").read_text()
    assert "Timed out waiting 1200ms" in said
    assert "start again with more minutes for --collective_timeout. To continue" in said
    assert "--collective_timeout" not in (tmp_path / "1.txt").read_text()  # its peer is gone


# a process of a launch of two, which waits for the other one
STARTING = """
import os, sys, time
import torch.distributed as dist
from tessera.runtime import watchdog
watchdog.TIMING = watchdog.Timing(interval=0.1, timeout=1.5, notice=1.0)
print("imported", flush=True)
{before}
with watchdog.watched():
    {inside}
    dist.init_process_group("gloo")
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
        code = STARTING.format(before=before, inside=inside)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes))
        return started[-1]

    yield process
    for one in started:
        one.kill()
        one.wait(20)


@pytest.mark.slow
def test_a_missing_process_is_named_and_awaited(start) -> None:
    waiting = start(0)
    late = start(1, before="time.sleep(6)")
    line = waiting.stderr.readline()
    assert line.startswith(f"process 0 on {socket.gethostname()} has waited for ")
    assert "Of 2 processes, these have not started: 1. Look at the logs" in line
    assert "together" in waiting.communicate(timeout=60)[0]
    assert "together" in late.communicate(timeout=60)[0]
    assert waiting.returncode == late.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "how"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_process_lost_during_the_start_ends_the_other(start, lost: int, how: signal.Signals) -> None:
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
    assert f"process {1 - lost}: process {lost} on {socket.gethostname()} was last heard at" in said


@pytest.mark.medium
def test_a_store_that_does_not_answer_is_named(start, free_port: int) -> None:
    waiting = start(1, port=free_port)
    lines = [waiting.stderr.readline() for _ in range(1)]
    while "does not answer" not in lines[-1] and lines[-1]:
        lines.append(waiting.stderr.readline())
    assert f"The store at 127.0.0.1:{free_port} does not answer" in lines[-1]


def _start(launch, output: Path):
    arguments = [*TINY, "--steps", "100000", "--output", str(output)]
    run = launch(arguments, processes=2, wrapped=True)
    run.wait_for(lambda: (output / "checkpoints" / "step-00000004").exists())
    trainers = run.children()
    assert len(trainers) == 2
    return run, trainers


def _resumes(fork, output: Path) -> None:
    """Assert that the run resumes from its newest checkpoint for two more steps."""
    newest = newest_step(output)
    shorter = ["--steps", str(newest + 2), "--optim.warmup_steps", "1", "--dino.freeze_steps", "0"]
    log = fork(["--output", str(output), "--resume", *shorter, "--dino.teacher_temperature_steps", "0"]).wait()
    assert re.search(rf"resumed at step {newest} of {newest + 2}: *{output}", log.replace("\n", ""))
    assert [r["step"] for r in records(output)][-2:] == [newest + 1, newest + 2]


@pytest.mark.slow
def test_a_killed_process_ends_the_run(launch, fork, tmp_path: Path) -> None:
    """The other process translates the error of gloo."""
    output = tmp_path / "run"
    run, trainers = _start(launch, output)
    os.kill(trainers[1], signal.SIGKILL)
    assert wait_until(lambda: not is_running(trainers[0], None), 60) < 60
    log = run.wait(60)
    assert run.process.returncode == 137
    assert re.search(r"run.py: process 0: .* \(.*by peer.*\)\. To continue .* with --resume", log), log
    assert "Traceback" not in log
    _resumes(fork, output)


@pytest.mark.slow
def test_a_frozen_process_ends_the_run_within_a_minute(launch, fork, tmp_path: Path) -> None:
    """The other process waits in a collective that never ends. The test uses the real intervals and takes a minute."""
    output = tmp_path / "run"
    run, trainers = _start(launch, output)
    os.kill(trainers[0], signal.SIGSTOP)  # process 0, to which all others listen
    assert 30 < wait_until(lambda: not is_running(trainers[1], None), 60) < 60
    assert re.search(r"run.py: process 1: process 0 on .* was last heard at .* with --resume", run.log.read_text())
    run.wait(20)  # the launcher kills the stopped trainer at once
    assert run.process.returncode == 69
    _resumes(fork, output)


@pytest.mark.slow
def test_a_frozen_process_ends_an_evaluation(launch, tmp_path: Path) -> None:
    script = tmp_path / "evaluate.py"
    script.write_text(
        textwrap.dedent("""
        import time
        import torch
        from tessera.runtime import watchdog
        watchdog.TIMING = watchdog.Timing(interval=0.5, timeout=6.0)
        from tessera.runtime.collectives import all_reduce_sum
        from tessera.runtime.processes import exit_on_user_error, make_accelerator
        with exit_on_user_error():
            make_accelerator()
            while True:
                all_reduce_sum(torch.ones(3))
                print("worked", flush=True)
                time.sleep(0.2)
        """)
    )
    run = launch([], processes=2, wrapped=True, script=script)
    run.wait_for(lambda: run.log.read_text().count("worked") > 10)
    trainers = run.children()
    os.kill(trainers[1], signal.SIGSTOP)
    wait_until(lambda: not is_running(trainers[0], None), 30)
    assert re.search(
        r"evaluate.py: process 0: process 1 on .* was last heard at .*Start the command again", run.log.read_text()
    )
    run.wait(20)  # the launcher kills the stopped trainer at once
    assert run.process.returncode == 69
