"""Numbers of the progress in words."""

import io

import pytest
from rich.console import Console

from tessera.pretrain.monitoring import progress_bar
from tessera.pretrain.monitoring.progress_bar import Progress


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, "loss 3.8312  k-NN 50.0 %"),
        (120, "loss 3.8312  k-NN 50.0 %  75 images/s"),
        (160, "loss 3.8312  k-NN 50.0 %  75 images/s  linear 60.0 % (step 200)  data wait 1 %"),
    ],
)
def test_a_narrow_terminal_keeps_the_step_and_the_time_left(
    width: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, no_color=True)
    monkeypatch.setattr(progress_bar, "Console", lambda stderr: console)
    progress = Progress(50_000, 0, enabled=True)
    progress.scored({"knn_top1": 0.5, "linear_top1": 0.6, "step": 200})
    with progress:
        progress.update(12_345, 3.83123, 75.0, 0.01)
        progress.progress.refresh()
    line = next(line for line in screen.getvalue().splitlines() if "loss" in line)
    assert "step 12345/50000" in line
    assert f"{shown} 0:00" in line
    assert "ETA" in line
    assert "…" not in line


def test_a_log_file_gets_its_first_line_early(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1000, 200, enabled=True) as progress:
        for step in range(201, 231):
            progress.update(step, 3.5, 75.0, 0.01)
    assert capsys.readouterr().err.startswith("step 210/1000  75 images/s  0 s left\n")


def test_a_notebook_shows_a_bar_of_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with Progress(40, 10, enabled=True) as progress:
        progress.update(30, 0.5, 100.0, 0.0)
        progress.line({"step": 30})
    shown = capsys.readouterr().err
    assert "30/40" in shown
    assert "loss 0.5000  100 images/s" in shown
    assert "10/40" in shown
