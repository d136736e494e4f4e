"""Shards that change on their server, wrong checksums, and servers that send almost nothing."""

import os
import signal
import time
from pathlib import Path

import pytest

from tessera.data.shards import ShardError, open_shards, remote, tar_shard
from tessera.data.shards import cache as caches
from tessera.data.shards.access import Access, SourceConfig
from tessera.runtime import preemption
from tests.data.shards.batches import add_index, sha256
from tests.data.shards.servers import Server

QUICK = Access(SourceConfig(retries=0, timeout=1))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "BACKOFF", 0.01)
    monkeypatch.setattr(remote, "_servers_with_ranges", {})
    monkeypatch.setattr(caches, "_versions", {})
    monkeypatch.setattr(tar_shard, "USUAL_REQUEST", 1)


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path) as running:
        yield running


def change(path):
    """Other images in a shard of the same size, with the same headers."""
    raw = Path(path).read_bytes()
    assert b"IDATx" in raw
    time.sleep(0.02)
    Path(path).write_bytes(raw.replace(b"IDATx", b"IDATy"))


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("version", ["ETag", "Last-Modified"])
def test_a_shard_that_changes_on_its_server_is_named(write_shards, server, indexed, version):
    (path,) = write_shards([6])
    server.version = version
    if indexed:
        add_index([path], [6], tables=True, sha256=sha256(path))
    opened = open_shards(f"{server.url}/index.json" if indexed else f"{server.url}/data-000000.tar")
    opened.shards[0].cache.remove(opened.shards[0].cache_name("whole"))
    before = opened.image(0)
    opened.shards[0].cache.remove(opened.shards[0].cache_name("whole"))
    change(path)
    assert opened.image(0) == before  # from the cache
    with pytest.raises(ShardError, match=r"data-000000.tar has changed on the server \(version .*, before"):
        opened.image(3)
    caches._versions.clear()  # another process of the node
    with pytest.raises(ShardError, match="has changed on the server"):
        opened.image(4)


def test_servers_may_lack_versions(write_shards, server, png):
    (path,) = write_shards([6])
    add_index([path], [6], tables=True, sha256=sha256(path))
    opened = open_shards(f"{server.url}/index.json")
    assert [opened.image(number) for number in range(3)] == [png(number) for number in range(3)]
    server.version = None
    assert [opened.image(number) for number in range(6)] == [png(number) for number in range(6)]


@pytest.mark.parametrize("part", [".tar", ".index", "index.json"])
def test_slow_servers_are_given_up(write_shards, server, part):
    (path,) = write_shards([3])
    add_index([path], [3], tables=True)
    server.faults = {part: "drip"}
    start = time.monotonic()
    with pytest.raises(ShardError, match=r"bytes were sent in 1 s|no response for"):
        open_shards(f"{server.url}/index.json", source=QUICK).image(0)
    assert time.monotonic() - start < 12


def test_waiting_for_a_server_hears_signals(write_shards, server, monkeypatch):
    (path,) = write_shards([3])
    add_index([path], [3], tables=True)
    opened = open_shards(f"{server.url}/index.json", source=Access(SourceConfig(timeout=60)))
    opened.shards[0].index()
    server.faults = {".tar": "silent"}
    monkeypatch.setattr(preemption, "LONGEST_WAIT", 1.0)
    start = time.monotonic()
    with preemption.listening():
        before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            with pytest.raises(preemption.WaitInterruptedError, match="stopped by SIGTERM while waiting for data"):
                opened.image(0)
        finally:
            signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 8
    assert not preemption.stop_requested()


def test_the_hash_of_remote_samples_has_the_versions_of_the_server(write_shards, server):
    paths = write_shards([6])
    url = f"{server.url}/data-000000.tar"
    first, same = (open_shards(url).samples_hash() for _ in range(2))
    os.utime(paths[0], (1, 1))  # the server states another version
    other = open_shards(url).samples_hash()
    assert first == same != other
    assert first.partition(":")[0] == other.partition(":")[0] == "samples, versions"
