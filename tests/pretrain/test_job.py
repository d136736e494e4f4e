"""What processes must agree on before a run."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tessera.data.demo import demo_shards
from tessera.data.shards import ShardError, Source, expand
from tessera.data.shards.tars import LocalTar, RemoteTar
from tessera.pretrain import job


def listed(*names, unreadable=()):
    counts = np.full(len(names), 3)
    return Source([RemoteTar(f"http://h/{name}", 10, "") for name in names], counts, counts, counts, list(unreadable))


def test_processes_that_see_other_shards(monkeypatch):
    both, one = listed("a.tar", "b.tar"), listed("a.tar", unreadable=["http://h/b.tar"])
    others = []
    monkeypatch.setattr(job, "gather_objects", lambda own: [own, *others])
    seen = job.agree([both], [1024])
    others = [(job.fingerprint([both], [1024]), 6, [])]
    assert job.agree([both], [1024]) == seen
    others = [(job.fingerprint([one], [1024]), 3, ["http://h/b.tar"])]
    with pytest.raises(
        ShardError,
        match=r"process 1 sees 3 images and process 0 sees 6.*Only one of the .* processes can read: http://h/b\.tar\.",
    ):
        job.agree([both], [1024])


# Each process has a disk of its own.
SCRIPT = """
import os, sys
from tessera.pretrain import run
sys.argv = [word.replace("DISK", "disk" + os.environ["RANK"]) for word in sys.argv]
sys.exit(run.main())
"""


@pytest.mark.slow
def test_two_processes_whose_disks_differ_stop(launch, tmp_path: Path) -> None:
    for rank, count in ((0, 4), (1, 3)):
        (tmp_path / f"disk{rank}").mkdir()
        for shard in expand(demo_shards()[0])[:count]:
            shutil.copy2(shard, tmp_path / f"disk{rank}")
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    words = [
        "--data",
        f"{tmp_path}/DISK/*.tar",
        "--batch_size",
        "16",
        "--steps",
        "2",
        "--output",
        str(tmp_path / "run"),
    ]
    run = launch(words, processes=2, script=script)
    log = run.wait(120)
    assert run.process.returncode != 0
    assert "process 1 sees 1078 images and process 0 sees 1437, but all processes must see the same shards" in log
    assert not (tmp_path / "run").exists()


def test_the_fingerprint_is_of_the_order():
    both = listed("a.tar", "b.tar")
    known = job.fingerprint([both], [1024])
    moved = Source([LocalTar(f"/disk/{n}", 99, "x") for n in ("a.tar", "b.tar")], both.counts, both.counts, both.counts)
    assert job.fingerprint([moved], [1024]) == known  # elsewhere, but the same order
    assert job.fingerprint([listed("b.tar", "a.tar")], [1024]) != known
    assert job.fingerprint([both], [512]) != known
