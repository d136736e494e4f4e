import logging
import os
import pickle
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
import webdataset

from tessera.data.failures import ShardError, warn_once
from tessera.data.shards import open_shards, tar_index
from tessera.data.shards.access import Access
from tessera.data.shards.cache import cache_folder
from tessera.data.shards.notes import describe
from tessera.data.shards.open import shard_at
from tessera.data.shards.samples import SampleKeys
from tessera.data.shards.tar_index import whole_number
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
        if (images := [value for extension, value in sample.items() if extension in tar_index.IMAGES])
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
    monkeypatch.setattr(tar_index, "LARGEST_MEMBER", 100)
    large = write_tar("large.tar", [("a.txt", bytes(101)), ("a.jpg", bytes(101))])
    with pytest.raises(ShardError, match=r"large.tar holds a.jpg with 101 bytes, but at most 100 are allowed"):
        shard_at(large).index()
    dotted = write_tar("dotted.tar", [(f"img.{number:04d}.jpg", png(0)) for number in range(9)])
    with pytest.raises(ShardError, match=r"Name image files .*without a dot in KEY"):
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


def said(path, caplog, **form):
    """Warnings of a run that opens a tar, without the path, which begins each of them. A second run says the same."""
    found = []
    for _ in range(2):  # the second time, the index is in the cache
        warn_once.cache_clear()
        caplog.clear()
        opened = open_shards(str(path), source=Access(keys=SampleKeys(**form)))
        assert [f"{path}: {line}" for line in describe(opened.notes)] == caplog.messages
        found.append([line.removeprefix(f"{path}: ") for line in caplog.messages])
    assert found[0] == found[1]
    return found[0]


def test_images_that_are_not_read_are_said(write_tar, caplog):
    names = ("a.jpg", "b.1.jpg", "c.heic", "d.txt", "e.cls", "f.heic", "g.bmp")
    path = write_tar("a.tar", [(name, b"0") for name in names])
    name, heic, bmp, orphan = said(path, caplog)
    assert name.startswith("1 image is not read. A name must be KEY.EXTENSION")
    assert name.endswith("Its name is a.tar/b.1.jpg.")
    assert (
        heic
        == "2 .heic files are left out, because this format is not read (convert to PNG). The first is a.tar/c.heic."
    )
    assert "1 .bmp file is" in bmp
    assert orphan.startswith("1 label or map belongs to no image")
    assert orphan.endswith("Its name is a.tar/e.")
    assert keys(shard_at(path).index()) == ["a"]


def test_links_in_a_tar_are_said(tmp_path, write_tar, caplog):
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        image = tarfile.TarInfo("a.jpg")
        image.size = 1
        file.addfile(image, BytesIO(b"0"))
        file.addfile(member("b.jpg", tarfile.LNKTYPE, "a.jpg"))
        file.addfile(member("c.jpg", tarfile.SYMTYPE, "a.jpg"))
    (line,) = said(tmp_path / "a.tar", caplog)
    assert line.startswith("2 images are links, which are not read. Write the tar again with `tar --hard-dereference")


@pytest.mark.parametrize("padding", [0, 10240 - 3072, 2**21])
def test_joined_tars_are_said(write_tar, caplog, padding):
    first, second = (Path(write_tar(f"{name}.tar", [(f"{name}.jpg", b"0")])) for name in "ab")
    whole = first.read_bytes()[:2048] + bytes(padding)
    joined = first.with_name("joined.tar")
    joined.write_bytes(whole + second.read_bytes())
    (line,) = said(joined, caplog)
    assert f"{joined.stat().st_size - 1024:,} bytes after the end mark of the tar are not read" in line
    joined.write_bytes(whole[: 2048 + 10240])  # padding alone is usual
    assert said(joined, caplog) == []


def test_repeated_names_are_said(write_tar, caplog):
    path = write_tar("a.tar", [("a.jpg", b"0"), ("b.jpg", b"0"), ("a.jpg", b"1"), ("b.jpg", b"2"), ("a.jpg", b"1")])
    (line,) = said(path, caplog)
    assert line.startswith("3 samples have the name of an earlier sample. All of them are read.")
    by_kind = write_tar("b.tar", [("a.jpg", b"0"), ("b.jpg", b"0"), ("a.cls", b"1"), ("b.cls", b"2")])
    (line,) = said(by_kind, caplog)
    assert line.startswith("2 labels or maps belong to no image. The members of a sample must follow one another")


def test_several_images_of_a_sample(write_tar, caplog):
    image, mask = ("a.webp", b"image"), ("a.png", b"m")
    path = write_tar("a.tar", [mask, image, ("b.webp", b"other"), ("b.png", b"m"), ("c.png", b"m")])
    with pytest.raises(ShardError, match=r"several images, a.png and a.webp. .*--data.image=png \(--image=png"):
        open_shards(path)
    (line,) = said(path, caplog, image="webp")
    assert line.startswith("1 sample has images, but not the image that data.image names (--image of other commands)")
    assert line.endswith("It is left out: 1 .png. Its name is a.tar/c.png.")
    opened = open_shards(path, source=Access(keys=SampleKeys("webp")))
    assert [opened.image(number) for number in range(opened.images)] == [b"image", b"other"]
    assert said(path, caplog, image=".PNG") == []


def test_samples_without_the_chosen_image_are_counted_by_kind(write_tar, caplog):
    """Labels of such samples belong to them, and are no orphans."""
    members = [("a.png", b"0"), ("a.cls", b"0"), ("b.jpg", b"0"), ("b.cls", b"7"), ("c.cls", b"7"), ("d.jpg", b"0")]
    members += [("e.tif", b"0"), ("e.cls", b"7\n"), ("f.jpg", b"0"), ("f.cls", b"7"), ("g.jpg", b"0"), ("g.cls", b"x")]
    path = write_tar("a.tar", members)
    chosen, orphan = said(path, caplog, image="png")
    groups = "4 .jpg, 1 .tif. The first is a.tar/b.jpg."
    assert chosen.startswith("5 samples have images, but not the image that data.image names")
    assert chosen.endswith(groups)
    assert orphan.endswith("Its name is a.tar/c.")
    with pytest.raises(ShardError, match=r"holds no image KEY.webp. .* 6 samples have images, .* 4 .jpg"):
        open_shards(path, source=Access(keys=SampleKeys("webp")))


@pytest.mark.parametrize(
    ("text", "number"),
    [(b"0", 0), (b"12\n", 12), (b" -3\r\n", -3), (b"007", 7), (b"9" * 18, 10**18 - 1)]
    + [(text, None) for text in (b"1_2", b"0_1", b"+1", b"1.0", b"--1", b"1 2", b"", b"\xd9\xa3", b"0x1", b"9" * 19)],
)
def test_whole_number(text, number):
    assert whole_number(text) == number


def test_several_maps_of_a_sample_are_said(write_tar, caplog):
    path = write_tar("a.tar", [("a.jpg", b"0"), ("a.depth.png", b"d"), ("a.seg.png", b"s"), ("b.jpg", b"0")])
    (line,) = said(path, caplog)
    assert line.startswith("1 sample has several maps. Only the first of KEY.seg.png")
