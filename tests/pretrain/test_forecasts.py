"""A dry run without a forecast."""

from pathlib import Path

import pytest

from tessera.pretrain.forecasts import FORECASTS
from tessera.pretrain.run import main

WORDS = "--encoder vit_micro --encoder.depth 1 --method mae --steps 3 --batch_size 16 --workers 0 --dry_run"


@pytest.mark.usefixtures("fresh_engine")
def test_a_dry_run_needs_no_forecast_but_a_named_gpu_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FORECASTS, "group", "tests.nothing")
    FORECASTS.clear()
    words = [*WORDS.split(), "--output", str(tmp_path / "run")]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "trained parameters" in shown
    assert "forecast" not in shown
    assert main([*words, "--gpu", "h100"]) == 2
    assert "--gpu h100 needs the extra `forecast`, which is not installed." in capsys.readouterr().err
