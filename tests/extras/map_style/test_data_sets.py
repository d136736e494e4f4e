"""Data sets of Python in place of SHARDS: runs, their continuation, and evaluations."""

import shutil

import numpy as np
import pytest
import torch

import tessera
from tessera.data.shards import ShardError
from tessera.runtime.settings import SettingsError
from tessera.runtime.user_error import UserError
from tests.tessera.test_interface import SMALL


class Blobs:
    """64 images of four classes, in which random pixels differ from one reading to the next."""

    classes = ("a", "b", "c", "d")

    def __init__(self, first=0):
        self.first = first

    def __len__(self):
        return 64

    def __getitem__(self, number):
        pixels = np.random.default_rng(self.first + number).integers(0, 100, (16, 16, 3), dtype=np.uint8)
        pixels[4 * (number % 4) :][:4] += 100
        return {"picture": pixels + np.uint8(np.random.randint(50)), "target": number % 4}


DATA = {"shards": Blobs(), "image": "picture", "label": "target"}
RUN = SMALL | {"evaluation": {"pictures": 0, "val": Blobs(64), "linear_iterations": 0}, "checkpoint_every": 2}


@pytest.mark.slow
def test_a_run_continues_with_the_data_set_that_is_passed_again(tmp_path):
    whole = tessera.pretrain(data=DATA, output=str(tmp_path / "whole"), **RUN)
    assert whole.config["data"]["shards"] == "python:Blobs"
    assert whole.config["evaluation"]["val"] == "python:Blobs-2"
    metrics = whole.metrics
    shutil.rmtree(whole.path / "checkpoints" / "step-00000003")
    (whole.path / "checkpoints" / "latest").unlink()
    with pytest.raises(ShardError, match="python:Blobs stands for a data set object"):
        tessera.pretrain(resume=True, output=str(whole.path))
    evaluation = {"evaluation": {"val": Blobs(64)}}
    part = tessera.pretrain(data={"shards": Blobs()}, resume=True, output=str(whole.path), workers=0, **evaluation)
    losses = [[line["loss"] for line in run if "loss" in line] for run in (metrics, part.metrics)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert metrics[-1]["knn_top1"] == part.metrics[-1]["knn_top1"]


@pytest.mark.medium
def test_evaluations(tmp_path):
    class Pairs:
        def __init__(self, first=0):
            self.blobs = Blobs(first)

        def __len__(self):
            return len(self.blobs)

        def __getitem__(self, number):
            return tuple(self.blobs[number].values())

    found = tessera.knn("pixels", Pairs(), Pairs(64), image_size=16, output=str(tmp_path / "knn.json"), workers=0)
    assert found["train_images"] == found["val_images"] == 64
    assert found["top1"] > 0.9
    stages = {"stages": [brighter], "image_size": 16, "workers": 0}
    found = tessera.knn("pixels", Blobs(), Blobs(64), image="picture", label="target", **stages)
    assert found["train_images"] == found["val_images"] == 48  # the stage drops the fourth class
    with pytest.raises(UserError, match="is in both train and val"):
        tessera.knn("pixels", both := Pairs(), both, image_size=16, workers=0)


def dark(crop):
    return crop // 4


def test_augmentations(tmp_path):
    plain, ours, named = (
        next(iter(tessera.training_batches(data=DATA, augment=augment, **SMALL | {"workers": 0})))
        for augment in (None, dark, "tests.extras.map_style.test_data_sets:dark")
    )
    assert ours.views[0].images.max() < plain.views[0].images.max()
    assert torch.equal(ours.views[0].images, named.views[0].images)
    file = tmp_path / "settings.yaml"
    file.write_text("method: dino\ndata:\n  shards: photos\n  augment: os:abort\n")
    for settings in ({}, {"dry_run": True}):
        with pytest.raises(SettingsError, match=r"only you may have run: data.augment os:abort. Give it again"):
            tessera.pretrain(config=str(file), output=str(tmp_path / "run"), **settings)
    with pytest.raises(UserError, match="photos does not exist"):
        tessera.pretrain(config=str(file), output=str(tmp_path / "run"), augment=None)


def brighter(samples):
    for sample in samples:
        if sample["cls"] != 3:
            yield sample | {"picture": sample["picture"] // 2 + np.uint8(100)}


def test_stages(tmp_path):
    given = SMALL | {"workers": 0}
    plain, ours, named = (
        next(iter(tessera.training_batches(data=DATA, stages=stages, **given)))
        for stages in (None, [brighter], ["tests.extras.map_style.test_data_sets:brighter"])
    )
    assert ours.views[0].images.min() > plain.views[0].images.min()
    assert torch.equal(ours.views[0].images, named.views[0].images)
    assert all(int(key.partition("/")[2]) % 4 != 3 for key in ours.keys)
    file = tmp_path / "settings.yaml"
    file.write_text("method: dino\ndata:\n  shards: photos\n  stages: [os:abort]\n  augment: os:abort\n")
    with pytest.raises(SettingsError, match=r"only you may have run: .*data.augment os:abort and data.stages os:abort"):
        tessera.pretrain(config=str(file), output=str(tmp_path / "run"))
