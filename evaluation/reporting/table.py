"""The table of a report: one row per run with its results and with the settings that differ between the runs.

The terminal, the page, the CSV file and the Markdown file show the same cells.
"""

import csv
import datetime
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from tessera.evaluation.reporting.runs import ReportError, Run
from tessera.evaluation.results import data_name

IRRELEVANT = (
    "workers",
    "record_every",
    "checkpoint_every",
    "evaluate_every",
    "checkpoint.",
    "metrics.",
    "loader.",
    "source.",
    "evaluation.pictures",
    "evaluation.batch_size",
)
"""Settings, and sections of settings, that do not change what a run learns. The table leaves them out."""
MISSING = "–"
"""Text of a cell whose run has no such value."""


class Cell(NamedTuple):
    """One cell of the table."""

    text: str = MISSING
    value: float | None = None
    """Number for sorting. None sorts last."""


@dataclass(frozen=True)
class Column:
    """One column of the table. `cells` has one cell per run."""

    title: str
    kind: Literal["run", "result", "fact", "setting"]
    cells: list[Cell]
    follows_method: bool = False
    """True for a setting that has the same value in all runs of a method."""
    ascending: bool = False
    """True if small numbers are better."""

    @property
    def count(self) -> int:
        """Number of runs that have a value."""
        return sum(cell.value is not None for cell in self.cells)


@dataclass(frozen=True)
class Table:
    """Columns of the table. The rows are in the order of `runs`, best first."""

    runs: list[Run]
    columns: list[Column]
    sorted_by: str | None
    """Title of the column by which the rows are sorted. None if no run has a result."""

    @property
    def titles(self) -> list[str]:
        """Headings of all columns."""
        return [column.title for column in self.columns]

    @property
    def rows(self) -> list[list[str]]:
        """Texts of all cells, row by row."""
        return [[column.cells[row].text for column in self.columns] for row in range(len(self.runs))]


def make_table(runs: Sequence[Run], sort: str | None = None) -> Table:
    """Return the table of some runs, best first.

    The rows are sorted by the result that most runs have. Runs without this result come last, in the given order.

    Args:
        runs: runs in any order.
        sort: title of the column to sort by instead.

    Raises:
        ReportError: no column has the title `sort`.
    """
    columns = [Column("run", "run", [Cell(run.name) for run in runs])]
    columns += evaluation_columns(runs) + training_columns(runs)
    columns += fact_columns(runs) + setting_columns(runs)
    chosen = _sort_column(columns, sort)
    order = list(range(len(runs)))
    if chosen:
        order.sort(key=lambda row: _sort_key(chosen, chosen.cells[row].value))
    sorted_columns = [
        Column(c.title, c.kind, [c.cells[row] for row in order], c.follows_method, c.ascending) for c in columns
    ]
    return Table([runs[row] for row in order], sorted_columns, chosen.title if chosen else None)


def _sort_column(columns: Sequence[Column], sort: str | None) -> Column | None:
    if sort is not None:
        titles = [column.title for column in columns if column.count]
        if sort not in titles:
            raise ReportError(f"No column with numbers has the heading {sort!r}. Choose one of: {'; '.join(titles)}.")
        return next(column for column in columns if column.title == sort)
    results = [column for column in columns if column.kind == "result"]
    return max(results, key=lambda column: column.count, default=None)


def _sort_key(column: Column, value: float | None) -> tuple[bool, float]:
    return (value is None, 0.0 if value is None else value if column.ascending else -value)


def evaluation_columns(runs: Sequence[Run]) -> list[Column]:
    """Return a column for each evaluation, with the score of the newest step. Evaluations of most runs come first."""
    names = dict.fromkeys(result.name for run in runs for result in run.results)
    columns = []
    for name in names:
        columns.append(Column(f"{name}, %", "result", [_newest(run, name) for run in runs]))
    return sorted(columns, key=lambda column: -column.count)


def _newest(run: Run, name: str) -> Cell:
    """Return the newest score of an evaluation, with its step if the run has gone on since."""
    scores = run.scores(name)
    if not scores:
        return Cell()
    step, score = list(scores.items())[-1]
    cell = percent(score)
    return cell._replace(text=f"{cell.text} (step {step})") if step < run.last_step else cell


def training_columns(runs: Sequence[Run]) -> list[Column]:
    """Return columns with the newest values of the metrics of training: accuracies of evaluations, and loss.

    Accuracies on different images, or with another protocol, are in different columns.
    """
    columns = []
    for name, _, curves in online_evaluations(runs):
        last = [percent(list(curve.values())[-1]) if curve else Cell() for curve in curves]
        first = [percent(curve[0]) if 0 in curve else Cell() for curve in curves]
        columns.append(Column(f"{name}, %", "result", last))
        columns.append(Column(f"{name}, at step 0, %", "fact", first))
    losses = [list(run.curve("loss").values())[-1:] for run in runs]
    cells = [Cell(f"{loss[0]:.4f}", loss[0]) if loss else Cell() for loss in losses]
    columns.append(Column("loss", "fact", cells, ascending=True))
    return [column for column in columns if column.count]


