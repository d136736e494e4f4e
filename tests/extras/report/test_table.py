"""The table: order, columns, and the same cells in the terminal, in CSV and in Markdown."""

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tessera.extras.report.run_folders import ReportError, RunFolder, read_runs
from tessera.extras.report.table import MISSING, Table, make_table, print_table, to_csv, to_markdown, verdict
from tests.extras.report.made import MACHINE, add_result, make_run, record


def runs_of(tmp_path: Path) -> list[RunFolder]:
    """Return four runs: worst, best, none without any result, mae."""
    knn = {"worst": 0.3, "best": 0.9, "mae": 0.5}
    for name, accuracy in knn.items():
        method = {"method": "mae", "mae": {"mask_ratio": 0.75}} if name == "mae" else {"dino": {"momentum": 0.9}}
        settings = method | {"optim": {"lr": {"worst": 1.0, "best": 0.1, "mae": 0.2}[name], "betas": [0.9, 0.95]}}
        lines = [{"step": 0, "images": 0, "knn_top1": 0.1}, record(20, 2.0, knn_top1=accuracy)]
        make_run(tmp_path / name, lines, workers=len(name), loader={"crops": name}, **settings)
    make_run(tmp_path / "none", [record(5, 2.5)])
    return read_runs([tmp_path / name for name in ("none", "worst", "best", "mae")])[0]


def column(table: Table, title: str) -> list[str]:
    return [row[table.titles.index(title)] for row in table.rows]


def test_best_first_and_runs_without_result_last(tmp_path: Path) -> None:
    table = make_table(runs_of(tmp_path))
    assert [run.name for run in table.runs] == column(table, "run") == ["best", "mae", "worst", "none"]
    assert table.sorted_by == "20-NN in training, val, %"
    assert column(table, "20-NN in training, val, %") == ["90.0", "50.0", "30.0", "–"]
    assert column(table, "20-NN in training, val, at step 0, %") == ["10.0", "10.0", "10.0", "–"]
    assert column(table, "steps done") == ["20", "20", "20", "5 of 20"]
    assert column(table, "training, h:mm:ss") == ["0:00:40", "0:00:40", "0:00:40", "0:00:10"]
    assert "linear" not in " ".join(table.titles)
    losses = make_table(table.runs, "loss")
    assert column(losses, "loss") == ["2", "2", "2", "2.5"]
    with pytest.raises(ReportError, match="20-NN in training"):
        make_table(table.runs, "accuracy")


def test_the_result_that_all_runs_have_sorts(tmp_path: Path) -> None:
    runs = runs_of(tmp_path)
    for name, score in {"none": 0.8, "worst": 0.7, "best": 0.4, "mae": 0.6}.items():
        add_result(tmp_path / name, "probe.json", protocol="linear probe", top1=score, step=20)
    add_result(tmp_path / "worst", "best.json", protocol="fine-tuning", top1=1.0, step=20)
    table = make_table(read_runs([run.folder for run in runs])[0])
    assert column(table, "run") == ["none", "worst", "mae", "best"]
    assert [one.title for one in table.columns if one.kind == "result"] == [
        "linear probe, %",
        "20-NN in training, val, %",
        "fine-tuning, %",
    ]
    assert column(table, "fine-tuning, %") == ["–", "100.0", "–", "–"]


def test_the_first_sentence_says_who_is_best(tmp_path: Path) -> None:
    runs = runs_of(tmp_path)
    assert verdict(make_table(runs)) == "best is best: 90.0 % (20-NN), 40.0 points above mae."
    assert verdict(make_table(runs[1:2])) == "worst: 30.0 % (20-NN), 10.0 % before training."
    assert verdict(make_table(runs[:1])) == "No run has a score yet."
    assert verdict(make_table(runs, "loss")) == ""
    near = make_run(tmp_path / "near", [record(20, 2.0, knn_top1=0.89)])
    close = verdict(make_table(read_runs([tmp_path / "best", near])[0]))
    assert close.startswith("best is best: 90.0 % (20-NN), 1.0 points above near. A lead below 3 points may be chance")


def test_scores_of_different_steps_say_their_steps(tmp_path: Path) -> None:
    for name, scores in {"long": {10: 0.4, 30: 0.7}, "short": {10: 0.6}, "other": {15: 0.2}}.items():
        make_run(tmp_path / name, [record(step, 2.0, knn_top1=score) for step, score in scores.items()])
    table = make_table(read_runs([tmp_path])[0])
    assert column(table, "20-NN in training, val, %") == ["70.0 (step 30)", "60.0 (step 10)", "20.0 (step 15)"]
    said = "long at step 30 is best: 70.0 % (20-NN), 10.0 points above short at step 10. At step 10, they have "
    assert verdict(table) == f"{said}40.0 and 60.0 %."
    table = make_table(read_runs([tmp_path / "long", tmp_path / "other"])[0])
    assert verdict(table).endswith("above other at step 15. They have no score at an equal step.")


