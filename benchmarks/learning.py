"""Measure the k-NN accuracy over the course of training, and then a linear probe, for each method and seed.

    python benchmarks/learning.py --train TRAIN_SHARDS --val VAL_SHARDS --run='--encoder vit_tiny' --steps 2000 \\
        [--methods dino,mae] [--seeds 0,1,2] [--output TABLE.md] [--picture CURVES.png]

Each row of the table is one run of `pretrain/run.py`, which evaluates at equal intervals, followed by
`evaluation/linear_probe.py`. The run folders stay in `--folder`, and a finished run is not repeated.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from curves import curve, draw
from pydantic import Field

from tessera.runtime.files import atomic_write
from tessera.runtime.machine import processor
from tessera.runtime.processes import exit_on_user_error
from tessera.runtime.settings import Settings, parse

ROOT = Path(__file__).parent.parent


class LearningBenchmark(Settings):
    """Measure how fast the methods learn on labelled shards."""

    train: str
    """labelled SHARDS. Pretraining ignores their labels; the k-NN evaluation uses them as its bank"""
    val: str
    """labelled SHARDS on which the accuracy is measured"""
    methods: tuple[str, ...] = ("dino", "mae")
    """methods to run"""
    seeds: tuple[int, ...] = (0,)
    """seeds with which to run each method"""
    run: str = ""
    """further flags of pretrain/run.py, as one string"""
    steps: int = Field(default=2000, ge=1)
    """optimizer steps of each run"""
    points: int = Field(default=6, ge=1)
    """number of evaluations, not counting the evaluation before training"""
    folder: Path = Path("runs/learning")
    """folder in which the run folders are created"""
    output: Path | None = None
    """Markdown file for the table"""
    picture: Path | None = None
    """PNG file for the curves; needs matplotlib"""


def pretrain(settings: LearningBenchmark, method: str, seed: int) -> Path:
    """Pretrain, unless the run folder holds a finished run. Return the run folder."""
    output = settings.folder / f"{method}-{seed}"
    if (output / "seconds.json").exists():
        return output
    every = max(settings.steps // settings.points, 1)
    command = ["--method", method, "--seed", str(seed), "--output", str(output), "--steps", str(settings.steps)]
    command += ["--evaluate_every", str(every), "--data", settings.train, "--evaluation.val", settings.val]
    command += shlex.split(settings.run)
    started = time.perf_counter()
    _call("pretrain/run.py", *command)
    with atomic_write(output / "seconds.json") as part:
        part.write_text(json.dumps(time.perf_counter() - started))
    return output


def probe(settings: LearningBenchmark, run: Path) -> dict[str, Any]:
    """Return the result of the linear probe of a run on centre crops."""
    path = run / "evaluation" / "linear_probe-learning.json"
    if not path.exists():
        shards = ("--train", settings.train, "--val", settings.val)
        options = ("--no-augment", "--batch_norm", "--output", str(path))
        _call("evaluation/linear_probe.py", "--checkpoint", str(run), *shards, *options)
    return json.loads(path.read_text())


def _call(script: str, *arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(ROOT / script), *arguments], check=True, env=environment)


def table(settings: LearningBenchmark, runs: dict[tuple[str, int], Path]) -> str:
    """Return the Markdown table: one row per run, one column per evaluated step."""
    first = next(iter(runs.values()))
    steps, pixels = list(curve(first)), curve(first, "knn_pixels")[0]
    lines = [
        f"`{shlex.join(['python', 'benchmarks/learning.py', *sys.argv[1:]])}`",
        "",
        f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}. "
        f"20-NN accuracy in percent at each step; raw pixels: {100 * pixels:.1f}.",
        "",
        f"| method | seed | {' | '.join(str(step) for step in steps)} | linear probe | minutes |",
        "|---|--:|" + "--:|" * (len(steps) + 2),
    ]
    for (method, seed), run in runs.items():
        shown = [f"{100 * accuracy:.1f}" for accuracy in curve(run).values()]
        top1 = probe(settings, run)["top1"]
        minutes = json.loads((run / "seconds.json").read_text()) / 60
        lines.append(f"| {method} | {seed} | {' | '.join(shown)} | {100 * top1:.1f} | {minutes:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all pretrainings and linear probes, and print the table."""
    settings = parse(LearningBenchmark)
    runs = {(method, seed): pretrain(settings, method, seed) for method in settings.methods for seed in settings.seeds}
    text = table(settings, runs)
    print(text)
    if settings.output:
        with atomic_write(settings.output) as part:
            part.write_text(text)
    if settings.picture:
        draw({"": list(runs.values())}, settings.picture)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
