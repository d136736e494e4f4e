"""Shards behind a real web server, with the faults of real ones."""

import hashlib
import multiprocessing
import os
import threading
import time
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
import torch

from tessera.data.shards import ShardError, describe_remote, expand, open_shards, remote, tar_shard
from tessera.data.shards.access import Access, SourceConfig
from tessera.data.shards.index import FOLDER_INDEX, FolderIndex, ShardEntry, write_folder, write_table
from tessera.data.shards.tar_index import scan_tar
from tessera.runtime.collectives import RankError
from tests.data.shards.batches import evaluate, train
from tests.data.shards.servers import Server
from tests.ranks import on_processes

fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short pauses, and no memory of servers that had the same port."""
    monkeypatch.setattr(remote, "BACKOFF", 0.01)
    monkeypatch.setattr(remote, "_servers_with_ranges", {})


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path) as running:
        yield running


def add_index(paths, counts, tables=True):
    listed = []
    for path, count in zip(map(Path, paths), counts, strict=True):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        listed.append(
            ShardEntry(url=path.name, nsamples=count, filesize=path.stat().st_size, labelled=count, sha256=digest)
        )
        if tables:
            write_table(path, scan_tar(str(path), str(path)))
    write_folder(Path(paths[0]).parent, FolderIndex(shardlist=listed))


def run(shards, **settings):
    settings = {"batch_size": 12, "seed": 1, "steps": 7, "streams": 4} | settings
    return list(train(shards, **settings))


def same(one, other):
    return len(one) == len(other) and all(
        a.keys == b.keys and a.skipped == b.skipped and torch.equal(a.views[0].images, b.views[0].images)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    ("index", "ending", "ranges"),
    [(True, ".tar", True), (False, ".tar", True), (False, ".tar", False), (True, ".tar.gz", True)],
)
def test_batches_are_those_of_local_shards(write_shards, tmp_path, index, ending, ranges):
    counts = [10, 23, 1]
    paths = write_shards(counts, ending)
    expected, graded = run(paths), list(evaluate(paths, 8))
    if index:
        add_index(paths, counts, tables=ending == ".tar")
    with Server(tmp_path, ranges) as server:
        named = f"{server.url}/data-{{000000..000002}}{ending}"
        assert same(run(named), expected)
        assert same(run(named, workers=2), expected)
        found = list(evaluate(named, 8, workers=2))
        assert same(found, graded)
        assert [batch.labels.tolist() for batch in found] == [batch.labels.tolist() for batch in graded]
        shards = {asked for path, asked in server.gets(ending) if path.endswith(ending) and asked != "bytes=0-0"}
        if ending == ".tar" and ranges and index:
            assert None not in shards
        else:
            assert shards == {None}  # whole, also to look for the headers
        assert max(server.gets("data-").values()) <= 3  # the probe, once a start; and each part of a shard once


def test_an_index_saves_a_request_a_shard(write_shards, server):
    counts = [2] * 30
    add_index(write_shards(counts), counts)
    opened = open_shards(f"{server.url}/index.json")
    assert [shard.name for shard in opened.shards] == [f"data-{n:06d}.tar" for n in range(30)]
    assert opened.counts.tolist() == opened.labelled.tolist() == counts
    assert [path for _, path, _ in server.requests] == ["/index.json", "/data-000029.tar"]  # are there ranges?
    assert expand(f"{server.url}/index.json") == [f"{server.url}/data-{n:06d}.tar" for n in range(30)]
    opened.image(14)
    assert set(server.gets("data-000007")) == {("/data-000007.tar.index", None), ("/data-000007.tar", "bytes=0-3585")}


def test_each_block_is_fetched_once_by_a_node(write_shards, server):
    source = Access(SourceConfig(cache_gb=5.5e-4))  # holds all, but does not know it
    counts = [64, 64, 40]
    paths = write_shards(counts)
    assert 5.5e5 / 2 < sum(map(os.path.getsize, paths)) < 4e5
    add_index(paths, counts)
    shards = f"{server.url}/data-{{000000..000002}}.tar"

    def process(rank):
        for batch in train(
            shards, batch_size=24, seed=0, steps=14, block=8, source=source,
            rank=rank, world_size=2, workers=2,
        ):  # fmt: skip
            assert len(batch) == 12
        os._exit(7)

    processes = [fork.Process(target=process, args=(rank,)) for rank in range(2)]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
    assert [one.exitcode for one in processes] == [7, 7]
    blocks = {key: count for key, count in server.gets(".tar").items() if key[1] not in (None, "bytes=0-0")}
    assert set(blocks.values()) == {1}  # two epochs, two processes of two workers
    assert len(blocks) == 8 + 8 + 5
    assert set(server.gets(".index").values()) == {1}


def test_large_blocks_are_split_and_small_ones_joined(write_tar, server, monkeypatch):
    path = write_tar("t.tar", [(f"{n}.{end}", bytes([n]) * 1000) for n in range(16) for end in ("jpg", "cls")])
    write_table(path, scan_tar(path, path))

    def asked(block):
        monkeypatch.setenv("TESSERA_CACHE", f"{server.folder}/cache{len(server.requests)}")
        start = len(server.requests)
        one = open_shards(f"{server.url}/t.tar").in_blocks(block)
        for sample in range(16):
            assert one.image(sample) == bytes([sample]) * 1000
        parts = [part[6:].split("-") for _, path, part in server.requests[start:] if path == "/t.tar" and part]
        return [int(last) + 1 - int(first) for first, last in parts if last != "0"]

    sample = 2 * (512 + 1024)
    joined = 8 * sample - 24
    assert asked(4) == [16 * sample - 24]  # all of it is small
    monkeypatch.setattr(tar_shard, "USUAL_REQUEST", 1)
    assert asked(8) == [joined, joined]
    monkeypatch.setattr(tar_shard, "LARGEST_REQUEST", 3 * sample)
    assert asked(8) == [2 * sample - 24] * 8
    monkeypatch.setattr(tar_shard, "LARGEST_REQUEST", 1600)
    assert asked(8) == [1512] * 16


def test_faults_that_pass_are_tried_again(write_shards, server, caplog):
    paths = write_shards([20])
    add_index(paths, [20])
    expected = run(paths)
    server.faults = {
        FOLDER_INDEX: [503, "cut", "reset", 429],
        ".tar.index": ["reset", 500, "cut"],
        "data-000000.tar": [500, "reset", "cut", 502, 408],
    }
    assert same(run(f"{server.url}/data-000000.tar"), expected)
    assert not any(server.faults.values())  # all of them came
    assert caplog.text.count("trying again in") == 12
    os.remove(paths[0] + ".index")
    os.remove(Path(paths[0]).parent / FOLDER_INDEX)
    server.faults = {"data-000000.tar": [500, "cut", "reset", "cut"]}
    assert same(run(f"{server.url}/data-000000.tar?fresh"), expected)  # fetched whole
    assert not any(server.faults.values())


@pytest.mark.medium
@pytest.mark.parametrize(("fault", "attempts", "message"), [
    (404, 1, "not found"),
    (403, 1, "status 403"),
    (500, 3, "status 500 .*failed attempts: 3"),
    ("reset", 3, "failed attempts: 3"),
    ("cut", 3, "failed attempts: 3"),
    ("silent", 3, "(no response for 1 s|Timeout).*failed attempts: 3"),
])  # fmt: skip
@pytest.mark.parametrize("workers", [0, 2])
def test_faults_that_stay_name_the_shard(write_shards, server, fault, attempts, message, workers):
    add_index(write_shards([20, 20]), [20, 20])
    timeout = 1 if fault == "silent" else 60  # the good shard is answered in time, even on a busy machine
    source = Access(SourceConfig(retries=2, timeout=timeout))
    batches = train(f"{server.url}/{FOLDER_INDEX}", batch_size=8, seed=1, steps=100, workers=workers, source=source)
    server.faults = {"data-000001.tar": fault}
    start = time.monotonic()
    with pytest.raises(ShardError, match=rf"data-000001.tar[^ ]*: .*{message}"):
        list(batches)
    assert time.monotonic() - start < 15
    asked = [path for _, path, _ in server.requests if path.startswith("/data-000001")]
    # its table and the shard itself, by each worker; and once to see whether there are ranges
    assert attempts <= len(asked) <= 1 + attempts * 2 * max(workers, 1)


def test_whole_shards_are_checked(write_shards, server):
    paths = write_shards([5], ".tar.gz")
    add_index(paths, [5], tables=False)
    opened = open_shards(f"{server.url}/{FOLDER_INDEX}", source=Access(SourceConfig(retries=1)))
    raw = bytearray(Path(paths[0]).read_bytes())
    raw[4] ^= 1  # the time in gzip's header: only the checksum sees it
    Path(paths[0]).write_bytes(raw)
    with pytest.raises(ShardError, match=r"000000.tar.gz: the SHA-256 .* differs from index.json.*attempts: 2"):
        opened.image(0)
    Path(paths[0]).write_bytes(raw + b"\0" * 100)
    with pytest.raises(ShardError, match=r"has more than the expected \d+ bytes"):
        replace(opened).image(0)  # another process


def test_a_shard_that_is_not_what_its_index_says(write_shards, write_tar, server, png):
    paths = write_shards([6, 6])
    add_index(paths, [6, 6])
    os.replace(paths[1], paths[0])  # of the same size, with other samples
    opened = open_shards(f"{server.url}/data-000000.tar")
    with pytest.raises(ShardError, match=r"data-000000.tar does not hold s00000 at byte 512"):
        opened.image(0)
    write_tar("data-000000.tar", [(f"{n}.png", png(n)) for n in range(30)])
    with pytest.raises(ShardError, match=r"data-000000.tar has \d+ bytes, but 20480 were expected"):
        opened.in_blocks(1).image(0)


def test_forked_workers_have_their_own_connections(write_shards, server):
    counts = [20, 20]
    paths = write_shards(counts)
    add_index(paths, counts)
    opened = open_shards(f"{server.url}/data-{{000000..000001}}.tar")
    going = train(opened, batch_size=4, seed=1, steps=10, workers=2)
    mine, stop = opened, threading.Event()

    def busy():
        while not stop.is_set():
            opened.shards[0].cache.remove(opened.shards[0].cache_name("0-1"))
            remote.read_range(opened.shards[0].path, 0, 512, 0, opened.access.settings)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        mine.image(0)  # this process has used the file system before
        assert same(list(going), list(train(paths, batch_size=4, seed=1, steps=10)))
    finally:
        stop.set()
        thread.join()


def test_an_endless_answer_is_bounded(server, monkeypatch, tmp_path):
    (tmp_path / "large.tar").write_bytes(bytes(3_000_000))
    with pytest.raises(ShardError, match=r"pieces-v1 is limited to 1.0 MB.*Raise source.cache_gb"):
        open_shards(f"{server.url}/large.tar", source=Access(SourceConfig(cache_gb=0.001)))
    monkeypatch.setattr("tessera.data.shards.index.LARGEST_FOLDER_INDEX", 1000)
    (tmp_path / FOLDER_INDEX).write_bytes(b" " * 2000)
    with pytest.raises(ShardError, match=r"index.json has more than 1000 bytes"):
        open_shards(f"{server.url}/{FOLDER_INDEX}")


def test_requests_go_through_the_proxy_of_the_environment(server, monkeypatch):
    """The server stands in for a proxy: it is asked for the whole URL."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, server.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ShardError):
        open_shards("http://shards.invalid/a.tar")
    assert any(path.startswith("http://shards.invalid/a.tar") for _, path, _ in server.requests)


