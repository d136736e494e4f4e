"""Progress of a run: its current step, its jobs and its results."""

import json
from pathlib import Path
from typing import Any

from tessera.launch.jobs import Job, is_over, quoted, read_jobs, read_settings, states

METRICS = {
    "top1": "top-1",
    "mean_average_precision": "mAP",
    "mean_iou": "mean IoU",
    "delta1": "delta1",
    "auroc": "AUROC",
}
"""Map from the key of the main metric in a result file to its displayed name."""
MEANINGS = {
    "PENDING (Dependency)": "starts after pretraining has succeeded",
    "PENDING (DependencyNeverSatisfied)": "never starts, because pretraining did not succeed",
    "PENDING (BeginTime)": "starts at a set time; a run that has stopped and saved, within minutes",
    "PENDING (JobHeld": "held; `scontrol release` lets it start",
    "PENDING": "waits in the queue for nodes",
    "RUNNING": "runs",
    "COMPLETING": "ends",
    "COMPLETED": "done",
    "CANCELLED": "cancelled",
    "TIMEOUT": "ended at its time limit",
    "PREEMPTED": "ended, because another job took its nodes",
    "OUT_OF_MEMORY": "failed: it used more memory than it had asked for (--mem)",
    "NODE_FAIL": "failed: its node was lost",
    "FAILED": "failed; its log says why",
}
"""Start of the state of a job -> its meaning. The first match counts."""


def status(output: Path) -> None:
    """Print the current step of a run, the states of its jobs and their logs, its results, and what continues it.

    Raises:
        LaunchError: the run has no jobs, or SLURM does not answer.
    """
    jobs = read_jobs(output)
    known = states([job.id for job in jobs])
    trains = any(job.name == "pretrain" for job in jobs)  # the jobs of a comparison train runs in folders of their own
    print(f"run: {output}\n" + (f"training: {_position(output)}\n" if trains else ""))
    rows = [[job.id, job.name, known[job.id], _meaning(known[job.id]), str(_log(job, output))] for job in jobs]
    _print_table([["job", "what", "state in SLURM", "meaning", "log"], *rows])
    rows = _results(output)
    print()
    if rows:
        _print_table([["result (.json in evaluation/)", "metric", "value"], *rows])
    else:
        print("no results of evaluations yet")
    if not trains and all(is_over(state) for state in known.values()) and {*known.values()} != {"COMPLETED"}:
        print("\nNo job is left. To submit what is not done, start the same command again.")
    if trains and all(is_over(known[job.id]) for job in jobs) and not _finished(output):
        begun = (output / "config.yaml").exists()
        how = (
            f"To continue it, call `tessera slurm submit --resume {quoted(str(output))}`"
            if begun
            else "Submit it again"
        )
        print(f"\nNo job is left, and the training is not finished. {how} with the same options, such as --gpus.")


def _position(output: Path) -> str:
    """Return a phrase that names the last recorded step, the total number of steps and the newest checkpoint."""
    settings = read_settings(output / "config.yaml") if (output / "config.yaml").exists() else {}
    checkpoints = sorted(folder.name for folder in (output / "checkpoints").glob("step-*"))
    recorded = _last_record(output / "metrics.jsonl").get("step", 0)
    parts = [f"step {recorded} of {settings['steps']}" if "steps" in settings else "not begun"]
    if checkpoints:
        parts.append(f"newest checkpoint at step {checkpoints[-1].removeprefix('step-').lstrip('0') or 0}")
    if _finished(output):
        parts.append("finished")
    return ", ".join(parts)


def _finished(output: Path) -> bool:
    """Return True if a run has exported its encoder and recorded its last step. More steps keep an earlier export."""
    if not (output / "encoder.safetensors").exists():
        return False
    settings = read_settings(output / "config.yaml") if (output / "config.yaml").exists() else {}
    return _last_record(output / "metrics.jsonl").get("step", 0) >= settings.get("steps", 0)


def _meaning(state: str) -> str:
    """Return what a state of SLURM means for a run, or nothing for a state that needs no words."""
    return next((meaning for start, meaning in MEANINGS.items() if state.startswith(start)), "")


def _log(job: Job, output: Path) -> Path:
    """Return the path of the log of a job, relative to the run folder."""
    named = next(word for word in job.options if word.startswith("--output=")).removeprefix("--output=")
    log = Path(named.replace("%%", "%").replace("%j", job.id))
    return log.relative_to(output) if log.is_relative_to(output) else log


def _last_record(path: Path) -> dict[str, Any]:
    """Return the record in the last complete line of metrics.jsonl. A killed run may leave a partial last line."""
    lines = path.read_text().splitlines() if path.exists() else []
    for line in reversed(lines):
        try:
            return json.loads(line)
        except ValueError:
            continue
    return {}


def _results(output: Path) -> list[list[str]]:
    """Return a row for each result of an evaluation in the run folder: file name without suffix, metric and value.

    Files with short names, such as knn.json, are copies of other results.
    """
    rows = []
    for path in sorted((output / "evaluation").glob("*-*.json")):
        try:
            result = json.loads(path.read_text())
        except ValueError:
            rows.append([path.stem, "not a JSON file", ""])
            continue
        rows += [[path.stem, name, f"{100 * result[key]:.2f} %"] for key, name in METRICS.items() if key in result]
    return rows


def _print_table(rows: list[list[str]]) -> None:
    """Print rows with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
