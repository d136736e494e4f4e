"""The page of a report: one HTML file with all charts and pictures in it, which needs no server and no network."""

import base64
import datetime
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from tessera.evaluation.reporting.curves import charts, looks, to_svg
from tessera.evaluation.reporting.features import Group
from tessera.evaluation.reporting.runs import Run
from tessera.evaluation.reporting.table import MISSING, Column, Table

MOST_SETTINGS = 8
"""Number of columns of settings from which those that differ only between methods are hidden at first."""
FIRST_PICTURES = ("attention", "pca", "reconstruction", "crops")
"""Order of the pictures on the page. Other pictures follow."""


@dataclass(frozen=True)
class Page:
    """Content of a page."""

    title: str
    table: Table
    groups: list[Group] = field(default_factory=list)
    """Pictures that need the encoders."""
    problems: list[str] = field(default_factory=list)
    """Sentences that say what is missing on the page."""


def render(page: Page) -> str:
    """Return the HTML text of a page. All names and texts that come from run folders are escaped."""
    table = page.table
    look = looks(table.runs)
    settings = [column for column in table.columns if column.kind == "setting"]
    common_facts, machines = machine_facts(table.runs)
    follows = sum(column.follows_method for column in settings)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        title=page.title,
        table=table,
        problems=page.problems,
        looks=look,
        follows=follows,
        hide_follows=len(settings) > MOST_SETTINGS,
        classes=lambda column, index: css_classes(table, column, index),
        is_best=is_best,
        charts=[Markup(to_svg(chart, look)) for chart in charts(table.runs)],  # matplotlib escapes the texts
        groups=[group for group in page.groups if group.seen[0].rows],
        png=png,
        pictures=run_pictures(table.runs, page.problems),
        common_facts=common_facts,
        machines=machines,
        made=f"Made by `tessera report` on {datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}.",
    )


def css_classes(table: Table, column: Column, index: int) -> str:
    """Return the CSS classes of the cells of a column, where `index` is the place of the column."""
    found = [column.kind] + ["number"] * (column.count > 0) + ["follows"] * column.follows_method
    if column.kind == "setting" and table.columns[index - 1].kind != "setting":
        found.append("first-setting")
    return " ".join(found)


def is_best(column: Column, row: int) -> bool:
    """Return True if a run has the best value of a column in which at least two runs have values."""
    values = [cell.value for cell in column.cells if cell.value is not None]
    best = min if column.ascending else max
    return len(values) > 1 and column.cells[row].value == best(values)


def png(pixels: np.ndarray) -> str:
    """Return an image (H, W, 3) uint8 as a data URL."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png", optimize=True)
    return _data_url(file.getvalue())


def _data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def run_pictures(runs: Sequence[Run], problems: list[str]) -> dict[str, list[tuple[Run, str]]]:
    """Return the newest pictures of all runs as data URLs, by the kind of picture.

    A picture that cannot be read adds a sentence to `problems`.
    """
    kinds = {kind: None for run in runs for kind in run.pictures}
    ordered = [kind for kind in FIRST_PICTURES if kind in kinds]
    found: dict[str, list[tuple[Run, str]]] = {}
    for kind in [*ordered, *(kind for kind in kinds if kind not in ordered)]:
        for run in runs:
            if kind not in run.pictures:
                continue
            try:
                content = run.pictures[kind].read_bytes()
                with Image.open(io.BytesIO(content)) as image:
                    image.verify()
            except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for a damaged PNG
                problems.append(f"{run.pictures[kind]} is not a readable picture: {error}. The picture is left out.")
            else:
                found.setdefault(kind, []).append((run, _data_url(content)))
    return found


def machine_facts(runs: Sequence[Run]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return facts about the machines of the runs with a machine.jsonl.

    Returns:
        Facts that are equal in all these runs, by heading; and the other facts, by the name of the run.
    """
    facts = {run.name: _facts(run) for run in runs if run.machines}
    headings = next(iter(facts.values()), {})
    common = {name: text for name, text in headings.items() if len({one[name] for one in facts.values()}) == 1}
    return common, {run: {h: text for h, text in one.items() if h not in common} for run, one in facts.items()}


def _facts(run: Run) -> dict[str, str]:
    """Return facts about the last start of a run, and the number of its starts, by heading."""
    last: dict[str, Any] = run.machines[-1]
    versions = last.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    speeds = list(run.curve("images_per_second").values())
    memory = list(run.curve("peak_memory_gb").values())
    return {
        "device": f"{last.get('processes', '?')} x {last.get('device', '?')}",
        "processor": f"{last.get('processor', '?')}, {last.get('cores', '?')} cores",
        "engine": f"{last.get('engine', '?')}, {last.get('precision', '?')}",
        "images/s": f"{sorted(speeds)[len(speeds) // 2]:,.0f}" if speeds else MISSING,
        "GPU memory": f"{max(memory):.1f} GB" if memory else MISSING,
        "started": str(run.machines[0].get("time", "?")).replace("T", " ").replace("+00:00", " UTC"),
        "starts": str(len(run.machines)),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
