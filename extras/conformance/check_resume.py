"""Kill a training run, resume it, and compare its last metrics with those of an uninterrupted run.

    tessera check_resume --kill_at 20 --metrics '{folder}/metrics.jsonl' \\
        --train 'tessera pretrain --output {folder} --steps 60 --record_every 1 --checkpoint_every 10' \\
        --resume 'tessera pretrain --resume {folder}'

The command works with any trainer that writes metrics as lines of JSON with a key `step`. `{folder}` stands for a new
folder. One run is uninterrupted. The other one is killed with SIGKILL when its metrics reach the step `kill_at`, and
resumed. The last lines of both must have the same step and the same values.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import Field

from tessera.evaluation.command import run_command
from tessera.runtime.settings import Settings
from tessera.runtime.user_error import UserError


class ResumeError(UserError):
    """A training command failed, or a resumed run differs from an uninterrupted one."""


class ResumeSettings(Settings):
    """Kill and resume a training run, and compare it with an uninterrupted run."""

    train: str
    """shell command that trains in {folder} from the beginning"""
    resume: str
    """shell command that continues the run in {folder} to its end"""
    metrics: str = "{folder}/metrics.jsonl"
    """file of metrics: one JSON object with a key `step` per line"""
    kill_at: int = Field(ge=1)
    """step at which the run is killed; there must be a checkpoint before it, and steps after it"""
    values: list[str] = Field(["loss"])
    """names of the metrics that are compared"""
    tolerance: float = Field(default=0.0, ge=0)
    """largest accepted difference of a metric, as a fraction of the uninterrupted run's value"""


def last_record(path: Path) -> dict[str, Any]:
    """Return the last complete line of a file of metrics. Without one, the step is -1."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1]) if lines else {"step": -1}


def run_and_kill(command: str, metrics: Path, step: int) -> None:
    """Run a command, and kill all its processes when the metrics reach `step`.

    Raises:
        ResumeError: the command ends earlier.
    """
    process = subprocess.Popen(command, shell=True, start_new_session=True)
    try:
        while (ended := process.poll()) is None and last_record(metrics)["step"] < step:
            time.sleep(0.01)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if ended is not None:
        raise ResumeError(f"The run ended before it was killed at step {step}. Choose more steps, or lower --kill_at.")


def run(settings: ResumeSettings) -> None:
    """Print the compared metrics.

    Raises:
        ResumeError: a command fails, or the resumed run differs.
    """
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("uninterrupted", "resumed"):
            folder = f"{scratch}/{name}"
            train, resume, metrics = (
                text.replace("{folder}", folder) for text in (settings.train, settings.resume, settings.metrics)
            )
            if name == "resumed":
                run_and_kill(train, Path(metrics), settings.kill_at)
            last = train if name == "uninterrupted" else resume
            if code := subprocess.run(last, shell=True).returncode:
                raise ResumeError(f"The command ended with exit code {code}: {last}")
            records.append(last_record(Path(metrics)))
    wrong = []
    for name in ("step", *settings.values):
        expected, found = (record.get(name) for record in records)
        print(f"{name}: uninterrupted {expected}, resumed {found}")
        if expected is None or found is None:
            raise ResumeError(f"The last line of the metrics has no {name}. Correct --metrics or --values.")
        if not abs(found - expected) <= settings.tolerance * abs(expected):
            wrong.append(name)
    if wrong:
        raise ResumeError(f"The resumed run differs from the uninterrupted run in {', '.join(wrong)}.")


def main() -> None:
    run_command(ResumeSettings, run)


if __name__ == "__main__":
    main()
