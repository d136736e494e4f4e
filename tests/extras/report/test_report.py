"""The command: the files that it writes, and runs that cannot be read."""

import csv
from pathlib import Path

import pytest

from tessera.extras.report.report import ReportSettings, run
from tessera.extras.report.run_folders import ReportError
from tessera.runtime.settings import flags, validate
from tests.extras.report.made import make_run, record


def command(*argv: str) -> None:
    run(validate(ReportSettings, flags(ReportSettings, argv, "report.py")))


def test_the_files_hold_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, accuracy in {"low": 0.2, "high": 0.8}.items():
        make_run(tmp_path / "runs" / name, [record(20, 1.0, knn_top1=accuracy)])
    with (tmp_path / "runs" / "low" / "metrics.jsonl").open("a") as file:
        file.write("broken\nbroken\n")
    out = tmp_path / "new" / "page.html"
    command(
        str(tmp_path / "runs"), str(tmp_path), "--output", str(out), "--csv", str(tmp_path / "t.csv"), "--markdown",
        str(tmp_path / "t.md"),
    )  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert [row["run"] for row in rows] == ["high", "low"]
    assert [row["20-NN in training, val, %"] for row in rows] == ["80.0", "20.0"]
    assert (tmp_path / "t.md").read_text().splitlines()[2].startswith("| high | 80.0 |")
    printed = " ".join(capsys.readouterr().out.split())
    assert "low: Line 2 of" in printed
    assert str(out) in printed
    text = out.read_text()
    assert "low: Line 2 of" in text


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="is not a folder"):
        command(str(tmp_path / "none"))
    folder = make_run(tmp_path / "a", [record(20, 1.0)])
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match="cannot be written"):
        command(str(folder), "--output", str(tmp_path / "file" / "page.html"))
