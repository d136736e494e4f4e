"""What processes must agree on before a run."""

import numpy as np
import pytest

from data.shards import ShardError, ShardList
from data.shards.shard import Shard
from pretrain import job


def listed(*names, unreadable=()):
    counts = np.full(len(names), 3)
    return ShardList([Shard(f"http://h/{name}", 10, "") for name in names], counts, counts, counts, list(unreadable))


def test_processes_that_see_other_shards(monkeypatch):
    both, one = listed("a.tar", "b.tar"), listed("a.tar", unreadable=["http://h/b.tar"])
    others = []
    monkeypatch.setattr(job, "gather", lambda own: [own, *others])
    seen = job.agree([both], [1024])
    others = [(job.fingerprint([both], [1024]), 6, [])]
    assert job.agree([both], [1024]) == seen
    others = [(job.fingerprint([one], [1024]), 3, ["http://h/b.tar"])]
    with pytest.raises(
        ShardError, match=r"process 1 sees 3 images and process 0 sees 6.*one of the two: http://h/b.tar;"
    ):
        job.agree([both], [1024])


def test_the_fingerprint_is_of_the_order():
    both = listed("a.tar", "b.tar")
    known = job.fingerprint([both], [1024])
    moved = ShardList([Shard(f"/disk/{n}", 99, "x") for n in ("a.tar", "b.tar")], both.counts, both.counts, both.counts)
    assert job.fingerprint([moved], [1024]) == known  # elsewhere, but the same order
    assert job.fingerprint([listed("b.tar", "a.tar")], [1024]) != known
    assert job.fingerprint([both], [512]) != known
