"""The command: the files that it writes, and runs that cannot be read."""

import csv
import json
import re
from pathlib import Path

import pytest

from tessera.extras.report import report
from tessera.extras.report.report import ReportSettings, run
from tessera.extras.report.run_folders import ReportError
from tessera.runtime.settings import flags, validate
from tests.evaluation.conftest import save_encoder
from tests.extras.report.made import make_run, record


def command(*argv: str) -> None:
    run(validate(ReportSettings, flags(ReportSettings, argv, "report.py")))


def test_the_files_hold_the_runs(tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"evaluation": {"val": str(shards / "val-0.tar"), "k": 20}}
    for name, accuracy in {"low": 0.2, "high": 0.8}.items():
        folder = make_run(tmp_path / "runs" / name, [record(20, 1.0, knn_top1=accuracy)], **settings)
        save_encoder(folder / "encoder.safetensors", depth=1, dim=24, heads=2, image_size=16)
    with (tmp_path / "runs" / "low" / "metrics.jsonl").open("a") as file:
        file.write("broken\nbroken\n")
    out = tmp_path / "new" / "page.html"
    command(
        str(tmp_path / "runs"), str(tmp_path), "--output", str(out), "--csv", str(tmp_path / "t.csv"), "--markdown",
        str(tmp_path / "t.md"), "--images", "3",
    )  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert [row["run"] for row in rows] == ["high", "low"]
    assert [row[f"20-NN in training, {shards.name}-val, %"] for row in rows] == ["80.0", "20.0"]
    assert (tmp_path / "t.md").read_text().splitlines()[2].startswith("| high | 80.0 |")
    printed = " ".join(capsys.readouterr().out.split())
    assert "low: Line 2 of" in printed
    assert str(out) in printed
    text = out.read_text()
    assert "Nearest neighbours" in text
    assert "low: Line 2 of" in text
    assert text.count("tokens of image") == 2 * 3
    command(str(tmp_path / "runs"), "--output", str(out), "--no-features")
    assert "Nearest neighbours" not in out.read_text()


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="is not a folder"):
        command(str(tmp_path / "none"))
    folder = make_run(tmp_path / "a", [record(20, 1.0)])
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match="cannot be written"):
        command(str(folder), "--output", str(tmp_path / "file" / "page.html"), "--no-features")


def test_a_watched_page_follows_the_run_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", [record(10, 1.0, knn_top1=0.25)])
    out = tmp_path / "page.html"
    pages: list[str] = []

    def sleep(seconds: float) -> None:
        assert seconds == 7
        pages.append(out.read_text())
        if len(pages) == 2:
            raise KeyboardInterrupt
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record(20, 1.0, knn_top1=0.75)) + "\n")

    monkeypatch.setattr(report.time, "sleep", sleep)
    command(str(folder), "--output", str(out), "--watch", "7")
    assert ["25.0" in page for page in pages] == [True, False]
    assert ["75.0" in page for page in pages] == [False, True]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]


def test_names_of_pages_are_safe_and_differ() -> None:
    names = ["a/b", "a-b", "../x", "\N{GREEK SMALL LETTER LAMDA}" * 200, "<b>"]
    pages = [report.page_name(name) for name in names]
    assert len(set(pages)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,100}", page) for page in pages)
