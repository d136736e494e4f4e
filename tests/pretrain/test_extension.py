"""A method and an encoder from outside go through everything that ours go through: training, resuming, two processes,
export, k-NN."""

import json
from pathlib import Path

import pytest
import torch

from tessera import encoders
from tessera.data.demo import demo_shards
from tessera.evaluation.knn import KNNSettings, run
from tessera.pretrain import export
from tests.pretrain.test_pairs import check_runs, scored_shards
from tests.pretrain.toy import ENTRIES, Toy, ToyConv


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for entries, name, value in ENTRIES:
        monkeypatch.setitem(entries, name, value)


@pytest.mark.slow
def test_a_method_and_an_encoder_from_outside_are_like_ours(registered, launch, tmp_path: Path) -> None:
    train, val = scored_shards()
    data = {"--data": demo_shards()[0]}
    pairs = [("toy", "toy_conv_micro"), ("toy", "vit_micro"), ("dino", "toy_conv_micro"), ("mae", "toy_conv_micro")]
    runs = {f"{m} of {v}": {"--method": m, "--encoder": v} | (data if m == "toy" else {}) for m, v in pairs}
    check_runs(launch, tmp_path, runs, script=Path(__file__).with_name("toy_runs.py"))

    folder = tmp_path / "toy of toy_conv_micro"
    said = export.export(folder, tmp_path / "method.safetensors", "method")
    assert "method of toy after 6 steps" in said
    method = export.load(tmp_path / "method.safetensors")
    assert isinstance(method, Toy)
    trained = encoders.load(folder / "encoder.safetensors")
    assert isinstance(trained, ToyConv)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(method.encoder.state_dict()[name], tensor)
    run(KNNSettings(checkpoint=str(folder), train=train, val=val, k=[20], workers=0))
    last = (folder / "metrics.jsonl").read_text().splitlines()[-1]
    (path,) = (folder / "evaluation").glob("knn-*-step-00000006-*.json")
    found = json.loads(path.read_text())
    assert found["top1"] == json.loads(last)["knn_top1"] > 0.2
