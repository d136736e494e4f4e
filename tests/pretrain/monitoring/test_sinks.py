"""Every sink holds each step once, whether the run was stopped or not."""

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.pretrain.command_line import load
from tessera.pretrain.monitoring import sinks
from tessera.pretrain.monitoring.recorder import Recorder
from tessera.pretrain.monitoring.sinks import CSV, MetricsConfig, keep_lines
from tessera.runtime.user_error import UserError

PICTURE = np.full((4, 6, 3), 7, dtype=np.uint8)


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"the package {package} is not installed")


def stopped_and_resumed(output: Path, name: Any, **settings: Any) -> None:
    """Record steps 0 to 5, then resume after step 3 and record steps 4 to 7. `knn_top1` appears at steps 0 and 7."""
    output.mkdir(exist_ok=True)
    for first, last in ((0, 5), (4, 7)):
        recorder = Recorder(output, max(first - 1, 0), MetricsConfig(sinks=(name,)), settings)
        for step in range(first, last + 1):
            record = {"step": step, "images": 16 * step, "loss": float(step)}
            if step == 2:
                record["loss"] = float("nan")
            if step in (0, 7):
                recorder.pictures(step, {"crops": PICTURE})
                record["knn_top1"] = 0.25
            recorder.scalars(record)
        recorder.close()


def rows(output: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((output / "metrics.csv").read_text().splitlines()))


def test_csv_holds_each_step_once(tmp_path: Path) -> None:
    stopped_and_resumed(tmp_path, "csv")
    found = rows(tmp_path)
    assert [int(row["step"]) for row in found] == list(range(8))
    assert [row["loss"] for row in found] == [str(float(s)) if s != 2 else "" for s in range(8)]
    assert [row["knn_top1"] for row in found] == ["0.25", *[""] * 6, "0.25"]


def test_a_step_that_is_evaluated_again_replaces_its_line(tmp_path: Path) -> None:
    """A resumed run evaluates the step of its checkpoint if it was stopped before, or if the images are others."""
    for step in (0, 2):
        csv_file, lines = sinks.CSV(tmp_path, step, {}), sinks.JSONLines(tmp_path, step, {})
        for sink in (csv_file, lines):
            if step == 0:
                for number in range(4):
                    sink.write(number, {"loss": number})
            else:
                sink.write(2, {"loss": 2.0, "knn_top1": 0.5})
                sink.write(3, {"loss": 3.5})
    assert [(row["step"], row["loss"], row["knn_top1"]) for row in rows(tmp_path)] == [
        ("0", "0", ""), ("1", "1", ""), ("2", "2.0", "0.5"), ("3", "3.5", "")
    ]  # fmt: skip
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found[2:] == [{"step": 2, "loss": 2.0, "knn_top1": 0.5}, {"step": 3, "loss": 3.5}]
    sinks.JSONLines(tmp_path, 3, {}).write(3, {"knn_top1": 0.75})
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1]) == {
        "step": 3,
        "loss": 3.5,
        "knn_top1": 0.75,
    }


