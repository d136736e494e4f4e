"""The files that a run writes while it trains."""

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tessera.pretrain.checkpoints.save import _make_empty
from tessera.pretrain.monitoring.recorder import LostFolderError, Recorder, record_start
from tessera.pretrain.monitoring.sinks import MetricsConfig
from tests.launched import records
from tests.pretrain import small


def test_a_resumed_run_leaves_no_step_twice(tmp_path) -> None:
    recorder = Recorder(tmp_path, 0)
    for step in range(6):
        recorder.scalars({"step": step, "loss": float(step)})
    recorder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a kill in mid line
    # TensorBoard reads its files in the order of their names: the time in seconds, then a count of which 10 is before 9
    time.sleep(1)
    recorder = Recorder(tmp_path, 3)
    for step in range(4, 8):
        recorder.scalars({"step": step, "loss": -float(step)})
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(s, float(s if s < 4 else -s)) for s in range(8)]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(e.step, e.value) for e in events] == [(s, float(s if s < 4 else -s)) for s in range(8)]


def test_pictures_and_skipped_samples_are_written(tmp_path) -> None:
    recorder = Recorder(tmp_path, 0)
    recorder.pictures(5, {"crops": np.full((4, 6, 3), 7, dtype=np.uint8)})
    recorder.skipped(5, "loss nan", ["a.tar/1", "a.tar/2"])
    recorder.close()
    assert (tmp_path / "pictures" / "crops.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "skipped.jsonl").read_text())["samples"] == ["a.tar/1", "a.tar/2"]
    assert EventAccumulator(str(tmp_path / "tensorboard")).Reload().Images("crops")[0].step == 5


def test_every_start_adds_a_line(tmp_path: Path) -> None:
    _, engine = small.make()
    for step in (0, 7):
        record_start(tmp_path, step, engine, "fp32", {"evaluation.val": "a1b2"})
    first, second = (json.loads(line) for line in (tmp_path / "machine.jsonl").read_text().splitlines())
    assert (first["step"], second["step"]) == (0, 7)
    assert (first["device"], first["processes"], first["engine"], first["precision"]) == ("cpu", 1, "ddp", "fp32")
    assert first["evaluation.val"] == "a1b2"
    assert first["cores"] == os.cpu_count()
    cpuinfo = Path("/proc/cpuinfo").read_text()
    assert f": {first['processor']}\n" in cpuinfo or first["processor"] == platform.machine()
    assert first["versions"]["python"] == platform.python_version()
    assert first["versions"]["torch"] == importlib.metadata.version("torch")
    started = datetime.datetime.fromisoformat(first["time"])
    assert abs(datetime.datetime.now(datetime.UTC) - started) < datetime.timedelta(minutes=5)


def test_a_lost_log_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path, 0)
    (tmp_path / "tensorboard").rename(tmp_path / "lost")  # at once, because a thread of TensorBoard may write a file
    shutil.rmtree(tmp_path / "lost", ignore_errors=True)
    (tmp_path / "pictures").touch()
    for step in (1, 2):
        recorder.scalars({"step": step, "loss": 1.0})
        recorder.pictures(step, {"crops": np.zeros((4, 6, 3), dtype=np.uint8)})
    recorder.close()
    assert [record["step"] for record in records(tmp_path)] == [1, 2]
    assert caplog.text.count("The run continues without its TensorBoard records") == 1
    assert "pictures'. The run continues without this record" in caplog.text


def test_a_lost_run_folder_is_named(tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()
    recorder = Recorder(output, 0, MetricsConfig(sinks=("jsonl",)))
    output.rename(tmp_path / "moved")
    for write in (
        lambda: recorder.scalars({"step": 1, "loss": 1.0}),
        lambda: recorder.pictures(1, {}),
        lambda: recorder.skipped(1, "loss nan", []),
    ):
        with pytest.raises(LostFolderError, match=r"run was moved or deleted .*--resume"):
            write()
    with pytest.raises(OSError, match="No such file"):
        _make_empty(output / "checkpoints" / ".step-00000001.part", 0)
    assert not output.exists()
