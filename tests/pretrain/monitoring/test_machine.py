"""The record of where a run trained."""

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path

from tessera.pretrain.monitoring.machine import record_start
from tests.pretrain import small


def test_every_start_adds_a_line(tmp_path: Path) -> None:
    _, engine = small.make()
    for step in (0, 7):
        record_start(tmp_path, step, engine, "fp32")
    first, second = (json.loads(line) for line in (tmp_path / "machine.jsonl").read_text().splitlines())
    assert (first["step"], second["step"]) == (0, 7)
    assert (first["device"], first["processes"], first["engine"], first["precision"]) == ("cpu", 1, "ddp", "fp32")
    assert first["cores"] == os.cpu_count()
    cpuinfo = Path("/proc/cpuinfo").read_text()
    assert f": {first['processor']}\n" in cpuinfo or first["processor"] == platform.machine()
    assert first["versions"]["python"] == platform.python_version()
    assert first["versions"]["torch"] == importlib.metadata.version("torch")
    started = datetime.datetime.fromisoformat(first["time"])
    assert abs(datetime.datetime.now(datetime.UTC) - started) < datetime.timedelta(minutes=5)
