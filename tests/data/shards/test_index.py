"""The index of a folder and the table of a shard: what goes in comes out, and what a stranger wrote is looked at."""

import io
import json
import pickle
import struct
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tessera.data.failures import ShardError
from tessera.data.shards import open_shards
from tessera.data.shards.index import (
    FolderIndex,
    ShardEntry,
    Statistics,
    parse_folder,
    parse_table,
    write_folder,
    write_table,
)
from tessera.data.shards.stored_index import header_of, map_index, packed, read_header
from tessera.data.shards.tar_index import Index, scan_tar
from tests.data.shards.batches import add_index


@pytest.fixture
def table(write_shards):
    """Path of a shard and where its five samples lie."""
    (path,) = write_shards([5])
    return path, scan_tar(path, path)


def equal(one, two):
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one, two, strict=True))


def archive(arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def test_a_table_comes_back(table):
    path, index = table
    write_table(path, index)
    content = Path(f"{path}.index").read_bytes()
    assert equal(parse_table(content, "t"), index)
    write_table(path, index)
    assert Path(f"{path}.index").read_bytes() == content
    assert not [p for p in Path(path).parent.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("maps", [0, 7])
def test_a_mapped_index_is_the_same(tmp_path, maps):
    rng = np.random.default_rng(0)
    names, places = [rng.bytes(n) for n in range(7)], lambda rows: rng.integers(-1, 2**62, (rows, 2))
    index = Index(
        np.frombuffer(b"".join(names), dtype=np.uint8), np.cumsum([len(one) for one in names]), places(7), places(7),
        np.array([7, 3, 2**40]), places(maps),
    )  # fmt: skip
    (tmp_path / "x").write_bytes(b"".join(packed(index)) + b"rest")
    with (tmp_path / "x").open("rb") as file:
        found, header = map_index(file.fileno()), read_header(file.fileno())
    (tmp_path / "x").unlink()
    assert equal(found, index)
    assert [found.raw_key(sample) for sample in range(7)] == names
    assert header is not None
    assert header.summary.tolist() == [7, 3, 2**40]
    assert header[1:] == header_of(found)[1:]


def test_an_index_comes_back(tmp_path):
    entries = [ShardEntry(url=f"s-{n}.tar", nsamples=n + 1, filesize=10240, sha256="ab" * 32) for n in range(3)]
    index = FolderIndex(name="x", shardlist=entries, image_sizes={"256": 6})
    write_folder(tmp_path, index)
    content = (tmp_path / "index.json").read_bytes()
    assert parse_folder(content, "x") == index
    plain = json.loads(content)
    assert (plain["__kind__"], plain["wids_version"]) == ("wids-shard-index-v1", 1)
    assert "labelled" not in plain["shardlist"][0]


def test_pixel_statistics_are_optional(write_shards):
    (path,) = write_shards([4])
    entries = add_index([path], [4])
    assert open_shards(path).statistics == Statistics()
    write_folder(Path(path).parent, FolderIndex(shardlist=entries, mean=(0.5, 0.25), std=(0.125, 0.0)))
    assert open_shards(path).statistics == Statistics((0.5, 0.25), (0.125, 0.0))


def test_pixel_statistics_of_several_folders(write_shards, tmp_path):
    """Shards of two folders have the statistics of neither."""
    for name, mean in (("a", 0.5), ("b", 0.25)):
        (path,) = write_shards([4])
        (tmp_path / name).mkdir()
        entries = add_index([Path(path).rename(tmp_path / name / "x.tar")], [4])
        write_folder(tmp_path / name, FolderIndex(shardlist=entries, mean=(mean,), std=(0.125,)))
    assert open_shards(tmp_path / "a" / "index.json").statistics.mean == (0.5,)
    assert open_shards([tmp_path / name / "index.json" for name in "ab"]).statistics.mean is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"shardlist": []}',
        b'{"shardlist": [{"url": "a.tar", "nsamples": 1, "filesize": 1}], "wids_version": 2}',
        b'{"shardlist": [{"url": "a.tar", "nsamples": 1, "filesize": 1}], "__kind__": "other"}',
        b'{"shardlist": [{"url": "a.tar", "nsamples": true, "filesize": 1024}]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_other_contents_are_no_index(text):
    with pytest.raises(ShardError, match="not an index of shards"):
        parse_folder(text, "x")


def test_an_index_of_too_many_shards_is_refused_before_it_is_parsed():
    entry = b'{"url": "a.tar", "nsamples": 1, "filesize": 1024}'
    start = time.process_time()
    with pytest.raises(ShardError, match="x lists more than 200,000 shards"):
        parse_folder(b'{"shardlist": [' + b",".join([entry] * 10**6) + b"]}", "x")
    assert time.process_time() - start < 0.5


CHANGES = {
    "offset outside": lambda a: a["images"].__setitem__((0, 0), 2**40),
    "offset that overflows": lambda a: a["images"].__setitem__((0, 0), 2**63 - 1),
    "offset below 0": lambda a: a["images"].__setitem__((0, 0), -5),
    "size outside": lambda a: a["images"].__setitem__((1, 1), 2**62),
    "size below 0": lambda a: a["images"].__setitem__((1, 1), -1),
    "label outside": lambda a: a["labels"].__setitem__((2, 1), 2**40),
    "more samples": lambda a: a["summary"].__setitem__(0, 6),
    "fewer labels": lambda a: a["summary"].__setitem__(1, 4),
    "names that go back": lambda a: a["ends"].__setitem__(1, 0),
    "names that are longer": lambda a: a["ends"].__setitem__(4, 99),
    "other type": lambda a: a.__setitem__("images", a["images"].astype(float)),
    "other shape": lambda a: a.__setitem__("labels", a["labels"][:, :1]),
    "missing": lambda a: a.pop("keys"),
    "no samples": lambda a: a.update({k: v[:0] for k, v in a.items() if k != "summary"}, summary=np.zeros(3, int)),
    "a number": lambda a: a.__setitem__("ends", np.int64(3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_lying_tables_are_refused(table, change):
    arrays = {name: array.copy() for name, array in table[1]._asdict().items()}
    assert equal(parse_table(archive(arrays), "x"), table[1])
    CHANGES[change](arrays)
    with pytest.raises(ShardError, match=r"s.tar.index is not a table of samples .*--write_index true"):
        parse_table(archive(arrays), "s.tar.index")


def test_nothing_is_unpickled(table, tmp_path):
    class Harm:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    arrays = dict(table[1]._asdict())
    for harm in (archive({**arrays, "keys": np.array([Harm()], dtype=object)}), pickle.dumps(Harm())):
        with pytest.raises(ShardError):
            parse_table(harm, "x")
    assert not (tmp_path / "ran").exists()


def test_a_table_that_unpacks_to_too_much_is_refused(table, monkeypatch):
    monkeypatch.setattr("tessera.data.shards.index.LARGEST_TABLE", 10_000)
    assert equal(parse_table(archive(table[1]._asdict()), "x"), table[1])
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("keys.npy", bytes(20_000))
    with pytest.raises(ShardError, match="the arrays have more than"):
        parse_table(file.getvalue(), "x")


def test_an_array_that_claims_to_be_large_is_refused(table):
    """A header of 2^40 entries over a few bytes must not ask for their memory."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**40,)})
    file = io.BytesIO(archive(table[1]._asdict()))
    with zipfile.ZipFile(file) as packed:
        members = {name: packed.read(name) for name in packed.namelist()}
    members["keys.npy"] = header.getvalue() + b"few"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    with pytest.raises(ShardError, match=r"not a table of samples .*bytes cannot hold an array"):
        parse_table(file.getvalue(), "x")


def test_a_lack_of_memory_is_no_damaged_table(table, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr("numpy.load", fail)
    with pytest.raises(ShardError, match=r"resources of this machine have run out .*The file may be good"):
        parse_table(archive(table[1]._asdict()), "x")


def test_tables_are_written_at_once(table, tmp_path, monkeypatch):
    path, index = table
    write_table(path, index)
    before = Path(f"{path}.index").read_bytes()
    (tmp_path / "opened").hardlink_to(f"{path}.index")
    write_table(path, index._replace(keys=index.keys[::-1]))
    assert (tmp_path / "opened").read_bytes() == before  # who has it open goes on with the old one
    (tmp_path / "opened").unlink()
    write_table(path, index)
    monkeypatch.setattr("os.fsync", lambda _: struct.unpack("q", b""))
    with pytest.raises(struct.error):
        write_table(path, index)
    assert Path(f"{path}.index").read_bytes() == before
    assert [p.name for p in Path(path).parent.iterdir() if p.suffix != ".tar" and p.is_file()] == [
        Path(path).name + ".index"
    ]
