import json
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tessera.evaluation.features import EvaluationError, LabelledFeatures
from tessera.evaluation.knn import KNNSettings, _nearest, _unpack, knn_accuracy, run
from tessera.runtime.processes import exit_on_user_error
from tests.evaluation.conftest import knn_oracle, made_up, save_encoder
from tests.launched import ROOT

images = partial(made_up, dim=12, classes=7, spread=1.2)


def accuracy(train, train_labels, val, val_labels, **protocol):
    return knn_accuracy(LabelledFeatures(train, train_labels), LabelledFeatures(val, val_labels), **protocol)


@pytest.mark.parametrize(("pass_size", "chunk"), [(1000, 2000), (40, 64), (7, 3), (90, 640)])
def test_accuracy_is_that_of_scikit_learn_for_any_chunks(pass_size, chunk):
    train, val = images(1300), images(151, seed=1)
    found = knn_accuracy(train, val, k=(1, 20, 5), pass_size=pass_size, chunk=chunk)
    assert list(found) == [1, 20, 5]
    for k, (top1, top5) in found.items():
        fitted = knn_oracle(k).fit(train.features.double().numpy(), train.labels.numpy())
        chances = fitted.predict_proba(val.features.double().numpy())
        right = chances[np.arange(151), val.labels.numpy()]
        ahead = (chances > right[:, None]).sum(1)
        assert top1 == np.mean((ahead < 1) & (right > 0))
        assert top5 == np.mean((ahead < 5) & (right > 0))
    assert 0.4 < found[20][0] < 0.95


def test_temperature_weighs_near_neighbours():
    train = torch.tensor([[1.0, 0.0], [0.9, 0.5], [0.9, -0.5]])
    labels = torch.tensor([0, 1, 1])
    val, target = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    sharp = accuracy(train, labels, val, target, k=(3,), temperature=0.07)
    flat = accuracy(train, labels, val, target, k=(3,), temperature=10.0)
    assert (sharp[3][0], flat[3][0]) == (1.0, 0.0)


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_ties_of_neighbours_and_classes(chunk):
    train = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 0.0], [1.0, 0.0], [4.0, 0.0]])  # four in one direction
    labels = torch.tensor([4, 3, 1, 2, 0])
    query = torch.tensor([[3.0, 0.0]])

    def right(target, k):
        target = torch.tensor([target])
        return accuracy(train, labels, query, target, classes=5, k=(k,), chunk=chunk)[k][0]

    assert [right(c, 1) for c in range(5)] == [0, 0, 0, 1, 0]  # the first of the four
    assert [right(c, 3) for c in range(5)] == [0, 1, 0, 0, 0]  # 3, 1 and 2 have a vote each
    assert [right(c, 4) for c in range(5)] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("chunk", [1000, 160, 96])  # in 96, no blocks are selected
def test_the_nearest_of_many_equal_neighbours_are_the_first(chunk):
    generator = torch.Generator().manual_seed(0)
    bank = torch.randint(-1, 2, (1000, 2), generator=generator).float()  # nine directions, one of them 0
    query = F.normalize(torch.tensor([[1.0, 0.5], [0.0, -1.0], [-1.0, -1.0]]), dim=1)
    similarity = query @ F.normalize(bank, dim=1).T
    expected = similarity.sort(dim=1, descending=True, stable=True).indices[:, :5]
    found = _unpack(_nearest(query, bank, 0, 5, chunk).sort(dim=1, descending=True).values)[1]
    assert torch.equal(found, expected)


