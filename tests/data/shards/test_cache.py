import contextlib
import errno
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time

import pytest

from tessera.data.shards import cache as caches
from tessera.data.shards.cache import Cache, CacheError

fork = multiprocessing.get_context("fork")


def name(number):
    return hashlib.sha256(b"%d" % number).hexdigest()[:32]


def content(number):
    return random.Random(number).randbytes(1000 + number % 3000)


def take(cache, number, size=None):
    descriptor = cache.open(name(number), lambda sink: sink.write(content(number)), size)
    with os.fdopen(descriptor, "rb") as file:
        return os.pread(descriptor, os.fstat(file.fileno()).st_size, 0)


def held(folder):
    """Bytes of all files, parts included."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size * path.is_file()
    return total


def test_an_entry_is_made_once(tmp_path):
    cache = Cache(tmp_path / "c", 10**6)

    def fill(sink):
        with (tmp_path / "made").open("a") as file:
            file.write(".")
        time.sleep(0.3)
        sink.write(b"abc")

    def use():
        assert os.pread(cache.open(name(1), fill), 9, 0) == b"abc"
        os._exit(7)

    processes = [fork.Process(target=use) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    threads = [threading.Thread(target=lambda: os.close(cache.open(name(2), fill))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.exitcode for process in processes] == [7] * 6
    assert (tmp_path / "made").read_text() == ".."
    assert cache.find(name(3)) is None


def test_what_was_not_used_for_longest_goes(tmp_path):
    cache = Cache(tmp_path, 10_000)
    for number in range(6):
        os.close(cache.open(name(number), lambda sink: sink.write(bytes(1500)), 1500))
        os.utime(tmp_path / name(number)[:2] / name(number), ns=(number, number))
    os.close(cache.find(name(0)))  # a use
    os.close(cache.open(name(9), lambda sink: sink.write(bytes(4000))))
    left = [number for number in (*range(6), 9) if cache.find(name(number)) is not None]
    assert left == [0, 4, 5, 9]  # 8,500 bytes: below nine tenths


def test_indices_go_after_other_entries_of_the_same_month(tmp_path):
    cache, day = Cache(tmp_path, 10_000), 86400 * 10**9
    ages = {"00.index": 40, "01.index": 20, "02": 9, "03": 1}
    for entry, age in ages.items():
        os.close(cache.open(entry, lambda sink: sink.write(bytes(2000))))
        os.utime(tmp_path / entry[:2] / entry, ns=(0, time.time_ns() - age * day))
    os.close(cache.open("04", lambda sink: sink.write(bytes(4000))))
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"01.index", "03", "04"}


def test_a_use_is_recorded_once_in_ten_seconds(tmp_path):
    """A record writes to the disk, and to a server if the folder is on a network disk."""
    cache, path = Cache(tmp_path, 10_000), tmp_path / name(1)[:2] / name(1)
    take(cache, 1)
    for ago, recorded in ((5, False), (15, True)):
        os.utime(path, ns=(0, time.time_ns() - ago * 10**9))
        before = path.stat().st_mtime_ns
        os.close(cache.find(name(1)))
        assert (path.stat().st_mtime_ns > before) == recorded


def test_an_entry_of_another_size_is_made_again(tmp_path):
    cache = Cache(tmp_path, 10_000)
    assert take(cache, 1, 1001) == content(1)
    os.truncate(tmp_path / name(1)[:2] / name(1), 500)
    assert take(cache, 1, 1001) == content(1)


def test_what_fails_leaves_nothing(tmp_path):
    cache = Cache(tmp_path, 10_000)

    def fail(sink):
        sink.write(bytes(3000))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cache.open(name(1), fail)
    assert held(tmp_path) == 0
    assert not list(tmp_path.rglob("*.part"))
    with pytest.raises(CacheError, match=r"is limited to 10.0 kB.*Raise source.cache_gb"):
        cache.open(name(1), lambda sink: [sink.write(bytes(1000)) for _ in range(11)])
    assert held(tmp_path) == 0
    assert take(cache, 1) == content(1)


def test_beginning_anew_forgets_what_was_written(tmp_path):
    cache = Cache(tmp_path, 10_000)

    def twice(sink):
        sink.write(bytes(3000))
        sink.restart()
        sink.write(b"abc")

    descriptor = cache.open(name(1), twice)
    assert os.pread(descriptor, 9999, 0) == b"abc"
    assert held(tmp_path) == 3


def test_a_full_disk(tmp_path, monkeypatch):
    cache = Cache(tmp_path, 10**6)
    for number in range(50):
        take(cache, number)
    before, room = held(tmp_path), 10_000
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: usage._replace(free=caches.SPARE_BYTES + room + before - held(tmp_path))
    )
    for number in range(100, 150):  # a disk that is smaller than the bound
        assert take(cache, number) == content(number)
    assert held(tmp_path) <= before + room
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    with pytest.raises(CacheError, match=r"No space left.*Set TESSERA_CACHE to a local folder with more free space"):
        take(cache, 999)
    monkeypatch.undo()
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(CacheError, match="Set TESSERA_CACHE"):
        take(cache, 999)


def test_a_dead_writer_is_replaced(tmp_path):
    cache = Cache(tmp_path, 10_000)

    def stuck(sink):
        sink.write(bytes(900))
        (tmp_path / "stuck").touch()
        time.sleep(60)

    process = fork.Process(target=lambda: cache.open(name(1), stuck))
    process.start()
    while not (tmp_path / "stuck").exists():
        time.sleep(0.01)
    found = []
    waiting = threading.Thread(target=lambda: found.append(take(cache, 1)))
    waiting.start()
    time.sleep(0.2)
    assert not found
    os.kill(process.pid, signal.SIGKILL)
    waiting.join(5)
    assert found == [content(1)]
    process.join()


def test_parts_of_dead_writers_are_removed(tmp_path):
    cache = Cache(tmp_path, 10_000)
    take(cache, 0)
    left = tmp_path / name(0)[:2] / f"{name(5)}.part"
    left.write_bytes(bytes(50_000))
    take(cache, 1)
    assert not left.exists()


def test_entries_are_looked_at_seldom(tmp_path, monkeypatch):
    cache, looks = Cache(tmp_path, 4_000_000), []
    evict = Cache._evict
    monkeypatch.setattr(Cache, "_evict", lambda *words: (looks.append(words), evict(*words))[1])
    for number in range(3000):  # 7.5 megabytes: one look for each 20 kB in the mean
        take(cache, number)
    assert 280 < len(looks) < 470
    assert 0.75 * 4_000_000 < held(tmp_path) <= 4_000_000
