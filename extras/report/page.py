"""The page of a report: one HTML file that includes all charts and pictures, and needs no server and no network."""

import base64
import datetime
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from tessera.extras.report.curves import charts, looks, to_svg
from tessera.extras.report.run_folders import RunFolder
from tessera.extras.report.table import MISSING, Table, verdict
from tessera.runtime.files import read_bounded
from tessera.runtime.user_error import printable

MOST_SETTINGS = 8
"""If more settings than this number differ between the runs, the page initially hides the settings that differ only
between methods."""
MOST_COLUMNS = 6
"""If more settings than this number are shown at first, a line below each run has them. Columns would be too wide."""
PICTURE_BYTES = 2**26
"""Largest size of a picture in bytes."""
FIRST_PICTURES = ("attention", "pca", "reconstruction", "crops")
"""Kinds of pictures that come first on the page, in this order. All other kinds follow."""


def render(
    title: str,
    table: Table,
    pictures: Mapping[str, Mapping[str, str]],
    problems: Sequence[str],
) -> str:
    """Return the HTML text of a page. All names and texts that come from run folders are escaped.

    Args:
        title: heading of the page.
        table: table of the runs.
        pictures: return value of `run_pictures`.
        problems: sentences that say what is missing on the page.
    """
    look = looks(table.runs)
    settings = [column for column in table.columns if column.kind == "setting"]
    follows = sum(column.follows_method for column in settings)
    hide_follows = len(settings) > MOST_SETTINGS
    lines = len(settings) - (follows if hide_follows else 0) > MOST_COLUMNS
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        title=title,
        table=table,
        columns=[column for column in table.columns if column.kind != "setting"] if lines else table.columns,
        lines=settings if lines else [],
        problems=[printable(problem) for problem in problems],
        verdict=verdict(table),
        folders={run.name: printable(str(run.folder)) for run in table.runs},
        looks=look,
        follows=follows,
        hide_follows=hide_follows,
        charts=[Markup(to_svg(chart, look)) for chart in charts(table.runs)],  # matplotlib escapes the texts
        pictures=pictures,
        machines={run.name: machine_facts(run) for run in table.runs if run.machines},
        made=f"Made by `tessera report` on {datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}.",
    )


def run_pictures(runs: Sequence[RunFolder]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the newest pictures of each run as data URLs, and sentences about pictures that cannot be read.

    The outer keys of the dictionary are kinds of pictures. The inner keys are names of runs.
    """
    kinds = dict.fromkeys(kind for run in runs for kind in run.pictures)
    found: dict[str, dict[str, str]] = {}
    problems = []
    for kind in sorted(kinds, key=lambda kind: [*FIRST_PICTURES, kind].index(kind)):
        for run in runs:
            if kind not in run.pictures:
                continue
            try:
                content = read_bounded(run.pictures[kind], PICTURE_BYTES)
                with Image.open(io.BytesIO(content)) as image:
                    image.verify()
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # errors of Pillow
                problems.append(f"{run.pictures[kind]} is not a readable picture: {error}. The picture is left out.")
            else:
                found.setdefault(kind, {})[run.name] = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return found, problems


def machine_facts(run: RunFolder) -> dict[str, str]:
    """Return facts about the hardware, speed and starts of a run, by heading. The run must have a machine.jsonl."""
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
