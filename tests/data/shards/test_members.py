"""Names and sizes in tar headers, read by bytes: as `tarfile` reads them, and in linear time."""

import io
import os
import re
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

from tessera.data.check_shards import main as check_shards
from tessera.data.shards import ShardError, open_shards, tar_shard
from tessera.data.shards.open import shard_at
from tessera.data.shards.tar_index import Headers, is_header, is_member, scan_tar, split_name
from tests.data.shards.batches import header
from tests.data.shards.servers import Server

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def padded(content):
    return content + bytes(-len(content) % 512)


def record(key, value):
    size = len(key) + len(value) + 3
    while len(b"%d" % size) + len(key) + len(value) + 3 != size:
        size = len(b"%d" % size) + len(key) + len(value) + 3
    return b"%d %s=%s\n" % (size, key, value)


def pax(records, kind=b"x"):
    content = b"".join(record(*one) for one in records)
    return header(b"PaxHeaders/x", len(content), kind, tarfile.USTAR_FORMAT) + padded(content)


def read_all(path, named=None):
    opened = open_shards(str(named or path))
    return [(opened.name(n), opened.image(n)) for n in range(opened.images)]


@pytest.mark.parametrize("remote", [False, True])
def test_latin_1_names_and_pax_records(tmp_path, png, capsys, remote):
    images = [png(number) for number in range(5)]
    long = b"d/" * 80 + b"f\xe9"
    raw = header(b"\xe9t\xe9.png", len(images[0])) + padded(images[0])
    raw += pax([(b"path", b"other.png")]) + header(b"a.txt", len(images[1])) + padded(images[1])
    raw += pax([(b"size", b"%d" % len(images[2]))]) + header(b"sized.png", 0) + padded(images[2])
    raw += header(b"././@LongLink", len(long) + 5, b"L") + padded(long + b".png\0")
    raw += header((long + b".png")[:100], len(images[3])) + padded(images[3])
    raw += pax([(b"path", b"both.png"), (b"size", b"%d" % len(images[4]))]) + header(b"y", 7) + padded(images[4])
    path = tmp_path / "t.tar"
    path.write_bytes(raw + bytes(1024))
    expected = ["\\xe9t\\xe9", "other", "sized", "d/" * 80 + "f\\xe9", "both"]
    assert check_shards([str(path)]) == 0, capsys.readouterr().out
    with Server(tmp_path) as server:
        found = read_all(path, f"{server.url}/t.tar" if remote else None)
        assert found == [(f"t.tar/{key}", image) for key, image in zip(expected, images, strict=True)]


def test_remote_members_behind_pax_headers_are_found(tmp_path, png, monkeypatch):
    monkeypatch.setattr(tar_shard, "USUAL_REQUEST", 1)
    raw = b"".join(
        pax([(b"path", b"k%d.png" % n), (b"comment", b"c" * 3000)]) + header(b"x", len(png(n))) + padded(png(n))
        for n in range(3)
    )
    path = tmp_path / "t.tar"
    path.write_bytes(raw + bytes(1024))
    from tessera.data.shards.index import write_table

    write_table(path, scan_tar(str(path), "t.tar"))
    with Server(tmp_path) as server:
        assert read_all(path, f"{server.url}/t.tar") == [(f"t.tar/k{n}", png(n)) for n in range(3)]
        assert ("/t.tar", None) not in server.gets("t.tar")


@pytest.mark.parametrize("format", FORMATS)
def test_headers_are_those_of_tarfile(tmp_path, format):
    path = tmp_path / "t.tar"
    names = ["a.jpg", "d/b.cls", "long/" * 30 + "name.png", "é.jpg", "x" * 99, "p/" * 60 + "y" * 60]
    with tarfile.open(path, "w", format=format) as archive:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = number * 300, 1.5 if format == tarfile.PAX_FORMAT else 1
            archive.addfile(info, io.BytesIO(bytes(info.size)))
            link = tarfile.TarInfo(f"l{number}")
            link.type, link.linkname = tarfile.SYMTYPE, name * 3 if format != tarfile.USTAR_FORMAT else "x"
            archive.addfile(link)
    with open(path, "rb") as file, tarfile.open(path) as archive:
        headers = Headers(file.fileno())
        found = [(one.name.decode(), one.type, one.offset, one.size) for one in headers]
        assert found == [(one.name, one.type, one.offset_data, one.size) for one in archive.getmembers()]
        assert headers.rest == bytes(512)


