"""Train small encoders on CIFAR-10 for a given time each, and write one table of speed and accuracy:

    python benchmarks/cifar10.py --train 'cifar10-train-*.tar.gz' --val 'cifar10-test-*.tar.gz' --output runs/cifar10

By default, DINO and LeJEPA each train `vit_mini` (patches of 4 pixels) and a ResNet-18 with the stem for images of 32
pixels (small_resnet.py), as in published results, for 150 s, meant for a quarter of an hour on a GPU. Crops have 32
pixels. A run of 60 steps measures the speed first, because the schedules need the length of a run. `--steps` gives the
length instead. OUTPUT/results.md has images/s, `data_wait` and `mfu` of the last record, and the accuracies of k-NN and
linear probe. The folders of the runs and their logs are beside it. A run that fails gets a row that says so.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import small_resnet
from pydantic import Field
from tables import machine, publish, table, typed_command

from tessera.runtime.settings import Settings, SettingsError, parse

ROOT = Path(__file__).parents[1]
HEADINGS = ["method", "encoder", "steps", "epochs", "images/s", "data_wait", "mfu", "k-NN, %", "linear, %", "minutes"]
PROBE = 60
"""Number of steps of the run that measures the speed."""


class Cifar10(Settings):
    """Train small encoders on CIFAR-10, and write a table of speed and accuracy."""

    train: str
    """labelled training SHARDS of images of 32 x 32 pixels"""
    val: str
    """labelled SHARDS to score"""
    output: Path = Path("runs/cifar10")
    """folder for the runs, their logs and results.md"""
    methods: tuple[str, ...] = ("dino", "lejepa")
    """methods with the settings global_size and local_size"""
    encoders: tuple[str, ...] = ("vit_mini", small_resnet.NAME)
    """encoder variants: `resnet18_cifar` of small_resnet.py, or those of `tessera pretrain`"""
    batch_size: int = Field(default=512, ge=1)
    """number of images per step"""
    precision: str = "bf16"
    """precision of the forward passes"""
    seconds: float = Field(default=150, gt=0)
    """training time of each run, without start and evaluations"""
    steps: int | None = Field(default=None, ge=1)
    """length of each run in steps, in place of `seconds`"""


def main(settings: Cifar10) -> int:
    """Train all pairs, and write the table after each. Return the exit code: 1 if a run failed, else 0."""
    settings.output.mkdir(parents=True, exist_ok=True)
    rows = list[list[str]]()
    for method in settings.methods:
        for encoder in settings.encoders:
            rows.append(row(settings, method, encoder))
            publish([typed_command(), machine(), table(HEADINGS, rows, text=2)], settings.output / "results.md")
    return int(any("failed" in one[2] for one in rows))


def row(settings: Cifar10, method: str, encoder: str) -> list[str]:
    """Train one pair, and return its row of the table."""
    output = settings.output / f"{method}-{encoder.replace(':', '-')}"
    steps, started = settings.steps, time.monotonic()
    try:
        if steps is None:
            none = ["--evaluation.view_images", "0", "--evaluation.pictures", "0", "--record_every", str(PROBE // 2)]
            speed = train(settings, method, encoder, output.with_name(f"{output.name}-speed"), PROBE, none)
            steps = max(round(settings.seconds * speed["images_per_second"] / settings.batch_size), 1)
        scored = ["--evaluation.train", settings.train, "--evaluation.val", settings.val]
        last = train(settings, method, encoder, output, steps, scored)
    except subprocess.CalledProcessError as error:
        return [method, encoder, f"failed: exit code {error.returncode}, {output}*.log", *[""] * (len(HEADINGS) - 3)]
    found = [f"{last['epoch']:.1f}", f"{last['images_per_second']:,.0f}", f"{last['data_wait']:.3f}"]
    found += [f"{last['mfu']:.3f}" if "mfu" in last else "none"]
    found += [f"{100 * last[name]:.1f}" if name in last else "none" for name in ("knn_top1", "linear_top1")]
    return [method, encoder, f"{steps:,}", *found, f"{(time.monotonic() - started) / 60:.1f}"]


def train(settings: Cifar10, method: str, encoder: str, output: Path, steps: int, more: list[str]) -> dict[str, Any]:
    """Train one pair for `steps` steps with the flags `more`. Return the last record of its metrics.

    Raises:
        CalledProcessError: the run failed.
    """
    script = "benchmarks/small_resnet.py" if encoder == small_resnet.NAME else "pretrain/run.py"
    line = [sys.executable, str(ROOT / script), "--method", method, "--encoder", encoder]
    line += ["--data", settings.train, "--output", str(output), "--overwrite", "--steps", str(steps)]
    line += ["--batch_size", str(settings.batch_size), "--precision", settings.precision]
    line += [f"--{method}.global_size", "32", f"--{method}.local_size", "16"]
    if encoder.startswith("vit_"):
        line += ["--encoder.patch_size", "4"]
    with output.with_name(f"{output.name}.log").open("w") as log:
        subprocess.run([*line, *more], check=True, stdout=log, stderr=subprocess.STDOUT)
    return json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])


if __name__ == "__main__":
    try:
        raise SystemExit(main(parse(Cifar10)))
    except SettingsError as error:
        raise SystemExit(f"cifar10.py: {error}") from None