def test_scale_and_precision_do_not_matter():
    train, val = images(1300), images(151, seed=1)
    expected = knn_accuracy(train, val, k=(20,))
    factors = torch.rand(1300, 1) * 100 + 0.01
    assert accuracy(train.features * factors, train.labels, val.features / 3, val.labels, k=(20,)) == expected
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert knn_accuracy(train, val, k=(20,)) == expected
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_what_cannot_be_scored_is_refused():
    train, val, nothing, broken = images(30), images(151, seed=1), images(0), images(151, seed=1)
    broken.features[3, 2] = torch.nan
    negative = val._replace(labels=val.labels - 1)
    for scored, protocol, message in (
        (val, {"k": (31,)}, "from 1 to 30"),
        (val, {"k": (0,)}, "from 1 to"),
        (val, {"k": (5,), "classes": 3}, r"less than `classes` \(3\)"),
        (negative, {"k": (5,)}, r"The labels run from -1 to \d+\. They must be at least 0\.$"),
        (nothing, {"k": (5,)}, "Each needs at least one image"),
        (broken, {"k": (5,)}, "NaN or infinite"),
    ):
        with pytest.raises(EvaluationError, match=message):
            knn_accuracy(train, scored, **protocol)


@pytest.fixture(scope="module")
def result(shards, tmp_path_factory):
    """A saved encoder, and its result by one process."""
    folder = tmp_path_factory.mktemp("run")
    encoder = save_encoder(folder / "vit.safetensors", depth=2)
    train, val = str(shards / "train-{0..1}.tar"), str(shards / "val-*.tar")
    run(KNNSettings(checkpoint=encoder, train=train, val=val, k=[3, 20, 25, 200], workers=0))
    return encoder, json.loads(next(folder.glob("vit-knn-*.json")).read_text())


def test_command_writes_every_k_and_setting(result):
    _, found = result
    assert set(found["k"]) == {"3", "20", "25"}
    assert found["k_left_out"] == [200]
    assert found["top1"] == found["k"]["20"]["top1"]
    assert 0.4 < found["top1"] < 1
    assert (found["train_images"], found["val_images"], found["classes"]) == (31, 13, 3)
    assert found["settings"]["image_size"] == found["settings"]["resize"] == 16
    assert found["settings"]["temperature"] == 0.07
    assert torch.__version__.startswith(found["versions"]["torch"])


@pytest.mark.slow
def test_two_processes_give_the_same(result, shards, tmp_path, fork):
    encoder, expected = result
    flags = ["--checkpoint", encoder, "--output", str(tmp_path / "two.json"), "--k", "3,20,25,200", "--workers", "0"]
    flags += ["--train", str(shards / "train-{0..1}.tar"), "--val", str(shards / "val-*.tar"), "--batch_size", "5"]
    fork(flags, 2, ROOT / "evaluation" / "knn.py").wait()
    found = json.loads((tmp_path / "two.json").read_text())
    assert found["settings"]["processes"] == 2
    same = ("top1", "top5", "k", "k_left_out", "train_images", "val_images", "classes")
    assert {key: found[key] for key in same} == {key: expected[key] for key in same}


@pytest.mark.medium
def test_mistakes_end_with_a_message(shards, tmp_path, capsys, monkeypatch):
    def fails(**changed):
        given = {"checkpoint": "pixels", "image_size": 16, "train": str(shards / "train-0.tar")}
        given |= {"val": str(shards / "val-0.tar"), "workers": 0, "k": [3], "output": str(tmp_path / "x.json")}
        with pytest.raises(SystemExit) as stopped, exit_on_user_error():
            run(KNNSettings(**given | changed))
        assert stopped.value.code == 2
        return capsys.readouterr().err

    with monkeypatch.context() as patch:
        patch.setattr(
            "tessera.evaluation.command.extract", lambda *_, **__: pytest.fail("encoded before labels were looked at")
        )
        assert "label" in fails(val=str(shards / "bare-0.tar"))
    assert "step-9" in fails(checkpoint=str(tmp_path / "step-9"))
    assert "--image_size" in fails(image_size=None)
    assert "Every k" in fails(k=[200])
    assert "does not fit" in fails(image_size=16, resize=8)
    assert not (tmp_path / "x.json").exists()
