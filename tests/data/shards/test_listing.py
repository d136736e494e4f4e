"""Folders and manifests: which images there are, their labels, and what is left out."""

import csv
import json
import os
import tarfile

import pytest

from tessera.data.failures import ShardError, forget_warnings
from tessera.data.shards import open_shards
from tessera.data.shards.index import parse_classes
from tessera.data.shards.listing import list_folder
from tessera.data.shards.notes import describe
from tessera.data.tools import pack
from tests.data.made import make, picture, rows, samples, shards


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
    assert ("labels        0 images" in capsys.readouterr().out) == (expected[0] is None)
    assert (tmp_path / "out" / "classes.json").exists() == (expected[0] is not None)


def test_class_folders_with_an_image_beside_them(photos, tmp_path, capsys):
    folder = photos({"x/a.jpg": picture(0), "empty.jpg": b""})
    make(folder, tmp_path / "good", "--labels=folders")
    (folder / "b.jpg").write_bytes(picture(1))
    make(folder, tmp_path / "out", "--labels=folders", status=2)
    assert "b.jpg is not in a class folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("folders", "example"),
    [
        (["train", "val"], "train"),
        (["Training", "other", "validation"], "Training"),
        (["test", "train"], "train"),
        (["test2017", "train2017", "val2017"], "train2017"),
        (["ILSVRC_img_train", "ILSVRC_img_val"], "ILSVRC_img_train"),
    ],
)
def test_sets_are_not_classes(photos, tmp_path, folders, example, capsys):
    folder = photos({f"{folder}/{name}/a.jpg": picture(n) for folder in folders for n, name in enumerate("ab")})
    make(folder, tmp_path / "out", status=2)
    text = capsys.readouterr().err
    assert f"{', '.join(name for name in folders if name != 'other')}, which look like separate sets" in text
    assert f"for example {folder / example}." in text
    make(folder, tmp_path / "classes", "--labels=folders")
    assert json.loads((tmp_path / "classes" / "classes.json").read_text()) == folders
    make(folder, tmp_path / "all", "--labels=none")
    assert {label for *_, label in samples(tmp_path / "all")} == {None}


@pytest.mark.parametrize("folders", [["train", "bus"], ["val", "test"], ["train"]])
def test_classes_that_are_named_like_a_set(photos, tmp_path, folders):
    make(photos({f"{name}/a.jpg": picture(n) for n, name in enumerate(folders)}), tmp_path / "out")
    assert len(samples(tmp_path / "out")) == len(folders)


def test_numbers_of_other_shards(photos, tmp_path, capsys):
    train = photos({f"{name}/a.jpg": picture(n) for n, name in enumerate("abc")}, "train")
    val = photos({f"{name}/a.jpg": picture(n) for n, name in enumerate("ac")}, "val")
    make(train, tmp_path / "one")
    make(val, tmp_path / "two", "--classes", tmp_path / "one" / "classes.json")
    assert sorted((key, label) for key, _, label in samples(tmp_path / "two")) == [("a/a", "0"), ("c/a", "2")]
    make(train, tmp_path / "three", "--classes", tmp_path / "one" / "index.json", status=2)
    (tmp_path / "classes.json").write_text('["a", "b"]')
    make(train, tmp_path / "three", "--classes", tmp_path / "classes.json", status=2)
    assert "class 'c' is not in --classes" in capsys.readouterr().err


@pytest.fixture
def three(photos):
    return photos({f"{n}.jpg": picture(n) for n in range(3)})


