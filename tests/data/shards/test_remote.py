import multiprocessing
import os
import sys
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import _registry

from tessera.data.shards import ShardError, expand, open_shards, remote
from tessera.data.shards.access import SourceConfig

fork = multiprocessing.get_context("fork")


@pytest.fixture
def memory(write_shards):
    """A folder of memory:// with shards of 3 and 4 samples."""
    store = fsspec.filesystem("memory")
    for path in write_shards([3, 4]):
        store.pipe(f"/m/{os.path.basename(path)}", Path(path).read_bytes())
    yield store
    store.rm("/m", recursive=True)


def test_whatever_fsspec_opens(memory, png):
    assert expand("memory://m/*.tar") == ["memory:///m/data-000000.tar", "memory:///m/data-000001.tar"]
    opened = open_shards("memory://m/data-00000{0,1}.tar")
    assert opened.counts.tolist() == [3, 4]
    assert [opened.image(n) for n in range(7)] == [png(n) for n in range(7)]


def test_a_process_that_is_forked_reads_too(memory, png):
    opened = open_shards("memory://m/*.tar")
    assert opened.image(0) == png(0)

    def read():
        assert remote.read_range(opened.shards[1].path, 0, 4, 0, opened.access.settings) == b"s000"
        os._exit(7)

    process = fork.Process(target=read)
    process.start()
    process.join(20)
    assert process.exitcode == 7


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gs"), ("s3", "s3"), ("https", "http")])
def test_a_package_that_is_missing_is_named(monkeypatch, scheme, extra):
    for name in ("gcsfs", "s3fs", "aiohttp", "fsspec.implementations.http"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(_registry, scheme, raising=False)  # fsspec remembers classes that it has imported
    remote._open_system.cache_clear()
    with pytest.raises(
        ShardError, match=rf"a package for {scheme}:// is missing. Install it: pip install 'tessera-ssl\[{extra}\]'"
    ):
        open_shards(f"{scheme}://x/a.tar")


class StatusError(Exception):
    def __init__(self, status):
        self.status = status


@pytest.mark.parametrize(("error", "calls"), [
    (StatusError(500), 4), (StatusError(503), 4), (StatusError(408), 4), (StatusError(429), 4),
    (ConnectionResetError(), 4), (TimeoutError(), 4), (StatusError(404), 1),
    (StatusError(403), 1), (PermissionError(), 1), (FileNotFoundError(), 1),
])  # fmt: skip
def test_what_is_tried_again(error, calls, monkeypatch):
    pauses, made = [], []
    monkeypatch.setattr(remote, "sleep", pauses.append)

    def fail():
        made.append(1)
        raise error

    with pytest.raises(ShardError, match=r"^name: "):
        remote.retry("name", SourceConfig(retries=3), fail)
    assert len(made) == calls
    assert len(pauses) == calls - 1
    for attempt, pause in enumerate(pauses):
        assert 0.25 * 2**attempt <= pause <= 0.75 * 2**attempt
    assert pauses != [0.5 * 2**attempt for attempt in range(len(pauses))] or not pauses  # not all clients at once


class NoCredentialsError(Exception):
    """Name of botocore's error."""


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("s3://bucket/x.tar", NoCredentialsError("Unable to locate credentials"), "AWS_ACCESS_KEY_ID"),
        ("s3://bucket/x.tar", PermissionError("Access Denied"), "AWS_PROFILE"),
        ("gs://bucket/x.tar", StatusError(401), "GOOGLE_APPLICATION_CREDENTIALS"),
        ("https://host/x.tar", StatusError(403), "a URL that needs no login"),
        ("hf://datasets/a/b.tar", StatusError(401), "HF_TOKEN"),
        ("other://host/x.tar", StatusError(403), "credentials for this server"),
    ],
)
def test_missing_credentials_are_named(url, error, message):
    def fail():
        raise error

    with pytest.raises(ShardError, match=f"Access is denied or credentials are missing.*{message}") as raised:
        remote.retry(url, SourceConfig(retries=3), fail)
    assert "Restore the shard" not in str(raised.value)
    with pytest.raises(ShardError, match="Restore the shard"):
        remote.retry(url, SourceConfig(retries=3), lambda: (_ for _ in ()).throw(StatusError(404)))


def test_pauses_are_bounded(monkeypatch):
    pauses = []
    monkeypatch.setattr(remote, "sleep", pauses.append)
    with pytest.raises(ShardError, match="failed attempts: 21"):
        remote.retry("name", SourceConfig(retries=20), lambda: (_ for _ in ()).throw(OSError("no")))
    assert max(pauses) <= 45


def test_what_never_ends_is_left_alone():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no response for 0.2 s"):
        remote.with_timeout(0.2, lambda: time.sleep(3))
    assert time.monotonic() - start < 2
