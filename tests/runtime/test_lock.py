"""The lock of a folder: one holder, dead holders are replaced without a hand, and live ones never."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tessera.runtime.lock import LockedError, Timing, locked
from tessera.runtime.machine import is_running
from tests.launched import wait_until

QUICK = Timing(interval=0.05, timeout=0.6)
PATIENT = Timing(interval=0.05, timeout=60)
HOLDER = """
import os, sys, time
from pathlib import Path
from tessera.runtime.lock import locked
with locked(Path(sys.argv[1])):
    if len(sys.argv) > 2 and os.fork() == 0:  # a loader worker, which has the descriptors of its parent
        print(os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    started = []

    def start(*more: str) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLDER, str(tmp_path), *more]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        started[-1].first = started[-1].stdout.readline().strip()
        return started[-1]

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def elsewhere(folder: Path, beats: int = 1, number: int = 1) -> Path:
    """Write the file of a lock as a holder on another machine does."""
    path = folder / f".lock-{number:08d}"
    record = {"host": "node7", "machine": "another", "pid": 1, "started": "5", "since": "then", "beats": beats}
    (folder / "part").write_text(json.dumps(record))  # a reader never finds an empty file
    return (folder / "part").replace(path)


def test_live_holders_are_named_and_killed_ones_replaced(tmp_path: Path, holder) -> None:
    process = holder()
    for stop in (None, signal.SIGSTOP):  # a frozen holder may continue at any time
        if stop:
            os.kill(process.pid, stop)
        began = time.monotonic()
        message = f"{tmp_path} is in use by process {process.pid} on .* started at 20"
        with pytest.raises(LockedError, match=message), locked(tmp_path, PATIENT):
            pass
        assert time.monotonic() - began < PATIENT.timeout / 2  # at once, even on a busy machine
    os.kill(process.pid, signal.SIGKILL)  # not waited for: a zombie is dead, too
    wait_until(lambda: not is_running(process.pid, None))
    began = time.monotonic()
    with locked(tmp_path, PATIENT):
        assert time.monotonic() - began < PATIENT.timeout / 2
        assert [path.name for path in tmp_path.iterdir()] == [".lock-00000002"]
    assert not list(tmp_path.iterdir())


def test_an_orphaned_loader_worker_does_not_hold_the_lock(tmp_path: Path, holder) -> None:
    process = holder("with a worker")
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    with locked(tmp_path):
        pass


def test_a_second_run_of_the_same_process_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(LockedError, match=f"in use by process {os.getpid()}"), locked(tmp_path / "." / ""):
            pass
        done = subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path)], capture_output=True, text=True)
        assert f"in use by process {os.getpid()}" in done.stderr  # the refusal above has not released the lock
    with locked(tmp_path):
        pass


def test_a_remote_holder_without_heartbeat_is_dead(tmp_path: Path) -> None:
    elsewhere(tmp_path)
    began = time.monotonic()
    with locked(tmp_path, QUICK):
        assert QUICK.timeout <= time.monotonic() - began < 20 * QUICK.timeout
    over = threading.Event()

    def beat() -> None:
        beats = 1
        while not over.wait(0.2):
            beats += 1
            elsewhere(tmp_path, beats)

    elsewhere(tmp_path)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(LockedError, match="process 1 on node7"), locked(tmp_path, PATIENT):
            pass
    finally:
        over.set()
        thread.join()


def test_a_remote_holder_may_end_while_watched(tmp_path: Path) -> None:
    path = elsewhere(tmp_path)
    threading.Timer(0.2, path.unlink).start()
    began = time.monotonic()
    with locked(tmp_path, PATIENT):
        assert time.monotonic() - began < PATIENT.timeout / 2


def _take(folder: Path, start, done, results) -> None:
    start.wait()
    try:
        with locked(folder, QUICK):
            results.put("held")
            done.wait(60)
    except LockedError:
        results.put("refused")


def test_exactly_one_process_takes_over(tmp_path: Path) -> None:
    elsewhere(tmp_path, number=41)
    context = multiprocessing.get_context("fork")
    start, done, results = context.Event(), context.Event(), context.Queue()
    processes = [context.Process(target=_take, args=(tmp_path, start, done, results)) for _ in range(8)]
    for process in processes:
        process.start()
    start.set()
    assert sorted(results.get(timeout=30) for _ in processes) == ["held", *["refused"] * 7]
    done.set()
    for process in processes:
        process.join(30)
    assert not list(tmp_path.iterdir())


def test_a_suspended_holder_ends_its_run(tmp_path: Path) -> None:
    told = []
    with locked(tmp_path, QUICK, told.append):
        later = elsewhere(tmp_path, number=2)
        wait_until(lambda: told)
    assert told == [
        f"process 1 on node7, which started at then has taken over {tmp_path}, because this run was suspended"
    ]
    assert later.exists()  # it belongs to the other run


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff" * 5000, b"[" * 4000, b'{"machine": 3, "pid": "x"}'])
def test_damaged_lock_files_are_replaced_after_the_timeout(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".lock-00000001").write_bytes(content)
    (tmp_path / ".lock-999999999999999").touch()  # not a name of this project
    with locked(tmp_path, QUICK):
        pass


def test_a_lock_with_the_largest_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock-999999999999").touch()
    with pytest.raises(LockedError, match=r"\.lock-999999999999 has the largest number"), locked(tmp_path, QUICK):
        pass


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_other_files_in_place_of_a_lock(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ".lock-00000001"
    {"link": lambda: path.symlink_to("target"), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    with pytest.raises((LockedError, OSError), match=r"not a regular file|symbolic links"), locked(tmp_path, QUICK):
        pass
    assert not (tmp_path / "target").exists()
