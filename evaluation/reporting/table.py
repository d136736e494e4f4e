"""The table of a report: one row per run with its results and with the settings that differ between the runs.

The terminal, the page, the CSV file and the Markdown file show the same cells.
"""

import csv
import datetime
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from tessera.evaluation.reporting.extrapolation import final_score
from tessera.evaluation.reporting.runs import ReportError, RunFolder, is_number

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
FORMULA = ("=", "+", "-", "@")
"""First characters of a formula in a spreadsheet."""
MISSING = "–"
"""Text of a cell if its run has no value in this column."""


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
    """True for a setting that differs only between methods: all runs of one method have the same value."""
    ascending: bool = False
    """True if small numbers are better."""
    short: str | None = None
    """Heading on the page, if the column belongs to the one before it. None: the title."""

    @property
    def count(self) -> int:
        """Number of runs that have a value."""
        return sum(cell.value is not None for cell in self.cells)

    @property
    def best(self) -> float | None:
        """Best value of the runs. None if fewer than two runs have values."""
        values = [cell.value for cell in self.cells if cell.value is not None]
        return (min if self.ascending else max)(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Table:
    """Comparison of runs: one row for each run, best first."""

    runs: list[RunFolder]
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


def make_table(runs: Sequence[RunFolder], sort: str | None = None) -> Table:
    """Return the table of some runs, best run first.

    By default, the rows are sorted by the result that most runs have. Runs without this result come last, in the given
    order.

    Args:
        runs: runs in any order.
        sort: title of the column to sort by. None selects the result that most runs have.

    Raises:
        ReportError: no column with numbers has the title `sort`.
    """
    columns = {column.title: column for column in make_columns(runs) if column.count}
    if sort is not None and sort not in columns:
        raise ReportError(f"No column with numbers has the heading {sort!r}. Choose one of: {'; '.join(columns)}.")
    chosen = columns[sort] if sort else next((one for one in columns.values() if one.kind == "result"), None)
    if chosen is None:
        return Table(list(runs), make_columns(runs), None)
    values = [cell.value for cell in chosen.cells]
    sign = 1 if chosen.ascending else -1
    order = sorted(range(len(runs)), key=lambda row: (values[row] is None, sign * (values[row] or 0.0)))
    ordered = [runs[row] for row in order]
    return Table(ordered, make_columns(ordered), chosen.title)


def make_columns(runs: Sequence[RunFolder]) -> list[Column]:
    """Return the columns: names, scores and loss, facts about the training, and settings that differ."""
    names = Column("run", "run", [Cell(run.name) for run in runs])
    return [names, *score_columns(runs), *fact_columns(runs), *setting_columns(runs)]


def score_columns(runs: Sequence[RunFolder]) -> list[Column]:
    """Return one column per evaluation, with the score of the newest step. The most common evaluations come first.

    If the untrained encoder was evaluated, another column has its score. For unfinished runs, a further column has the
    score that is expected at the last step.
    """
    columns = []
    evaluations = dict.fromkeys(name for run in runs for name in run.scores)
    for name in sorted(evaluations, key=lambda name: -sum(name in run.scores for run in runs)):
        columns.append(Column(f"{name}, %", "result", [_newest(run, name) for run in runs]))
        if any(0 in run.scores.get(name, {}) for run in runs):
            first = [_percent(run.scores.get(name, {}).get(0)) for run in runs]
            columns.append(Column(f"{name}, at step 0, %", "fact", first, short="at step 0, %"))
        cells = [_expected(run, name) for run in runs]
        expected = Column(f"{name}, forecast at the end, %", "fact", cells, short="forecast at the end, %")
        columns += [expected] if expected.count else []
    return columns


def _newest(run: RunFolder, name: str) -> Cell:
    """Return the newest score of an evaluation. The step is added if the run has taken further steps since."""
    if name not in run.scores:
        return Cell()
    step, score = list(run.scores[name].items())[-1]
    cell = _percent(score)
    return cell._replace(text=f"{cell.text} (step {step})") if step < run.last_step else cell


def _expected(run: RunFolder, name: str) -> Cell:
    """Return the score that is expected at the last step, and its interval of two standard errors."""
    steps = run.settings.get("steps")
    expected = final_score(run.scores.get(name, {}), int(steps)) if is_number(steps) else None
    return Cell(f"{100 * expected[0]:.1f} ± {100 * expected[1]:.1f}", expected[0]) if expected else Cell()


def _percent(score: float | None) -> Cell:
    return Cell() if score is None else Cell(f"{100 * score:.2f}", score)


def fact_columns(runs: Sequence[RunFolder]) -> list[Column]:
    """Return columns for the newest loss, the number of steps done and the training time. If the runs used different
    devices, add a column for the device."""
    losses = [list(run.curve("loss").values())[-1:] for run in runs]
    totals = ["" if run.finished else f" of {run.settings.get('steps', '?')}" for run in runs]
    devices = [str(run.machines[-1].get("device", MISSING)) if run.machines else MISSING for run in runs]
    times = [run.training_seconds for run in runs]
    columns = [
        Column("loss", "fact", [Cell(f"{one[0]:.4f}", one[0]) if one else Cell() for one in losses], ascending=True),
        Column(
            "steps done",
            "fact",
            [Cell(f"{run.last_step}{total}", run.last_step) for run, total in zip(runs, totals, strict=True)],
        ),
        Column(
            "training, h:mm:ss",
            "fact",
            [_duration(one) for one in times],
            ascending=True,
        ),
    ]
    if len(set(devices)) > 1:
        columns.append(Column("device", "fact", [Cell(device) for device in devices]))
    return columns


def _duration(seconds: float) -> Cell:
    """Return a training time as a cell. Impossible times, as from a damaged file, are left out."""
    return Cell(str(datetime.timedelta(seconds=round(seconds))), seconds) if 0 < seconds < 1e12 else Cell()


def setting_columns(runs: Sequence[RunFolder]) -> list[Column]:
    """Return a column for each setting that differs between two runs. Runs without the setting are ignored.

    Paths of the same images do not differ.
    """
    columns = []
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        if name.startswith(IRRELEVANT):
            continue
        texts = [setting_text(run.settings[name]) if name in run.settings else None for run in runs]
        values = {run.content(name) or text for run, text in zip(runs, texts, strict=True) if text is not None}
        if len(values) < 2:
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
    """Print the table. If it is too wide for the terminal, print the runs as columns, or leave out settings that follow
    from the method, or all settings. As a last resort, numbers stand for the headings, and the last columns are left
    out."""
    unlimited = console.options.update(width=10**6)
    everything = range(len(table.columns))
    without_method = [i for i in everything if not table.columns[i].follows_method]
    results = [i for i in everything if table.columns[i].kind != "setting"]
    for chosen in (everything, without_method, results):
        titles, *rows = ([line[i] for i in chosen] for line in (table.titles, *table.rows))
        turned, *others = zip(titles, *rows, strict=True)
        sides = ["right" if table.columns[i].count else "left" for i in chosen]
        for wide in (_rich_table(titles, rows, sides), _rich_table(turned, others, ["left"] * len(turned))):
            if wide.__rich_measure__(console, unlimited).maximum <= console.width:
                console.print(wide)
                _print_hidden(len(everything) - len(titles), console)
                return
    for count in range(len(titles), 1, -1):
        numbered = [titles[0], *map(str, range(1, count))]
        wide = _rich_table(numbered, [row[:count] for row in rows], sides[:count])
        if wide.__rich_measure__(console, unlimited).maximum <= console.width or count == 2:
            break
    console.print(wide)
    for number, title in enumerate(titles[1:count], start=1):
        console.print(f"{number}: {title}", markup=False, highlight=False)
    _print_hidden(len(everything) - count, console)


def _print_hidden(columns: int, console: Console) -> None:
    if columns:
        console.print(f"{columns} more columns do not fit here. The page and --csv FILE have all.")


def _rich_table(titles: Sequence[str], rows: Sequence[Sequence[str]], sides: Sequence[Any]) -> RichTable:
    """Return a table for the terminal. `sides` is the alignment of each column: `left` or `right`."""
    shown = RichTable()
    for title, side in zip(titles, sides, strict=True):
        shown.add_column(escape(title), justify=side, overflow="fold")
    for row in rows:
        shown.add_row(*map(escape, row))
    return shown


def to_csv(table: Table) -> str:
    """Return the table as CSV text. The first line contains the headings.

    A cell that a spreadsheet would compute as a formula begins with an apostrophe.
    """
    text = io.StringIO()
    rows = [["" if cell == MISSING else cell for cell in row] for row in (table.titles, *table.rows)]
    rows = [
        [f"'{cell}" if cell.startswith(FORMULA) and _number(cell) is None else cell for cell in row] for row in rows
    ]
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def to_markdown(table: Table) -> str:
    """Return the table as a Markdown table. Columns of numbers are aligned to the right."""
    rules = ["--:" if column.count else "---" for column in table.columns]
    rows = [[_markdown(text) for text in row] for row in (table.titles, *table.rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], rules, *rows[1:]))


def _markdown(text: str) -> str:
    """Escape characters that would end a cell or start a tag or a link."""
    for character in "\\|[]*_`":
        text = text.replace(character, f"\\{character}")
    return " ".join(html.escape(text, quote=False).split())