def manifest(path, names, labels):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "path", "label"), *((1, *row) for row in zip(names, labels, strict=True))])
    return path


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["dog", "cat", "dog"], ["1", "0", "1"]),
        (["7", "", "3.0"], ["7", None, "3"]),
        (["", "", ""], [None] * 3),
        (["7", "cat", ""], ["0", "1", None]),
    ],
)
def test_manifests(three, tmp_path, labels, expected):
    names = ["2.jpg", "0.jpg", "./1.jpg"]
    listed = manifest(three / "m.csv", names, labels)
    make(listed, tmp_path / "out", "--shuffle=false")
    assert [(key, label) for key, _, label in samples(tmp_path / "out")] == list(zip("201", expected, strict=True))
    make(listed, tmp_path / "none", "--labels=none")
    assert {label for *_, label in samples(tmp_path / "none")} == {None}
    away = manifest(tmp_path / "m.csv", [str(three / name) for name in names], labels)
    make(away, tmp_path / "away", "--shuffle=false", f"--root={three}")
    assert samples(tmp_path / "away") == samples(tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("path\n../x.jpg\n", [], "entry 1, '../x.jpg', is outside"),
        ("path\n0.jpg\n/etc/passwd\n", [], "entry 2, '/etc/passwd', is outside"),
        ("path\n0.jpg\n1.jpg\n./0.jpg\n", [], "entry 3, './0.jpg', is repeated"),
        ("path\nno.jpg\n", [], "lists no existing images"),
        ("path\n0.jpg\n", ["--labels=folders"], "--labels folders is for a folder"),
    ],
)
def test_manifests_that_are_refused(three, tmp_path, text, words, message, capsys):
    (three / "m.csv").write_text(text)
    make(three / "m.csv", tmp_path / "out", *words, status=2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def bomb(width, height):
    """A PNG whose header claims a size."""
    png = bytearray(picture(0, format="PNG"))
    png[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    png[29:33] = __import__("zlib").crc32(png[12:29]).to_bytes(4, "big")
    return bytes(png)


def test_what_is_left_out_is_named(photos, tmp_path, capsys):
    files = {
        "good.jpg": picture(0),
        "really-a.png": picture(1),
        "upper.JPEG": picture(2),
        "text.jpg": b"not an image",
        "empty.png": b"",
        "bomb.png": bomb(60000, 60000),
        "header.jpg": b"\xff\xd8\xff\xe0\x00\x10JFIF",
        "half.png": picture(1, (64, 64), "PNG")[:2000],
        "notes.txt": b"text",
        "old.gif": b"GIF89a",
        "._hidden.jpg": b"resource fork",
    }
    folder = photos(files)
    (folder / "gone.jpg").symlink_to(tmp_path / "gone.jpg")
    (folder / "in.jpg").symlink_to("good.jpg")
    (folder / "broken.jpg").symlink_to("nowhere.jpg")
    (folder / "loop").symlink_to(".")
    os.mkfifo(folder / "pipe.jpg")
    make(folder, tmp_path / "out")
    found = dict(rows(tmp_path / "out" / "left_out.csv"))
    damaged = {"bomb.png", "header.jpg", "half.png"}
    assert set(found) == {"broken.jpg", "empty.png", "gone.jpg", "pipe.jpg", "text.jpg"} | damaged
    assert found["bomb.png"].startswith("60000 x 60000 pixels are more than the limit")
    assert found["empty.png"] == "the file is empty"
    assert (found["broken.jpg"], found["gone.jpg"]) == ("not found", "not found")
    assert found["pipe.jpg"] == "not a regular file"
    assert "not a JPEG, PNG" in found["text.jpg"]
    with tarfile.open(shards(tmp_path / "out")[0]) as archive:
        assert set(archive.getnames()) == {"good.jpg", "in.jpg", "really-a.jpg", "upper.jpg"}
    text = capsys.readouterr().out
    assert f"left out      {len(found)}" in text
    assert list_folder(folder, labels="none").other_files == {".txt": 1, ".gif": 1}


def test_the_limit_of_pixels_is_a_setting(photos, tmp_path):
    folder = photos({"a.jpg": picture(0, (20, 20)), "b.png": picture(1, (30, 30), "PNG")})
    make(folder, tmp_path / "out", "--max_pixels=400")
    assert rows(tmp_path / "out" / "left_out.csv") == [["b.png", "30 x 30 pixels are more than the limit of 400"]]


def test_links_are_followed(photos, tmp_path):
    farm, real = photos({"a.jpg": picture(0)}, "farm"), photos({"x/b.jpg": picture(1)}, "real")
    (farm / "b.jpg").symlink_to(real / "x" / "b.jpg")
    (farm / "folder").symlink_to(real)
    (real / "up").symlink_to(real)
    make(farm, tmp_path / "out", "--shuffle=false")
    assert [key for key, *_ in samples(tmp_path / "out")] == ["a", "b", "folder/x/b"]


def test_nothing_to_read_says_what_is_there(photos, tmp_path, capsys):
    make(photos({"a.gif": b"GIF89a", "b.jpg": b""}), tmp_path / "out", status=2)
    assert "1 x the file is empty, 1 x .gif" in capsys.readouterr().err
    make(photos({"a.jpg": b"no image"}, "other"), tmp_path / "out", status=2)
    assert "none of the files is a good image" in capsys.readouterr().err
    assert rows(tmp_path / "out" / "left_out.csv")
    make(tmp_path / "nowhere", tmp_path / "out2", status=2)
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["gone", "grown", "touched"])
def test_a_file_that_changes_is_left_out(photos, tmp_path, change):
    folder = photos({"a.jpg": picture(0)})
    listing = list_folder(folder, labels="auto", besides=tmp_path / "out")
    path = folder / "a.jpg"
    assert pack.read(listing, 0) == path.read_bytes()
    if change == "grown":
        path.write_bytes(path.read_bytes() + b"x")
        os.utime(path, ns=(0, int(listing.modified[0])))
    elif change == "touched":
        os.utime(path, ns=(0, 0))
    else:
        path.unlink()
    reason = "No such file" if change == "gone" else "has changed"
    with pytest.raises(pack.LeftOut, match=reason):
        pack.read(listing, 0)


def notes(folder):
    """Sentences on a folder, and the names of its classes."""
    listing = list_folder(folder, labels="auto")
    return describe(listing.notes()), listing.classes


OTHERS = ("cat/a.txt", "cat/a.xyz", "cat/.b.jpg", "cat/README", "Thumbs.db", "cat/.DS_Store", "index.json")


def test_formats_and_classes_that_are_left_out(photos):
    files = {"cat/a.jpg": 0, "dog/a.bmp": 0, "dog/b.BMP": 0, "fox/a.JFIF": 0, "fox/b.jpe": 0, "fox/c.heic": 0}
    folder = photos({name: picture(n) for n, name in enumerate(files)} | dict.fromkeys(OTHERS, b""))
    (folder / "owl").mkdir()
    found, classes = notes(folder)
    assert classes == ["cat", "dog", "fox"]  # the number of fox does not depend on the format of the dogs
    assert list_folder(folder, labels="auto").labels.tolist() == [0, 2, 2]
    assert found == [
        "1 file without an extension is left out. Its name is cat/README.",
        "1 .txt file is left out (1 of class cat), because this format is not read. Its name is cat/a.txt.",
        "1 .xyz file is left out (1 of class cat), because this format is not read. Its name is cat/a.xyz.",
        "1 hidden file or folder is left out, because its name begins with a dot. Its name is cat/.b.jpg.",
        "2 .bmp files are left out (2 of class dog), because this format is not read (convert to PNG). "
        "The first is dog/a.bmp.",
        "1 .heic file is left out (1 of class fox), because this format is not read (convert to PNG). "
        "Its name is fox/c.heic.",
        "2 of the class folders hold no image that can be read: dog, owl.",
    ]


def test_without_classes_no_class_is_named(photos):
    folder = photos({"x/y/a.jpg": picture(0), "x/a.gif": b""})
    assert notes(folder) == (
        ["1 .gif file is left out, because this format is not read (convert to PNG). Its name is x/a.gif."],
        None,
    )


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["a.jpg", "a_mask.png", "b.jpg", "b-seg.png"], ["2 images look like masks", "The first is a_mask.png"]),
        (["benign (1).png", "benign (1)_mask.png", "benign (1)_mask_1.png"], ["2 images look like masks"]),
        (["images/a.jpg", "masks/a.png"], ["1 image looks like a mask", "Its name is masks/a.png"]),
        (["t/Images/a.jpg", "t/annotations/x/a.png"], ["1 image looks like a mask"]),
        (["face_mask.jpg", "mask_1.jpg", "gt.png", "labels/a.jpg", "cat/a.jpg"], []),
    ],
)
def test_images_that_may_be_masks(photos, files, said):
    found, _ = notes(photos({name: picture(n) for n, name in enumerate(files)}))
    assert len(found) == bool(said)
    assert all(text in found[0] for text in said)


def test_a_class_in_two_unicode_forms(photos, tmp_path):
    decomposed, composed = "cafe\u0301", "caf\u00e9"
    folder = photos({f"{name}/{n}.jpg": picture(n) for n, name in enumerate((decomposed, composed, "tea"))})
    listing = list_folder(folder, labels="auto")
    assert listing.classes == [composed, "tea"]
    assert sorted(listing.labels.tolist()) == [0, 0, 1]
    make(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == [composed, "tea"]
    assert parse_classes(json.dumps([decomposed]).encode(), "x") == (composed,)
    with pytest.raises(ShardError, match="more than once"):
        parse_classes(json.dumps([decomposed, composed]).encode(), "x")


def test_the_classes_of_a_folder_are_listed_in_every_run(photos, caplog):
    names = [f"{name}/{n}.jpg" for name in ("golf ball", "tench", "church") for n in range(2)] + ["GOLF  BALL/a.jpg"]
    folder = photos({name: picture(n) for n, name in enumerate(names)})
    for _ in range(2):
        caplog.clear()
        forget_warnings()  # another run in the same process
        with caplog.at_level("INFO"):
            open_shards(str(folder))
        assert "4 classes: GOLF  BALL (1), church (2), golf ball (2), tench (2)" in caplog.text
