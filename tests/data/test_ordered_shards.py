"""OrderedShards before stages of webdataset, the members of samples, and other names of members."""

import json
from pathlib import Path

import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader

from tessera.data.crops import RandomCrop, RandomCropConfig
from tessera.data.ordered_shards import OrderedShards
from tessera.data.shards import ShardError, open_shards
from tessera.data.shards.access import Access
from tessera.data.shards.index import write_table
from tessera.data.shards.open import open_sources
from tessera.data.shards.samples import SampleKeys
from tessera.data.shards.tar_index import scan_tar
from tessera.data.statistics import count_classes
from tests.data.batches import training_batches
from tests.data.made import picture
from tests.data.shards.servers import Server

COUNTS = (23, 14)
LONG = "a_folder_with_a_long_name/" * 5


@pytest.fixture(params=[".tar", ".tgz"])
def tars(request, write_tar):
    """Shards with members before and after the image, of which some precede a sample without an image."""
    paths, number = [], 0
    for shard, count in enumerate(COUNTS):
        members = []
        for _ in range(count):
            key = f"{LONG if number % 5 == 4 else ''}s{number:03d}"
            if number % 3 == 0:
                members.append((f"{key}.a.txt", f"before {number}".encode()))
            members.append((f"{key}.left.JPG", picture(100 + number)))
            members += [(f"{key}.jpg", picture(number)), (f"{key}.cls", str(number % 4).encode())]
            members.append((f"{key}.json", json.dumps({"object": {"kind": number % 3}, "n": number}).encode()))
            if number % 7 == 0:
                members.append((f"t{number:03d}.txt", b"a sample without an image"))
            number += 1
        path = write_tar(f"data-{shard}.tar.gz" if request.param == ".tgz" else f"data-{shard}.tar", members)
        paths.append(str(Path(path).rename(Path(path).with_name(f"data-{shard}{request.param}"))))
    return paths


def by_webdataset(paths):
    """The samples with an image, as webdataset reads them."""
    samples = wds.WebDataset(paths, shardshuffle=False, empty_check=False)
    kept = [sample for sample in samples if "jpg" in sample]
    return [{key: value for key, value in sample.items() if key != "__local_path__"} for sample in kept]


def form(**values):
    return Access(keys=SampleKeys(**values))


def batches(shards, **settings):
    crop = RandomCrop(RandomCropConfig(size=12))
    given = {"batch_size": 12, "seed": 3, "steps": 9, "classes": 4} | settings
    return list(training_batches(shards, crop, **given))


def check_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.views[0].images, other.views[0].images)
        assert torch.equal(one.labels, other.labels)


def test_members_are_those_of_webdataset(tars):
    source, expected = open_shards(tars), by_webdataset(tars)
    assert source.images == len(expected) == sum(COUNTS)
    assert [source.members(number) for number in range(source.images)] == expected


@pytest.mark.parametrize("ranges", [True, False])
def test_members_of_a_remote_shard(tars, tmp_path, ranges):
    expected = [sample | {"__url__": ""} for sample in by_webdataset(tars)]
    for path in tars:
        if path.endswith(".tar"):
            write_table(path, scan_tar(path, path))  # so that byte ranges are read
    with Server(tmp_path, ranges) as server:
        source = open_shards([f"{server.url}/{Path(path).name}" for path in tars]).in_blocks(4)
        found = [source.members(number) | {"__url__": ""} for number in range(source.images)]
    assert found == expected


def pipeline(shards, batch=12, workers=0, stages=(), **settings):
    source = OrderedShards(shards, **{"batch_size": 12, "seed": 3, "steps": 9, "stages": stages} | settings)
    behind = wds.DataPipeline(source, wds.decode("rgb8", partial=True), wds.to_tuple("__position__", "__key__", "jpg"))
    loader = DataLoader(behind.compose(wds.batched(batch, collation_fn=list)), batch_size=None, num_workers=workers)
    return [[(int(p), key, bytes(image.numpy())) for p, key, image in step] for step in loader]


def test_ordered_shards(tars, monkeypatch):
    """The order is that of the run; two ranks equal one, a resumed pipeline equals the rest, workers do not matter."""
    whole = pipeline(tars)
    for step, batch in zip(whole, batches(tars), strict=True):
        assert [p for p, _, _ in step] == batch.positions.tolist()
        assert [f"{key}" for _, key, _ in step] == [key.partition("/")[2] for key in batch.keys]
    assert pipeline(tars, first_step=5) == whole[5:]
    assert pipeline(tars, workers=2) == whole
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        ranks.append(pipeline(tars, batch=6, workers=2))
    assert [left + right for left, right in zip(*ranks, strict=True)] == whole


def test_other_names_of_members(tars):
    usual, left = open_shards(tars), open_shards(tars, source=form(image="left.jpg", label="json:object.kind"))
    assert [left.image(n) for n in range(left.images)] == [picture(100 + n) for n in range(sum(COUNTS))]
    assert [left.label(n) for n in range(left.images)] == [n % 3 for n in range(sum(COUNTS))]
    source = OrderedShards(tars, batch_size=4, steps=1, image="left.jpg", label="json:object.kind")
    pictures = [left.image(n) for n in range(left.images)]
    assert all(sample["left.jpg"] in pictures for sample in source)
    assert usual.image(3) == picture(3)
    assert count_classes(open_sources(tars, source=form(label="json:object.kind"))) == 3
    with pytest.raises(ShardError, match=r"has no field 'object.name'"):
        open_shards(tars, source=form(label="json:object.name")).label(0)
    with pytest.raises(ShardError, match=r"KEY\.right\.jpg"):
        open_shards(tars, source=form(image="right.jpg"))
