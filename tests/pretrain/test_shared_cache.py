"""Kills at random moments of a run and of an evaluation that share one cache with another run.

The other run goes on as if it were alone. The killed ones give the same results when they are started again, and leave
nothing behind.
"""

import gzip
import json
import random
import shutil
import time
from pathlib import Path

import pytest

from tessera.data.demo import demo_shards
from tests.launched import ROOT, TINY
from tests.pretrain.small import losses
from tests.ranks import Script

KILLS = 2
STEPS = 16


def kill(run: Script, rng: random.Random, longest: float) -> None:
    """Kill a command, with all its processes, after a random time of at most `longest` seconds."""
    time.sleep(rng.uniform(0, longest))
    run.kill()


@pytest.fixture
def compressed(tmp_path: Path) -> list[str]:
    """The embedded digits as compressed shards, which are unpacked to the cache: train and held-out pattern."""
    for path in Path(demo_shards()[0]).parent.glob("*.tar"):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    return [str(tmp_path / f"{part}-*.tar.gz") for part in ("train", "held-out")]


@pytest.mark.slow
def test_what_is_killed_harms_nobody_and_leaves_nothing(fork, compressed: list[str], tmp_path: Path) -> None:
    train, val = compressed
    # 1.5 MB are less than the unpacked shards, so that blocks are removed and unpacked again all the time
    words = [*TINY, "--steps", str(STEPS), "--data", train, "--source.cache_gb", "0.0015"]
    words += ["--evaluation.view_images", "0"]
    score = ["--checkpoint", "pixels", "--image_size", "8", "--source.cache_gb", "0.0015"]
    score += ["--train", train, "--val", val]
    knn = ROOT / "evaluation" / "knn.py"

    def start_run(name: str, cache: str, *flags: str) -> Script:
        given = [*words, "--output", str(tmp_path / name), *flags]
        return fork(given, TESSERA_CACHE=str(tmp_path / cache))

    def start_score(name: str, cache: str) -> Script:
        given = [*score, "--output", str(tmp_path / f"{name}.json")]
        return fork(given, processes=2, script=knn, TESSERA_CACHE=str(tmp_path / cache))

    started = time.monotonic()
    alone = start_run("alone", "own")
    alone.wait()
    took = time.monotonic() - started
    start_score("alone", "own").wait()
    expected = json.loads((tmp_path / "alone.json").read_text())["top1"]

    rng = random.Random(0)
    other = start_run("other", "shared")
    for number in range(KILLS):
        if not other.is_running():  # there is always another run
            other.wait()
            assert losses(tmp_path / "other") == losses(tmp_path / "alone")
            shutil.rmtree(tmp_path / "other")
            other = start_run("other", "shared")
        run = start_run("killed", "shared", *(["--resume"] if number else []))
        kill(run, rng, took)
        kill(start_score("killed", "shared"), rng, took)
    start_run("killed", "shared", "--resume").wait()
    (tmp_path / "killed.json").unlink(missing_ok=True)
    start_score("killed", "shared").wait()
    other.wait()
    assert json.loads((tmp_path / "killed.json").read_text())["top1"] == expected
    for name in ("other", "killed"):
        assert losses(tmp_path / name) == losses(tmp_path / "alone")
    shared, own = (pieces(tmp_path / name) for name in ("shared", "own"))
    assert shared.keys() & own.keys()
    for name in shared.keys() & own.keys():  # equal names mean equal content
        assert shared[name].read_bytes() == own[name].read_bytes()
    total = sum(path.stat().st_size for path in shared.values())
    assert total <= 1.5e6


def pieces(cache: Path) -> dict[str, Path]:
    """Return the entries of a cache by name, and the files that killed writers have left."""
    return {path.name: path for path in (cache / "pieces-v1").glob("*/*")}
