"""Shards of folders, lists and manifests: what is in them, what is not, and that nothing depends on how it was made."""

import csv
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from data import make_shards
from data.make_shards import main
from data.making import pack, parallel
from data.making.listing import list_folder
from data.making.split import find_duplicates, same, split
from data.shards import Reader, open_shards
from data.shards.index import read_folder, read_table
from data.shards.tars import walk


def picture(seed, size=(24, 16), format="JPEG", mode="RGB", **options):
    """An encoded picture of noise, (width, height) in size."""
    width, height = size
    channels = {"L": (), "RGB": (3,), "RGBA": (4,), "CMYK": (4,)}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, *channels), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, format, **options)
    return file.getvalue()


@pytest.fixture
def photos(tmp_path):
    """A function: {relative path: bytes} -> a folder with these files."""

    def write(files, name="photos"):
        for path, content in files.items():
            target = tmp_path / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return tmp_path / name

    return write


@pytest.fixture
def animals(photos):
    """60 images in three class folders, about 1.2 kB each."""
    return photos(
        {f"{animal}/{animal}_{n:02d}.jpg": picture(100 * k + n) for k, animal in enumerate(CLASSES) for n in range(20)}
    )


CLASSES = ["ant", "bee", "cat"]
SMALL = "--shard_size_mb=0.03"


def make(*words, status=0):
    assert main([str(word) for word in words]) == status


