"""List runs: state, progress and scores, and the commands that continue them.

    tessera runs [FOLDERS...]

FOLDERS are run folders, or folders that contain run folders; by default, the folder `runs`, in which `tessera pretrain`
makes run folders. The newest run comes last.
"""

import shlex
import time
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.table import Table

from tessera.evaluation.command import run_command
from tessera.extras.report.run_folders import ReportError, RunFolder, read_runs
from tessera.runtime.lock import holder
from tessera.runtime.settings import Positional, Settings
from tessera.runtime.user_error import printable

SCORES = {
    "knn_top1": "k-NN %",
    "linear_top1": "probe in training %",
    "val_top1": "top-1 %",
    "view_retrieval": "views %",
}
"""Accuracies during training, and their headings. Only fine-tuning has `val_top1`, and only a run without labels has
`view_retrieval`."""


class RunsSettings(Settings):
    """List runs, their scores, and the commands that continue them. FOLDERS: run folders, or folders of run folders."""

    folders: Positional[list[str]] = Field(["runs"])
    """run folders, or folders that contain run folders"""


def run(settings: RunsSettings) -> None:
    """Print one line for each run.

    Raises:
        ReportError: there is no run.
    """
    if settings.folders == ["runs"] and not Path("runs").is_dir():
        raise ReportError(
            "There is no folder `runs` here. Give a folder of runs, or start a run: tessera pretrain --data IMAGES"
        )
    found, problems = read_runs(settings.folders)
    found.sort(key=changed)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("run", "method", "encoder", "step", "state", *SCORES.values(), "changed"):
        table.add_column(heading, no_wrap=heading == "run", justify="right" if "%" in heading else "left")
    for one in found:
        table.add_row(*map(printable, row(one)))
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # nothing is cut in a file or in a pipe
    console.print(table, markup=False)
    stopped = [one.folder for one in found if state(one) == "stopped"]
    for folder in stopped:
        path = shlex.quote(printable(str(folder)))
        console.print(f"continue: tessera pretrain --resume {path}", markup=False, highlight=False, soft_wrap=True)
    for problem in problems:
        console.print(printable(problem), style="yellow", markup=False, soft_wrap=True)


def row(one: RunFolder) -> list[str]:
    """Return the cells of a run."""
    total = one.settings.get("steps", "?")
    return [
        one.name,
        one.method,
        str(one.settings.get("encoder.variant", "?")),
        f"{one.last_step}/{total}",
        state(one),
        *(score(one, metric) for metric in SCORES),
        age(time.time() - changed(one)),
    ]


def state(one: RunFolder) -> str:
    """Return `running`, `finished`, `stopped` for a run that can be resumed, or `no checkpoint`."""
    if holder(one.folder):
        return "running"
    if one.finished:
        return "finished"
    return "stopped" if any((one.folder / "checkpoints").glob("step-*")) else "no checkpoint"


def score(one: RunFolder, metric: str) -> str:
    """Return the newest value of an accuracy in percent, or an empty text."""
    curve = one.curve(metric)
    return f"{100 * curve[max(curve)]:.1f}" if curve else ""


def changed(one: RunFolder) -> float:
    """Return the time at which the newest file of a run changed."""
    return max((path.stat().st_mtime for path in one.folder.glob("*.*") if path.is_file()), default=0.0)


def age(seconds: float) -> str:
    """Return a duration in words, such as `3 h ago`."""
    for length, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"


def main() -> None:
    run_command(RunsSettings, run)


if __name__ == "__main__":
    main()
