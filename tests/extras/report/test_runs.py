"""The list of runs: states, scores, and how runs go on."""

import json
from pathlib import Path

import pytest

from tessera.extras.report.run_folders import ReportError
from tessera.extras.report.runs import RunsSettings, run
from tessera.runtime.lock import holder, locked


def make(folder: Path, *, step: int, checkpoint: bool = True, method: str = "dino", **scores: float) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"method: {method}\nsteps: 20\nencoder: {{variant: vit_micro}}\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": step} | scores) + "\n")
    if checkpoint:
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    return folder


def test_runs_are_listed_with_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a-finished", step=20, knn_top1=0.75, linear_top1=0.8125)
    stopped = make(tmp_path / "b-stopped", step=10)
    make(tmp_path / "c-early", step=0, checkpoint=False)
    make(tmp_path / "d-tuned", step=20, method="finetune", val_top1=0.5)
    running = make(tmp_path / "e-running", step=5)
    assert holder(running) is None
    with locked(running):
        assert "process" in str(holder(running))
        run(RunsSettings(folders=[str(tmp_path)]))
    assert holder(running) is None
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.split()}
    assert lines["a-finished"][1:] == ["dino", "vit_micro", "20/20", "finished", "75.0", "81.2", "now"]
    assert lines["b-stopped"][1:] == ["dino", "vit_micro", "10/20", "stopped", "now"]
    assert lines["c-early"][3:6] == ["0/20", "no", "checkpoint"]
    assert lines["d-tuned"][4:] == ["finished", "50.0", "now"]
    assert lines["e-running"][4] == "running"
    assert lines["continue:"] == ["continue:", "tessera", "pretrain", "--resume", str(stopped)]


def test_a_dead_holder_holds_nothing(tmp_path: Path) -> None:
    with locked(tmp_path):
        (lock,) = tmp_path.glob(".lock-*")
        record = json.loads(lock.read_text())
    lock.write_text(json.dumps(record | {"started": "long ago"}))
    assert holder(tmp_path) is None
    lock.write_text(json.dumps(record | {"machine": "another"}))
    assert "process" in str(holder(tmp_path))


def test_without_runs_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReportError, match=r"start a run: tessera pretrain --data IMAGES"):
        run(RunsSettings())
