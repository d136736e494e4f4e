"""The table of small encoders, at a tiny size."""

from pathlib import Path

import cifar10
import pytest
from cifar10 import Cifar10

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
