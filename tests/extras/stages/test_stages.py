"""Stages of webdataset before the crops."""

import random

import numpy as np
import pytest
import torch
import webdataset as wds

from tessera.data import dataset
from tessera.data.crops import CenterCrop, RandomCrop, RandomCropConfig
from tessera.data.ordered_shards import OrderedShards
from tessera.data.shards import ShardError, open_shards
from tessera.data.shards.access import Access
from tessera.data.shards.samples import SampleKeys
from tessera.data.user_code import load_stages
from tessera.extras.stages.stages import Stages
from tessera.runtime.settings import SettingsError
from tests.data.batches import evaluation_batches, training_batches
from tests.data.made import picture
from tests.data.test_ordered_shards import batches, by_webdataset, check_equal, pipeline, tars

__all__ = ["tars"]


def form(stages=None, **values):
    return Access(keys=SampleKeys(**values), stages=load_stages(stages))


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


@pytest.mark.slow
def test_stages_of_ordered_shards_may_drop(tars):
    whole = pipeline(tars, stages=STAGES)
    assert all(int(key[-1]) % 2 for step in whole for _, key, _ in step)
    assert [len(step) for step in whole] == [12] * 9
    assert pipeline(tars, stages=STAGES, workers=2, first_step=3) == whole[3:]
    with pytest.raises(ShardError, match="drop 1000 samples in a row"):
        next(iter(OrderedShards(tars, batch_size=4, stages=[wds.select(lambda sample: False)])))


def fails(samples):
    for sample in samples:
        yield {}[sample["__key__"]]


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (fails, r"cannot be read: KeyError: 's000' \(test_stages.py, line"),
        (wds.rename(picture="png"), "has no image under 'image' or 'img'.*Name the key of the image with data.image"),
        (wds.decode("rgb"), "an image of the type float32 in a data set of the type uint8"),
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
    loaded = load_stages("tessera_stage_code:same")
    assert isinstance(loaded, Stages)
    (stage,) = loaded.stages
    assert list(stage(iter([1]))) == [1]
    for stage in (wds.shuffle(10), wds.batched(3), wds.detshuffle(10), wds.slice(3)):
        with pytest.raises(SettingsError, match="needs a stream of samples"):
            load_stages([stage])


def test_stages_get_other_names_of_members(tars):
    staged = form(image="left.jpg", label="json:n", stages=(wds.decode("pil"),))
    assert open_shards(tars, source=staged).label(5) == 5