def test_csv_takes_new_columns_and_drops_a_partial_line(tmp_path: Path) -> None:
    sink = sinks.CSV(tmp_path, 0, {})
    sink.write(0, {"images": 0})
    sink.write(1, {"images": 16, "loss": 0.5})
    sink.write(2, {"images": 32, "loss": 0.25, "knn_top1": 0.125})
    assert rows(tmp_path)[0] == {"step": "0", "images": "0", "loss": "", "knn_top1": ""}
    assert rows(tmp_path)[2] == {"step": "2", "images": "32", "loss": "0.25", "knn_top1": "0.125"}
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("3,4")  # killed in the middle of a line
    sink = sinks.CSV(tmp_path, 2, {})
    sink.write(3, {"images": 48, "loss": 0.125})
    assert [row["step"] for row in rows(tmp_path)] == ["0", "1", "2", "3"]
    assert sinks.CSV(tmp_path, 0, {})
    assert rows(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


@needs("wandb")
@pytest.mark.slow
def test_wandb_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    output = tmp_path / "my run"
    stopped_and_resumed(output, "wandb", optim={"lr": 0.5})
    known = json.loads((output / "tracking.json").read_text())["wandb"]
    assert known["name"] == "my run"
    folders = sorted((output / "wandb").glob("offline-run-*"))
    assert {folder.name.split("-")[3] for folder in folders} == {known["id"]}
    assert all(list(folder.glob("*.wandb")) for folder in folders)
    assert list((output / "wandb").glob("offline-run-*/files/media/images/crops_*.png"))


@needs("mlflow")
def test_mlflow_holds_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # versions that prefer a database refuse files without
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    output = tmp_path / "my run"
    stopped_and_resumed(output, "mlflow", optim={"lr": 0.5}, many={str(i): "x" * 600 for i in range(150)})
    known = json.loads((output / "tracking.json").read_text())["mlflow"]
    client = mlflow.MlflowClient()
    run = client.get_run(known["id"])
    assert (run.info.run_name, run.info.status) == ("my run", "FINISHED")
    assert run.data.params["optim.lr"] == "0.5"
    assert len(run.data.params) == 151
    steps = [(metric.step, metric.value) for metric in client.get_metric_history(known["id"], "images")]
    assert sorted(steps) == [(step, 16.0 * step) for step in range(8)]
    losses = [(metric.step, metric.value) for metric in client.get_metric_history(known["id"], "loss")]
    assert sorted(losses) == [(step, float(step)) for step in range(8) if step != 2]
    pictures = [artifact.path for artifact in client.list_artifacts(known["id"], "pictures")]
    assert pictures == ["pictures/crops-00000000.png", "pictures/crops-00000007.png"]


def test_sinks_are_chosen_by_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load([]).metrics.sinks == ("jsonl", "tensorboard")
    assert load(["--metrics.sinks", "jsonl,csv,csv"]).metrics.sinks == ("jsonl", "csv")
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    for name in sinks.OPTIONAL_PACKAGES:
        with pytest.raises(UserError, match=rf"package {name} is not installed\. Install it with `pip install {name}`"):
            load(["--metrics.sinks", f"jsonl,{name}"])
    with pytest.raises(UserError, match=r"metrics\.sinks"):
        load(["--metrics.sinks", "pigeon"])


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = [f'{{"step": {step}, "loss": 0.5}}' for step in range(1, 5)]
    bad = ["7", "[1]", "null", '{"step": "2"}', '{"loss": 1}', "{\0", "[" * 100_000, '{"step": [1]}']
    path = tmp_path / "metrics.jsonl"
    text = "\n".join([*good[:2], *bad, *good[2:], '{"step": 5, "lo']).encode()
    path.write_bytes(text.replace(b"[1]", b"\xff\xfe", 1))
    keep_lines(path, 3)
    assert path.read_text().splitlines() == good[:3]
    assert f"metrics.jsonl: {len(bad)} damaged line(s) were removed" in caplog.text
    caplog.clear()
    path.write_text(good[0] + '\n{"step": 2, "lo')
    keep_lines(path, 3)
    assert path.read_text().splitlines() == good[:1]
    assert not caplog.text


def test_damaged_rows_of_csv_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.csv"
    bad = [b"x,0.5", b"2", b"2,1,1", b"\xff,1", b"", b"9" * 5000 + b",1", b"2," + b"9" * 200_000]
    path.write_bytes(b"\n".join([b"step,loss", b"1,0.5", *bad, b"2,0.\0", b"3,0.25", b"4,1", b"5,"]))
    CSV(tmp_path, 3, {})
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3"]
    assert f"metrics.csv: {len(bad)} damaged line(s) were removed" in caplog.text
    path.write_bytes(b"")
    CSV(tmp_path, 3, {}).write(4, {"loss": 1.0})
    assert rows(tmp_path) == [{"step": "4", "loss": "1.0"}]
