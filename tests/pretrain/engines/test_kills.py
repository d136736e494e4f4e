"""Kills and stops at random moments of runs of two processes, under both kinds of sharding: by ranges, and by rows.

Each run is stopped by SIGTERM and then by SIGKILL, to one process or to all, and resumed until it is done. Its losses
and its encoder are then bit-equal to those of an undisturbed run, and nothing is left behind.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tessera.pretrain.checkpoints import resume
from tessera.runtime import preemption, watchdog
from tessera.runtime.machine import is_running
from tests.launched import TINY, same_encoder, wait_until
from tests.pretrain.small import losses

KILLS = 2
STEPS = 48


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def descendants(pid: int) -> list[int]:
    """Return the processes below a process: trainers and loader workers."""
    try:
        own = [int(c) for t in Path(f"/proc/{pid}/task").glob("*/children") for c in t.read_text().split()]
    except OSError:
        return []
    return own + [one for child in own for one in descendants(child)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_kills_at_random_moments_change_nothing(launch, fork, tmp_path: Path, engine: str) -> None:
    before = shared_memory()
    tiny = [*TINY, "--steps", str(STEPS), "--checkpoint_every", "3", "--checkpoint.background"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    fork([*tiny, "--output", str(whole)], processes=2, engine=engine).wait()
    rng = random.Random(engine)
    words, started = [*tiny, "--output", str(broken)], []
    for number in range(KILLS):
        run = launch(words, processes=2, engine=engine, wrapped=True)
        goal = max(losses(broken)) + rng.randint(1, 10) if losses(broken) else 1
        run.wait_for(lambda goal=goal: max(losses(broken), default=0) >= goal)
        time.sleep(rng.random() * 0.3)
        trainers = run.children()
        started += [run.process.pid, *descendants(run.process.pid)]
        how, targets = (signal.SIGTERM, signal.SIGKILL)[number % 2], rng.choice([trainers, trainers[:1], trainers[1:]])
        for pid in targets:
            os.kill(pid, how)
        log = run.wait(120)
        expected = {preemption.EXIT_CODE} if how == signal.SIGTERM else {137, watchdog.EXIT_CODE, 1}
        assert run.process.returncode in expected, log
        assert "Traceback" not in log or how == signal.SIGKILL
        for path in resume.list_checkpoints(broken / "checkpoints"):
            resume.verify(path)
        words = ["--output", str(broken), "--resume"]
    fork(words, processes=2, engine=engine).wait()
    assert losses(broken) == losses(whole)
    assert same_encoder(broken, whole)
    # other programs of the machine may hold shared memory for a while
    wait_until(lambda: not any(is_running(pid, None) for pid in started) and shared_memory() <= before, 30)
    assert not [path for path in broken.rglob(".*") if path.name != ".metadata"], "a temporary file or a lock is left"
