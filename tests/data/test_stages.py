"""Stages of webdataset before the crops, OrderedShards before stages of webdataset, and other names of members."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader

from tessera.data import dataset
from tessera.data.crops import CenterCrop, RandomCrop, RandomCropConfig
from tessera.data.ordered_shards import OrderedShards
from tessera.data.shards import ShardError, open_shards
from tessera.data.shards.access import Access
from tessera.data.shards.index import write_table
from tessera.data.shards.open import open_sources
from tessera.data.shards.samples import SampleKeys
from tessera.data.shards.tar_index import scan_tar
from tessera.data.stages import load_stages
from tessera.data.statistics import count_classes
from tessera.runtime.settings import SettingsError
from tests.data.batches import evaluation_batches, training_batches
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


def form(stages=None, **values):
    return Access(keys=SampleKeys(**values), stages=load_stages(stages))


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


def test_decoding_by_webdataset_changes_nothing(tars):
    """webdataset decodes by Pillow; images of this size are not shrunk."""
    stages = (wds.decode("pil"), wds.rename(image="jpg", cls="cls"))
    check_equal(batches(tars, source=form(stages=stages)), batches(tars))
    pairs = (wds.decode("rgb8"), wds.to_tuple("jpg", "cls"))
    check_equal(batches(tars, source=form(stages=pairs), workers=2), batches(tars))


def random_shift(samples):
    for sample in samples:
        shift = random.randrange(40) + np.random.randint(40) + int(torch.randint(40, ()))
        yield sample | {"jpg": sample["jpg"] // 2 + np.uint8(shift)}


def odd(sample):
    return int(sample["__key__"][-1]) % 2 == 1


STAGES = (wds.decode("rgb8"), wds.select(odd), random_shift)


def test_random_and_dropping_stages_depend_on_the_position_alone(tars):
    source = form(stages=STAGES)
    whole = batches(tars, source=source)
    assert all(int(key[-1]) % 2 == 1 for batch in whole for key in batch.keys)
    assert not any(batch.skipped for batch in whole)
    assert [len(batch) for batch in whole] == [12] * 9
    check_equal(batches(tars, source=source, workers=2), whole)
    check_equal(batches(tars, source=source, first_step=4), whole[4:])
    ranks = [batches(tars, source=source, rank=rank, world_size=2) for rank in range(2)]
    for step, parts in zip(whole, zip(*ranks, strict=True), strict=True):
        images = {
            int(p): image for part in parts for p, image in zip(part.positions, part.views[0].images, strict=True)
        }
        assert all(
            torch.equal(images[int(p)], image) for p, image in zip(step.positions, step.views[0].images, strict=True)
        )
    kept = {
        key for batch in evaluation_batches(tars, CenterCrop(8), batch_size=10, source=source) for key in batch.keys
    }
    assert len(kept) == sum(odd(sample) for sample in by_webdataset(tars))


def test_stages_of_every_kind_of_data(tars, photos):
    seen = []

    def note(samples):
        for sample in samples:
            seen.append({key: type(value).__name__ for key, value in sample.items() if key != "__url__"})
            yield sample

    folder = photos({f"{name}/{n}.v1.png": picture(n, format="PNG") for name in "ab" for n in range(2)})

    class Items:
        def __len__(self):
            return 4

        def __getitem__(self, number):
            return {"image": np.zeros((9, 9, 3), dtype=np.uint8), "label": 1, "text": "more"}

    for shards in (str(folder), Items()):
        batch = next(iter(evaluation_batches(shards, CenterCrop(8), batch_size=4, source=form(stages=(note,)))))
        assert len(batch) == 4
    assert seen[-1] == {
        "__key__": "str", "jpg": "ndarray", "cls": "int", "image": "ndarray", "label": "int", "text": "str"
    }  # fmt: skip
    assert seen[0] == {"__key__": "str", "png": "bytes", "cls": "int"}


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


@pytest.mark.slow
def test_stages_of_ordered_shards_may_drop(tars):
    whole = pipeline(tars, stages=STAGES)
    assert all(int(key[-1]) % 2 for step in whole for _, key, _ in step)
    assert [len(step) for step in whole] == [12] * 9
    assert pipeline(tars, stages=STAGES, workers=2, first_step=3) == whole[3:]
    with pytest.raises(ShardError, match="drop 1000 samples in a row"):
        next(iter(OrderedShards(tars, batch_size=4, stages=[wds.select(lambda sample: False)])))


def test_other_names_of_members(tars):
    usual, left = open_shards(tars), open_shards(tars, source=form(image="left.jpg", label="json:object.kind"))
    assert [left.image(n) for n in range(left.images)] == [picture(100 + n) for n in range(sum(COUNTS))]
    assert [left.label(n) for n in range(left.images)] == [n % 3 for n in range(sum(COUNTS))]
    source = OrderedShards(tars, batch_size=4, steps=1, image="left.jpg", label="json:object.kind")
    pictures = [left.image(n) for n in range(left.images)]
    assert all(sample["left.jpg"] in pictures for sample in source)
    assert usual.image(3) == picture(3)
    assert count_classes(open_sources(tars, source=form(label="json:object.kind"))) == 3
    staged = form(image="left.jpg", label="json:n", stages=(wds.decode("pil"),))
    assert open_shards(tars, source=staged).label(5) == 5
    with pytest.raises(ShardError, match=r"has no field 'object.name'"):
        open_shards(tars, source=form(label="json:object.name")).label(0)
    with pytest.raises(ShardError, match=r"KEY\.right\.jpg"):
        open_shards(tars, source=form(image="right.jpg"))


def fails(samples):
    for sample in samples:
        yield {}[sample["__key__"]]


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (fails, r"cannot be read: KeyError: 's000' \(test_stages.py, line"),
        (wds.rename(picture="png"), "has no image under 'image' or 'img'.*Name the key of the image with data.image"),
        (wds.decode("rgb"), "its values are float32, not uint8"),
        (lambda samples: (sample for sample in samples for _ in range(2)), "makes 2 samples of"),
        (wds.select(lambda sample: False), "50 samples in a row are dropped by data.stages"),
    ],
)
def test_stages_that_cannot_be_used(write_shards, stage, message, monkeypatch):
    monkeypatch.setattr(dataset, "MOST_DROPPED", 50)
    shards = write_shards([1])
    crop = RandomCrop(RandomCropConfig(size=4))
    with pytest.raises(ShardError, match=message.replace("s000", "s00000")):
        list(training_batches(shards, crop, batch_size=1, seed=0, steps=1, source=form(stages=(stage,))))


def test_names_of_stages(tmp_path, monkeypatch):
    (tmp_path / "tessera_stage_code.py").write_text("def same(samples):\n    yield from samples\n")
    monkeypatch.chdir(tmp_path)
    (stage,) = load_stages("tessera_stage_code:same").stages
    assert list(stage(iter([1]))) == [1]
    for stage in (wds.shuffle(10), wds.batched(3), wds.detshuffle(10), wds.slice(3)):
        with pytest.raises(SettingsError, match="needs a stream of samples"):
            load_stages([stage])