@pytest.mark.parametrize(
    "raw",
    [
        pax([(b"size", b"9" * 30)]) + header(b"a.png", 0),
        pax([(b"size", b"-5")]) + header(b"a.png", 0),
        header(b"x", 20, b"x") + padded(b"999 path=a.png\n"),
        header(b"x", 20, b"x") + padded(b"path=a.png\n"),
        pax([(b"path", b"a.png")]),
        header(b"././@LongLink", 600, b"L") + bytes(100),
        header(b"a.png", 2**33),
    ],
)
def test_damaged_headers_are_named(tmp_path, raw):
    path = tmp_path / "t.tar"
    path.write_bytes(raw)
    with pytest.raises(ShardError, match=re.escape(str(path))):
        shard_at(str(path)).index()


def test_keys_are_those_of_webdatasets_pattern():
    pattern = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")  # webdataset's, which takes quadratic time
    rng = np.random.default_rng(0)
    for _ in range(20_000):
        name = "".join(rng.choice(list("a./"), rng.integers(0, 9)))
        expected = pattern.match(name)
        found = split_name(name.encode())
        assert found == (expected and (expected[1].encode(), expected[2].encode())), name


@pytest.mark.parametrize(
    "name", [b"a/" * 250_000, b"." * 500_000, b"/" * 500_000, b"a." * 250_000 + b"jpg", b"a/." * 160_000 + b".png"]
)
def test_long_names_take_linear_time(tmp_path, png, name):
    raw = header(b"././@LongLink", len(name), b"L") + padded(name) + header(name[:100], 5) + padded(b"12345")
    path = tmp_path / "t.tar"
    path.write_bytes(raw * 20 + header(b"good.png", len(png(0))) + padded(png(0)))
    start = time.process_time()
    assert shard_at(str(path)).index().key(0).endswith("good")
    assert time.process_time() - start < 2


def test_many_headers_take_linear_time(tmp_path, png):
    path = tmp_path / "t.tar"
    end = header(b"a.png", len(png(0))) + padded(png(0))
    many = record(b"comment", b"x") * 60_000
    for raw in (
        pax([(b"k", b"v")]) * 20_000,
        pax([(b"k", b"v")], b"g") * 20_000,
        header(b"x", len(many), b"x") + padded(many),
    ):
        path.write_bytes(raw + end)
        start = time.process_time()
        assert len(shard_at(str(path)).index().images) == 1
        assert time.process_time() - start < 4


def test_a_member_is_known_by_its_header():
    good = header(b"key.png", 100)
    assert is_header(good)
    assert is_member(good, b"key", 100)
    assert not is_member(good, b"key", 101)
    assert not is_member(good, b"other", 100)
    assert not is_member(good[:-1], b"other", 100)
    assert not is_member(header(b"key.png", 100, b"2"), b"key", 0)
    assert not is_header(bytes(512))


def test_names_cannot_forge_lines_of_the_log(write_tar, png, caplog):
    name = "a\x1b[31m\n2026-01-01 WARNING corrupt image b\r"
    path = write_tar("t.tar", [(f"{name}.png", png(0)), (f"{name}.heic", b"1")])
    index = shard_at(path).index()
    assert index.raw_key(0) == name.encode()
    assert index.key(0) == "a\\x1b[31m\\n2026-01-01 WARNING corrupt image b\\r"
    open_shards(path)
    (warning,) = caplog.messages
    assert ".heic file is left out" in warning
    assert not {"\n", "\r", "\x1b"} & set(warning)
    Path(path).write_bytes(Path(path).read_bytes()[:560])
    with pytest.raises(ShardError) as caught:
        shard_at(path).index()
    assert not {"\n", "\r", "\x1b"} & set(str(caught.value))
    assert os.path.basename(path) in str(caught.value)