def test_options_of_the_user_keep_the_time_limits(monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": {"trust_env": False}, "block_size": 9})
    options = remote._options("http", 7.0)
    assert (options["client_kwargs"]["trust_env"], options["block_size"]) == (False, 9)
    assert options["client_kwargs"]["timeout"].sock_read == 7.0
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 3}})
    assert remote._options("s3", 7.0)["config_kwargs"] == {
        "connect_timeout": 7.0, "read_timeout": 3, "retries": {"max_attempts": 0},
    }  # fmt: skip


def _open_on_each_process(rank, url, cache):
    os.environ["TESSERA_CACHE"] = f"{cache}-{rank}"  # each process is a node of its own
    config = describe_remote([{f"{url}/data-{{000000..000003}}.tar": 1}], Access(SourceConfig(retries=0)))
    opened = open_shards(f"{url}/data-{{000000..000003}}.tar", source=config)
    assert opened.counts.tolist() == [3, 5, 2, 4]
    assert all(shard.version for shard in opened.shards)
    missing = describe_remote([f"{url}/data-00000{{0,9}}.tar"], Access(SourceConfig(retries=0)))
    with pytest.raises(ShardError, match=r"1 of 2 shards cannot be used:\n.*data-000009.tar: not found"):
        open_shards(f"{url}/data-00000{{0,9}}.tar", source=missing)
    with pytest.raises(RankError, match=r"process 0: .*globs do not work with web servers"):
        describe_remote([f"{url}/*.tar"], Access(SourceConfig(retries=0)))


