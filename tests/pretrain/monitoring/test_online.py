"""Evaluations inside a run against scikit-learn, alone and over two processes, and the result of a classifier."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import top_k_accuracy_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from threadpoolctl import threadpool_limits

from tessera import encoders
from tessera.data.shards import open_shards
from tessera.encoders.base import IMAGENET, Encoder, Preprocessing
from tessera.evaluation.features import EvaluationError
from tessera.evaluation.view_retrieval import crop_features, view_retrieval
from tessera.pretrain.command_line import load
from tessera.pretrain.config import EvaluationConfig
from tessera.pretrain.methods import METHODS
from tessera.pretrain.monitoring.online import OF_MAPS, Accuracy, OnlineKNN, OnlineViews, write_accuracy
from tessera.pretrain.monitoring.verdict import Scores, accuracy_line
from tessera.pretrain.resolve import resolve
from tessera.pretrain.run import main
from tessera.runtime.processes import make_accelerator
from tests.evaluation.conftest import knn_oracle, write_shard
from tests.launched import TINY
from tests.pretrain.toy import ToyLabels

SIDE, K, CLASSES = 16, 5, 8
ENCODER = {"depth": 1, "dim": 24, "heads": 2, "image_size": SIDE, "drop_path": 0.5}


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Paths of the shards, and the pixels, of noisy images in 3 classes that differ by a faint stripe."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    paths, found = {}, {}
    for part, count in (("train", 45), ("val", 31)):
        images = rng.integers(0, 120, (count, SIDE, SIDE, 3), dtype=np.uint8)
        for i, image in enumerate(images):
            image[:, 5 * (i % 3) : 5 * (i % 3) + 5, i % 3] += 12
        paths[part], found[part] = str(tmp_path / f"{part}-0.tar"), images
        write_shard(Path(paths[part]), images, [i % 3 for i in range(count)], part)
    return paths, found


def make(paths: dict[str, str], pictures: int = 2, **settings: Any) -> tuple[OnlineKNN, Encoder]:
    torch.manual_seed(0)
    encoder = encoders.build("vit_micro", **ENCODER)
    config = EvaluationConfig(val=paths["val"], k=K, batch_size=8, pictures=pictures, **settings)
    return OnlineKNN(config, paths["train"], SIDE, make_accelerator()), encoder


def normalised(images: np.ndarray, preprocessing: Preprocessing = IMAGENET) -> torch.Tensor:
    return torch.from_numpy((images / 255.0 - preprocessing.mean) / preprocessing.std).permute(0, 3, 1, 2).float()


def test_knn_and_linear_probe_equal_scikit_learn(shards) -> None:
    preprocessing = Preprocessing((0.1, 0.2, 0.3), (0.5, 0.1, 1.5))
    paths, images = shards
    online_knn, encoder = make(paths)
    encoder.eval().preprocessing = preprocessing
    with torch.no_grad():
        features = {part: encoder(normalised(images[part], preprocessing)).pooled.numpy() for part in images}
    labels = {part: np.arange(len(images[part])) % 3 for part in images}
    oracle = knn_oracle(K)
    expected = oracle.fit(features["train"], labels["train"]).score(features["val"], labels["val"])
    assert 0.34 < expected < 1  # else the test could not see a mistake
    probe = make_pipeline(
        StandardScaler(), Normalizer(), LogisticRegression(C=1 / 0.0025, fit_intercept=False, tol=1e-8, max_iter=5000)
    )
    with threadpool_limits(1):  # its threads wait for each other on busy cores
        linear = probe.fit(features["train"], labels["train"]).score(features["val"], labels["val"])
    assert 0.34 < linear < 1
    scores = online_knn.evaluate(encoder)
    assert scores == {"knn_top1": pytest.approx(expected), "linear_top1": pytest.approx(linear)}
    assert online_knn.evaluate(encoder) == scores
    assert make(paths, linear_iterations=0)[0].evaluate(encoder) == {"knn_top1": scores["knn_top1"]}
    assert make(paths, pictures=0)[0].shown_images(preprocessing).shape == (0, 3, SIDE, SIDE)
    shown = online_knn.shown_images(preprocessing)
    torch.testing.assert_close(shown, normalised(images["val"][[0, -1]], preprocessing), rtol=1e-5, atol=1e-5)


def test_raw_pixels_equal_scikit_learn_on_shrunk_centred_images(shards, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, images = shards
    online_knn, encoder = make(paths)
    monkeypatch.setattr("tessera.pretrain.monitoring.online.PIXEL_SIDE", 8)
    means = {part: found.reshape(len(found), 8, 2, 8, 2, 3).mean((2, 4)) for part, found in images.items()}  # 2 x 2
    flat = {part: normalised(found).flatten(1).double().numpy() for part, found in means.items()}
    oracle = knn_oracle(K)
    centre = flat["train"].mean(0)
    oracle.fit(flat["train"] - centre, np.arange(45) % 3)
    expected = oracle.score(flat["val"] - centre, np.arange(31) % 3)
    plain = online_knn.evaluate(encoder)
    found = online_knn.evaluate(encoder, pixels=True)
    assert found == plain | {"knn_pixels": pytest.approx(expected)}
    assert 0.34 < expected < 1
    assert online_knn.queries == 31


@pytest.mark.parametrize(
    ("asked", "run", "expected"),
    [
        ("auto", "bf16", torch.float32),  # chosen without being asked on a GPU only
        ("auto", None, torch.float32),
        ("bf16", None, torch.bfloat16),
        ("fp32", "bf16", torch.float32),
    ],
)
def test_the_precision_of_the_forward_passes_is_a_setting(shards, monkeypatch, asked, run, expected) -> None:
    online_knn, encoder = make(shards[0], precision=asked, linear_iterations=0)
    monkeypatch.setattr(online_knn.accelerator.state, "_mixed_precision", run or "no")
    seen: set[torch.dtype] = set()
    encoder.blocks[0].mlp.register_forward_hook(lambda *hooked: seen.add(hooked[2].dtype))  # pyright: ignore
    online_knn.evaluate(encoder)
    assert seen == {expected}


def test_views_are_those_of_the_command_and_leave_the_encoder_as_it_was(shards) -> None:
    paths, _ = shards
    encoder = make(paths)[1]
    views = OnlineViews(EvaluationConfig(view_images=20), paths["train"], SIDE, make_accelerator())
    before = torch.get_rng_state()
    found = views.evaluate(encoder)
    assert encoder.training
    assert torch.equal(torch.get_rng_state(), before)
    features = crop_features(encoder.eval(), open_shards(paths["train"]), make_accelerator(), 20, workers=0)
    assert found == {"view_retrieval": view_retrieval(features)[0]}
    assert views.queries == 20


def test_leaves_mode_random_numbers_and_gradients_as_they_were(shards) -> None:
    online_knn, encoder = make(shards[0])
    first = online_knn.evaluate(encoder.eval())
    assert not encoder.training
    before = torch.get_rng_state()
    assert online_knn.evaluate(encoder.train()) == first  # without drop path
    assert encoder.training
    assert encoder.blocks[0].training  # pyright: ignore
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in encoder.parameters())


@pytest.fixture
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], np.ndarray, np.ndarray]:
    """Paths of the shards, and the pixels and labels of the held-out images."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (37, SIDE, SIDE, 3), dtype=np.uint8)
    labels = np.arange(37) % CLASSES
    parts = {"train": 255 - images, "val": images}
    paths = {part: str(write_shard(tmp_path / f"{part}.tar", x, labels.tolist())) for part, x in parts.items()}
    return paths, images, labels


