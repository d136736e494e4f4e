"""The training set and the validation set: no image is in both, and classes are matched by name, never shifted."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tessera import encoders
from tessera.data import make_shards as make
from tessera.data.crops import CenterCrop
from tessera.data.loader import evaluation_batches
from tessera.data.shards import SourceConfig, open_shards, open_sources
from tessera.data.shards.access import Access
from tessera.data.shards.tar_shard import LocalTar
from tessera.data.tools.pack import write_samples
from tessera.evaluation import linear_probe
from tessera.evaluation.features import EvaluationError
from tessera.evaluation.knn import KNNSettings, run
from tessera.evaluation.splits import check_labels, check_training_images, open_labelled_splits, open_splits
from tessera.pretrain.command_line import load
from tessera.pretrain.config import EvaluationConfig
from tessera.pretrain.job import evaluations, prepare
from tessera.pretrain.monitoring.online import OnlineKNN
from tessera.runtime.collectives import RankError
from tessera.runtime.processes import make_accelerator
from tests.data.made import picture
from tests.data.shards.batches import add_index, sha256
from tests.data.shards.servers import Server
from tests.installed import needs_extra
from tests.pretrain.small import on_processes

COLOURS = {"ant": (220, 20, 20), "bee": (20, 220, 20), "cat": (20, 20, 220), "dog": (200, 200, 20)}


def make_set(folder: Path, classes: str, seed: int) -> str:
    """Make shards of 6 images a class, whose colour is that of the class, and return the folder of the shards."""
    rng = np.random.default_rng(seed)
    for name in classes.split():
        (folder / "images" / name).mkdir(parents=True)
        for number in range(6):
            pixels = (rng.integers(-15, 16, (16, 16, 3)) + COLOURS[name]).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{seed}-{number}.png")
    assert make.main([str(folder / "images"), str(folder / "shards"), "--workers=1"]) == 0
    return str(folder / "shards")


@pytest.fixture
def sets(tmp_path):
    """A function: names of the training and of the validation classes -> folders of shards."""
    return lambda train, val: (make_set(tmp_path / "train", train, 0), make_set(tmp_path / "val", val, 1))


def settings(train, val, **more):
    return KNNSettings(checkpoint="pixels", image_size=16, train=train, val=val, k=[1], workers=0, **more)


@pytest.mark.parametrize("lacking", ["bee cat dog", "dog ant"])
def test_classes_missing_in_validation_shift_no_label(sets, tmp_path, lacking):
    train, val = sets("ant bee cat dog", lacking)
    run(settings(f"{train}/*.tar", f"{val}/*.tar", output=str(tmp_path / "knn.json")))
    result = json.loads((tmp_path / "knn.json").read_text())
    assert (result["top1"], result["classes"]) == (1.0, 4)


@pytest.mark.parametrize("lacking", ["dog ant"])
def test_online_knn_and_probe_match_by_name_too(sets, tmp_path, lacking):
    train, val = sets("ant bee cat dog", lacking)
    torch.manual_seed(0)
    encoder = encoders.build("vit_micro", depth=1, image_size=16)
    scores = OnlineKNN(EvaluationConfig(val=val, k=1), train, 16, make_accelerator()).evaluate(encoder, pixels=True)
    assert scores["knn_pixels"] == 1.0
    options = {"rates": [0.1], "holdout": 0, "augment": False, "batch_norm": True, "epochs": 10, "workers": 0}
    options |= {"checkpoint": "pixels", "image_size": 16, "train": train, "val": val}
    linear_probe.run(linear_probe.ProbeSettings.model_validate(options | {"output": str(tmp_path / "probe.json")}))
    result = json.loads((tmp_path / "probe.json").read_text())
    assert (result["top1"], result["classes"]) == (1.0, 4)


def test_a_class_that_the_training_set_lacks_is_named(sets):
    train, val = sets("ant cat dog", "ant bee cat dog")
    with pytest.raises(EvaluationError, match=r"The class 'bee' of --val is not in --train \(1 of 4 classes"):
        run(settings(train, val))
    with pytest.raises(EvaluationError, match="The class 'bee'"):
        OnlineKNN(EvaluationConfig(val=val, k=1), train, 16, make_accelerator())
    (Path(train) / "classes.json").write_text('["ant", "cat", "dog", "bee"]')  # named, but without an image
    with pytest.raises(EvaluationError, match="1 classes of --val are not in --train, for example 'bee'"):
        run(settings(train, val))


@pytest.mark.parametrize("named", ["train", "val"])
def test_names_of_one_set_only_are_refused(sets, named):
    train, val = sets("ant bee", "ant bee")
    other = {"train": "val", "val": "train"}[named]
    file = Path(val if other == "val" else train) / "classes.json"
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(EvaluationError, match=f"--{named} have a classes.json, but those of --{other} have none"):
        run(settings(train, val))
    file.write_bytes(content)
    run(settings(train, val))


def test_without_names_the_largest_labels_have_to_agree(sets, tmp_path):
    train, val = sets("ant bee cat", "ant cat")
    for folder in (train, val):
        (Path(folder) / "classes.json").unlink()
    with pytest.raises(EvaluationError, match="is 2 in --train, but 1 in --val, and no classes"):
        run(settings(train, val))
    online = OnlineKNN(EvaluationConfig(val=val, k=1), train, 16, make_accelerator())
    with pytest.raises(EvaluationError, match="is 2 in --train, but 1 in --val"):
        online.evaluate(encoders.build("vit_micro", depth=1, image_size=16))
    check_labels(torch.tensor([0, 1, 2]), torch.tensor([2, 0]))
    check_labels(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), ["ant", "bee", "cat"])


def test_labels_without_a_name_are_refused(sets):
    train, val = sets("ant bee cat", "ant bee cat")
    (Path(val) / "classes.json").write_text('["ant", "bee"]')
    with pytest.raises(ValueError, match=r"is 2, but classes\.json names 2 classes"):
        run(settings(train, val))


def test_several_folders_need_the_same_names(sets, tmp_path):
    train, val = sets("ant bee", "ant bee")
    same = make_set(tmp_path / "same", "ant bee", 2)
    more = make_set(tmp_path / "more", "bee cat", 3)
    opened, _ = open_labelled_splits([train, same], val, settings("", "").access, make_accelerator())
    assert (opened.images, opened.classes) == (24, ("ant", "bee"))
    with pytest.raises(RankError, match="number their classes differently: class 0 is"):
        open_labelled_splits([train, more], val, settings("", "").access, make_accelerator())
    (Path(more) / "classes.json").unlink()
    with pytest.raises(RankError, match=f"names its classes, but {more}"):
        open_labelled_splits([train, more], val, settings("", "").access, make_accelerator())


def test_names_are_found_beside_shards_on_a_server(sets):
    pytest.importorskip("aiohttp")
    folder = Path(sets("ant bee cat", "ant cat")[0]).parents[1]
    with Server(folder) as server:
        train, val = (f"{server.url}/{part}/shards/shard-000000.tar" for part in ("train", "val"))
        _, opened = open_labelled_splits(train, val, settings("", "").access, make_accelerator())
        assert (opened.classes, opened.numbers) == (("ant", "bee", "cat"), (0, 2))
        (batch,) = evaluation_batches(opened, CenterCrop(16), 64)
    assert batch.labels is not None
    assert torch.bincount(batch.labels).tolist() == [6, 0, 6]


def test_classes_that_are_not_trained_on_are_refused():
    check_labels(torch.tensor([0, 1, 5]), torch.tensor([5, 5, 0]))
    with pytest.raises(EvaluationError, match="2 classes of --val are not in --train, for example 3"):
        check_labels(torch.tensor([0, 1, 5]), torch.tensor([5, 7, 3, 3]))
    with pytest.raises(EvaluationError, match="--train has the label -1"):
        check_labels(torch.tensor([0, -1]), torch.tensor([0]))
    with pytest.raises(EvaluationError, match="--val has no readable image"):
        check_labels(torch.tensor([0]), torch.tensor([], dtype=torch.int64))


def _run(rank, train, val, folder):
    """Run the command. The second process of two that see other class names fails, as the first does."""
    options = {"output": f"{folder}/knn.json"}
    if "RANK" not in train:
        run(settings(train, val, **options))
        return
    with pytest.raises(EvaluationError, match="The processes read different class names"):
        run(settings(train.replace("RANK", str(rank)), val, **options))


@pytest.mark.medium
def test_two_processes_match_classes_and_refuse_different_names(sets, tmp_path, free_port):
    train, val = sets("ant bee cat dog", "bee dog")
    on_processes(_run, free_port, train, val, str(tmp_path))
    found = json.loads((tmp_path / "knn.json").read_text())
    (tmp_path / "knn.json").unlink()  # an existing --output is refused
    assert (found["top1"], found["settings"]["processes"]) == (1.0, 2)
    (tmp_path / "node-0").symlink_to(train)  # a copy of the shards on each node, of which one has other names
    shutil.copytree(train, tmp_path / "node-1")
    (tmp_path / "node-1" / "classes.json").write_text('["ant", "cat", "bee", "dog"]')
    on_processes(_run, free_port, str(tmp_path / "node-RANK"), val, str(tmp_path))


def write(path, numbers, names=None):
    path.parent.mkdir(exist_ok=True)
    named = zip(names or numbers, numbers, strict=True)
    write_samples(path, [{"__key__": f"{name:03d}", "jpg": picture(number)} for name, number in named])
    return str(path)


def opened(train, val, **source):
    """Open the shards of both sets, as an evaluation does."""
    return open_splits(train, val, Access(SourceConfig(**source)), make_accelerator())


def refuses(train, val):
    with pytest.raises(EvaluationError, match=r"--source\.allow_overlap true") as caught:
        opened(train, val)
    opened(train, val, allow_overlap=True)
    return str(caught.value)


def test_a_shard_under_another_name_is_refused(tmp_path):
    for name in "abc":
        write(tmp_path / f"{name}.tar", [ord(name)])
    (tmp_path / "alias.tar").symlink_to(tmp_path / "b.tar")
    os.link(tmp_path / "b.tar", tmp_path / "hard.tar")
    both, other = str(tmp_path / "{a,b}.tar"), str(tmp_path / "c.tar")
    opened(both, other)
    for name in ("alias.tar", "hard.tar", "b.tar"):
        assert f"{name} is in both --train and --val" in refuses(both, [other, str(tmp_path / name)])


def test_copies_of_shards_are_refused(tmp_path):
    train = [write(tmp_path / "train" / f"t-{n}.tar", range(20 * n, 20 * n + 20)) for n in range(3)]
    copy = tmp_path / "val" / "v-0.tar"
    write(copy, range(100, 110))
    val = [str(copy)]
    opened(train, val)
    shutil.copy(train[1], copy)
    assert "v-0.tar/020 of --val is also in --train, as t-1.tar/020" in refuses(train, val)
    for path in (train[1], val[0]):
        add_index([path], [20], labelled=False, sha256=sha256(path))
    assert f"v-0.tar is in both --train and --val. Its path in --train is {train[1]}" in refuses(train, val)


def test_training_images_in_other_shards_are_refused(tmp_path):
    train = write(tmp_path / "train.tar", range(50))
    val = write(tmp_path / "val.tar", [100, 101, 7, 102])
    assert "val.tar/007 of --val is also in --train, as train.tar/007" in refuses(train, val)


def photos(folder, numbers):
    """Write one picture per number to folders of two classes."""
    for number in numbers:
        path = folder / ("ant" if number % 2 else "bee") / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    return str(folder)


def table(path, images):
    path.parent.mkdir(exist_ok=True)
    path.write_text("path,label\n" + "".join(f"{image},{Path(image).parent.name}\n" for image in images))
    return str(path)


def test_a_file_of_a_folder_is_refused_in_a_csv_and_in_another_folder(tmp_path):
    scans, held_out = photos(tmp_path / "scans", range(8)), photos(tmp_path / "other", range(100, 104))
    every = sorted(map(str, Path(scans).rglob("*.png")))
    inside = table(tmp_path / "scans" / "val.csv", [str(Path(every[0]).relative_to(scans))])
    below = table(tmp_path / "val.csv", ["other/ant/101.png", str(Path(every[5]).relative_to(tmp_path))])
    for val in (inside, below):
        assert "is also in --train, as scans/" in refuses(scans, val)
        assert "is also in --train, as " in refuses(val, scans)
    assert "Image files in both sets: 1. To keep images out of --train, give a CSV" in refuses(scans, below)
    good = table(tmp_path / "good.csv", ["other/ant/101.png", "other/bee/100.png"])
    opened(scans, good)
    opened(good, scans)
    assert "as other/ant/101.png" in refuses(held_out, good)
    for number, link in enumerate((os.symlink, os.link)):
        (tmp_path / f"links-{number}").mkdir()
        link(every[-1], tmp_path / f"links-{number}" / "renamed.png")
        assert "renamed.png of --val is also in --train" in refuses(scans, f"{tmp_path}/links-{number}")
    assert "is also in --train" in refuses(scans, f"{scans}/ant")  # the names differ by the folder


def test_copies_of_files_are_refused_in_a_csv_and_in_shards(tmp_path):
    scans = photos(tmp_path / "scans", range(8))
    photos(tmp_path / "a" / "copies", [3])
    csv = table(tmp_path / "a" / "val.csv", ["copies/ant/003.png"])
    assert "copies/ant/003.png of --val is also in --train, as scans/ant/003.png" in refuses(scans, csv)
    assert make.main([scans, str(tmp_path / "shards"), "--workers=1"]) == 0
    tars = str(tmp_path / "shards")
    for train, val in ((tars, csv), (scans, tars), (tars, scans)):
        assert "is also in --train" in refuses(train, val)


def test_training_images_of_a_run_are_compared_with_scored_images(tmp_path, monkeypatch):
    """Also those of a mixture. Images of remote shards are not downloaded."""
    scans, others = photos(tmp_path / "scans", range(8)), photos(tmp_path / "other", range(20, 24))
    val = open_shards(table(tmp_path / "val.csv", ["scans/ant/003.png"]))
    sources = open_sources({others: 1, scans: 1}).lists
    message = "scans/ant/003.png of --evaluation.val is also in --data, as scans/ant/003.png"
    with pytest.raises(EvaluationError, match=message):
        check_training_images(sources, val, "--evaluation.val")
    check_training_images(sources[:1], val, "--evaluation.val")
    check_training_images(sources, replace(val, access=Access(SourceConfig(allow_overlap=True))), "--evaluation.val")
    train, val = (open_shards(write(tmp_path / f"{name}.tar", [7])) for name in ("train", "val"))
    with pytest.raises(EvaluationError, match=r"is also in --data, as train.tar/007"):
        check_training_images([train], val, "--evaluation.val")
    monkeypatch.setattr(LocalTar, "is_remote", True)
    check_training_images([train], val, "--evaluation.val")


@pytest.mark.parametrize("method", ["dino", pytest.param("finetune", marks=needs_extra("finetune"))])
def test_a_run_refuses_scored_images_in_its_data(tmp_path, method, caplog):
    """Also with images of their own for the bank of k-NN; in this case, --data needs no labels."""
    scans = photos(tmp_path / "scans", range(8))
    files = sorted(str(path.relative_to(tmp_path)) for path in Path(scans).rglob("*.png"))
    train, val = table(tmp_path / "train.csv", files[:-2:2]), table(tmp_path / "val.csv", files[1::2])
    flags = ["--method", method, "--data", scans, "--evaluation.train", train, "--evaluation.val", val]
    config = load([*flags, "--encoder", "vit_micro", "--steps", "2", "--batch_size", "4"])
    prepared = prepare(config, make_accelerator())
    fake = SimpleNamespace(image_size=16, supervised=method == "finetune")
    with pytest.raises(EvaluationError, match=r"of --evaluation.val is also in --data, as scans/"):
        evaluations(config, fake, prepared, make_accelerator())
    if method != "finetune":  # a run of an earlier version, which did not compare them, continues
        assert any(evaluations(config, fake, prepared, make_accelerator(), continues=True))
        assert "of --evaluation.val is also in --data, as scans/" in caplog.text
    good = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"val": train, "train": val})})
    own = prepared._replace(sources=open_sources(train), shards=train)
    with pytest.raises(EvaluationError, match=r"also in --data, as train.csv/scans|is in both --data and"):
        evaluations(good, fake, own, make_accelerator())
    swapped = prepared._replace(sources=open_sources(val), shards=val)
    assert any(evaluations(good, fake, swapped, make_accelerator()))
