"""Parquet files give the same samples as tars of the same images."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from tessera.data.check_shards import main as check_shards
from tessera.data.crops import CenterCrop, RandomCrop, RandomCropConfig
from tessera.data.shards import ShardError, expand, open_shards
from tessera.data.shards.access import Access
from tessera.data.shards.cache import _intact
from tessera.data.shards.notes import describe
from tessera.data.shards.samples import SampleKeys
from tests.data.batches import evaluation_batches, training_batches
from tests.data.made import picture

COUNTS = (31, 12)
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def rows(shard):
    """Encoded images and labels of a shard."""
    numbers = range(sum(COUNTS[:shard]), sum(COUNTS[: shard + 1]))
    return [picture(n) for n in numbers], [n % 3 for n in numbers]


def write(path, images, labels, name="image", label="label", kind=IMAGE, group=7, metadata=None, **options):
    values = [{"bytes": image, "path": "x.jpg"} for image in images] if kind == IMAGE else images
    table = pa.table({"id": list(range(len(images))), name: pa.array(values, kind), label: labels})
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(table.replace_schema_metadata(metadata), path, row_group_size=group, **options)
    return str(path)


@pytest.fixture
def files(tmp_path):
    features = {"info": {"features": {"label": {"names": ["x", "y", "z"], "_type": "ClassLabel"}}}}
    metadata = {"huggingface": json.dumps(features)}
    return [
        write(tmp_path / "data" / f"train-{n:05d}-of-00002.parquet", *rows(n), metadata=metadata)
        for n in range(len(COUNTS))
    ]


@pytest.fixture
def tars(write_tar):
    paths = []
    for shard in range(len(COUNTS)):
        members = []
        for number, (image, label) in enumerate(zip(*rows(shard), strict=True)):
            members += [(f"{number:03d}.jpg", image), (f"{number:03d}.cls", str(label).encode())]
        paths.append(str(write_tar(f"{shard}.tar", members)))
    return paths


def batches(shards, **settings):
    crop = RandomCrop(RandomCropConfig(size=12))
    given = {"batch_size": 10, "seed": 3, "steps": 9, "classes": 3} | settings
    return [(batch.views[0].images, batch.labels) for batch in training_batches(shards, crop, **given)]


def check_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, one, other))


def test_equal_to_tars(files, tars, tmp_path):
    expected = batches(tars)
    check_equal(batches(str(tmp_path / "data")), expected)
    check_equal(batches(f"{tmp_path}/data/train-*.parquet", workers=2), expected)
    check_equal(batches(files, first_step=5), expected[5:])
    ranks = [batches(files, rank=rank, world_size=2) for rank in range(2)]
    for step, (left, right) in zip(expected, zip(*ranks, strict=True), strict=True):
        joined = torch.cat([left[0], right[0]]), torch.cat([left[1], right[1]])
        assert torch.equal(*(one[1].sort().values for one in (joined, step)))
        assert torch.equal(*(one[0].flatten(1).double().sum(1).sort().values for one in (joined, step)))
    opened = open_shards(files)
    assert opened.class_names() == ("x", "y", "z")
    assert opened.all_labelled()
    assert opened.name(31) == "train-00001-of-00002.parquet/0"
    assert opened.identity == [(os.path.basename(path), count) for path, count in zip(files, COUNTS, strict=True)]


@pytest.mark.parametrize("options", [{"kind": pa.large_binary(), "compression": "zstd"}, {"group": 1000}, {"group": 1}])
def test_layouts(tmp_path, tars, options):
    paths = [write(tmp_path / "other" / f"{n}.parquet", *rows(n), **options) for n in range(2)]
    check_equal(batches(paths), batches(tars))


def test_named_columns(tmp_path, tars):
    paths = [write(tmp_path / "other" / f"{n}.parquet", *rows(n), name="left", label="kind") for n in range(2)]
    with pytest.raises(ShardError, match=r"no column of encoded images named image or img.*columns id, left, kind"):
        open_shards(paths)
    check_equal(batches(paths, source=Access(keys=SampleKeys("left", "kind"))), batches(tars))
    left = Access(keys=SampleKeys("left"))
    with pytest.raises(ShardError, match=r"0.parquet/0 has no label, .* name another column with data.label"):
        batches(paths, source=left)


def test_rows_without_image_or_label(tmp_path):
    images, labels = rows(0)
    images[4], images[9], labels[5] = None, b"broken", None
    path = write(tmp_path / "other" / "0.parquet", images, labels)
    batch = next(iter(evaluation_batches(path, CenterCrop(8), batch_size=40, labels=False)))
    assert len(batch) == 29
    assert [name.partition(":")[0] for name in batch.skipped] == ["0.parquet/4", "0.parquet/9"]
    with pytest.raises(ShardError, match=r"0.parquet/5 has no label"):
        list(evaluation_batches(path, CenterCrop(8), batch_size=40))


def test_a_damaged_copy_in_the_cache_is_made_again(files, cache):
    expected = batches(files, steps=1)
    copies = [path for path in (cache / "pieces-v1").rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert copies
    for path in copies:
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.unlink()
        path.write_bytes(content)
    _intact.clear()  # each process checks a file once
    check_equal(batches(files, steps=1), expected)


def test_refusals(files, tmp_path):
    content = Path(files[0]).read_bytes()
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(content[: len(content) // 2])
    with pytest.raises(ShardError, match="cannot be read as Parquet"):
        open_shards(str(broken))
    with pytest.raises(ShardError, match=r"nowhere.parquet does not exist"):
        open_shards(str(tmp_path / "nowhere.parquet"))
    with pytest.raises(ShardError, match="read from a local disk only"):
        open_shards("https://host/a.parquet")
    opened = open_shards(files)
    os.utime(files[0])
    with pytest.raises(ShardError, match="has changed since it was opened"):
        opened.image(0)
    (tmp_path / "data" / "test-00000-of-00001.parquet").write_bytes(content)
    with pytest.raises(ShardError, match=r"shards of several sets: test-\*-of-\*.parquet, train-\*-of-\*.parquet"):
        expand(str(tmp_path / "data"))
    broken.unlink()
    with pytest.raises(ShardError, match="its subfolders may"):
        expand(str(tmp_path))
    empty = write(tmp_path / "e.parquet", [], pa.array([], pa.int64()))
    with pytest.raises(ShardError, match="has no rows"):
        open_shards(empty)
    assert np.array_equal(open_shards(files[1]).counts, [12])


def test_check_shards(files, capsys):
    assert check_shards([*files, "--workers=1"]) == 0
    assert f"{sum(COUNTS)} images" in capsys.readouterr().out
    assert check_shards([files[0], "--workers=1", "--write_index=true"]) == 2
    assert "is no tar, and only tars have an index" in capsys.readouterr().err
    write(Path(files[1]), *rows(1), metadata=named(["y", "x", "z"]))
    assert check_shards([*files, "--workers=1"]) == 1
    said = capsys.readouterr().out
    assert "1 labels that stop an evaluation:" in said  # a run without labels reads both
    assert "number their classes differently" in said
    assert "align_labels_with_mapping" in said
    write(Path(files[1]), *rows(1), metadata=named(["x"]))
    assert check_shards([files[1], "--workers=1"]) == 1
    assert f"{files[1]} has names for the 1 classes 0 to 0, but the largest label is" in capsys.readouterr().out


def named(names):
    return {"huggingface": json.dumps({"info": {"features": {"label": {"names": names}}}})}


def test_files_that_number_classes_differently(tmp_path):
    numberings = [["cat", "dog"], ["dog", "cat"]]
    paths = [
        write(tmp_path / "data" / f"{n}.parquet", [picture(n), picture(n + 2)], [0, 1], metadata=named(names))
        for n, names in enumerate(numberings)
    ]
    refusal = r"0.parquet and .*1.parquet number their classes differently: class 0 is 'cat' in the first, but 'dog'"
    opened = open_shards(paths)
    for read in (opened.class_names, opened.require_labels):
        with pytest.raises(ShardError, match=refusal):
            read()
    assert not opened.all_labelled()
    with pytest.raises(ShardError, match=refusal):
        batches(paths, batch_size=2)
    with pytest.raises(ShardError, match=refusal):
        batches(dict.fromkeys(paths, 1.0), batch_size=2)
    assert len(batches(paths, batch_size=2, classes=None, steps=1)) == 1  # without labels, the numbers do not matter
    write(tmp_path / "data" / "1.parquet", [picture(1)], [0])
    with pytest.raises(ShardError, match=r"0.parquet names its classes, but .*1.parquet does not"):
        open_shards(paths).class_names()
    write(tmp_path / "data" / "1.parquet", [picture(1)], [0], metadata=named(["cat", "dog"]))
    assert open_shards(paths).class_names() == ("cat", "dog")


def test_columns_that_may_be_meant(tmp_path):
    image = pa.array([picture(0)], pa.binary())

    def file(columns, names):
        path = str(tmp_path / "one.parquet")
        parquet.write_table(pa.Table.from_arrays(columns, names=names), path)
        return path

    several = file([image, image], ["png", "jpg"])
    with pytest.raises(ShardError, match=r"several columns of encoded images: jpg, png. .*--data.image=jpg"):
        open_shards(several)
    assert open_shards(several, source=Access(keys=SampleKeys("png"))).images == 1
    labels = pa.array([3]), pa.array([4])
    both = file([image, *labels], ["image", "label", "cls"])
    assert not open_shards(both).all_labelled()
    assert describe(open_shards(both).notes) == [
        "1 sample is used without a label: there are the columns label and cls. Choose one with data.label (--label "
        "of other commands)."
    ]
    with pytest.raises(ShardError, match=r"if the file has only one of them; name another column with data.label"):
        open_shards(both).require_labels()
    assert open_shards(both, source=Access(keys=SampleKeys(None, "cls"))).label(0) == 4
    (line,) = describe(open_shards(both, source=Access(keys=SampleKeys(None, "fine"))).notes)
    assert line == "1 sample is used without a label: there is no column fine, which data.label names."
    (line,) = describe(open_shards(file([image, pa.array(["cat"])], ["image", "label"])).notes)
    assert line.startswith("1 sample is used without a label: the column label holds string, not integers.")
    assert open_shards(file([image, pa.nulls(1)], ["image", "label"])).notes == ()


def test_images_that_expand(tmp_path, monkeypatch):
    options = {"use_dictionary": True, "store_schema": False, "group": 1000}
    image = picture(0) + bytes(10_000)
    path = write(tmp_path / "data" / "0.parquet", [image] * 40, [0] * 40, compression="zstd", **options)
    assert os.path.getsize(path) < 10_000
    with monkeypatch.context() as patch:
        patch.setattr("tessera.extras.parquet.parquet_file.LARGEST_GROUP", 200_000)
        opened = open_shards(path)  # the metadata count the value once
        with pytest.raises(ShardError, match=r"0.parquet has a row group with more than 2\d\d,\d\d\d bytes of images"):
            opened.image(0)
    assert open_shards(path).image(39) == image
    monkeypatch.setattr("tessera.extras.parquet.parquet_file.LARGEST_GROUP", 200_000)
    path = write(tmp_path / "data" / "1.parquet", [bytes(300_000)], [0], compression="zstd", use_dictionary=False)
    with pytest.raises(ShardError, match=r"has a row group with 300,.* bytes of images, but at most 200,000"):
        open_shards(path)


def test_missing_parts_are_said(files, tmp_path, caplog):
    for path in files:
        os.rename(path, path.replace("00002", "00010"))
    assert open_shards(str(tmp_path / "data")).images == sum(COUNTS)
    assert f"{tmp_path}/data: 8 parts of the data set are missing, by the file names train-*-of-00010" in caplog.text


def test_urls_and_metadata_beside_tars_are_refused(tmp_path):
    with pytest.raises(ShardError, match=r"/x\.parquet: such files are read from a local disk only"):
        expand("https://nowhere/x.parquet")
    for name in ("0.parquet", "0.tar"):
        (tmp_path / name).touch()
    with pytest.raises(ShardError, match=r"sets: \*.tar, \*.parquet. Give one set, for example '.*/\*.tar'"):
        expand(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardError, match=r"holds no shards \(.tar, .tar.gz, .tgz, .parquet\) and no images"):
        expand(str(tmp_path / "empty"))