def classifier(paths: dict[str, str], classes: int = CLASSES) -> tuple[Accuracy, ToyLabels]:
    torch.manual_seed(0)
    encoder = encoders.build("vit_micro", **ENCODER)
    method = ToyLabels(encoder, ToyLabels.Config(classes=classes), 10)
    torch.nn.init.normal_(method.head.weight)
    config = EvaluationConfig(val=paths["val"], batch_size=8)
    return Accuracy(config, paths["train"], SIDE, make_accelerator()), method


def test_classifier_accuracy_equals_scikit_learn(classes) -> None:
    paths, images, labels = classes
    accuracy, method = classifier(paths)
    before = torch.get_rng_state()
    found = accuracy.evaluate(method.train())
    assert method.encoder.training
    assert torch.equal(torch.get_rng_state(), before)
    mean, std = np.array(method.encoder.preprocessing.mean), np.array(method.encoder.preprocessing.std)
    pixels = torch.from_numpy((images / 255.0 - mean) / std).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        scores = method.eval().logits(pixels).numpy()
    for k, name in ((1, "val_top1"), (5, "val_top5")):
        expected = top_k_accuracy_score(labels, scores, k=k, labels=np.arange(CLASSES))
        assert found[name] == pytest.approx(expected)
    assert found["val_images"] == 37
    assert 0 < found["val_top1"] < found["val_top5"] < 1