class OnlineEvaluation(NamedTuple):
    """Accuracies of one evaluation during training."""

    title: str
    """Name of the evaluation. It names the images if the runs were evaluated in several ways."""
    metric: str
    """Name of the metric in metrics.jsonl."""
    curves: list[dict[int, float]]
    """Accuracies of each run by step. Empty for a run that lacks this evaluation."""


def online_evaluations(runs: Sequence[Run]) -> list[OnlineEvaluation]:
    """Return the evaluations during training.

    Accuracies on images of another name, of another number of neighbours, or of another number of iterations, belong
    to different evaluations.
    """
    found = []
    for metric, setting, name in (
        ("knn_top1", "evaluation.k", "{}-NN in training"),
        ("linear_top1", "evaluation.linear_iterations", "linear probe of {} iterations in training"),
    ):
        curves = [run.curve(metric) for run in runs]
        kinds = [(run.settings.get(setting), data_name(run.settings.get("evaluation.val") or "")) for run in runs]
        different = list(dict.fromkeys(kind for kind, curve in zip(kinds, curves, strict=True) if curve))
        for number, shards in different:
            title = name.format("k" if number is None else number) + (f", {shards}" if len(different) > 1 else "")
            of_kind = [c if kind == (number, shards) else {} for kind, c in zip(kinds, curves, strict=True)]
            found.append(OnlineEvaluation(title, metric, of_kind))
    return found


def percent(score: float) -> Cell:
    """Return the cell of a score from 0 to 1."""
    return Cell(f"{100 * score:.2f}", score)


def fact_columns(runs: Sequence[Run]) -> list[Column]:
    """Return columns that say how far a run is, how long it took, and on which device."""
    totals = ["" if run.finished else f" of {run.settings.get('steps', '?')}" for run in runs]
    steps = [Cell(f"{run.last_step}{total}", run.last_step) for run, total in zip(runs, totals, strict=True)]
    devices = [str(run.machines[-1].get("device", MISSING)) if run.machines else MISSING for run in runs]
    durations = [run.training_seconds for run in runs]
    times = [Cell(str(datetime.timedelta(seconds=round(one))), one) if one else Cell() for one in durations]
    columns = [
        Column("steps done", "fact", steps),
        Column("training, h:mm:ss", "fact", times, ascending=True),
    ]
    if len(set(devices)) > 1:
        columns.append(Column("device", "fact", [Cell(device) for device in devices]))
    return columns


def setting_columns(runs: Sequence[Run]) -> list[Column]:
    """Return a column for each setting that differs between two runs. The settings of other methods do not count."""
    columns = []
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        if name.startswith(IRRELEVANT):
            continue
        texts = [setting_text(run.settings[name]) if name in run.settings else None for run in runs]
        if len({text for text in texts if text is not None}) < 2:
            continue
        of_method: dict[str, set[str]] = {}
        for run, text in zip(runs, texts, strict=True):
            if text is not None:
                of_method.setdefault(run.method, set()).add(text)
        follows = name != "method" and all(len(values) == 1 for values in of_method.values())
        cells = [Cell(MISSING if text is None else text, _number(text)) for text in texts]
        columns.append(Column(name, "setting", cells, follows_method=follows))
    return columns


def setting_text(value: Any) -> str:
    """Return a setting as a user would type it."""
    if isinstance(value, (list, tuple)):
        return ",".join(setting_text(one) for one in value)
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def print_table(table: Table, console: Console) -> None:
    """Print the table. If it is too wide for the terminal, print the runs as columns."""
    wide = _rich_table(table.titles, table.rows, lambda column: table.columns[column].count > 0)
    unlimited = console.options.update(width=10**6)
    if wide.__rich_measure__(console, unlimited).maximum <= console.width:
        console.print(wide)
        return
    columns = [list(column) for column in zip(table.titles, *table.rows, strict=True)]
    console.print(_rich_table(columns[0], columns[1:], lambda _: False))


def _rich_table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Callable[[int], bool]) -> RichTable:
    """Return a table for the terminal. `right` says which columns hold numbers."""
    shown = RichTable()
    for number, title in enumerate(titles):
        shown.add_column(escape(title), justify="right" if right(number) else "left", overflow="fold")
    for row in rows:
        shown.add_row(*map(escape, row))
    return shown


def to_csv(table: Table) -> str:
    """Return the table as CSV text with a line of headings."""
    text = io.StringIO()
    rows = [["" if cell == MISSING else cell for cell in row] for row in table.rows]
    csv.writer(text, lineterminator="\n").writerows([table.titles, *rows])
    return text.getvalue()


def to_markdown(table: Table) -> str:
    """Return the table as a Markdown table. Columns of numbers are aligned to the right."""
    rules = ["--:" if column.count else "---" for column in table.columns]
    rows = [[_markdown(text) for text in row] for row in (table.titles, *table.rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], rules, *rows[1:]))


def _markdown(text: str) -> str:
    """Escape characters that would end a cell or start a tag or a link."""
    for character in "\\|<>[]*_`":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
