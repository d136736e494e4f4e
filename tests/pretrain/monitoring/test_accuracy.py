"""The accuracy of a classifier inside a run against scikit-learn, alone and over two processes, and its result file."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from sklearn.metrics import top_k_accuracy_score

from tessera import encoders
from tessera.evaluation.features import EvaluationError
from tessera.pretrain.command_line import load
from tessera.pretrain.config import EvaluationConfig
from tessera.pretrain.methods.finetune import Finetune, FinetuneConfig
from tessera.pretrain.monitoring.accuracy import Accuracy, accuracy_line, write_result
from tessera.pretrain.monitoring.verdict import Scores
from tessera.pretrain.resolve import resolve
from tessera.runtime.processes import make_accelerator
from tests.evaluation.conftest import write_shard

SIDE, CLASSES, IMAGES = 16, 8, 37


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], np.ndarray, np.ndarray]:
    """Paths of the shards, and the pixels and labels of the held-out images."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (IMAGES, SIDE, SIDE, 3), dtype=np.uint8)
    labels = np.arange(IMAGES) % CLASSES
    parts = {"train": 255 - images, "val": images}
    paths = {part: str(write_shard(tmp_path / f"{part}.tar", x, labels.tolist())) for part, x in parts.items()}
    return paths, images, labels


def make(paths: dict[str, str], classes: int = CLASSES) -> tuple[Accuracy, Finetune]:
    torch.manual_seed(0)
    encoder = encoders.build("vit_micro", depth=1, dim=24, heads=2, image_size=SIDE, drop_path=0.5)
    method = Finetune(encoder, FinetuneConfig(classes=classes), 10)
    torch.nn.init.normal_(method.head.weight)
    config = EvaluationConfig(val=paths["val"], batch_size=8)
    return Accuracy(config, paths["train"], SIDE, make_accelerator()), method


def test_equals_scikit_learn(shards) -> None:
    paths, images, labels = shards
    accuracy, method = make(paths)
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
    assert found["val_images"] == IMAGES
    assert 0 < found["val_top1"] < found["val_top5"] < 1


def test_a_classifier_that_has_diverged_is_never_correct(shards) -> None:
    accuracy, method = make(shards[0])
    with torch.no_grad():
        method.head.bias.fill_(torch.nan)
    assert accuracy.evaluate(method)["val_top5"] == 0
    with torch.no_grad():  # of equal scores, the class with the smaller number ranks first
        method.head.bias.zero_()
        method.head.weight.zero_()
    found = accuracy.evaluate(method)
    assert found["val_top1"] == pytest.approx(np.mean(shards[2] == 0))
    assert found["val_top5"] == pytest.approx(np.mean(shards[2] < 5))


def test_labels_of_other_classes_and_shared_shards_are_refused(shards, tmp_path: Path) -> None:
    accuracy, method = make(shards[0], classes=CLASSES - 1)
    with pytest.raises(EvaluationError, match=r"has the label 7, but the training images have 7 classes"):
        accuracy.evaluate(method)
    negative = write_shard(tmp_path / "negative.tar", shards[1][:3], [0, -1, 2])
    with pytest.raises(EvaluationError, match=r"has the label -1"):
        make(shards[0] | {"val": str(negative)})[0].evaluate(method)
    with pytest.raises(EvaluationError, match=r"is in both"):
        make(shards[0] | {"train": shards[0]["val"]})


def _process(rank: int, port: int, paths: dict[str, str], folder: str) -> None:
    torch.set_num_threads(1)
    mp.set_start_method("fork", force=True)  # of the loader's workers, as it is under a launcher
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    accuracy, method = make(paths)
    torch.save(accuracy.evaluate(method), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.medium
def test_two_processes_equal_one(shards, tmp_path: Path, free_port: int) -> None:
    accuracy, method = make(shards[0])
    expected = accuracy.evaluate(method)
    mp.start_processes(_process, (free_port, shards[0], str(tmp_path)), nprocs=2, start_method="forkserver")
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == expected


def test_the_result_lies_with_the_encoder_that_was_fine_tuned(shards, tmp_path: Path) -> None:
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
    output = run / "finetune"
    for init_from, expected in (
        (run, run / "evaluation" / "finetune.json"),
        (run / "encoder.safetensors", run / "evaluation" / "finetune.json"),
        (published, output / "evaluation" / "finetune.json"),
        (None, output / "evaluation" / "finetune.json"),
    ):
        given = [] if init_from is None else ["--init_from", str(init_from)]
        flags = ["--data", "x.tar", "--evaluation.val", "val.tar", "--method", "finetune", "--encoder", "vit_micro"]
        config = load([*flags, *given])
        write_result(resolve(config, 1000, classes=CLASSES), output, scores)
        result = json.loads(expected.read_text())
        assert (result["top1"], result["top5"], result["best_top1"], result["best_step"]) == (0.5, 0.875, 0.75, 5)
        assert result["settings"]["finetune"]["classes"] == CLASSES
        expected.unlink()
