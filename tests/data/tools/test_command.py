"""Work spread over processes."""

import multiprocessing
import os
import signal
import time

import pytest

from tessera.data.tools.offline import spread
from tessera.runtime.machine import is_running
from tests.launched import wait_until


def test_results_of_all_tasks():
    assert sorted(spread(lambda task: task**2, range(4), workers=2, title="squares")) == [0, 1, 4, 9]
    assert list(spread(lambda task: task, [], workers=2, title="nothing")) == []


def test_an_error_stops_the_other_workers(tmp_path):
    def work(task):
        for n in range(1 if task else 400):
            (tmp_path / f"{task}-{n}").touch()
            time.sleep(0.05)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        list(spread(work, [0, 1], workers=2, title=""))
    assert len(list(tmp_path.glob("0-*"))) < 200


def test_workers_end_with_the_command(tmp_path):
    def work(_):
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    def run():
        list(spread(work, [0, 1], workers=2, title=""))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    wait_until(lambda: len(list(tmp_path.glob("[0-9]*"))) == 2)
    workers = [int(path.name) for path in tmp_path.glob("[0-9]*")]
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    wait_until(lambda: not any(is_running(worker, None) for worker in workers), 5)