def test_a_classifier_that_has_diverged_is_never_correct(classes) -> None:
    accuracy, method = classifier(classes[0])
    with torch.no_grad():
        method.head.bias.fill_(torch.nan)
    assert accuracy.evaluate(method)["val_top5"] == 0
    with torch.no_grad():  # of equal scores, the class with the smaller number ranks first
        method.head.bias.zero_()
        method.head.weight.zero_()
    found = accuracy.evaluate(method)
    assert found["val_top1"] == pytest.approx(np.mean(classes[2] == 0))
    assert found["val_top5"] == pytest.approx(np.mean(classes[2] < 5))


def test_labels_of_other_classes_and_shared_shards_are_refused(classes, tmp_path: Path) -> None:
    accuracy, method = classifier(classes[0], classes=CLASSES - 1)
    with pytest.raises(EvaluationError, match=r"has the label 7, but the training images have 7 classes"):
        accuracy.evaluate(method)
    negative = write_shard(tmp_path / "negative.tar", classes[1][:3], [0, -1, 2])
    with pytest.raises(EvaluationError, match=r"has the label -1"):
        classifier(classes[0] | {"val": str(negative)})[0].evaluate(method)
    with pytest.raises(EvaluationError, match=r"is in both"):
        classifier(classes[0] | {"train": classes[0]["val"]})


def test_the_result_lies_with_the_encoder_that_was_fine_tuned(
    classes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "classifier", ToyLabels)
    scores = Scores()
    for step, top1 in ((0, 0.1), (5, 0.75), (9, 0.5)):
        scores.add(step, {"val_top1": top1})
    scores.memory["last"] = {"val_top1": 0.5, "val_top5": 0.875, "val_images": 37.0}
    assert accuracy_line(scores, scores.memory["last"]) == (
        "step 9: top-1 50.0 %, top-5 87.5 % (best top-1 75.0 % at step 5)"
    )
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("")
    encoders.save(encoders.build("vit_micro"), run / "encoder.safetensors")
    published = tmp_path / "published.pth"
    published.write_bytes(b"")
    output = run / "classifier"
    for init_from, expected in (
        (run, run / "evaluation" / "classifier.json"),
        (run / "encoder.safetensors", run / "evaluation" / "classifier.json"),
        (published, output / "evaluation" / "classifier.json"),
        (None, output / "evaluation" / "classifier.json"),
    ):
        given = [] if init_from is None else ["--init_from", str(init_from)]
        flags = ["--data", "x.tar", "--evaluation.val", "val.tar", "--method", "classifier", "--encoder", "vit_micro"]
        config = load([*flags, *given])
        write_accuracy(resolve(config, 1000, classes=CLASSES), output, scores, "a1b2")
        result = json.loads(expected.read_text())
        assert (result["top1"], result["top5"], result["best_top1"], result["best_step"]) == (0.5, 0.875, 0.75, 5)
        assert result["settings"]["classifier"]["classes"] == CLASSES
        assert result["data_content"] == "a1b2"
        expected.unlink()


@pytest.mark.usefixtures("fresh_engine")
def test_maps_need_an_installed_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(OF_MAPS, "_entry_points", dict)  # as if the extra were deleted
    monkeypatch.delitem(OF_MAPS, "segmentation", raising=False)
    words = [*TINY, "--evaluation.maps_train", "a.tar", "--evaluation.maps_val", "b.tar"]
    assert main([*words, "--output", str(tmp_path / "run")]) == 2
    assert "unknown evaluation of images with maps 'segmentation'" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.yaml").exists()
