"""Compare runs on one HTML page: settings that differ, results, curves and pictures.

    tessera report RUNS... [--output FILE.html | --site FOLDER] [--watch SECONDS] [--open] [--csv FILE]
        [--markdown FILE]

RUNS are run folders, or folders that contain run folders. The table of the page is also printed to the terminal, best
run first. The page is one file that includes all pictures, and needs no server and no network.
"""

import re
import time
import webbrowser
import zlib
from contextlib import suppress
from pathlib import Path

from pydantic import Field
from rich.console import Console

from tessera.evaluation.command import run_command
from tessera.extras.report.neighbours import examine
from tessera.extras.report.page import render, run_pictures
from tessera.extras.report.run_folders import ReportError, read_runs
from tessera.extras.report.table import make_table, print_table, to_csv, to_markdown, verdict
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
    site: Path | None = None
    """folder for index.html and for a page of each run, instead of --output"""
    watch: float | None = Field(None, gt=0)
    """rewrite the page each time this number of seconds has passed, until Ctrl-C; the page in the browser follows.
    Neighbours and tokens are left out, because they take long"""
    open: bool = False
    """open the page in a browser"""
    csv: Path | None = None
    """CSV file for the table"""
    markdown: Path | None = None
    """Markdown file for the table"""
    sort: str | None = None
    """heading of the column by which the table is sorted; default: a score that all runs have"""
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
    """Print the table, and write the page or the site and, if requested, the CSV file and the Markdown file.

    With `watch`, the files are written again and again until Ctrl-C.

    Raises:
        ReportError: no run can be read, or a file cannot be written.
    """
    console = Console()
    page = write_report(settings, console)
    console.print(f"Page written to {page}", markup=False, highlight=False, soft_wrap=True)
    if settings.open:
        webbrowser.open(page.resolve().as_uri())
    if settings.watch:
        console.print(f"It is rewritten every {settings.watch:g} s. Press Ctrl-C to stop.", highlight=False)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(settings.watch)
                write_report(settings, Console(quiet=True))


def write_report(settings: ReportSettings, console: Console) -> Path:
    """Read the runs, write all files, print the table and the problems, and return the path of the page."""
    runs, problems = read_runs(settings.runs)
    table = make_table(runs, settings.sort)
    console.print(verdict(table), markup=False, highlight=False, soft_wrap=True)
    print_table(table, console)
    problems += [f"{one.name}: {problem}" for one in table.runs for problem in one.problems]
    if settings.csv:
        write(settings.csv, to_csv(table))
    if settings.markdown:
        write(settings.markdown, to_markdown(table))
    groups = []
    if settings.features and not settings.watch:
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
    pages: dict[str, str] = {}
    if settings.site:
        pages = {run.name: f"runs/{page_name(run.name)}" for run in table.runs}
        for run in table.runs:
            page = render(run.name, table, [], pictures, run.problems, focus=run, reload=settings.watch)
            write(settings.site / pages[run.name], page)
    output = settings.site / "index.html" if settings.site else settings.output
    page = render(settings.title, table, groups, pictures, problems, pages=pages, reload=settings.watch)
    write(output, page)
    for problem in problems:
        console.print(printable(problem), style="yellow", markup=False, highlight=False, soft_wrap=True)
    return output


def page_name(run: str) -> str:
    """Return the file name of the page of a run: its name without special characters, and a checksum of the name."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', run)[-80:]}-{zlib.crc32(run.encode()):08x}.html"


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
