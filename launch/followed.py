"""A run in its folder while its jobs go on: how far it is, and the checkpoints that are still to be evaluated."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from jobs import EVALUATIONS, Job, evaluation, read_record, read_settings, states, submit, write_record

ENCODER = ("encoder.json", "encoder.safetensors")


def follow(output: Path) -> None:
    """Submit one job for each whole checkpoint that has had none, of each kind that was asked for with the run.

    An encoder that waits for its evaluation is kept in OUTPUT/evaluation/step-..., as its checkpoint may be removed
    before; it goes when all its results are there. Can be called again at any time, by one process.

    Raises:
        LaunchError: SLURM does not take a job; the next call tries again.
    """
    record = read_record(output)
    kinds = record["every_checkpoint"]
    jobs = [Job(**{name: value for name, value in job.items() if name != "command"}) for job in record["jobs"]]
    if not kinds:
        return
    for kept in (output / "evaluation").glob("step-*"):
        if all((kept / f"{EVALUATIONS[kind]}.json").exists() for kind in kinds):
            for name in ENCODER:
                (kept / name).unlink(missing_ok=True)
    steps = [folder.name for folder in sorted((output / "checkpoints").glob("step-*")) if keep(folder, output, kinds)]
    known = {job.name for job in jobs}
    for step in steps:
        for kind in kinds:
            job = evaluation(kind, record["options"], record["flags"][kind], output, step)
            if job.name not in known:
                submit(job)
                jobs.append(job)
                write_record(output / "submitted", record, jobs)
                print(f"job {job.id}: {job.name}")


def keep(checkpoint: Path, output: Path, kinds: list[str]) -> bool:
    """Whether a checkpoint lacks results; its encoder is in OUTPUT/evaluation then, where nobody removes it."""
    kept = output / "evaluation" / checkpoint.name
    if all((kept / f"{EVALUATIONS[kind]}.json").exists() for kind in kinds):
        return False
    kept.mkdir(parents=True, exist_ok=True)
    for name in ENCODER:
        if not (kept / name).exists():
            try:
                link(checkpoint / name, kept / name)
            except FileNotFoundError:  # a newer checkpoint has taken its place
                return False
    return True


def link(file: Path, name: Path) -> None:
    """Another name for a file, or a copy of it where the disk knows no such thing."""
    try:
        os.link(file, name)
    except FileNotFoundError:
        raise
    except OSError:
        part = name.with_name(f".{name.name}.part")
        shutil.copyfile(file, part)
        part.replace(name)


def status(output: Path) -> None:
    """Print how far a run is, its jobs, and the results there are.

    Raises:
        LaunchError: it has no jobs, or SLURM cannot be asked.
    """
    jobs = read_record(output)["jobs"]
    known = states([job["id"] for job in jobs])
    print(f"{output}: {position(output)}\n")
    table([["job", "what", "state"], *([job["id"], job["name"], known[job["id"]]] for job in jobs)])
    rows = results(output)
    print()
    if rows:
        table([["result", "top-1"], *rows])
    else:
        print("no results yet")


def position(output: Path) -> str:
    """Steps done, of how many, and the newest checkpoint."""
    settings = read_settings(output / "config.yaml") if (output / "config.yaml").exists() else {}
    checkpoints = sorted(folder.name for folder in (output / "checkpoints").glob("step-*"))
    recorded = last_record(output / "metrics.jsonl").get("step", 0)
    parts = [f"step {recorded} of {settings['steps']}" if "steps" in settings else "not begun"]
    parts += [f"newest checkpoint {checkpoints[-1]}"] if checkpoints else []
    parts += ["finished"] if (output / "encoder.safetensors").exists() else []
    return ", ".join(parts)


def last_record(path: Path) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; a kill may have cut one short."""
    lines = path.read_text().splitlines() if path.exists() else []
    for line in reversed(lines):
        try:
            return json.loads(line)
        except ValueError:
            continue
    return {}


def results(output: Path) -> list[list[str]]:
    """Name and accuracy of each evaluation, those of checkpoints first."""
    rows = []
    for path in sorted((output / "evaluation").rglob("*.json"), key=lambda path: (len(path.parts) * -1, path)):
        result = json.loads(path.read_text())
        if "top1" in result:
            rows.append([str(path.relative_to(output / "evaluation").with_suffix("")), f"{100 * result['top1']:.2f} %"])
    return rows


def table(rows: list[list[str]]) -> None:
    """Columns as wide as they have to be."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