def content(folder):
    """All files of a folder of shards, but the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def shards(folder):
    return sorted(folder.glob("*.tar"))


def samples(folder):
    """(key, image, label) of all samples, by webdataset."""
    found = []
    for path in shards(folder):
        for sample in webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False):
            image = next(sample[kind] for kind in ("jpg", "png", "webp") if kind in sample)
            found.append((sample["__key__"], image, sample["cls"].decode() if "cls" in sample else None))
    return found


def rows(path):
    with path.open(newline="", errors="surrogateescape") as file:
        return list(csv.reader(file))[1:]


# What is in shards


def test_every_image_with_its_label_and_what_the_index_says(animals, tmp_path, capsys):
    out = tmp_path / "out"
    make(animals, out, SMALL)
    found = {key: (image, label) for key, image, label in samples(out)}
    assert len(found) == 60
    for path in animals.rglob("*.jpg"):
        image, label = found[str(path.relative_to(animals).with_suffix(""))]
        assert image == path.read_bytes()
        assert label == str(CLASSES.index(path.parent.name))
    assert json.loads((out / "classes.json").read_text()) == CLASSES
    index = read_folder((out / "index.json").read_bytes(), "index.json")
    assert [entry.url for entry in index.shardlist] == [path.name for path in shards(out)]
    assert len(index.shardlist) > 2
    assert index.image_sizes == {"32": 60}
    for path, entry in zip(shards(out), index.shardlist, strict=True):
        table, walked = read_table(Path(f"{path}.index").read_bytes(), "table"), walk(str(path), "shard")
        assert all(np.array_equal(a, b) for a, b in zip(table, walked, strict=True))
        assert (entry.nsamples, entry.labelled, entry.filesize) == tuple(walked.summary)
        assert entry.sha256 == pack.hashlib.sha256(path.read_bytes()).hexdigest()
        with tarfile.open(path) as archive:
            assert {(m.mtime, m.uid, m.gid, m.mode, m.uname) for m in archive} == {(0, 0, 0, 0o644, "")}
    sizes = [entry.filesize for entry in index.shardlist]
    assert max(sizes) - min(sizes) <= 10240
    assert max(sizes) < 0.03e6 + 10240 + 2048
    text = capsys.readouterr().out
    assert "3 classes, ant to cat" in text
    assert f"--data '{out}/shard-*.tar'" in text


def test_a_run_reads_them(animals, tmp_path):
    make(animals, tmp_path / "out", SMALL)
    opened = open_shards(str(tmp_path / "out" / "*.tar"))
    assert opened.images == 60
    reader = Reader(opened)
    labels = [reader.label(s, n) for s, count in enumerate(opened.counts) for n in range(count)]
    assert np.bincount(labels).tolist() == [20, 20, 20]
    assert labels != sorted(labels)


def test_the_same_bytes_whatever_the_workers(animals, tmp_path):
    for name, *words in (("a", "--workers=1"), ("b", "--workers=4"), ("c", "--seed=1"), ("d", "--shuffle=false")):
        make(animals, tmp_path / name, SMALL, *words)
    a, b, c = (content(tmp_path / name) for name in "abc")
    assert a == b
    assert sorted(a) == sorted(c)
    assert a["shard-000000.tar"] != c["shard-000000.tar"]
    assert sorted(samples(tmp_path / "a")) == sorted(samples(tmp_path / "c"))
    keys = [key for key, *_ in samples(tmp_path / "d")]
    assert keys == sorted(keys)
    assert [key for key, *_ in samples(tmp_path / "a")] != keys


def in_process(words):
    """A process that runs the command, and its workers, in a group of their own as a shell makes it."""

    def run():
        os.setsid()
        os._exit(main(words))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def test_killed_at_random_and_started_again(photos, tmp_path, capsys):
    folder = photos({f"{n % 2}/{n:03d}.png": picture(n, (120, 120), "PNG") for n in range(120)})
    words = [str(folder), str(tmp_path / "killed"), "--shard_size_mb=0.4", "--duplicates=drop", "--workers=2"]
    start = time.monotonic()
    process = in_process([words[0], str(tmp_path / "whole"), *words[2:]])
    process.join()
    took, whole = time.monotonic() - start, content(tmp_path / "whole")
    assert len(shards(tmp_path / "whole")) > 10
    rng, kept = random.Random(0), []
    for _ in range(12):
        process = in_process(words)
        time.sleep(rng.uniform(0, took))
        process.kill()
        process.join()
        found = shards(tmp_path / "killed")
        kept.append(len(found))
        for path in found:  # what has a name is whole
            assert path.read_bytes() == whole[path.name]
        if kept[-1] == len(shards(tmp_path / "whole")):
            make(*words)
            assert content(tmp_path / "killed") == whole
            shutil.rmtree(tmp_path / "killed")
    assert len({*kept}) > 2  # it was at different points
    make(*words)
    assert content(tmp_path / "killed") == whole


def test_ctrl_c_says_how_to_go_on(animals, tmp_path, capfd, monkeypatch):
    fast = pack.prepare
    monkeypatch.setattr(pack, "prepare", lambda *arguments: time.sleep(0.03) or fast(*arguments))
    words = [str(animals), str(tmp_path / "out"), SMALL, "--workers=2"]
    process = in_process(words)
    while not shards(tmp_path / "out"):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 130
    text = capfd.readouterr().err
    assert "the same command makes the others" in text
    assert "Traceback" not in text
    before = len(shards(tmp_path / "out"))
    assert not list((tmp_path / "out").glob(".shard*"))
    monkeypatch.setattr(pack, "prepare", fast)
    make(*words)
    assert f"{before:,} are there already" in capfd.readouterr().out
    assert len(samples(tmp_path / "out")) == 60


def test_a_shard_that_is_gone_or_cut_is_made_again(animals, tmp_path):
    make(animals, tmp_path / "out", SMALL)
    before, paths = content(tmp_path / "out"), shards(tmp_path / "out")
    paths[0].unlink()
    os.truncate(paths[1], 5000)
    make(animals, tmp_path / "out", SMALL)
    assert content(tmp_path / "out") == before


def test_shards_in_the_folder_of_images(animals, tmp_path, capsys):
    out = animals / "shards"
    make(animals, out, SMALL)
    before = content(out)
    (out / "picture.jpg").write_bytes(picture(0))
    make(animals, out, SMALL)
    (out / "picture.jpg").unlink()
    assert content(out) == before
    make(animals, animals, status=1)
    assert "a folder of their own" in capsys.readouterr().err


# Labels


@pytest.mark.parametrize(
    ("files", "labels", "expected"),
    [
        (["a.jpg", "b.jpg"], "auto", [None, None]),
        (["t/x/a.jpg", "t/y/b.jpg"], "auto", [None, None]),
        (["x/a.jpg", "x/b.jpg"], "auto", [None, None]),
        (["x/a.jpg", "y/b.jpg"], "auto", ["0", "1"]),
        (["x/a.jpg", "y/b.jpg"], "none", [None, None]),
        (["x/a.jpg", "y/b.jpg", "c.jpg"], "auto", [None] * 3),
        (["t/x/a.jpg", "t/y/b.jpg", "v/x/c.jpg"], "auto", [None] * 3),
        (["t/x/a.jpg", "t/y/b.jpg", "v/x/c.jpg"], "folders", ["0", "0", "1"]),
        (["x/a.jpg"], "folders", ["0"]),
        (["10/a.jpg", "2/b.jpg", "9/c.jpg"], "auto", ["2", "0", "1"]),
    ],
)
def test_labels_of_folders(photos, tmp_path, files, labels, expected, capsys):
    folder = photos({name: picture(n) for n, name in enumerate(files)})
    make(folder, tmp_path / "out", "--labels", labels, "--shuffle=false", "--name=x")
    found = {key + ".jpg": label for key, _, label in samples(tmp_path / "out")}
    assert [found[name] for name in files] == expected
    assert ("labels        none" in capsys.readouterr().out) == (expected[0] is None)
    assert (tmp_path / "out" / "classes.json").exists() == (expected[0] is not None)


def test_class_folders_with_an_image_beside_them(photos, tmp_path, capsys):
    folder = photos({"x/a.jpg": picture(0), "empty.jpg": b""})
    make(folder, tmp_path / "good", "--labels=folders")
    (folder / "b.jpg").write_bytes(picture(1))
    make(folder, tmp_path / "out", "--labels=folders", status=1)
    assert "b.jpg lies in no class folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_numbers_of_other_shards(photos, tmp_path, capsys):
    train = photos({f"{name}/a.jpg": picture(n) for n, name in enumerate("abc")}, "train")
    val = photos({f"{name}/a.jpg": picture(n) for n, name in enumerate("ac")}, "val")
    make(train, tmp_path / "one")
    make(val, tmp_path / "two", "--classes", tmp_path / "one" / "classes.json")
    assert sorted((key, label) for key, _, label in samples(tmp_path / "two")) == [("a/a", "0"), ("c/a", "2")]
    make(train, tmp_path / "three", "--classes", tmp_path / "one" / "index.json", status=1)
    (tmp_path / "classes.json").write_text('["a", "b"]')
    make(train, tmp_path / "three", "--classes", tmp_path / "classes.json", status=1)
    assert "class 'c' is not in --classes" in capsys.readouterr().err


# Lists and manifests


@pytest.fixture
def three(photos):
    return photos({f"{n}.jpg": picture(n) for n in range(3)})


def manifest(path, names, labels):
    if path.suffix == ".txt":
        path.write_text(
            "".join(f"{n}\t{label}\n" if label else f"{n}\n" for n, label in zip(names, labels, strict=True))
        )
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(
                [("id", "path", "label"), *((1, *row) for row in zip(names, labels, strict=True))]
            )
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = pyarrow.table({"path": names, "label": [label or None for label in labels]})
        parquet.write_table(table, path)
    return path


@pytest.mark.parametrize("ending", ["txt", "csv", "parquet"])
@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["dog", "cat", "dog"], ["1", "0", "1"]),
        (["7", "", "3.0"], ["7", None, "3"]),
        (["", "", ""], [None] * 3),
        (["7", "cat", ""], ["0", "1", None]),
    ],
)
def test_lists_and_manifests(three, tmp_path, ending, labels, expected):
    names = ["2.jpg", "0.jpg", "./1.jpg"]
    listed = manifest(three / f"m.{ending}", names, labels)
    make(listed, tmp_path / "out", "--shuffle=false")
    assert [(key, label) for key, _, label in samples(tmp_path / "out")] == list(zip("201", expected, strict=True))
    make(listed, tmp_path / "none", "--labels=none")
    assert {label for *_, label in samples(tmp_path / "none")} == {None}
    away = manifest(tmp_path / f"m.{ending}", [str(three / name) for name in names], labels)
    make(away, tmp_path / "away", "--shuffle=false", f"--root={three}")
    assert samples(tmp_path / "away") == samples(tmp_path / "out")


def test_columns_by_name(three, tmp_path, capsys):
    (three / "m.csv").write_text("file,kind\n0.jpg,5\n1.jpg,6\n")
    make(three / "m.csv", tmp_path / "out", status=1)
    assert "no column 'path'; --path_column is one of 'file', 'kind'" in capsys.readouterr().err
    make(three / "m.csv", tmp_path / "out", "--path_column=file", "--label_column=what", status=1)
    make(three / "m.csv", tmp_path / "out", "--path_column=file", "--label_column=kind", "--shuffle=false")
    assert [label for *_, label in samples(tmp_path / "out")] == ["5", "6"]
    make(three / "m.csv", tmp_path / "plain", "--path_column=file")
    assert {label for *_, label in samples(tmp_path / "plain")} == {None}


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("path\n../x.jpg\n", [], "entry 1, '../x.jpg', lies outside"),
        ("path\n0.jpg\n/etc/passwd\n", [], "entry 2, '/etc/passwd', lies outside"),
        ("path\n0.jpg\n1.jpg\n./0.jpg\n", [], "1 paths are there again, the first 0.jpg"),
        ("path,label\n0.jpg,-1\n", [], "below 0"),
        ("path,label\n0.jpg\n", [], "line 2 has 1 fields, its heading 2"),
        ("path\nno.jpg\n", [], "names no images that are there"),
        ("path\n0.jpg\n", ["--labels=folders"], "--labels folders is for a folder"),
        ("", [], "no column 'path'"),
    ],
)
def test_manifests_that_are_refused(three, tmp_path, text, words, message, capsys):
    (three / "m.csv").write_text(text)
    make(three / "m.csv", tmp_path / "out", *words, status=1)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_parquet_that_is_none_and_without_pyarrow(three, tmp_path, capsys, monkeypatch):
    (three / "m.parquet").write_bytes(b"PAR1 no PAR1")
    make(three / "m.parquet", tmp_path / "out", status=1)
    assert "cannot read" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    make(three / "m.parquet", tmp_path / "out", status=1)
    assert 'pip install "tessera-ssl[parquet]"' in capsys.readouterr().err


# What is left out


def bomb(width, height):
    """A PNG whose header claims a size."""
    png = bytearray(picture(0, format="PNG"))
    png[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    png[29:33] = __import__("zlib").crc32(png[12:29]).to_bytes(4, "big")
    return bytes(png)


@pytest.mark.parametrize("verify", ["true", "false"])
def test_what_is_left_out_is_named(photos, tmp_path, verify, capsys):
    files = {
        "good.jpg": picture(0),
        "really-a.png": picture(1),
        "upper.JPEG": picture(2),
        "text.jpg": b"not an image",
        "empty.png": b"",
        "bomb.png": bomb(60000, 60000),
        "header.jpg": b"\xff\xd8\xff\xe0\x00\x10JFIF",
        "notes.txt": b"text",
        "old.gif": b"GIF89a",
        "._hidden.jpg": b"resource fork",
    }
    folder = photos(files)
    (folder / "out.jpg").symlink_to(photos({"secret.jpg": picture(9)}, "photos-secret") / "secret.jpg")
    (folder / "gone.jpg").symlink_to(tmp_path / "gone.jpg")
    (folder / "in.jpg").symlink_to("good.jpg")
    (folder / "broken.jpg").symlink_to("nowhere.jpg")
    (folder / "loop").symlink_to(".")
    os.mkfifo(folder / "pipe.jpg")
    make(folder, tmp_path / "out", "--verify", verify)
    found = dict(rows(tmp_path / "out" / "left_out.csv"))
    assert sorted(found) == sorted(
        ["bomb.png", "broken.jpg", "empty.png", "gone.jpg", "header.jpg", "out.jpg", "pipe.jpg", "text.jpg"]
    )
    assert found["bomb.png"].startswith("Image size (3600000000 pixels) exceeds limit")
    assert found["empty.png"] == "the file is empty"
    assert (found["broken.jpg"], found["gone.jpg"]) == ("not found", "not found")
    assert "--links all" in found["out.jpg"]
    assert found["pipe.jpg"] == "not a regular file"
    assert "not a JPEG, PNG or WebP" in found["text.jpg"]
    with tarfile.open(shards(tmp_path / "out")[0]) as archive:
        assert sorted(archive.getnames()) == ["good.jpg", "in.jpg", "really-a.jpg", "upper.jpg"]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["images"], sum(report["left_out"].values())) == (4, 8)
    assert report["other_files"] == {".txt": 1, ".gif": 1, "hidden": 1, "links to folders": 1}
    text = capsys.readouterr().out
    assert "1 more are left out: a symbolic link out of the folder" in text
    assert "left out      8" in text


def test_the_limit_of_pixels_is_a_setting(photos, tmp_path):
    folder = photos({"a.jpg": picture(0, (20, 20)), "b.png": picture(1, (30, 30), "PNG")})
    for verify in ("true", "false"):
        make(folder, tmp_path / verify, "--max_pixels=400", "--verify", verify)
        assert rows(tmp_path / verify / "left_out.csv") == [["b.png", "30 x 30 pixels are more than the limit of 400"]]


def test_a_truncated_image_only_where_it_is_decoded(photos, tmp_path):
    folder = photos({"whole.jpg": picture(0), "half.png": picture(1, (64, 64), "PNG")[:2000]})
    make(folder, tmp_path / "out")
    assert [name for name, _ in rows(tmp_path / "out" / "left_out.csv")] == ["half.png"]
    make(folder, tmp_path / "quick", "--verify=false")
    assert not rows(tmp_path / "quick" / "left_out.csv")


def test_links_are_followed_when_asked(photos, tmp_path):
    farm, real = photos({"a.jpg": picture(0)}, "farm"), photos({"x/b.jpg": picture(1)}, "real")
    (farm / "b.jpg").symlink_to(real / "x" / "b.jpg")
    (farm / "folder").symlink_to(real)
    (real / "up").symlink_to(real)
    make(farm, tmp_path / "inside")
    assert [key for key, *_ in samples(tmp_path / "inside")] == ["a"]
    make(farm, tmp_path / "all", "--links=all", "--shuffle=false")
    assert [key for key, *_ in samples(tmp_path / "all")] == ["a", "b", "folder/x/b"]


def test_nothing_to_read_says_what_is_there(photos, tmp_path, capsys):
    make(photos({"a.gif": b"GIF89a", "b.jpg": b""}), tmp_path / "out", status=1)
    assert "1 x the file is empty, 1 x .gif" in capsys.readouterr().err
    make(photos({"a.jpg": b"no image"}, "other"), tmp_path / "out", status=1)
    assert "no image is good" in capsys.readouterr().err
    assert rows(tmp_path / "out" / "left_out.csv")
    make(tmp_path / "nowhere", tmp_path / "out2", status=1)
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["gone", "grown", "touched", "pipe", "link"])
def test_a_file_that_changes_is_left_out(photos, tmp_path, change):
    folder = photos({"a.jpg": picture(0)})
    listing = list_folder(folder, labels="auto", links="inside", besides=tmp_path / "out")
    path = folder / "a.jpg"
    assert pack.read(listing, 0, "inside") == path.read_bytes()
    if change == "grown":
        path.write_bytes(path.read_bytes() + b"x")
        os.utime(path, ns=(0, int(listing.modified[0])))
    elif change == "touched":
        os.utime(path, ns=(0, 0))
    else:
        path.unlink()
    if change == "pipe":
        os.mkfifo(path)
    if change == "link":
        (tmp_path / "b.jpg").write_bytes(picture(0))
        path.symlink_to(tmp_path / "b.jpg")
    reason = {"gone": "No such file", "pipe": "not a regular", "link": "symbolic link"}.get(change, "has changed")
    with pytest.raises(pack.LeftOut, match=reason):
        pack.read(listing, 0, "inside")


# Encoding


def decoded(image):
    return np.asarray(Image.open(io.BytesIO(image)))


def test_resize_makes_large_images_smaller_and_leaves_small_ones(photos, tmp_path):
    smooth = Image.radial_gradient("L").resize((90, 60)).convert("RGB")
    file = io.BytesIO()
    smooth.save(file, "PNG")
    folder = photos({"large.png": file.getvalue(), "tall.jpg": picture(1, (20, 80)), "small.jpg": picture(2, (30, 20))})
    make(folder, tmp_path / "out", "--resize=20")
    found = {key: image for key, image, _ in samples(tmp_path / "out")}
    assert found["small"] == (folder / "small.jpg").read_bytes()
    assert found["tall"] == (folder / "tall.jpg").read_bytes()
    expected = np.asarray(smooth.resize((30, 20), Image.Resampling.BICUBIC))
    assert np.array_equal(decoded(found["large"]), expected)
    record = json.loads(next((tmp_path / "out" / ".make_shards").glob("shard-*.json")).read_text())
    assert record["sides"] == {"32": 2, "128": 1}


@pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
def test_formats(photos, tmp_path, format):
    files = {}
    for kind in ("jpeg", "png", "webp"):
        file = io.BytesIO()
        Image.radial_gradient("L").resize((48, 32)).convert("RGB").save(file, kind)
        files[f"{kind}.{kind}"] = file.getvalue()
    folder = photos(files)
    make(folder, tmp_path / "out", f"--format={format}", *([] if format == "png" else ["--quality=100"]))
    for key, image, _ in samples(tmp_path / "out"):
        assert Image.open(io.BytesIO(image)).format == format.upper()
        source = (folder / f"{key}.{key}").read_bytes()
        if key == format:
            assert image == source
        else:
            difference = np.abs(decoded(image).astype(int) - decoded(source))
            assert difference.mean() < (0.01 if format == "png" else 2)


def test_encoded_images_stand_upright_on_white(photos, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = picture(0, (24, 16), "PNG", exif=exif)
    clear = io.BytesIO()
    Image.new("RGBA", (16, 16), (9, 9, 9, 0)).save(clear, "PNG")
    folder = photos({"turned.png": turned, "clear.png": clear.getvalue()})
    make(folder, tmp_path / "out", "--format=webp", "--quality=95")
    found = {key: decoded(image) for key, image, _ in samples(tmp_path / "out")}
    assert found["turned"].shape == (24, 16, 3)
    assert (found["clear"] > 250).all()


def test_quality_and_the_size_of_shards_of_encoded_images(photos, tmp_path):
    folder = photos({f"{n}.png": picture(n, (128, 128), "PNG") for n in range(40)})  # about 49 kB
    sizes = {}
    for quality in (30, 95):
        out = tmp_path / str(quality)
        make(folder, out, "--format=jpeg", f"--quality={quality}", "--shard_size_mb=0.1")
        sizes[quality] = [path.stat().st_size for path in shards(out)]
        assert max(sizes[quality]) < 130_000
        assert min(sizes[quality]) > 50_000
        index = read_folder((out / "index.json").read_bytes(), "")
        assert index.image_sizes == {"128": 40}
    assert len(sizes[30]) < len(sizes[95])


# Duplicates


def test_duplicates(photos, tmp_path, capsys):
    files = {f"{kind}/{n}.jpg": picture(n) for n in range(10) for kind in ("a", "b")}
    folder = photos({**files, "b/bad1.jpg": b"no image", "b/bad2.jpg": b"no image"})
    make(folder, tmp_path / "keep", SMALL)
    expected = [[f"b/{n}.jpg", f"a/{n}.jpg"] for n in range(10)]
    assert sorted(rows(tmp_path / "keep" / "duplicates.csv")) == expected
    assert len(samples(tmp_path / "keep")) == 20
    assert "10, 10 with another label, kept" in capsys.readouterr().out
    for workers in (1, 3):
        make(folder, tmp_path / f"drop{workers}", SMALL, "--duplicates=drop", f"--workers={workers}")
        assert sorted(key for key, *_ in samples(tmp_path / f"drop{workers}")) == [f"a/{n}" for n in range(10)]
    assert content(tmp_path / "drop1") == content(tmp_path / "drop3")
    assert [*expected, ["b/bad2.jpg", "b/bad1.jpg"]] == sorted(rows(tmp_path / "drop1" / "duplicates.csv"))


def test_duplicates_are_looked_for_in_parts(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("data.making.split.CHUNK", 3)
    files = {f"{n:02d}.jpg": bytes([n % 5]) * 10 for n in range(20)}
    folder = photos({**files, "20.jpg": b"x" * 10, "21.jpg": b"y" * 10})
    listing = list_folder(folder, labels="none", links="inside", besides=tmp_path / "out")
    for name in ("20.jpg", "21.jpg"):  # what cannot be read is nobody's duplicate
        (folder / name).unlink()
    assert find_duplicates(listing, pack.Recipe(), workers=2).tolist() == [[n, n % 5] for n in range(5, 20)]


def test_same_beside_a_dictionary():
    rng = np.random.default_rng(0)
    entries = rng.permutation(500)
    digests = np.zeros((500, 16), dtype=np.uint8)
    digests[:, 3], digests[:, 12] = rng.integers(0, 9, 500), rng.integers(0, 9, 500)
    first, expected = {}, []
    for entry, row in sorted(zip(entries.tolist(), map(bytes, digests), strict=True)):
        if row in first:
            expected.append([entry, first[row]])
        first.setdefault(row, entry)
    assert same(entries, digests).tolist() == expected


# Names


def test_keys_are_unique_and_without_dots(photos, tmp_path):
    names = ["a.jpg", "a.png", "a.b.jpg", "a_b.jpg", "x.y/c.jpg", "é ü.jpg", "back\\slash.jpg", f"{'k' * 200}.jpg"]
    folder = photos({name: picture(n) for n, name in enumerate(names)})
    (folder / os.fsdecode(b"\xff.jpg")).write_bytes(picture(50))
    make(folder, tmp_path / "out", "--labels=none")
    keys = [key for key, *_ in samples(tmp_path / "out")]
    assert len(set(keys)) == len(names) + 1
    assert not any("." in key or "\\" in key for key in keys)
    assert {"x_y/c", "é ü", "back_slash", "k" * 200, "_"} <= set(keys)
    assert sum(key.startswith("a-") for key in keys) == 2
    assert sum(key.startswith("a_b-") for key in keys) == 2


def test_an_image_larger_than_a_shard(photos, tmp_path):
    folder = photos({"a.jpg": picture(0), "b.png": picture(1, (200, 200), "PNG"), "c.jpg": picture(2)})
    make(folder, tmp_path / "out", "--shard_size_mb=0.02", "--shuffle=false")
    paths = shards(tmp_path / "out")
    assert [path.name for path in paths] == [f"shard-{n:06d}.tar" for n in range(len(paths))]
    assert len(samples(tmp_path / "out")) == 3


def test_split_covers_everything_in_order(photos, tmp_path):
    folder = photos({f"{n:03d}.jpg": bytes(1 + 997 * n % 5000) for n in range(300)})
    listing = list_folder(folder, labels="none", links="inside", besides=tmp_path)
    order = np.random.default_rng(0).permutation(300)
    cut = split(listing, order, 50_000, 1.0)
    assert np.concatenate([cut.entries(n) for n in range(len(cut))]).tolist() == order.tolist()
    padded = 512 + -(-listing.sizes // 512) * 512
    assert [int(padded[cut.entries(n)].sum()) for n in range(len(cut))] == cut.bytes.tolist()
    listing.labels = np.where(np.arange(300) < 150, 7, -1)  # 1,024 bytes for each label
    labelled = split(listing, order, 50_000, 1.0)
    assert int(labelled.bytes.sum()) == int(padded.sum()) + 150 * 1024
    assert cut.bytes.max() < 50_000 + 6000
    assert cut.bytes.min() > 30_000


# What is refused


def test_other_settings_and_other_images_are_named(animals, tmp_path, capsys):
    make(animals, tmp_path / "out", SMALL)
    before = content(tmp_path / "out")
    make(animals, tmp_path / "out", SMALL, "--seed=3", "--verify=false", status=1)
    assert "--seed 3 (there 0), --verify False (there True)" in capsys.readouterr().err.replace("seed=", "seed ")
    (animals / "ant" / "new.jpg").write_bytes(picture(7))
    make(animals, tmp_path / "out", SMALL, status=1)
    assert "60 files" in (text := capsys.readouterr().err)
    assert "61 files" in text
    (animals / "ant" / "new.jpg").unlink()
    os.utime(animals / "ant" / "ant_00.jpg", ns=(0, 0))
    make(animals, tmp_path / "out", SMALL, status=1)
    assert "as many, but other paths, dates or labels" in capsys.readouterr().err
    assert content(tmp_path / "out") == before


def test_a_damaged_plan(animals, tmp_path, capsys):
    make(animals, tmp_path / "out", SMALL)
    (tmp_path / "out" / ".make_shards" / "plan.json").write_text("{")
    make(animals, tmp_path / "out", SMALL, status=1)
    assert "plan.json is damaged" in capsys.readouterr().err


def test_out_of_memory(animals, tmp_path, monkeypatch, capsys):
    def short(*_, **__):
        raise MemoryError

    monkeypatch.setattr(pack, "decode", short)
    make(animals, tmp_path / "out", SMALL, status=1)
    assert "fewer --workers" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train-000000.tar", "x.tar.gz", "index.json"])
def test_a_folder_with_other_shards(animals, tmp_path, name, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(b"precious")
    make(animals, out, SMALL, status=1)
    assert f"holds other shards ({name})" in capsys.readouterr().err
    assert content(out) == {name: b"precious"}


def test_two_calls_at_once(animals, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("data.making.shard_folder.PATIENCE", 1)
    folder = make_shards.Folder(tmp_path / "out", "shard")
    with folder.locked():
        make(animals, tmp_path / "out", SMALL, status=1)
    assert "another call is writing" in capsys.readouterr().err


def test_no_space(animals, tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=make_shards.SPARED + 1000))
    make(animals, tmp_path / "out", SMALL, status=1)
    assert "has 1.0 kB free" in capsys.readouterr().err
    assert not shards(tmp_path / "out")


def test_a_full_disk_while_writing(animals, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pack, "write_table", full)
    make(animals, tmp_path / "out", SMALL, status=1)
    assert "No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.tar")) + list((tmp_path / "out").glob(".*.part"))


def test_a_shard_has_no_name_before_it_is_whole(animals, tmp_path, monkeypatch):
    rename = Path.replace

    def fails(path, target):
        if str(target).endswith(".tar"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", fails)
    make(animals, tmp_path / "out", SMALL, status=1)
    assert not shards(tmp_path / "out")


def test_a_worker_that_is_killed(animals, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_shards, "write_shard", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    make(animals, tmp_path / "out", SMALL, status=1)
    assert "take fewer --workers; the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--quality=80"], 2, "set resize or format"),
        (["--format=png", "--quality=80"], 2, "set resize or format"),
        (["--verify=false", "--resize=64"], 2, "leave it out"),
        (["--resize=4"], 2, "greater than or equal to 8"),
        (["--name=../x"], 2, "name"),
        (["--label_column=x"], 1, "--label_column is for lists"),
        (["--sed=1"], 2, "did you mean '--seed'?"),
    ],
)
def test_settings_that_are_refused(animals, tmp_path, words, status, message, capsys):
    make(animals, tmp_path / "out", *words, status=status)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(parallel, "LINE", 0.0)
    monkeypatch.setattr(parallel, "POLL", 0.01)

    def work(task, advance):
        for _ in range(5):
            time.sleep(0.02)
            advance(2)
        return task

    assert sorted(parallel.spread(work, range(4), workers=2, title="writing", total=40)) == [0, 1, 2, 3]
    assert "of 40 images" in capsys.readouterr().err


def test_an_error_stops_the_other_workers(tmp_path):
    def work(task, advance):
        for n in range(1 if task else 400):
            (tmp_path / f"{task}-{n}").touch()
            time.sleep(0.05)
            advance(1)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        list(parallel.spread(work, [0, 1], workers=2, title="", total=2))
    assert len(list(tmp_path.glob("0-*"))) < 200


def test_workers_end_with_the_command(tmp_path):
    def work(_, advance):
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    def run():
        list(parallel.spread(work, [0, 1], workers=2, title="", total=2))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    while len(list(tmp_path.glob("[0-9]*"))) < 2:
        time.sleep(0.01)
    workers = [int(path.name) for path in tmp_path.glob("[0-9]*")]
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        state = [Path(f"/proc/{w}/stat").read_text().split()[2] for w in workers if Path(f"/proc/{w}").exists()]
        if set(state) <= {"Z"}:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
