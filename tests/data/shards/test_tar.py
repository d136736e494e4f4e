import logging
import os
import pickle
import tarfile
from pathlib import Path

import pytest
import webdataset

from tessera.data.shards import cache, open_shards, tar
from tessera.data.shards.cache import cache_folder
from tessera.data.shards.failures import ShardError
from tessera.data.shards.open import shard_at
from tessera.data.shards.tar import whole_number
from tests.data.shards.batches import header, keys


def member(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def content(path, place):
    with open(path, "rb") as file:
        file.seek(place[0])
        return file.read(place[1])


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_those_of_webdataset(write_tar, format):
    names = ["a.jpg", "a.cls", "b.cls", "b.JPG", "./c/x.png", "./c/y.webp"]
    names += ["d.txt", "d.jpeg", "e.txt", "f.cls", "a.png"]
    names += [f"{'long/' * 18}{'k' * length}.jpg" for length in (1, 5, 9, 40, 90)]
    names += ["é.jpg", "e" * 95 + ".jpg", "e" * 80 + ".jpg"]
    path = write_tar("t.tar", [(name, f"content of {name}".encode()) for name in names], format=format)
    index, opened = shard_at(path).index(), open_shards(path)
    expected = [
        (sample["__key__"], images[0], sample.get("cls"))
        for sample in webdataset.WebDataset(path, shardshuffle=False)
        if (images := [value for extension, value in sample.items() if extension in tar.IMAGES])
    ]
    found = [
        (
            index.key(n),
            opened.image(n),
            content(path, index.labels[n]) if index.labels[n][0] >= 0 else None,
        )
        for n in range(index.summary[0])
    ]
    assert found == expected
    assert len(found) == 14
    assert index.summary.tolist() == [14, 2, os.path.getsize(path)]


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_other_members_are_left_alone(write_tar, tmp_path, png):
    trap = tmp_path / "trap"
    loaded = pickle.dumps(Trap(str(trap)))
    path = write_tar(
        "t.tar",
        [
            ("a.pickle", loaded),
            ("a.pyd", loaded),
            ("a.png", png(1)),
            (member("a.cls", tarfile.SYMTYPE, "/etc/passwd"), b""),
            (member("b.jpg", tarfile.SYMTYPE, "/etc/passwd"), b""),
            (member("c.jpg", tarfile.LNKTYPE, "a.png"), b""),
            (member("d.jpg", tarfile.CHRTYPE), b""),
            (member("e.jpg", tarfile.DIRTYPE), b""),
            ("../../outside.png", png(2)),
        ],
    )
    assert keys(shard_at(path).index()) == ["a", "../../outside"]
    assert not trap.exists()
    pickle.loads(loaded)
    assert trap.exists()  # so the trap was a real one


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:700], r"has 700 bytes, but its member a.png ends at byte \d+"),
        (lambda raw: raw[:1200], "broken header at byte 1024"),
        (lambda raw: b"not a tar at all\n" * 100, "not a complete tar"),
        (lambda raw: bytes(10240), "holds no images"),
        (lambda raw: b"", "has 0 bytes"),
        (lambda raw: raw[:1024] + header(b"z.png", 2**40) + raw[1024:], r"truncated or .* z.png ends at byte 10995116"),
        (lambda raw: header(b"a.png", -512) + raw[512:], r"truncated or damaged.* a.png ends at byte 0"),
        (lambda raw: header(b"x", 2**21, b"x") + bytes(2**21) + raw, "a header of 2097152 bytes"),
        (lambda raw: raw[:1024] + b"\x01" * 20 + raw[1044:], "broken header at byte 1024"),
    ],
)
def test_a_bad_shard_is_named(write_tar, png, damage, message):
    path = Path(write_tar("t.tar", [(f"{name}.png", png(0).ljust(500, b"\0")) for name in "abc"]))
    assert keys(shard_at(str(path)).index()) == ["a", "b", "c"]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ShardError, match=message) as caught:
        shard_at(str(path)).index()
    assert str(path) in str(caught.value)


def test_members_that_cannot_be(write_tar, png, monkeypatch):
    twice = write_tar("twice.tar", [("a.png", png(0)), ("a.png", png(1))])
    with pytest.raises(ShardError, match=r"twice.tar holds a.png twice"):
        shard_at(twice).index()
    monkeypatch.setattr(tar, "LARGEST_MEMBER", 100)
    large = write_tar("large.tar", [("a.txt", bytes(101)), ("a.jpg", bytes(101))])
    with pytest.raises(ShardError, match=r"large.tar holds a.jpg with 101 bytes, but at most 100 are allowed"):
        shard_at(large).index()
    dotted = write_tar("dotted.tar", [("a.v2.jpg", png(0))])
    with pytest.raises(ShardError, match="without a dot in KEY"):
        shard_at(dotted).index()


def test_a_missing_end_mark_is_a_warning(write_tar, png, caplog):
    path = Path(write_tar("t.tar", [("a.png", png(0).ljust(512, b"\0"))]))
    path.write_bytes(path.read_bytes()[:1024])
    with caplog.at_level(logging.WARNING):
        assert keys(shard_at(str(path)).index()) == ["a"]
    assert "byte 1024 without an end mark" in caplog.text


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("TESSERA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/tessera")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "tessera"


@pytest.mark.parametrize(
    ("home", "temporary", "mode", "moved"),
    [
        ("nfs4", "xfs", 0o700, True),
        ("lustre", "ext4", 0o755, True),
        ("ext4", "ext4", 0o700, False),
        ("nfs4", "nfs4", 0o700, False),
        ("nfs4", "tmpfs", 0o700, False),
        ("nfs4", None, 0o700, False),
        ("nfs4", "xfs", 0o770, False),  # others could write to the cache
    ],
)
def test_the_cache_is_not_on_a_network_home(monkeypatch, tmp_path, home, temporary, mode, moved):
    kinds = {str(tmp_path / "home"): home, str(tmp_path / "tmp"): temporary}
    monkeypatch.setattr(
        cache, "file_system", lambda path: next(kinds[one] for one in kinds if str(path).startswith(one))
    )
    for name in ("TESSERA_CACHE", "XDG_CACHE_HOME", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if temporary:
        monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    folder = tmp_path / "tmp" / f"tessera-{os.getuid()}"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert cache_folder() == (folder if moved else tmp_path / "home" / ".cache" / "tessera")
    folder.rmdir()
    assert cache_folder() == (folder if moved or mode == 0o770 else tmp_path / "home" / ".cache" / "tessera")
    if folder.exists():
        folder.rmdir()
        folder.symlink_to(tmp_path)  # a link of another user could lead anywhere
        assert cache_folder() == tmp_path / "home" / ".cache" / "tessera"


def test_images_that_are_not_read_are_said(write_tar, caplog):
    names = ("a.jpg", "b.1.jpg", "c.heic", "d.txt", "e.cls")
    index = tar.scan_tar(write_tar("a.tar", [(name, b"0") for name in names]), "a.tar")
    assert index.key(0) == "a"
    assert len(index.images) == 1
    assert "a.tar: 2 images are not read, the first is b.1.jpg" in caplog.text


@pytest.mark.parametrize(
    ("text", "number"),
    [(b"0", 0), (b"12\n", 12), (b" -3\r\n", -3), (b"007", 7), (b"9" * 18, 10**18 - 1)]
    + [(text, None) for text in (b"1_2", b"0_1", b"+1", b"1.0", b"--1", b"1 2", b"", b"\xd9\xa3", b"0x1", b"9" * 19)],
)
def test_whole_number(text, number):
    assert whole_number(text) == number
