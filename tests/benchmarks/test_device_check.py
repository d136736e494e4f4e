"""The stages of benchmarks/device_check.py: a stage that goes wrong costs itself only."""

import importlib
import signal
import sys
from pathlib import Path

import device_check
import pytest
import torch
from device import runner
from device.runner import Stage
from device_check import DeviceCheck

from tessera.runtime.machine import start_time
from tests.launched import ROOT

ROW = """
import sys
sys.path.insert(0, {benchmarks!r})
from pathlib import Path
from device.runner import append
append(Path({output!r}), {{"stage": {name!r}, "value": {value}}})
"""


def stage(output: Path, name: str, value: int, then: str = "", seconds: float = 20) -> Stage:
    """A stage that appends one row and then runs some code."""
    code = ROW.format(benchmarks=str(ROOT / "benchmarks"), output=str(output), name=name, value=value)
    return Stage(name, [sys.executable, "-c", code + then], seconds)


@pytest.mark.medium
def test_a_stage_that_goes_wrong_costs_itself_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = tmp_path / "child"
    hang = f"""
import subprocess, time
sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
Path({str(child)!r}).write_text(str(sleeper.pid))
time.sleep(1000)
"""
    garbage = """
import os
os.write(1, bytes(range(256)) * 50)
with open(OUTPUT / "results.jsonl", "ab") as file:
    file.write(b'{"stage": "forged"')
print("the last word | of the stage")
raise SystemExit(3)
""".replace("OUTPUT", f"Path({str(tmp_path)!r})")
    stages = [
        stage(tmp_path, "good", 1),
        stage(tmp_path, "raises", 2, "raise ValueError('broken\\x1b[31m')"),
        stage(tmp_path, "hangs", 3, hang, seconds=5),
        stage(tmp_path, "garbage", 4, garbage),
        stage(tmp_path, "killed", 5, f"import os; os.kill(os.getpid(), {signal.SIGSEGV})"),
        stage(tmp_path, "last", 6),
    ]
    assert not runner.run_stages(stages, tmp_path, 5, "# Title")
    rows = runner.rows(tmp_path)
    assert [row["value"] for row in rows if "value" in row] == [1, 2, 3, 4, 5, 6]
    results = {row["stage"]: row for row in rows if "result" in row}
    assert [result["result"] for result in results.values()] == [
        "passed", "failed: exit code 1", "failed: ran longer than 10 s", "failed: exit code 3",
        "failed: ended by SIGSEGV", "passed",
    ]  # fmt: skip
    assert "ValueError: broken\\x1b[31m" in results["raises"]["last lines"]
    assert results["garbage"]["last lines"].endswith("the last word | of the stage")
    assert "last lines" not in results["good"]
    assert start_time(int(child.read_text())) is None  # what the stage had started in a session of its own is gone too
    table = (tmp_path / "results.md").read_text()
    assert table.startswith("# Title\n")
    assert table.index("## good") < table.index("## raises") < table.index("## last")
    assert "the last word \\| of the stage" in table
    assert "hangs: failed: ran longer than 10 s" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_exit_code_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert device_check.main(DeviceCheck(output=tmp_path / "output")) == 1
    assert "There is no GPU" in capsys.readouterr().out
    assert not (tmp_path / "output").exists()


def test_the_function_of_each_stage_exists() -> None:
    for place, _ in device_check.STAGES.values():
        module, function = place.split(".")
        assert callable(getattr(importlib.import_module(f"device.{module}"), function))
    assert sum(seconds for _, seconds in device_check.STAGES.values()) <= 60 * DeviceCheck().minutes
    assert device_check.chosen(DeviceCheck(stages=["run", "equality"])) == ["run", "equality"]
    with pytest.raises(ValueError, match="There is no stage nothing"):
        device_check.chosen(DeviceCheck(stages="nothing"))
