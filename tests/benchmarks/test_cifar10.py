"""The table of small encoders, at a tiny size."""

import subprocess
from pathlib import Path

import cifar10
import pytest
import small_resnet
import torch
from cifar10 import Cifar10

from tessera import encoders
from tests.pretrain.small import few_digits


@pytest.mark.slow
def test_a_run_and_a_failure_have_rows(tmp_path: Path) -> None:
    """A run, and one of an encoder that does not exist."""
    train, val = few_digits()
    chosen = {"methods": ("lejepa",), "encoders": ("vit_mini", "vit_none"), "batch_size": 8, "precision": "fp32"}
    assert cifar10.main(Cifar10(train=train, val=val, output=tmp_path, steps=2, **chosen)) == 1
    *_, first, second = (tmp_path / "results.md").read_text().splitlines()
    cells = [cell.strip() for cell in first.split("|")][1:-1]
    assert cells[:2] == ["lejepa", "vit_mini"]
    assert int(cells[2]) == 2
    assert all(float(cell.replace(",", "")) >= 0 for cell in cells[2:])
    assert "failed: exit code 2" in second


def test_the_resnet_has_the_small_stem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of parameters is torchvision's of ResNet-18 without head, less those of its 7 x 7 kernel."""
    encoder = small_resnet.register()
    del encoders.VARIANTS[small_resnet.NAME]  # other tests go through all encoders
    assert sum(p.numel() for p in encoder.parameters()) == 11_689_512 - 513_000 - 64 * 3 * (49 - 9)
    features = encoder.eval()(torch.zeros(1, 3, 32, 32))
    assert features.tokens.shape == (4 * 4, 512)
    lines = list[list[str]]()
    monkeypatch.setattr(subprocess, "run", lambda line, **_: lines.append(line))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    settings = Cifar10(train="a.tar", val="b.tar")
    for name, script in ((small_resnet.NAME, "small_resnet.py"), ("vit_mini", "run.py")):
        cifar10.train(settings, "dino", name, tmp_path / "run", 2, [])
        assert Path(lines.pop()[1]).name == script
