"""Shards in an S3-compatible store: moto's server, reached by AWS_ENDPOINT_URL, as a user reaches any other store."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from tessera.data.shards import ShardError, expand, open_shards, remote, tar_shard
from tessera.data.shards.access import Access, SourceConfig
from tests.data.shards.batches import add_index, train

s3fs = pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")


REQUESTS = []
"""Method, path and range of each request that the store has received."""


def request_of(environ):
    return environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_RANGE")


@pytest.fixture(scope="module")
def endpoint():
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    answer = server._server.app
    server._server.app = lambda environ, start: (REQUESTS.append(request_of(environ)), answer(environ, start))[1]
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint, monkeypatch):
    """The store and an empty bucket."""
    values = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}
    for name, value in values.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(remote, "BACKOFF", 0.01)
    store = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    if store.exists("shards"):
        store.rm("shards", recursive=True)
    store.mkdir("shards")
    return store


def run(shards, **settings):
    settings = {"batch_size": 12, "seed": 1, "steps": 7, "streams": 4} | settings
    return list(train(shards, **settings))


@pytest.mark.medium
@pytest.mark.parametrize("index", [True, False])
def test_batches_are_those_of_local_shards(write_shards, bucket, tmp_path, index):
    counts = [10, 23, 1]
    paths = write_shards(counts)
    expected = run(paths)
    if index:
        add_index(paths, counts, tables=True, labelled=False)
        bucket.put(str(tmp_path / "index.json"), "shards/a/index.json")
        bucket.put([f"{path}.index" for path in paths], "shards/a/")
    bucket.put(paths, "shards/a/")
    names = [f"s3://shards/a/data-00000{n}.tar" for n in range(3)]
    assert expand("s3://shards/a/*.tar") == expand("s3://shards/a/data-{000000..000002}.tar") == names
    for workers in (0, 2):
        for named in ["s3://shards/a/*.tar", "s3://shards/a/index.json"][: 1 + index]:
            found = run(named, workers=workers)
            assert [batch.keys for batch in found] == [batch.keys for batch in expected]
            assert all(torch.equal(a.views[0].images, b.views[0].images) for a, b in zip(found, expected, strict=True))
    opened = open_shards("s3://shards/a/*.tar")
    assert opened.labelled.tolist() == ([-1] * 3 if index else counts)
    assert opened.all_labelled()
    assert opened.label(13) == 13


def test_a_range_is_one_request(write_shards, bucket, tmp_path, png, monkeypatch):
    """The answer with the bytes also states their version and the size of the shard."""
    monkeypatch.setattr(tar_shard, "USUAL_REQUEST", 1)
    (path,) = write_shards([6])
    add_index([path], [6], tables=True)
    bucket.put([path, f"{path}.index", str(tmp_path / "index.json")], "shards/")
    opened = open_shards("s3://shards/index.json")
    opened.shards[0].index()
    REQUESTS.clear()
    assert [opened.image(number) for number in range(3)] == [png(number) for number in range(3)]
    assert [(method, name) for method, name, _ in REQUESTS] == [("GET", "/shards/data-000000.tar")] * 3
    assert all(asked for *_, asked in REQUESTS)
    raw = Path(path).read_bytes()
    bucket.pipe("shards/data-000000.tar", raw.replace(b"IDATx", b"IDATy"))
    with pytest.raises(ShardError, match=r"data-000000.tar has changed on the server \(version .*, before"):
        opened.image(3)
    bucket.pipe("shards/data-000000.tar", raw + bytes(512))
    with pytest.raises(ShardError, match=rf"has {len(raw) + 512} bytes, but {len(raw)} were expected"):
        dataclasses.replace(opened).image(4)
    bucket.rm("shards/data-000000.tar")
    with pytest.raises(ShardError, match=r"data-000000.tar: not found"):
        dataclasses.replace(opened).image(5)


@pytest.mark.parametrize("path", ["shards/a.tar", "nowhere/a.tar", "shards/*.tar", "shards/index.json"])
def test_missing_files_of_a_bucket_are_named(bucket, path):
    url = f"s3://{path}"
    expected = {"shards/*.tar": f"no file matches {url}", "shards/index.json": f"{url} was not found"}
    with pytest.raises(ShardError, match=re.escape(expected.get(path, f"{url}: not found"))):
        open_shards(f"s3://{path}")


def test_a_store_that_is_gone(monkeypatch, free_port):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setattr(remote, "BACKOFF", 0.01)
    with pytest.raises(
        ShardError, match=r"^s3://shards/a.tar cannot be used.* s3://shards/index.json: .*failed attempts: 3"
    ):
        open_shards("s3://shards/a.tar", source=Access(SourceConfig(retries=2, timeout=3)))


def test_without_credentials(bucket, monkeypatch):
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nowhere")
    with pytest.raises(
        ShardError, match=r"^s3://shards/a.tar cannot be used.* s3://shards/index.json: .*[Cc]redentials"
    ):
        open_shards("s3://shards/{a,b}.tar", source=Access(SourceConfig(retries=2, timeout=4)))
    with pytest.raises(
        ShardError, match=r"s3://shards/folder is no tar, .* Give the tars, such as s3://shards/folder/\*"
    ):
        open_shards("s3://shards/folder", source=Access(SourceConfig(retries=2, timeout=4)))
