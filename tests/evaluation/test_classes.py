"""Classes of the training set and the validation set are matched by name, and never shifted."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tessera import encoders
from tessera.data import make_shards as make
from tessera.data.crops import CenterCrop
from tessera.data.loader import evaluation_batches
from tessera.evaluation import linear_probe
from tessera.evaluation.classes import open_labelled_pair
from tessera.evaluation.features import EvaluationError, check_labels
from tessera.evaluation.knn import KNNSettings, run
from tessera.pretrain.config import EvaluationConfig
from tessera.pretrain.monitoring.online_knn import OnlineKNN
from tessera.runtime.collectives import RankError
from tessera.runtime.processes import make_accelerator
from tests.data.shards.servers import Server

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("lacking", ["bee cat dog", "ant cat dog", "ant bee cat", "dog ant"])
def test_a_class_that_the_validation_set_lacks_shifts_no_label(sets, tmp_path, lacking):
    train, val = sets("ant bee cat dog", lacking)
    run(settings(f"{train}/*.tar", f"{val}/*.tar", output=str(tmp_path / "knn.json")))
    result = json.loads((tmp_path / "knn.json").read_text())
    assert (result["top1"], result["classes"]) == (1.0, 4)


@pytest.mark.parametrize("lacking", ["ant cat dog", "dog ant"])
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
    with pytest.raises(EvaluationError, match="--train end at 2, but those of --val end at 1, and no classes"):
        run(settings(train, val))
    online = OnlineKNN(EvaluationConfig(val=val, k=1), train, 16, make_accelerator())
    with pytest.raises(EvaluationError, match="end at 2, but those of --val end at 1"):
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
    opened, _ = open_labelled_pair([train, same], val, settings("", "").source, make_accelerator())
    assert (opened.images, opened.classes) == (24, ("ant", "bee"))
    with pytest.raises(RankError, match="have different class names in classes"):
        open_labelled_pair([train, more], val, settings("", "").source, make_accelerator())
    (Path(more) / "classes.json").unlink()
    with pytest.raises(RankError, match=f"{more} has none"):
        open_labelled_pair([train, more], val, settings("", "").source, make_accelerator())


def test_names_are_found_beside_shards_on_a_server(sets):
    pytest.importorskip("aiohttp")
    folder = Path(sets("ant bee cat", "ant cat")[0]).parents[1]
    with Server(folder) as server:
        train, val = (f"{server.url}/{part}/shards/shard-000000.tar" for part in ("train", "val"))
        _, opened = open_labelled_pair(train, val, settings("", "").source, make_accelerator())
        assert (opened.classes, opened.numbers) == (("ant", "bee", "cat"), (0, 2))
        (batch,) = evaluation_batches(opened, CenterCrop(16), 64)
    assert batch.labels is not None
    assert torch.bincount(batch.labels).tolist() == [6, 0, 6]


RANKS = """
import sys
from accelerate import PartialState
from tessera.evaluation.knn import KNNSettings, run
from tessera.runtime.processes import exit_on_user_error
train, val, output = sys.argv[1:]
rank = PartialState(cpu=True).process_index
with exit_on_user_error():
    run(KNNSettings(checkpoint="pixels", image_size=16, train=train.replace("RANK", str(rank)), val=val, k=[1],
                    workers=0, output=output))
"""


@pytest.mark.medium
def test_two_processes(sets, tmp_path):
    train, val = sets("ant bee cat dog", "bee dog")
    (tmp_path / "job.py").write_text(RANKS)

    def launch(*words):
        command = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", "--multi_gpu"]
        command += ["--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
        command = [sys.executable, *command, str(tmp_path / "job.py"), *words, str(tmp_path / "knn.json")]
        env = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    result = launch(train, val)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "knn.json").read_text())
    (tmp_path / "knn.json").unlink()  # an existing --output is refused
    assert (found["top1"], found["settings"]["processes"]) == (1.0, 2)
    for rank in range(2):  # a copy of the shards on each node, of which one has other names
        (tmp_path / f"node-{rank}").symlink_to(train)
    (tmp_path / "node-1").unlink()
    shutil.copytree(train, tmp_path / "node-1")
    (tmp_path / "node-1" / "classes.json").write_text('["ant", "cat", "bee", "dog"]')
    result = launch(str(tmp_path / "node-RANK"), val)
    assert result.returncode != 0
    assert "The processes see different class names" in result.stderr
