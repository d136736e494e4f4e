import gzip
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tessera.data.shards import ShardError, open_shards, remote, source, tar_shard
from tessera.data.shards import cache as caches
from tessera.data.shards.access import Access, SourceConfig
from tessera.data.shards.index import FOLDER_INDEX, FolderIndex, write_folder, write_table
from tessera.data.shards.open import shard_at
from tessera.data.shards.tar_index import scan_tar
from tests.data.shards.batches import add_index, keys


def read(descriptor):
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def test_the_index_is_kept_until_the_shard_changes(write_tar, png, cache, monkeypatch):
    path = write_tar("t.tar", [("a.png", png(0))])
    shard = shard_at(path)
    shard.index()
    (kept,) = (path for path in cache.rglob("*") if path.is_file())
    with monkeypatch.context() as patch:
        patch.setattr(tar_shard, "scan_tar", lambda *_: pytest.fail("the index was in the cache"))
        assert keys(shard.index()) == ["a"]
        assert shard.header().summary[0] == 1
    whole = kept.read_bytes()
    for damaged in (whole[:-100], whole[:60] + b"?" + whole[61:], bytes(len(whole)), b""):
        kept.unlink()
        kept.write_bytes(damaged)
        caches._intact.clear()  # another process
        assert keys(shard.index()) == ["a"]
        assert kept.read_bytes() == whole
    write_tar("t.tar", [("b.png", png(0))])
    os.utime(path, ns=(1, 1))  # of the same size, but of another time
    assert keys(shard_at(path).index()) == ["b"]
    time.sleep(0.02)  # a tick of the file system's clock
    write_tar("t.tar", [("c.png", png(0))])
    os.utime(path, ns=(1, 1))  # now of the same time as well
    assert keys(shard_at(path).index()) == ["c"]


def test_without_a_cache_all_still_works(write_tar, png, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "file"))  # cannot become a folder, not even for root
    assert keys(shard_at(write_tar("t.tar", [("a.png", png(0))])).index()) == ["a"]
    assert str(tmp_path / "file") in caplog.text
    packed = shard_at(write_tar("t.tar.gz", [("a.png", png(0))]))
    with pytest.raises(ShardError, match="Set TESSERA_CACHE"):
        packed.index()