@pytest.mark.medium
def test_one_process_asks_for_the_sizes_of_shards(write_shards, server, tmp_path, free_port):
    """Without index.json, the others get the answers of the first process."""
    write_shards([3, 5, 2, 4])
    on_processes(_open_on_each_process, free_port, server.url, str(tmp_path / "cache"), count=2, group=True)
    asked = Counter(path for method, path, _ in server.requests if method == "HEAD" and path.endswith(".tar"))
    assert asked == {f"/data-00000{number}.tar": 1 + (number == 0) for number in (0, 1, 2, 3)} | {"/data-000009.tar": 1}


SIGNED = "%2Fb%40c%7Ed%27e%3Af%20g/a[1].tar?X-Sig=a%2Fb%3D%7E*+c&d=%27"


def test_urls_are_sent_unchanged(tmp_path, write_tar, png, cache):
    """A server that signs the bytes of a URL gets these bytes, also after a redirect."""
    content = Path(write_tar("a.tar", [("a.png", png(0))])).read_bytes()
    seen = []

    class Signed(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format, *args):
            pass

        def do_GET(self):
            seen.append(self.path)
            moved = self.path.startswith("/old/")
            good = self.path == f"/new/{SIGNED}"
            self.send_response(302 if moved else 200 if good else 403)
            if moved:
                self.send_header("Location", f"/new/{self.path.removeprefix('/old/')}")
            self.send_header("Content-Length", str(len(content) if good else 0))
            self.end_headers()
            if good and self.command == "GET":
                self.wfile.write(content)

        def do_HEAD(self):
            self.do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), Signed) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        for folder in ("new", "old"):
            opened = open_shards(f"http://127.0.0.1:{server.server_port}/{folder}/{SIGNED}")
            assert opened.image(0) == png(0)
        server.shutdown()
    assert {path.split("/", 2)[2] for path in seen} - {"index.json"} <= {SIGNED, "%2Fb%40c%7Ed%27e%3Af%20g/index.json"}


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("http://h/a b/%C3%A9é.tar?x=%2f", "http://h/a%20b/%C3%A9%C3%A9.tar?x=%2f"),
        ("https://h:8/100%/a.tar", "https://h:8/100%25/a.tar"),
        ("https://exämple.org?a=|", "https://xn--exmple-cua.org?a=%7C"),
    ],
)
def test_what_no_url_may_contain_is_encoded(url, sent):
    assert remote.encoded_url(url) == sent
