"""Loader workers that are stopped, and parents that are killed."""

import contextlib
import logging
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from tessera.data import batches, workers
from tessera.data.workers import WorkersError, WorkerStates, check_semaphores, free_cores, start_worker
from tessera.runtime import preemption
from tessera.runtime.machine import is_running
from tests.data.shards.batches import evaluate, train
from tests.launched import wait_until

PROGRAM = """
import multiprocessing, os, signal, sys, time
from tests.data.shards.batches import train
multiprocessing.set_start_method("forkserver")  # the default of Python 3.14
batches = iter(train(sys.argv[1], batch_size=4, seed=0, steps=10**6, streams=2, workers=2))
next(batches)
children = [int(pid) for pid in open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()]
for pid in children:
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        os.kill(pid, number)
os.system("kill -TERM " + " ".join(map(str, children)))  # from another process than the workers' parent
for _ in range(40):
    next(batches)
os.kill(children[0], signal.SIGSTOP)
print(*children, flush=True)
time.sleep(600)
"""


def children():
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


def hang():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def begun(batches):
    """An iterator over batches, its first batch, and the processes of its workers."""
    before = set(children())
    iterator = iter(batches)
    return iterator, next(iterator), sorted(set(children()) - before)


def test_a_stopped_worker_is_named_while_waiting(write_shards, monkeypatch, caplog):
    monkeypatch.setattr(workers, "STALLED", 2)
    monkeypatch.setattr(preemption, "LONGEST_WAIT", 1.0)
    loader = train(write_shards([20]), batch_size=4, seed=0, steps=1000, streams=2, workers=1)
    batches, _, (worker,) = begun(loader)
    os.kill(worker, signal.SIGSTOP)
    try:
        start = time.monotonic()
        with caplog.at_level(logging.WARNING), preemption.listening():
            handler = logging.Handler()
            handler.emit = lambda _: os.kill(os.getpid(), signal.SIGTERM)  # the line is there: now the signal
            logging.getLogger("tessera.data.workers").addHandler(handler)
            try:
                with pytest.raises(preemption.WaitInterruptedError):
                    list(batches)
            finally:
                logging.getLogger("tessera.data.workers").removeHandler(handler)
        assert time.monotonic() - start < 20
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)
    assert f"worker 0 (process {worker}) is stopped" in caplog.text


@pytest.mark.parametrize("evaluation", [True, False])
def test_a_worker_that_goes_on_gives_the_same_batches(write_shards, monkeypatch, evaluation):
    """An evaluation also waits for it after a signal, which ends a training run."""
    monkeypatch.setattr(preemption, "LONGEST_WAIT", 0.0)
    start = evaluate if evaluation else partial(train, seed=0, steps=12, streams=2)
    shards = write_shards([40])
    expected = [batch.keys for batch in start(shards, batch_size=4)]
    with preemption.listening():
        if evaluation:
            os.kill(os.getpid(), signal.SIGTERM)
        batches, first, (worker,) = begun(start(shards, batch_size=4, workers=1))
        os.kill(worker, signal.SIGSTOP)
        threading.Timer(max(3 * workers.POLL, 2.5), os.kill, (worker, signal.SIGCONT)).start()
        assert [first.keys, *(batch.keys for batch in batches)] == expected


def test_workers_that_never_send_anything_end_the_run(write_shards, monkeypatch):
    def start(number, states, **_):
        states.start(number)
        hang()

    monkeypatch.setattr(workers, "IDLE_LIMIT", 1)
    monkeypatch.setattr(batches, "start_worker", start)
    before = set(children())
    found = iter(train(write_shards([20]), batch_size=4, seed=0, steps=3, streams=2, workers=1))
    with pytest.raises(workers.WorkersError, match=r"all loader workers have been idle for 1 s.*--resume.*--workers"):
        next(found)
    wait_until(lambda: set(children()) <= before, 10)


@pytest.mark.parametrize("hanging", [2, 99])
def test_workers_that_hang_at_their_start_are_forked_again(write_shards, monkeypatch, caplog, hanging):
    forks = mmap.mmap(-1, 1)  # number of workers that have been forked

    def start(number, **given):
        forks[0] += 1
        if forks[0] <= hanging:
            hang()
        start_worker(number, **given)

    loader = partial(train, write_shards([20]), batch_size=4, seed=0, steps=3, streams=2)
    expected = [batch.keys for batch in loader()]
    wait, waits = workers.WorkerStates.wait, []

    def waiting(states, started):  # one second for workers that hang, from when they have been forked
        waits.append(1)
        wait_until(lambda: forks[0] == len(waits))
        monkeypatch.setattr(workers, "START_LIMIT", 1 if len(waits) <= hanging else 30)
        return wait(states, started)

    monkeypatch.setattr(workers.WorkerStates, "wait", waiting)
    monkeypatch.setattr(batches, "start_worker", start)
    before = set(children())
    if hanging > workers.ATTEMPTS:
        with pytest.raises(workers.WorkersError, match=r"workers do not start\. .*--resume.*--workers 0"):
            list(loader(workers=1))
    else:
        assert [batch.keys for batch in loader(workers=1)] == expected
    assert forks[0] == 3
    assert "are killed and forked again: worker 0 has not started." in caplog.text
    wait_until(lambda: set(children()) <= before, 10)


def test_a_worker_that_dies_at_its_start_is_named_at_once(write_shards, monkeypatch):
    monkeypatch.setattr(batches, "start_worker", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    with pytest.raises(workers.WorkersError, match=r"was killed by SIGKILL\. .*short of memory"):
        list(train(write_shards([20]), batch_size=4, seed=0, steps=3, streams=2, workers=1))
    assert time.monotonic() - start < workers.START_LIMIT / 2


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (signal.SIGKILL, "short of memory .* use fewer --workers"),
        (signal.SIGSEGV, "output above may state the reason"),
    ],
)
def test_a_worker_that_dies_is_named(number, advice, write_shards):
    loader = train(write_shards([20]), batch_size=4, seed=0, steps=1000, streams=2, workers=2)
    found, _, (_, worker) = begun(loader)
    os.kill(worker, number)
    time.sleep(0.5)  # nothing is raised outside of the loader
    with pytest.raises(
        workers.WorkersError, match=rf"process {worker}\) was killed by {number.name}\. .*{advice}.*--res"
    ):
        list(found)


def test_a_worker_long_at_work_is_described(monkeypatch):
    states = WorkerStates(2)
    assert states.describe() == ("worker 0 has not started, worker 1 has not started", True)
    states.start(1)
    states.working(1, True)
    monkeypatch.setattr(workers, "BUSY", 0)
    busy = f"worker 1 (process {os.getpid()}) has worked on a batch for 0 s"
    assert states.describe() == (f"worker 0 has not started, {busy}", False)
    monkeypatch.setattr(workers, "BUSY", 20)
    states.working(1, False)
    assert states.describe() == ("worker 0 has not started", True)


def test_workers_outlive_signals_but_not_a_killed_parent(write_shards):
    (path,) = write_shards([20])
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, path], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2
    program.kill()
    program.wait()
    wait_until(lambda: not any(is_running(pid, None) for pid in pids), 5)


def _in_daemon(found) -> None:
    found.put(free_cores(1))
    try:
        check_semaphores()
    except WorkersError as error:
        found.put(str(error))


def test_a_daemonic_process_has_no_workers() -> None:
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    child = context.Process(target=_in_daemon, args=(found,), daemon=True)
    child.start()
    child.join(20)
    assert found.get() == 0 < free_cores(1)
    assert "multiprocessing.Pool are, and may not start loader workers. Use --workers 0" in found.get()