def test_gzip_is_decompressed_once(write_tar, png, monkeypatch):
    members = [(f"{n}.png", png(n)) for n in range(50)]
    shard = shard_at(write_tar("t.tar.gz", members))
    calls, fetch = [], remote.fetch
    monkeypatch.setattr(remote, "fetch", lambda *a, **k: (calls.append(1), fetch(*a, **k)))
    threads = [threading.Thread(target=lambda: os.close(shard.open())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    content = gzip.decompress(Path(shard.path).read_bytes())
    assert read(shard.open()) == content
    assert shard.index().summary[2] == len(content)


def test_bad_gzip_is_named_and_leaves_nothing(write_tar, png, cache):
    path = Path(write_tar("t.tar.gz", [("a.png", png(0)), ("b.png", os.urandom(5000))]))
    whole = path.read_bytes()
    for raw in (whole[: len(whole) // 2], b"text" * 300, whole[:1000] + b"\0" * 50 + whole[1050:]):
        path.write_bytes(raw)
        with pytest.raises(ShardError, match=r"t.tar.gz cannot be decompressed"):
            shard_at(str(path)).index()
    path.write_bytes(gzip.compress(b"text" * 300))
    with pytest.raises(ShardError, match=r"t.tar.gz is not a complete tar"):
        shard_at(str(path)).index()
    path.write_bytes(gzip.compress(bytes(2**22)))
    with pytest.raises(ShardError, match=r"pieces-v1 is limited to 1.0 MB.*Raise source.cache_gb"):
        shard_at(str(path), Access(SourceConfig(cache_gb=0.001))).index()
    assert not list(cache.rglob("*.part"))
    assert sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) < 2**20


def test_tables_beside_shards_are_used_while_valid(write_tar, png, monkeypatch, caplog):
    path = write_tar("t.tar", [(f"{n}.png", png(n)) for n in range(3)])
    write_table(path, scan_tar(path, path)._replace(keys=np.frombuffer(b"xyz", dtype=np.uint8)))
    assert keys(shard_at(path).index()) == ["x", "y", "z"]
    with pytest.raises(ShardError, match=r"t.tar does not hold x at byte 512"):
        open_shards(path).image(0)
    write_table(path, scan_tar(path, path)._replace(keys=np.frombuffer(b"uvw", dtype=np.uint8)))
    assert keys(shard_at(path).index()) == ["u", "v", "w"]  # not the copy of the former table in the cache
    os.utime(path, ns=(2**62, 2**62))
    assert keys(shard_at(path).index()) == ["0", "1", "2"]
    assert f"{path}.index is older than its shard, does not fit it" in caplog.text
    other = write_tar("other.tar", [("a.png", png(0)), ("b.png", bytes(20000))])
    os.utime(other, ns=(1, 1))
    write_table(other, scan_tar(path, path))
    with pytest.raises(
        ShardError, match=r"other.tar.index belongs to a shard of 10240 bytes, but .*other.tar has 30720"
    ):
        shard_at(other).index()


def test_the_index_of_a_local_folder(write_shards, tmp_path, monkeypatch, caplog):
    paths = write_shards([3, 5])
    listed = add_index(paths, [3, 5])
    with monkeypatch.context() as patch:
        patch.setattr(tar_shard, "scan_tar", lambda *_: pytest.fail("the folder's index knows it"))
        for named in (paths, tmp_path / FOLDER_INDEX, f"file://{tmp_path}/data-*.tar", f"file:{tmp_path}/data-*.tar"):
            opened = open_shards(named)
            assert opened.counts.tolist() == opened.labelled.tolist() == [3, 5]
    assert opened.label(7) == 7
    write_folder(tmp_path, FolderIndex(shardlist=[listed[0].model_copy(update={"nsamples": 4}), listed[1]]))
    for written in (1, 2**62):
        os.utime(paths[0], ns=(written, written))
        lying = open_shards(paths)
        with pytest.raises(ShardError, match=r"data-000000.tar has 3 samples, but 4 were expected"):
            lying.image(0)


@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_a_copy_without_times_keeps_its_index(write_shards, tmp_path, monkeypatch, caplog, png, ending):
    """Files of a copy get the times at which they were written, in any order."""
    paths = write_shards([3, 5], ending)
    add_index(paths, [3, 5], sha256=None if ending == ".tar.gz" else "ab" * 32)
    for path in paths:
        with (gzip.open if ending == ".tar.gz" else open)(path, "rb") as file:
            (tmp_path / "unpacked").write_bytes(file.read())
        write_table(path, scan_tar(str(tmp_path / "unpacked"), path))
        os.utime(path, ns=(2**62, 2**62))
    monkeypatch.setattr(tar_shard, "scan_tar", lambda *_: pytest.fail("the folder's index and the tables know it"))
    opened = open_shards(paths)
    assert [shard.sha256 for shard in opened.shards] == [None if ending == ".tar.gz" else "ab" * 32] * 2
    assert [opened.image(number) for number in range(8)] == [png(number) for number in range(8)]
    assert not caplog.text


def test_a_changed_shard_of_the_same_size_is_named(write_tar, png, tmp_path, caplog):
    """The old index.json counts as many samples, and the old table fits no more."""
    path = write_tar("t.tar", [(f"{n}.png", png(n)) for n in range(3)])
    add_index([path], [3], tables=True, labelled=False)
    os.utime(f"{path}.index", ns=(1, 1))
    size = os.path.getsize(path)
    write_tar("t.tar", [("0.png", png(0)), ("1.png", png(1) + bytes(600)), ("2.png", png(2))])
    assert os.path.getsize(path) == size
    assert [open_shards(path).image(number) for number in range(3)] == [png(0), png(1) + bytes(600), png(2)]
    assert "is older than its shard, does not fit it, and is not used" in caplog.text
    os.utime(f"{path}.index")
    with pytest.raises(ShardError, match=r"t.tar does not hold 2 at byte .* Make the index again"):
        open_shards(path).image(2)
    write_tar("t.tar", [("0.png", png(0)), ("2.png", png(2))])
    os.remove(f"{path}.index")
    with pytest.raises(ShardError, match=r"t.tar has 2 samples, but 3 were expected from index.json"):
        open_shards(path).image(0)


def test_tables_are_read_once_by_all_processes(write_shards, monkeypatch):
    """Among more shards than a process keeps, tables are mapped again, and not read again."""
    paths = write_shards([2] * 12)
    add_index(paths, [2] * 12, tables=True)
    read, parse = [], tar_shard.parse_table
    monkeypatch.setattr(tar_shard, "parse_table", lambda content, path: (read.append(path), parse(content, path))[1])
    monkeypatch.setattr(source, "KEPT_INDICES", 4)
    monkeypatch.setattr(source, "KEPT_SAMPLES", 8)
    for _ in range(2):
        opened = open_shards(paths)
        assert [opened.name(number)[-6:] for _ in range(3) for number in range(24)] == [
            f"s{number:05d}" for _ in range(3) for number in range(24)
        ]
    assert sorted(read) == [f"{path}.index" for path in paths]


def test_a_truncated_shard_differs_from_the_index(write_shards, tmp_path):
    paths = write_shards([3, 5])
    size = add_index(paths, [3, 5])[1].filesize
    os.truncate(paths[1], 3 * 1024)  # three whole samples: only a missing end mark would tell
    with pytest.raises(ShardError, match=rf"data-000001.tar has 3072 bytes, but index.json lists {size}"):
        open_shards(tmp_path / FOLDER_INDEX)


def test_an_index_of_something_else(write_shards, tmp_path, caplog):
    paths = write_shards([3])
    (tmp_path / FOLDER_INDEX).write_text("<html>")
    assert open_shards(paths).images == 3
    assert "not used: " in caplog.text
    with pytest.raises(ShardError, match=r"index.json is not an index of shards"):
        open_shards(tmp_path / FOLDER_INDEX)


def test_a_command_is_a_shard(write_shards, png, tmp_path, caplog):
    paths = write_shards([4, 6])
    pattern = f"pipe:cat {paths[0][:-5]}{{0..1}}.tar | cat; echo . >> {tmp_path}/runs"
    opened = open_shards(pattern)
    assert opened.counts.tolist() == [4, 6]
    assert opened.sizes.tolist() == [os.path.getsize(path) for path in paths]
    assert [opened.image(n) for n in range(10)] == [png(n) for n in range(10)]
    assert (tmp_path / "runs").read_text().count(".") == 2  # each once
    bad = f"pipe:cat {paths[0]} | false; exit 3"
    with pytest.raises(ShardError, match=r"exit 3: the command ended with status 3. Number of failed attempts: 1"):
        open_shards(bad, source=Access(SourceConfig(retries=0)))
    with pytest.raises(ShardError, match=r"ended with status 1. .*failed attempts: 1"):  # the first of a pipeline
        open_shards(f"pipe:(cat {paths[0]}; exit 1) | cat", source=Access(SourceConfig(retries=0)))
    start = time.monotonic()
    with pytest.raises(ShardError, match=r"no response for 0.5 s"):
        open_shards(f"pipe:head -c 700 {paths[0]}; sleep 100", source=Access(SourceConfig(retries=0, timeout=0.5)))
    assert time.monotonic() - start < 5


def test_commands_come_from_the_user_alone(write_shards, tmp_path, monkeypatch):
    paths = write_shards([2])
    trap = tmp_path / "trap"
    listed = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": []}
    for url in (f"pipe:touch {trap}", f"x.tar; touch {trap}", "http://127.0.0.1:1/a.tar", "../a.tar"):
        listed["shardlist"] = [{"url": url, "nsamples": 1, "filesize": 1}]
        (tmp_path / FOLDER_INDEX).write_text(json.dumps(listed))
        with pytest.raises(ShardError):
            open_shards(tmp_path / FOLDER_INDEX, source=Access(SourceConfig(retries=0)))
    os.remove(tmp_path / FOLDER_INDEX)
    monkeypatch.chdir(tmp_path)
    os.rename(paths[0], "pipe:touch trap; cat x.tar")
    assert [shard.path for shard in open_shards("*.tar").shards] == ["./pipe:touch trap; cat x.tar"]
    listed["shardlist"] = [{"url": "pipe:touch trap; cat x.tar", "nsamples": 2, "filesize": 10240}]
    (tmp_path / FOLDER_INDEX).write_text(json.dumps(listed))
    assert open_shards(FOLDER_INDEX).images == 2
    assert not trap.exists()
    with pytest.raises(ShardError):
        open_shards("pipe:touch trap", source=Access(SourceConfig(retries=0)))
    assert trap.exists()  # so the trap was a real one


def test_a_folder_may_have_a_question_mark(write_tar, tmp_path):
    (tmp_path / "a?b").mkdir()
    assert open_shards(write_tar("a?b/t.tar", [("k.jpg", b"0")])).name(0) == "t.tar/k"
