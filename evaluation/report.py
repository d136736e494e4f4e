"""Compare runs on one HTML page: settings that differ, results, curves and pictures.

    tessera report RUNS... [--output FILE.html] [--open] [--csv FILE] [--markdown FILE]

RUNS are run folders, or folders that contain run folders. The table of the page is also printed to the terminal, best
run first. The page is one file that includes all pictures, and needs no server and no network.
"""

import webbrowser
from pathlib import Path

from pydantic import Field
from rich.console import Console

from tessera.evaluation.command import main
from tessera.evaluation.reporting.neighbours import examine
from tessera.evaluation.reporting.page import render, run_pictures
from tessera.evaluation.reporting.runs import ReportError, read_runs
from tessera.evaluation.reporting.table import make_table, print_table, to_csv, to_markdown
from tessera.runtime.files import atomic_write
from tessera.runtime.processes import make_accelerator
from tessera.runtime.settings import Positional, Settings
from tessera.runtime.user_error import printable


class ReportSettings(Settings):
    """Compare runs in one HTML file, and print their table. RUNS: run folders, or folders that contain run folders."""

    runs: Positional[list[str]]
    """run folders, or folders that contain run folders"""
    output: Path = Path("report.html")
    """HTML file to write; an older file of this name is replaced"""
    open: bool = False
    """open the page in a browser"""
    csv: Path | None = None
    """CSV file for the table"""
    markdown: Path | None = None
    """Markdown file for the table"""
    sort: str | None = None
    """heading of the column by which the table is sorted; default: the result that most runs have"""
    title: str = "Comparison of runs"
    """heading of the page"""
    features: bool = True
    """show nearest neighbours and token colours of validation images, which needs the encoders and the validation
    shards; --no-features leaves this part out"""
    val: str | list[str] | None = None
    """SHARDS of the validation images; default: the validation shards of each run"""
    images: int = Field(6, ge=1)
    """number of validation images whose neighbours and tokens are shown"""
    neighbours: int = Field(5, ge=1)
    """number of nearest neighbours per image"""
    bank: int = Field(2000, ge=2)
    """maximum number of validation images among which neighbours are searched"""


def run(settings: ReportSettings) -> None:
    """Print the table, and write the page and, if requested, the CSV file and the Markdown file.

    Raises:
        ReportError: no run can be read, or a file cannot be written.
    """
    runs, problems = read_runs(settings.runs)
    table = make_table(runs, settings.sort)
    console = Console()
    print_table(table, console)
    problems += [f"{one.name}: {problem}" for one in table.runs for problem in one.problems]
    if settings.csv:
        write(settings.csv, to_csv(table))
    if settings.markdown:
        write(settings.markdown, to_markdown(table))
    groups = []
    if settings.features:
        groups, missing = examine(
            table.runs,
            make_accelerator(),
            val=settings.val,
            images=settings.images,
            neighbours=settings.neighbours,
            bank=settings.bank,
        )
        problems += missing
    pictures, damaged = run_pictures(table.runs)
    problems += damaged
    write(settings.output, render(settings.title, table, groups, pictures, problems))
    for problem in problems:
        console.print(printable(problem), style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Page written to {settings.output}", markup=False, highlight=False, soft_wrap=True)
    if settings.open:
        webbrowser.open(settings.output.resolve().as_uri())


def write(path: Path, text: str) -> None:
    """Write a file, and create its folder.

    Raises:
        ReportError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}. Choose another file.") from error


if __name__ == "__main__":
    main(ReportSettings, run)
