"""The page: escaped texts, damaged pictures, and its behaviour in Chromium."""

import csv
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tessera.extras.report import report
from tessera.extras.report.page import machine_facts, render, run_pictures
from tessera.extras.report.run_folders import RunFolder, read_runs
from tessera.extras.report.table import make_table
from tessera.runtime.settings import validate
from tests.extras.report.made import add_result, make_run, record

EVIL = "<script>alert(1)</script>"


class Cells(HTMLParser):
    """Collects the texts of the cells of the table of runs, and all tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "table":
            self.inside = ("id", "runs") in attrs
        if self.inside and tag == "tr":
            self.rows.append([])
        if self.inside and tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "table"

    def handle_data(self, data: str) -> None:
        if self.inside and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def three_runs(folder: Path) -> list[RunFolder]:
    for name, accuracy in {"a": 0.3, "b": 0.9, "c & d": 0.5}.items():
        knn = [{"step": 0, "images": 0, "knn_top1": 0.1}, record(10, 3.0), record(20, 2.0, knn_top1=accuracy)]
        run = make_run(folder / name, knn, seed=len(name), optim={"lr": accuracy})
        for step in (10, 20):
            add_result(run, f"{step}.json", protocol="linear probe", top1=accuracy - step / 1000, step=step)
    return read_runs([folder])[0]


def page_of(runs: list[RunFolder], problems: list[str] | None = None) -> str:
    table = make_table(runs)
    pictures, damaged = run_pictures(table.runs)
    return render("Runs", table, pictures, [*(problems or []), *damaged])


def test_the_page_shows_the_table_best_first(tmp_path: Path) -> None:
    runs = three_runs(tmp_path)
    table = make_table(runs)
    rows = Cells(page_of(runs)).rows
    assert rows == [[column.heading for column in table.columns], *table.rows]
    assert [row[0] for row in rows[1:]] == ["b", "c & d", "a"]


def test_texts_of_run_folders_are_escaped(tmp_path: Path) -> None:
    name = EVIL.replace("/", "")
    evil = make_run(tmp_path / name, [record(20, 2.0)], seed=EVIL, method=EVIL, evaluation={"val": EVIL, "k": EVIL})
    other = make_run(tmp_path / "other", [record(20, 2.0, knn_top1=0.5)])
    for step in (10, 20):
        add_result(evil, f"{step}.json", protocol=EVIL, data=EVIL, top1=0.5, step=step)
    (evil / "pictures" / "attention.png").rename(evil / "pictures" / f"{name}.png")
    (evil / "machine.jsonl").write_text(json.dumps({"device": EVIL, "versions": {EVIL: EVIL}}))
    text = page_of(read_runs([evil, other])[0], [EVIL])
    assert EVIL not in text
    assert name not in text
    assert Cells(text).tags.count("script") == 1  # the page's own
    assert any(EVIL in cell for row in Cells(text).rows for cell in row)


def hostile(folder: Path) -> Path:
    """Write a run folder with values of wrong types and sizes, control characters, and files that never end."""
    odd = "\x1b[31m=1+1"
    run = make_run(folder, [record(1, 1.0)], optim={"lr": odd}, steps="many", evaluation={"val": 5, "k": [1]})
    lines = [
        record(2, 10**400, speed=0),
        record(3, 1e308, speed=5e-324),
        {"step": 10**400},
        {"step": -1},
        {"step": "4"},
    ]
    lines += [record(4, "x", speed=[1], knn_top1=0.5, linear_top1={}), {**record(5, 1.0, speed=1e-300), "images": 1e30}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + "[" * 100_000 + "\n7\n"
    (run / "metrics.jsonl").open("a").write(text)
    (run / "machine.jsonl").write_text('{"device": "\\ud800\\u001b[1m", "versions": [1], "time": 7}\n')
    evaluation = run / "evaluation"
    add_result(run, "a.json", protocol="\ud800", top1=10**400)
    add_result(run, "b.json", protocol="\ud800=", top1=0.5, step=10**400, time=3)
    (evaluation / "c.json").write_text("[" * 100_000)
    os.mkfifo(evaluation / "d.json")
    (evaluation / "e.json").symlink_to("/dev/zero")
    os.mkfifo(run / "pictures" / "pipe.png")
    (run / "pictures" / "zero.png").symlink_to("/dev/zero")
    with (run / "pictures" / "large.png").open("w") as file:
        file.truncate(2**30)
    return run


def test_hostile_run_folders_hide_no_other_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_run(tmp_path / "good", [record(20, 2.0)], name="<b>@x")
    hostile(tmp_path / os.fsdecode(b"bad\xff"))
    pipes = make_run(tmp_path / "pipes", [])
    for name in ("metrics.jsonl", "machine.jsonl"):
        (pipes / name).unlink()
        os.mkfifo(pipes / name)
    files = {name: tmp_path / name for name in ("page.html", "t.csv", "t.md")}
    report.run(
        validate(
            report.ReportSettings,
            {"runs": [str(tmp_path)], "output": files["page.html"], "csv": files["t.csv"], "markdown": files["t.md"]},
        )
    )
    printed = capsys.readouterr().out
    for words in ("evaluation.val", "nested too deeply", "not a regular file", "larger than the limit"):
        assert words in printed
    assert "\x1b" not in printed + "".join(path.read_text() for path in files.values())
    assert "good" in files["page.html"].read_text()
    cells = list(csv.reader(files["t.csv"].read_text().splitlines()))
    assert not [cell for row in cells for cell in row if cell.startswith(("=", "@"))]
    assert "<b>" not in files["t.md"].read_text()


def test_a_damaged_picture_is_named_and_left_out(tmp_path: Path) -> None:
    runs = three_runs(tmp_path)
    (tmp_path / "a" / "pictures" / "attention.png").write_bytes(b"\x89PNG damaged")
    text, (_, problems) = page_of(runs), run_pictures(runs)
    assert len(problems) == 1
    assert "a/pictures/attention.png" in problems[0]
    assert problems[0].split(":")[0] in text
    assert text.count('alt="attention of') == 2


def test_facts_of_the_last_start_are_shown(tmp_path: Path) -> None:
    three_runs(tmp_path)
    (tmp_path / "a" / "machine.jsonl").unlink()
    with (tmp_path / "b" / "machine.jsonl").open("a") as file:
        file.write('{"device": "H100", "processes": 8, "processor": "Some CPU", "cores": 4}\n')
    runs = read_runs([tmp_path])[0]
    b, c = (machine_facts(run) for run in runs[1:])
    assert (b["device"], b["processor"], b["starts"], b["images/s"]) == ("8 x H100", "Some CPU, 4 cores", "2", "32")
    assert (c["device"], c["starts"], c["versions"]) == ("2 x cpu", "1", "python 3.11.7, torch 2.15.0")
    text = page_of(runs)
    assert "8 x H100" in text
    assert text.count("<td>Some CPU, 4 cores</td>") == 2


def test_a_run_without_anything_gets_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    runs, _ = read_runs([tmp_path])
    text = render("Runs", make_table(runs), {}, [])
    assert Cells(text).rows[1][0] == tmp_path.name


@pytest.mark.medium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_chromium(browser: Any, tmp_path: Path, scheme: str) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_of(three_runs(tmp_path / "runs")))
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    said: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    images = page.eval_on_selector_all("img", "all => all.map(one => [one.complete, one.naturalWidth])")
    assert len(images) == 3  # attention
    assert all(complete and width > 0 for complete, width in images)
    assert page.locator(".charts svg").count() == 3  # k-NN, loss, linear probe
    first = "all => all.map(row => row.cells[0].innerText.trim())"
    assert page.eval_on_selector_all("#runs tbody tr", first) == ["b", "c & d", "a"]
    heading = page.locator("#runs th", has_text="linear probe")
    assert heading.get_attribute("aria-sort") == "descending"
    heading.click()
    assert page.eval_on_selector_all("#runs tbody tr", first) == ["a", "c & d", "b"]
    page.locator("#runs th", has_text="run").first.click()
    assert page.eval_on_selector_all("#runs tbody tr", first) == ["a", "b", "c & d"]
    ink, paper = (
        [int(part) for part in re.findall(r"\d+", page.evaluate(f"getComputedStyle(document.body).{name}"))[:3]]
        for name in ("color", "backgroundColor")
    )
    assert (sum(ink) < sum(paper)) == (scheme == "light")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("#filter").fill("LR 0.5")
    assert page.locator("#runs td.run:visible").all_inner_texts() == ["c & d"]
    page.locator("#filter").fill("lr 0.5 x")
    assert page.locator("#runs tbody:visible").count() == 0
    page.close()
    assert said == []
    assert [url for url in requests if not url.startswith("data:")] == [file.as_uri()]


def many_settings(folder: Path) -> list[RunFolder]:
    """Read runs with long names, several data sets, 20 settings that differ, and unfinished curves."""
    for number, name in enumerate(("short", "a-long-name-" * 7, "a_name_that_has_no_hyphen_" * 4)):
        settings = {f"dino.a_long_name_of_a_setting_{one}": f"a/long/value/of/it/{number}" for one in range(20)}
        curve = [{"step": 0, "knn_top1": 0.1}] + [
            record(step, 1.0, knn_top1=0.8 - 14 / (20 + step)) for step in (20, 30, 40)
        ]
        run = make_run(folder / name, curve, seed=number, steps=50, **settings)
        for data in ("imagenette5-val", "cifar10-test", "photographs-test"):
            add_result(run, f"{data}.json", protocol="linear probe", data=data, top1=0.5 + number / 10, step=40)
    return read_runs([folder])[0]


@pytest.mark.medium
def test_nothing_overflows_at_three_widths(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_of(many_settings(tmp_path / "runs")))
    page = browser.new_page()
    page.goto(file.as_uri())
    wider = "[...document.querySelectorAll('html, .scroll:has(#runs)')].map(one => one.scrollWidth - one.clientWidth)"
    hidden = "all => all.filter(one => one.offsetWidth && one.scrollWidth > one.clientWidth).map(one => one.outerHTML)"
    for width in (400, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(wider) == [0, 0], width
        assert page.eval_on_selector_all("#runs td, #runs th, h1, .legend span", hidden) == [], width
    assert "±" in page.locator("#runs").inner_text()
    page.locator("#filter").fill("dino it/2")
    assert page.locator("#runs tbody:visible").count() == 1
    page.close()
