"""The stages of benchmarks/device_check.py: a stage that goes wrong costs itself only."""

import importlib
import signal
import sys
from pathlib import Path

import device_check
import pytest
import torch
from device import ceilings, runner
from device.runner import Stage
from device.steps import covered
from device_check import DeviceCheck

from tessera.runtime.machine import start_time
from tessera.runtime.settings import SettingsError
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
        stage(tmp_path, "hangs", 3, hang, seconds=1.5),
        stage(tmp_path, "garbage", 4, garbage),
        stage(tmp_path, "killed", 5, f"import os; os.kill(os.getpid(), {signal.SIGSEGV})"),
        stage(tmp_path, "last", 6),
    ]
    assert not runner.run_stages(stages, tmp_path, 5, "# Title")
    rows = runner.rows(tmp_path)
    assert [row["value"] for row in rows if "value" in row] == [1, 2, 3, 4, 5, 6]
    results = {row["stage"]: row for row in rows if "result" in row}
    assert [result["result"] for result in results.values()] == [
        "passed", "failed: exit code 1", "failed: ran longer than 3 s", "failed: exit code 3",
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
    assert "hangs: failed: ran longer than 3 s" in capsys.readouterr().out


def test_rows_of_an_earlier_check_stay_and_are_not_in_the_table(tmp_path: Path) -> None:
    assert runner.run_stages([stage(tmp_path, "first", 10)], tmp_path, 1, "# One")
    assert runner.run_stages([stage(tmp_path, "second", 20)], tmp_path, 1, "# Two")
    assert [row["value"] for row in runner.rows(tmp_path) if "value" in row] == [10, 20]
    table = (tmp_path / "results.md").read_text()
    assert "## second" in table
    assert "first" not in table


def test_a_stage_that_does_not_start_has_not_passed(tmp_path: Path) -> None:
    assert not runner.run_stages([stage(tmp_path, "late", 1)], tmp_path, 0.01, "# Title")
    (row,) = runner.rows(tmp_path)
    assert row["result"].startswith("not started")


def test_a_stage_may_use_the_time_that_earlier_stages_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def run_stage(stage: Stage, output: Path, limit: float) -> runner.Row:
        limits.append(limit)
        return {"result": "passed"}

    monkeypatch.setattr(runner, "run_stage", run_stage)
    stages = [Stage(f"{seconds} s", [], seconds) for seconds in (10, 20, 30)]
    assert runner.run_stages(stages, tmp_path, 1, "# Title")
    assert limits == pytest.approx([10, 30, 60], abs=1)


def test_rows_of_equal_keys_share_a_table(tmp_path: Path) -> None:
    rows = [{"stage": "one", "a": 1, "b": 0.123456}, {"stage": "one", "a": 2, "b": 12345.6}, {"stage": "one", "c": "|"}]
    lines = runner.markdown([*rows, {"stage": "one", "result": "passed", "seconds": 2.0}]).splitlines()
    assert lines[:8] == [
        "## one", "", "result passed, seconds 2", "", "| a | b |", "|---|---|", "| 1 | 0.1235 |", "| 2 | 12,346 |",
    ]  # fmt: skip
    assert lines[9:12] == ["| c |", "|---|", "| \\| |"]


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


def test_a_row_that_is_not_ok_fails_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ceilings, "ceilings", lambda small: iter([{"a": 1}, {"a": 2, "ok": False}, {"a": 3, "ok": True}])
    )
    assert device_check.run_one(tmp_path, "ceilings") == 1
    assert [row["a"] for row in runner.rows(tmp_path)] == [1, 2, 3]


def test_union_of_intervals() -> None:
    assert covered([(0, 2), (1, 3), (1, 2), (5, 6)]) == 4


def test_wheels_are_made_of_a_copy_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def pip(*arguments: str) -> None:
        commands.append(arguments)
        if Path(arguments[-1]).is_dir():
            assert {"pyproject.toml", "data"} <= {path.name for path in Path(arguments[-1]).iterdir()}
            (tmp_path / "tessera_ssl-1-py3-none-any.whl").write_bytes(bytes(2_000_000))

    monkeypatch.setattr(device_check, "pip", pip)
    device_check.make_wheels(tmp_path, "3.12")
    assert Path(commands[-1][-1]) != ROOT
    assert "2.00 MB  tessera_ssl" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="not empty"):
        device_check.make_wheels(tmp_path, "3.12")
