"""A method and an encoder from outside go through everything that ours go through: training, resuming, two processes,
export, k-NN."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tessera import encoders
from tessera.evaluation.knn import KNNSettings, run
from tessera.pretrain import export
from tests.pretrain.small import scored_shards
from tests.pretrain.test_pairs import Both
from tests.pretrain.toy import ENTRIES, Toy, ToyConv

PAIRS = ["toy of toy_conv_micro", "toy of vit_micro", "dino of toy_conv_micro", "mae of toy_conv_micro"]


@pytest.fixture(scope="module")
def runs(start: Callable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with pytest.MonkeyPatch.context() as patch:
        for entries, name, value in ENTRIES:
            patch.setitem(entries, name, value)
        yield Both(start, PAIRS, tmp_path_factory.mktemp("runs"), Path(__file__).with_name("toy_runs.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_pairing_from_outside_is_like_ours(name: str, runs: Both) -> None:
    runs.check(name)


@pytest.mark.slow
def test_a_run_from_outside_is_exported_and_scored(runs: Both, tmp_path: Path) -> None:
    folder = runs.check(PAIRS[0])
    train, val = scored_shards()
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
