"""Labels from a CSV: beside a folder of images, and as SHARDS."""

from pathlib import Path

import pytest
from PIL import Image

from tessera.data.make_shards import main as make_shards
from tessera.data.shards import ShardError, Source, open_shards
from tessera.data.shards.access import Access
from tessera.data.shards.samples import SampleKeys
from tests.installed import needs_extra


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Folder with a.png, b.png, c.png and deep/d.png."""
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    for number, name in enumerate(("a", "b", "c", "deep/d")):
        Image.new("RGB", (8 + number, 8)).save(folder / f"{name}.png")
    return folder


def opened(photos: Path, text: str | bytes, *, only: bool = True, name: str = "labels.csv") -> Source:
    file = photos.parent / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_shards(str(photos), source=Access(keys=SampleKeys(labels=str(file), labelled_only=only)))


def labels(source: Source) -> dict[str, str | int]:
    names = source.class_names()
    numbers = {source.name(one): source.label(one) for one in range(source.images)}
    return {name: number if names is None else names[number] for name, number in numbers.items()}


@pytest.mark.parametrize(
    "text",
    [
        "path,label\nphotos/a.png,cat\nphotos/b.png,dog\nphotos/c.png,cat\nphotos/deep/d.png,dog\n",
        "\ufeffFile;Class\r\nphotos/a.png;cat\r\nphotos/b.png;dog\r\nphotos/c.png; cat\r\nphotos/deep/d.png;dog\r\n",
        "sep=;\nid;filename;label\n1;photos/a.png;cat\n2;photos/b.png;dog\n3;photos/c.png;cat\n4;photos/deep/d.png;dog\n",
        'category\tImage\ncat\t"photos/a.png"\ndog\tphotos/b.png\ncat\t./photos/c.png\ndog\tphotos/../photos/deep/d.png',
    ],
)
def test_spellings_of_one_table(photos: Path, text: str) -> None:
    found = labels(opened(photos, text))
    assert found == {"photos/a.png": "cat", "photos/b.png": "dog", "photos/c.png": "cat", "photos/deep/d.png": "dog"}


def test_integers_are_class_numbers_and_absolute_paths_and_links_are_followed(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(photos, target_is_directory=True)
    text = f"path,label\n{photos}/a.png,3\nlink/b.png,0.0\nphotos/c.png,1\nlink/deep/d.png,2\n"
    assert list(labels(opened(photos, text)).values()) == [3, 0, 1, 2]
    assert list(labels(opened(tmp_path / "link", text)).values()) == [3, 0, 1, 2]


def test_a_manifest_in_another_folder(photos: Path, tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "train.csv").write_text(f"path,label\n{photos}/a.png,cat\n../photos/deep/d.png,dog\n")
    source = open_shards(str(tables / "train.csv"))
    assert labels(source) == {"train.csv/../photos/a.png": "cat", "train.csv/../photos/deep/d.png": "dog"}
    assert source.image(1) == (photos / "deep" / "d.png").read_bytes()


def test_names_in_the_other_unicode_form(photos: Path, tmp_path: Path) -> None:
    (photos / "deep").rename(photos / "B\u00e4r")
    (photos / "a.png").rename(photos / "u\u0308.png")
    text = "path,label\nphotos/\u00fc.png,cat\nphotos/Ba\u0308r/d.png,dog\n"
    found = labels(opened(photos, text))
    assert found == {"photos/u\u0308.png": "cat", "photos/B\u00e4r/d.png": "dog"}
    assert [*labels(open_shards(str(tmp_path / "labels.csv"))).values()] == ["cat", "dog"]
    (photos / "\u00fc.png").write_bytes((photos / "b.png").read_bytes())  # both forms: the exact one is read
    assert "photos/\u00fc.png" in labels(opened(photos, text, name="other.csv"))


def test_images_without_a_label_are_counted_and_named(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "path,label\nphotos/a.png,cat\nphotos/b.png,\nphotos/gone.png,dog\nelsewhere/x.png,dog\n"
    source = opened(photos, text)
    assert labels(source) == {"photos/a.png": "cat"}
    assert source.class_names() == ("cat", "dog")  # of the whole file, so that other folders have the same numbers
    assert "without a label in" in caplog.text
    assert "3 (b.png, c.png, deep/d.png). They are left out." in caplog.text
    assert "whose image does not exist: 1 (" in caplog.text
    assert "elsewhere" not in caplog.text
    kept = opened(photos, text, only=False, name="other.csv")
    assert kept.images == 4
    assert not kept.all_labelled()
    with pytest.raises(ShardError, match=r"photos/b.png has no label.*Give --labels"):
        kept.require_labels()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,label\nphotos/a.png,cat\n", r"no column 'path'. Columns of the file: 'name', 'label'. Rename"),
        ("path,kind\nphotos/a.png,cat\n", r"no column 'label'"),
        ("path,label,class\nphotos/a.png,cat,dog\n", r"several columns with labels: 'label', 'class'"),
        ("path,label\nphotos/a.png,cat\nphotos/./a.png,dog\n", r"entry 2, 'photos/./a.png', is repeated"),
        ("path,label\na.png,cat\n", r"a label of no image in .*photos. Its first labelled entry is .*/a.png"),
        ("path,label\nphotos/a.png,-1\n", "a label is below 0"),
        ("path,label\nphotos/a.png,a,b\n", "different numbers of fields"),
        ("path,label\nphotos/a.png,caf\xe9\n".encode("latin-1"), "the label in line 2 is not UTF-8"),
        ("path,label\nphotos/a.png,cat\n".encode("utf-16"), "not text in UTF-8"),
        ("", "no column 'path'"),
    ],
)
def test_refused_with_the_reason(photos: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        opened(photos, text)


def test_a_changed_file_is_read_again(photos: Path) -> None:
    assert labels(opened(photos, "path,label\nphotos/a.png,cat\n")) == {"photos/a.png": "cat"}
    assert labels(opened(photos, "path,label\nphotos/a.png,cats\n")) == {"photos/a.png": "cats"}


def test_a_csv_is_a_set_of_images(photos: Path) -> None:
    for name, text in (("train", "a.png,cat\nphotos/b.png,dog"), ("val", "photos/c.png,dog")):
        (photos.parent / f"{name}.csv").write_text(f"path,label\nphotos/{text.removeprefix('photos/')}\n")
    train, val = (open_shards(str(photos.parent / f"{name}.csv")) for name in ("train", "val"))
    assert labels(train) == {"train.csv/photos/a.png": "cat", "train.csv/photos/b.png": "dog"}
    assert labels(val) == {"val.csv/photos/c.png": "dog"}
    assert train.image(0) == (photos / "a.png").read_bytes()


def test_a_column_of_another_name_is_said(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    (photos.parent / "species.csv").write_text("file,species\nphotos/a.png,cat\n")
    assert open_shards(str(photos.parent / "species.csv")).images == 1
    assert "has no column with labels, so its images have none. Columns of the file: 'file', 'species'" in caplog.text


def test_shards_with_labels_of_their_own_are_refused(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("path,label\nphotos/a.png,cat\nphotos/b.png,dog\n")
    make_shards([str(photos), str(tmp_path / "shards"), "--labels", str(tmp_path / "labels.csv"), "--workers", "1"])
    shards = open_shards(str(tmp_path / "shards"))
    assert shards.class_names() == ("cat", "dog")
    assert shards.images == 4
    with pytest.raises(ShardError, match="--labels is for folders of images"):
        opened(tmp_path / "shards", "path,label\na,b\n")


def as_shards(photos: Path, text: str, *, only: bool = False) -> Source:
    (photos.parent / "set.csv").write_text(text)
    return open_shards(str(photos.parent / "set.csv"), source=Access(keys=SampleKeys(labelled_only=only)))


def test_blank_rows_and_rows_without_a_label_are_left_out(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "path;label\nphotos/a.png;cat\nphotos/b.png;\nphotos/gone.png;dog\n;\n ; \n;;\n"
    assert labels(as_shards(photos, text, only=True)) == {"set.csv/photos/a.png": "cat"}
    assert "Images without a label in" in caplog.text
    assert "1 (photos/b.png). They are left out." in caplog.text
    assert "These files do not exist: 1 (photos/gone.png)." in caplog.text
    with pytest.raises(ShardError, match=r"photos/b.png has no label, .*column `label` of .*set.csv"):
        as_shards(photos, text).require_labels()
    with pytest.raises(ShardError, match="different numbers of fields"):
        as_shards(photos, text + "photos/c.png\n")


def test_files_that_do_not_exist_are_named(photos: Path) -> None:
    with pytest.raises(ShardError, match=r"do not exist: 1 \(elsewhere/x.png\)") as caught:
        as_shards(photos, "path,label\nelsewhere/x.png,cat\n")
    assert "1 of 1 shards" not in str(caught.value)


@needs_extra("map_style")
def test_a_list_of_images_with_labels_is_a_data_set(photos: Path) -> None:
    pairs = [(Image.open(photos / f"{name}.png"), number) for number, name in enumerate("abc")]
    assert labels(open_shards(pairs)) == {"list/0": 0, "list/1": 1, "list/2": 2}
    with pytest.raises(ShardError, match=r"pairs of a path and a label\. Write them to a CSV"):
        open_shards([("a.png", 0)])
