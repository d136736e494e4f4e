"""A folder of images gives the same samples as a shard of these images in the order of their names."""

import os
import shutil
from dataclasses import replace

import pytest

from tessera.data.check_shards import main as check_shards
from tessera.data.crops import CenterCrop, RandomCrop, RandomCropConfig
from tessera.data.shards import ShardError, expand, open_shards, open_sources
from tessera.data.statistics import count_classes
from tests.data.batches import evaluation_batches, training_batches
from tests.data.made import make, picture


@pytest.fixture
def photos(tmp_path):
    """A folder of 23 images in three classes, and an empty file that is left out."""
    for number in range(23):
        path = tmp_path / "photos" / ("ant", "bee", "10")[number % 3] / f"{number}.v1.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, size=(24 + number, 16)))
    (tmp_path / "photos" / "bee" / "empty.png").touch()
    (tmp_path / "photos" / "bee" / "notes.txt").write_text("no image")
    return tmp_path / "photos"


@pytest.fixture
def shards(photos, tmp_path):
    """The same images in one shard, in the order of their names."""
    make(photos, tmp_path / "shards", "--shuffle", "false")
    return tmp_path / "shards"


def batches(source, **settings):
    """The pixels, labels and positions of training batches."""
    crop = RandomCrop(RandomCropConfig(size=16))
    given = {"batch_size": 8, "seed": 3, "steps": 7, "classes": 3} | settings
    return [values(batch) for batch in training_batches(source, crop, **given)]


def values(batch):
    positions = None if batch.positions is None else batch.positions.tolist()
    labels = None if batch.labels is None else batch.labels.tolist()
    return batch.views[0].images.tolist(), labels, positions


def test_images_and_labels_are_those_of_a_shard(photos, shards, caplog):
    folder, tar = open_shards(photos), open_shards(shards)
    assert folder.images == tar.images == 23
    assert folder.all_labelled()
    for sample in range(23):
        assert folder.image(sample) == tar.image(sample)
        assert folder.label(sample) == tar.label(sample)
    assert folder.class_names() == tar.class_names() == ("10", "ant", "bee")
    assert folder.name(0) == "photos/10/11.v1.jpg"
    assert f"{photos}/: 1 file is left out: the file is empty. Its name is {photos}/" in caplog.text
    assert expand(photos) == expand(f"{photos}/") == [f"{photos}/"]
    assert count_classes(open_sources(expand(photos))) == 3
    found, expected = (evaluation_batches(one, CenterCrop(16), batch_size=8) for one in (photos, shards))
    assert [values(batch) for batch in found] == [values(batch) for batch in expected]


def test_the_stream_is_that_of_a_shard(photos, shards):
    expected = batches(shards)
    assert batches(photos) == expected
    assert batches(str(photos), workers=2) == expected
    assert batches(photos, first_step=4, workers=1) == expected[4:]  # a resumed run
    first, mixed = photos / "ant", {str(photos / "ant"): 0.5, str(photos / "bee"): 0.5}
    assert open_shards(first).class_names() is None
    assert len(batches(mixed, classes=None, steps=2)[0][0]) == 8


def test_the_hash_of_the_images_depends_on_no_path_and_order(photos, shards, tmp_path):
    make(photos, tmp_path / "shuffled", "--shuffle", "true")
    make(photos, tmp_path / "smaller", "--resize", "12")
    kinds = {
        name: open_shards(path).content()
        for name, path in (
            ("folder", photos),
            ("shards", shards),
            ("shuffled", tmp_path / "shuffled"),
            ("smaller", tmp_path / "smaller"),
        )
    }
    assert kinds["folder"] == kinds["shards"] == kinds["shuffled"] != kinds["smaller"]
    (photos / "bee" / "new.png").write_bytes(picture(99, size=(20, 20)))
    assert open_shards(photos).content() != kinds["folder"]
    for path in [one for one in photos.rglob("*.*") if one.suffix != ".txt"]:
        path.write_bytes(b"x" * 100)
    assert open_shards(photos).content() is None, "files of one size have no hash"


def test_a_changed_file_is_refused(photos, tmp_path):
    opened = open_shards(photos)
    expected = opened.image(5)
    path = photos / opened.name(5).removeprefix("photos/")
    status = path.stat()
    path.write_bytes(expected)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert opened.image(5) == expected
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(ShardError, match=rf"{path} has changed since the folder was listed\. Restart the run"):
        opened.image(5)
    assert open_shards(photos).image(5) == expected  # listed again
    path.unlink()
    with pytest.raises(ShardError, match=rf"{path} cannot be read: No such file or directory"):
        replace(opened).image(5)  # another process
    assert open_shards(photos).images == 22


def test_without_a_cache_the_folder_is_listed_again(photos, cache):
    opened = open_shards(photos)
    index = opened.shards[0].index()
    shutil.rmtree(cache)
    assert [bytes(array) for array in opened.shards[0].index()] == [bytes(array) for array in index]
    (photos / "ant" / "new.jpg").write_bytes(picture(99))
    assert len(opened.shards[0].index().ends) == len(index.ends)  # still in the cache
    shutil.rmtree(cache)
    with pytest.raises(ShardError, match=r"photos/ has changed since it was opened\. Restart the run"):
        opened.shards[0].index()


def test_names_that_are_not_utf8_and_links(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    names = [b"a\xff.png", "ü.jpg".encode(), b"line\nbreak.jpg", b"link.jpg"]
    for number, name in enumerate(names[:3]):
        (folder / os.fsdecode(name)).write_bytes(picture(number))
    (tmp_path / "elsewhere.bin").write_bytes(picture(3))
    (folder / "link.jpg").symlink_to(tmp_path / "elsewhere.bin")
    reader = open_shards(folder)
    order = sorted(range(4), key=lambda number: names[number])
    assert [reader.image(sample) for sample in range(4)] == [picture(number) for number in order]
    assert reader.name(0) == "photos/a\\xff.png"
    with pytest.raises(ShardError, match=r"has no label.* Give --labels labels.csv"):
        reader.label(0)


def test_links_to_class_folders_are_followed(photos, tmp_path, monkeypatch, caplog):
    (tmp_path / "subset").mkdir()
    for name in ("ant", "bee"):
        (tmp_path / "subset" / name).symlink_to(photos / name)
    (photos / "ant" / "loop").symlink_to(photos / "ant")
    found = open_shards(tmp_path / "subset")
    assert count_classes(open_sources(str(tmp_path / "subset"))) == 2
    assert found.images == 16
    scandir = os.scandir

    def locked(path):
        if os.fsencode(path).endswith(b"bee"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    assert open_shards(tmp_path / "subset").images == 8
    assert "1 folder cannot be read, and its images are left out" in caplog.text


def test_folders_that_are_refused(photos, tmp_path, capsys):
    (tmp_path / "sets").mkdir()
    shutil.copytree(photos, tmp_path / "sets" / "train")
    shutil.copytree(photos, tmp_path / "sets" / "val")
    with pytest.raises(ShardError, match=r"train, val, which look like separate sets .* for example .*/sets/train"):
        open_shards(tmp_path / "sets")
    (tmp_path / "void").mkdir()
    (tmp_path / "void" / "a.jpg").touch()
    with pytest.raises(ShardError, match=r"no images below .*void.*the file is empty"):
        open_shards(tmp_path / "void")
    (photos / "ant" / "0.bmp").touch()
    assert check_shards([str(photos), "--workers=1"]) == 0
    said = capsys.readouterr().out
    assert "23 images, 3 classes from 0 to 2" in said
    assert "left out      1 .bmp file is left out (1 of class ant)" in said
