"""Compare runs on one HTML page: settings that differ, results, curves and pictures.

    tessera report RUNS... [--output FILE.html] [--open] [--csv FILE] [--markdown FILE]

RUNS are run folders, or folders that contain run folders. The table of the page is also printed to the terminal, best
run first. The page is one file that includes all pictures, and needs no server and no network.
"""

import webbrowser
from pathlib import Path

from rich.console import Console

from tessera.evaluation.command import run_command
from tessera.extras.report.page import render, run_pictures
from tessera.extras.report.run_folders import ReportError, read_runs
from tessera.extras.report.table import make_table, print_table, to_csv, to_markdown, verdict
from tessera.runtime.files import atomic_write
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
    """heading of the column by which the table is sorted; default: a score that all runs have"""


def run(settings: ReportSettings) -> None:
    """Print the table, and write the page and, if requested, the CSV file and the Markdown file.

    Raises:
        ReportError: no run can be read, or a file cannot be written.
    """
    console = Console()
    runs, problems = read_runs(settings.runs)
    table = make_table(runs, settings.sort)
    console.print(verdict(table), markup=False, highlight=False, soft_wrap=True)
    print_table(table, console)
    problems += [f"{one.name}: {problem}" for one in table.runs for problem in one.problems]
    if settings.csv:
        write(settings.csv, to_csv(table))
    if settings.markdown:
        write(settings.markdown, to_markdown(table))
    pictures, damaged = run_pictures(table.runs)
    problems += damaged
    write(settings.output, render("Comparison of runs", table, pictures, problems))
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


def main() -> None:
    run_command(ReportSettings, run)


if __name__ == "__main__":
    main()