def test_runs_without_a_common_score_are_not_ranked(tmp_path: Path) -> None:
    """The weaker run must not come first because its score is in the first column."""
    weak = make_run(tmp_path / "weak", [record(20, 2.0, knn_top1=0.2)])
    strong = make_run(tmp_path / "strong", [record(20, 2.0)])
    add_result(strong, "probe.json", protocol="linear probe", data="val", top1=0.9, step=20)
    table = make_table(read_runs([strong, weak])[0])
    assert table.sorted_by is None
    assert column(table, "run") == ["strong", "weak"]
    assert verdict(table).startswith("These runs cannot be compared, because no score is common to all of them (")
    assert "20-NN: weak" in verdict(table)
    assert "linear probe: strong" in verdict(table)
    add_result(weak, "probe.json", protocol="linear probe", data="val", top1=0.95, step=20)
    table = make_table(read_runs([strong, weak])[0])
    assert (table.sorted_by, column(table, "run")) == ("linear probe, val, %", ["weak", "strong"])
    # one more column for the first score only, and headings without the one data set
    assert [one.heading for one in table.columns[:4]] == ["run", "linear probe, %", "20-NN, %", "loss"]
    assert make_table(table.runs, "20-NN, %").sorted_by == "20-NN in training, val, %"


def test_settings_that_differ_are_columns(tmp_path: Path) -> None:
    table = make_table(runs_of(tmp_path))
    settings = [one for one in table.columns if one.kind == "setting"]
    # betas and steps are equal; workers and loader do not change what is learned; one method alone has mask_ratio
    assert [one.title for one in settings] == ["method", "optim.lr"]
    assert column(table, "optim.lr") == ["0.1", "0.2", "1.0", "–"]
    assert not any(one.follows_method for one in settings)
    two = make_table([run for run in table.runs if run.name in ("best", "mae")])
    assert {one.title: one.follows_method for one in two.columns if one.kind == "setting"} == {
        "method": False,
        "optim.lr": True,
    }


def printed(table: Table, width: int) -> list[list[str]]:
    """Return the cells of the table as a terminal shows them."""
    console = Console(file=io.StringIO(), width=width)
    print_table(table, console)
    assert isinstance(console.file, io.StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if "┃" in line or "│" in line]
    return [[cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]] for line in lines]


def test_cells_are_escaped_for_each_format(tmp_path: Path) -> None:
    texts = {"equals": "=1+1", "at": "@x", "tag": "<b>x</b>", "link": "[x](y)", "number": "-1"}
    for name, text in texts.items():
        make_run(tmp_path / name, [record(20, 3.0)], method=text)
    table = make_table(read_runs([tmp_path])[0])
    assert set(texts.values()) <= {cell for row in table.rows for cell in row}
    cells = {cell for row in csv.reader(io.StringIO(to_csv(table))) for cell in row}
    assert {"'=1+1", "'@x", "<b>x</b>", "-1"} <= cells
    assert not cells & {"=1+1", "@x"}
    for text in ("&lt;b&gt;x&lt;/b&gt;", r"\[x\](y)", "=1+1"):
        assert f"| {text} |" in to_markdown(table)


def test_terminal_csv_and_markdown_show_the_same_cells(tmp_path: Path) -> None:
    make_run(tmp_path / "strange, |[b]name", [record(20, 3.0, knn_top1=0.2)])
    table = make_table([*runs_of(tmp_path), *read_runs([tmp_path / "strange, |[b]name"])[0]])
    expected = [table.titles, *table.rows]
    without_dashes = [["" if cell == MISSING else cell for cell in row] for row in expected]
    assert list(csv.reader(io.StringIO(to_csv(table)))) == without_dashes != expected
    expected[0] = [one.heading for one in table.columns]
    assert printed(table, 400) == expected
    assert printed(table, 100) == [list(line) for line in zip(*expected, strict=True)]  # too narrow: runs are columns
    lines = to_markdown(table).splitlines()
    assert len(lines) == 2 + len(table.rows)
    assert r"| strange, \|\[b\]name |" in to_markdown(table)
    cells = [line.replace(r"\|", "").count("|") for line in lines]
    assert cells == [len(table.titles) + 1] * len(lines)


def test_a_forecast_is_a_column_of_its_own(tmp_path: Path) -> None:
    for name, last in (("done", 5), ("half", 3), ("early", 1)):
        curve = [record(100 * step, 1.0, knn_top1=0.8 - 0.5 / (1 + step)) for step in range(last + 1)]
        make_run(tmp_path / name, curve, steps=500)
    columns = {column.title: column for column in make_table(read_runs([tmp_path])[0]).columns}
    column = columns["20-NN in training, val, forecast at the end, %"]
    text = column.cells[1].text
    assert [cell.text for cell in column.cells] == [MISSING, text, MISSING]
    assert text.startswith(("71.", "72.")), "0.8 - 0.5 / 6 = 71.7 %"


def test_paths_of_the_same_images_are_no_difference(tmp_path: Path) -> None:
    for name, content in (("a", "11"), ("b", "11")):
        folder = make_run(tmp_path / name, [record(10, 1.0)], evaluation={"val": f"{name}/val.tar"})
        (folder / "machine.jsonl").write_text(json.dumps(MACHINE | {"evaluation.val": content}) + "\n")
    assert "evaluation.val" not in make_table(read_runs([tmp_path])[0]).titles
    (tmp_path / "b" / "machine.jsonl").write_text(json.dumps(MACHINE | {"evaluation.val": "22"}) + "\n")
    assert "evaluation.val" in make_table(read_runs([tmp_path])[0]).titles
