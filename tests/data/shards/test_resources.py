"""What the machine does, not the data: damaged and locked caches, and resources that run out."""

import errno
import multiprocessing
import os
import resource
from pathlib import Path

import pytest

from tessera.data.crops import CenterCrop
from tessera.data.failures import ResourceError, unreadable
from tessera.data.loader import Reading, evaluation_batches
from tessera.data.shards import ShardError, open_shards, remote, tar_shard
from tessera.data.shards import cache as caches
from tessera.data.shards.access import Access, SourceConfig
from tessera.data.shards.cache import CacheError, cache_folder
from tessera.data.shards.open import shard_at
from tessera.data.workers import WorkersError
from tests.data.made import picture
from tests.data.shards.batches import add_index
from tests.data.shards.servers import Server

NO_RETRY = Access(SourceConfig(retries=0))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "_servers_with_ranges", {})
    monkeypatch.setattr(caches, "_versions", {})
    monkeypatch.setattr(caches, "_intact", set())
    monkeypatch.setattr(tar_shard, "USUAL_REQUEST", 1)


@pytest.fixture
def few_files():
    """A function that leaves this process without free file descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit():
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_damaged_piece_of_the_cache_is_downloaded_again(write_shards, tmp_path, png, caplog, cache):
    (path,) = write_shards([4])
    add_index([path], [4], tables=True)
    with Server(tmp_path) as server:
        opened = open_shards(f"{server.url}/index.json")
        assert opened.image(1) == png(1)
        (piece,) = [one for one in (cache / "pieces-v1").rglob("*") if one.is_file() and png(1) in one.read_bytes()]
        raw = bytearray(piece.read_bytes())
        raw[600] ^= 1  # a byte of the image: the header is intact
        piece.write_bytes(raw)
        caches._intact.clear()  # another process
        assert opened.image(1) == png(1)
        assert "is damaged, and is made again" in caplog.text
        piece.write_bytes(bytes(len(raw)))  # zeros, as after a power cut
        caches._intact.clear()
        assert opened.image(1) == png(1)
        assert len([1 for asked in server.gets("data-000000.tar") if asked[1]]) >= 1


def test_too_few_files_are_no_corrupt_data(write_shards, few_files):
    paths = write_shards([3] * 12)
    opened = open_shards(paths, source=NO_RETRY)
    opened.image(0)
    few_files()
    with pytest.raises(ResourceError, match=r"resources of this machine have run out \(Too many open files\)"):
        [opened.image(3 * shard) for shard in range(12)]
    with pytest.raises(ShardError, match="have run out"):
        list(evaluation_batches(opened, CenterCrop(4), 4, reading=Reading(source=NO_RETRY)))


def test_too_few_files_at_the_start(write_shards, few_files):
    paths = write_shards([3] * 3)
    few_files()
    with pytest.raises(ShardError, match="Too many open files"):
        open_shards(paths, source=NO_RETRY, progress=False)


def test_too_few_files_for_a_folder(photos, few_files):
    folder = photos({f"{n}.jpg": picture(n) for n in range(3)})
    opened = open_shards(str(folder), source=NO_RETRY)
    few_files()
    with pytest.raises(ResourceError):
        opened.image(0)
    with pytest.raises(ShardError, match="Too many open files"):
        open_shards(str(folder), source=NO_RETRY)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC])
def test_which_errors_are_of_the_machine(number):
    assert isinstance(unreadable("x", OSError(number, os.strerror(number))), ResourceError)
    assert not isinstance(unreadable("x", OSError(errno.EIO, "Input/output error")), ResourceError)
    cause = ConnectionError("no socket")
    cause.__cause__ = OSError(number, "")
    assert isinstance(unreadable("x", cause), ResourceError)


def test_a_lack_of_memory_stops_a_run_by_name(write_tar, png, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    path = write_tar("t.tar", [("a.png", png(0))])
    monkeypatch.setattr("tessera.data.dataset.Decoding.picture", fail)
    with pytest.raises(ShardError, match=r"t.tar/a cannot be decoded, because the memory of this"):
        list(evaluation_batches(path, CenterCrop(4), 4, labels=False, reading=Reading(source=NO_RETRY)))


def test_without_a_home_folder(write_tar, png, monkeypatch, caplog, photos):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("TESSERA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(CacheError, match="Set TESSERA_CACHE"):
        cache_folder()
    assert shard_at(write_tar("t.tar", [("a.png", png(0))])).index().key(0) == "a"
    assert open_shards(str(photos({"a.jpg": picture(0)}))).images == 1
    assert "cannot be stored: there is no home folder" in caplog.text
    with pytest.raises(ShardError, match="Set TESSERA_CACHE"):
        shard_at(write_tar("t.tar.gz", [("a.png", png(0))])).index()


def test_without_semaphores_workers_are_refused_by_name(write_shards, monkeypatch):
    def refuse(*_):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(multiprocessing.get_context("fork"), "Lock", refuse)
    with pytest.raises(WorkersError, match="Mount /dev/shm, or use --workers 0"):
        list(evaluation_batches(write_shards([4]), CenterCrop(4), 4, reading=Reading(workers=1)))
