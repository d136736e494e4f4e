"""Work spread over processes."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from tessera.data.shards import progress
from tessera.data.tools import parallel


def test_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE", 0.0)
    monkeypatch.setattr(parallel, "POLL", 0.01)

    def work(task, advance):
        for _ in range(5):
            time.sleep(0.02)
            advance(2)
        return task

    assert sorted(parallel.spread(work, range(4), workers=2, title="writing", total=40)) == [0, 1, 2, 3]
    assert "of 40 images" in capsys.readouterr().err


def test_an_error_stops_the_other_workers(tmp_path):
    def work(task, advance):
        for n in range(1 if task else 400):
            (tmp_path / f"{task}-{n}").touch()
            time.sleep(0.05)
            advance(1)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        list(parallel.spread(work, [0, 1], workers=2, title="", total=2))
    assert len(list(tmp_path.glob("0-*"))) < 200


def test_workers_end_with_the_command(tmp_path):
    def work(_, advance):
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    def run():
        list(parallel.spread(work, [0, 1], workers=2, title="", total=2))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    while len(list(tmp_path.glob("[0-9]*"))) < 2:
        time.sleep(0.01)
    workers = [int(path.name) for path in tmp_path.glob("[0-9]*")]
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        state = [Path(f"/proc/{w}/stat").read_text().split()[2] for w in workers if Path(f"/proc/{w}").exists()]
        if set(state) <= {"Z"}:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
