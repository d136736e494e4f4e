"""The table of a report: one row per run with its results and with the settings that differ between the runs.

The terminal, the page, the CSV file and the Markdown file show the same cells.
"""

import csv
import datetime
import html
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from tessera.extras.report.extrapolation import final_score
from tessera.extras.report.run_folders import ReportError, RunFolder, is_number

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
DIGITS = 4
"""Significant digits of a setting in the table."""
CHANCE = 3
"""Points of accuracy that two runs of equal quality may differ by on 2,000 images: two standard errors of a difference
at 50 %."""
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
    """Short heading for the page and the terminal. None: the title."""

    @property
    def heading(self) -> str:
        """Heading on the page and in the terminal."""
        return self.short or self.title

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
    """Title of the column by which the rows are sorted. None if the runs have no score in common."""

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

    By default, the rows are sorted by a score that all runs with a score have. If there is none, the rows keep the
    given order, and `verdict` says so. Runs without the score come last, in the given order.

    Args:
        runs: runs in any order.
        sort: title or heading of the column to sort by. None selects a score that all runs have.

    Raises:
        ReportError: no column with numbers has the title `sort`.
    """
    columns = [column for column in make_columns(runs) if column.count]
    chosen = next((one for one in columns if sort in (one.title, one.short)), None)
    if sort is not None and chosen is None:
        titles = "; ".join(column.title for column in columns)
        raise ReportError(f"No column with numbers has the heading {sort!r}. Choose one of: {titles}.")
    if sort is None:
        scored = sum(bool(run.scores) for run in runs)
        chosen = next((one for one in columns if one.kind == "result" and one.count == scored), None)
    if chosen is None:
        return Table(list(runs), make_columns(runs), None)
    values = [cell.value for cell in chosen.cells]
    sign = 1 if chosen.ascending else -1
    order = sorted(range(len(runs)), key=lambda row: (values[row] is None, sign * (values[row] or 0.0)))
    ordered = [runs[row] for row in order]
    return Table(ordered, make_columns(ordered), chosen.title)


def verdict(table: Table) -> str:
    """Return sentences that say which run is best and by how much, or why the runs cannot be compared."""
    chosen = next((one for one in table.columns if one.title == table.sorted_by), None)
    results = [one for one in table.columns if one.kind == "result"]
    if not results:
        return "No run has a score yet."
    if chosen is None:
        having = {
            one.heading: [run.name for run, cell in zip(table.runs, one.cells, strict=True) if cell.value is not None]
            for one in results
        }
        parts = "; ".join(f"{heading.removesuffix(', %')}: {', '.join(names)}" for heading, names in having.items())
        return (
            f"These runs cannot be compared, because no score is common to all of them ({parts}). Evaluate all of them "
            "with the same command and data, such as `tessera knn --checkpoint RUN --train SHARDS --val SHARDS`."
        )
    if chosen.kind != "result":
        return ""
    name, key = chosen.heading.removesuffix(", %"), chosen.title.removesuffix(", %")
    best, *others = [
        (run.name, f"{100 * cell.value:.1f}", run.scores[key])
        for run, cell in zip(table.runs, chosen.cells, strict=True)
        if cell.value is not None
    ]
    if not others:
        before = next(
            (one.cells[0].text for one in table.columns if one.title == f"{key}, at step 0, %"),
            MISSING,
        )
        return f"{best[0]}: {best[1]} % ({name}){f', {before} % before training' if before != MISSING else ''}."
    steps = [list(curve)[-1] for _, _, curve in (best, others[0])]
    at = [f" at step {step}" if len(set(steps)) > 1 else "" for step in steps]
    lead = 100 * (best[2][steps[0]] - others[0][2][steps[1]])
    if lead < 0.05:
        return f"{best[0]}{at[0]} and {others[0][0]}{at[1]} are equally good: {best[1]} % ({name})."
    said = f"{best[0]}{at[0]} is best: {best[1]} % ({name}), {lead:.1f} points above {others[0][0]}{at[1]}."
    if any(at):
        common = [step for step in best[2] if step and step in others[0][2]]
        both = " and ".join(f"{100 * curve[common[-1]]:.1f}" for _, _, curve in (best, others[0])) if common else ""
        said += f" At step {common[-1]}, they have {both} %." if common else " They have no score at an equal step."
    chance = f" A lead below {CHANCE} points may be chance, unless there are many images." if lead < CHANCE else ""
    return said + chance


def make_columns(runs: Sequence[RunFolder]) -> list[Column]:
    """Return the columns: names, scores and loss, facts about the training, and settings that differ."""
    names = Column("run", "run", [Cell(run.name) for run in runs])
    return [names, *score_columns(runs), *fact_columns(runs), *setting_columns(runs)]


def score_columns(runs: Sequence[RunFolder]) -> list[Column]:
    """Return one column per evaluation, with the score of the newest step. The most common evaluations come first.

    The first evaluation of the untrained encoder has a further column for this score. The first one that allows a
    forecast has a column for the score that is expected at the last step of unfinished runs.
    """
    columns: list[Column] = []
    headings = score_headings(runs)
    once: dict[str, Callable[[RunFolder, str], Cell]] = {"at step 0": _at_start, "forecast at the end": _expected}
    for name in sorted(headings, key=lambda name: -sum(name in run.scores for run in runs)):
        equal = len({max(run.scores[name]) for run in runs if name in run.scores}) == 1
        cells = [_newest(run, name, equal=equal) for run in runs]
        columns.append(Column(f"{name}, %", "result", cells, short=f"{headings[name]}, %"))
        for kind, cell in list(once.items()):
            extra = Column(f"{name}, {kind}, %", "fact", [cell(run, name) for run in runs], short=f"{kind}, %")
            if extra.count:
                columns.append(extra)
                del once[kind]
    return columns


def score_headings(runs: Sequence[RunFolder]) -> dict[str, str]:
    """Return short headings of all evaluations, by name.

    A heading leaves out numbers of iterations or images, the words "in training", and the data set if all evaluations
    have the same one. Parts are kept where two headings would be equal otherwise.
    """
    protocols = {name: test.protocol for run in runs for test, name in run.names.items() if test in run.found}
    data = {name: name.removeprefix(protocol) for name, protocol in protocols.items()}
    if len(set(data.values())) == 1:
        data = dict.fromkeys(data, "")
    plain = {name: re.sub(r" of [\d,]+ (iterations|images)", "", protocol) for name, protocol in protocols.items()}
    headings: dict[str, str] = {}
    for texts in ({name: text.replace(" in training", "") for name, text in plain.items()}, plain, protocols):
        texts = {name: text + data[name] for name, text in texts.items() if name not in headings}
        counts = Counter([*texts.values(), *headings.values()])
        headings |= {name: text for name, text in texts.items() if counts[text] == 1}
    return {name: headings.get(name, name) for name in protocols}


def _newest(run: RunFolder, name: str, *, equal: bool) -> Cell:
    """Return the newest score of an evaluation. The step is added if the run has taken further steps since, or if it is
    not `equal` for all runs."""
    if name not in run.scores:
        return Cell()
    step, score = list(run.scores[name].items())[-1]
    cell = _percent(score)
    return cell if equal and step >= run.last_step else cell._replace(text=f"{cell.text} (step {step})")


def _at_start(run: RunFolder, name: str) -> Cell:
    """Return the score of the untrained encoder."""
    return _percent(run.scores.get(name, {}).get(0))


def _expected(run: RunFolder, name: str) -> Cell:
    """Return the score that is expected at the last step, and its interval of two standard errors."""
    steps = run.settings.get("steps")
    expected = final_score(run.scores.get(name, {}), int(steps)) if is_number(steps) else None
    return Cell(f"{100 * expected[0]:.1f} ± {100 * expected[1]:.1f}", expected[0]) if expected else Cell()


def _percent(score: float | None) -> Cell:
    return Cell() if score is None else Cell(f"{100 * score:.1f}", score)


def fact_columns(runs: Sequence[RunFolder]) -> list[Column]:
    """Return columns for the newest loss, the number of steps done and the training time. If the runs used different
    devices, add a column for the device."""
    losses = [list(run.curve("loss").values())[-1:] for run in runs]
    totals = ["" if run.finished else f" of {run.settings.get('steps', '?')}" for run in runs]
    devices = [str(run.machines[-1].get("device", MISSING)) if run.machines else MISSING for run in runs]
    times = [run.training_seconds for run in runs]
    columns = [
        Column("loss", "fact", [Cell(f"{one[0]:.4g}", one[0]) if one else Cell() for one in losses], ascending=True),
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
        cells = [
            Cell() if text is None else Cell(setting_text(run.settings[name], digits=DIGITS), _number(text))
            for run, text in zip(runs, texts, strict=True)
        ]
        columns.append(Column(name, "setting", cells, follows_method=follows))
    return columns


def setting_text(value: Any, digits: int | None = None) -> str:
    """Return a setting as a user would type it. Longer numbers are rounded to `digits` significant digits."""
    if isinstance(value, (list, tuple)):
        return ",".join(setting_text(one, digits) for one in value)
    if isinstance(value, float) and digits and len(str(value)) > digits + 2:
        return f"{value:.{digits}g}"
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def print_table(table: Table, console: Console) -> None:
    """Print the table. If it is too wide for the terminal, print the runs as columns, or leave out settings that follow
    from the method, or all settings. If nothing fits, the cells are cut."""
    unlimited = console.options.update(width=10**6)
    everything, headings = range(len(table.columns)), [column.heading for column in table.columns]
    without_method = [i for i in everything if not table.columns[i].follows_method]
    results = [i for i in everything if table.columns[i].kind != "setting"]
    for chosen in (everything, without_method, results):
        titles, *rows = ([line[i] for i in chosen] for line in (headings, *table.rows))
        turned, *others = zip(titles, *rows, strict=True)
        sides = ["right" if table.columns[i].count else "left" for i in chosen]
        forms = _rich_table(titles, rows, sides), _rich_table(turned, others, ["left"] * len(turned))
        fitting = [form for form in forms if form.__rich_measure__(console, unlimited).maximum <= console.width]
        if fitting:
            break
    console.print(*(fitting or forms)[:1])
    if hidden := len(everything) - len(titles):
        console.print(f"{hidden} more columns do not fit here. The page and --csv FILE have all.")


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
