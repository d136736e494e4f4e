"""Compare runs whose batches are shared unevenly with runs on one process, under every method and engine.

    python benchmarks/shares.py [--output FILE.md] [--engines '["ddp"]']

A run trains a small encoder for a few steps on the embedded digits, in float32, with statistics over all images: batch
norm in the heads, and Sinkhorn-Knopp. A table has the largest relative difference of a loss from that of one process.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import cast

from accelerate.state import AcceleratorState, GradientState
from pydantic import Field
from tables import machine, publish, table, typed_command

from tessera.pretrain.methods import METHODS
from tessera.pretrain.run import main as pretrain
from tessera.runtime.processes import exit_on_user_error
from tessera.runtime.settings import Settings, parse

ENGINES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
LAUNCHES = {"16 on 3": (16, 3), "16 on 5": (16, 5), "4 on 5 (empty share)": (4, 5)}
"""Images of a batch and processes of each launch."""
RUN = "--record_every 1 --workers 0 --precision fp32 --encoder vit_micro --encoder.drop_path 0.2 --optim.lr 1e-3"
RUN += " --encoder.depth 2 --encoder.dim 24 --encoder.heads 2 --evaluation.view_images 0 --evaluation.pictures 0"
STATISTICS = {"batch_norm": "true", "centering": "sinkhorn"}
"""Settings of methods that have them."""


class SharesBenchmark(Settings):
    """Compare runs whose batches are shared unevenly with runs on one process."""

    engines: tuple[str, ...] = ENGINES
    """engines: names of files in configs/accelerate/, without .yaml"""
    methods: tuple[str, ...] = tuple(sorted(METHODS.names()))
    """methods; distill needs dino, whose encoder is its teacher"""
    steps: int = Field(default=3, ge=1)
    """number of steps of a run"""
    output: Path | None = None
    """Markdown file for the table"""
    runs: Path | None = None
    """for internal use: JSON file with the command lines of one launch"""


def command(method: str, batch_size: int, steps: int, folder: Path) -> list[str]:
    """Return the command line of a run in `folder`."""
    own = METHODS[method].small_settings | {
        name: value for name, value in STATISTICS.items() if name in METHODS[method].Config.model_fields
    }
    if method == "distill":  # the teacher is the encoder of a run on one process
        own |= {"teacher": str(folder.parent.parent / "one" / str(batch_size) / "dino")}
    words = ["--method", method, *RUN.split(), "--steps", str(steps), "--batch_size", str(batch_size)]
    return [*words, *(f"--{method}.{name}={value}" for name, value in own.items()), "--output", str(folder / method)]


def launch(
    settings: SharesBenchmark, engine: str, processes: int, batch_size: int, folder: Path
) -> dict[str, list[float]]:
    """Train with every method in one launch. Return the loss of each step of each method."""
    methods = sorted(settings.methods, key=lambda method: method == "distill")
    runs = [command(method, batch_size, settings.steps, folder) for method in methods]
    folder.mkdir(parents=True)
    (folder / "runs.json").write_text(json.dumps(runs))
    words = [sys.executable]
    if processes > 1:
        file = Path(__file__).parent.parent / "configs" / "accelerate" / f"{engine}.yaml"
        words += ["-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file", str(file)]
        words += ["--num_processes", str(processes), "--mixed_precision", "no"]
    words += [__file__, "--runs", str(folder / "runs.json")]
    ran = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if ran.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{ran.stderr[-3000:]}")
    records = {method: (folder / method / "metrics.jsonl").read_text().splitlines() for method in methods}
    lines = {method: [json.loads(line) for line in of_method] for method, of_method in records.items()}
    return {method: [line["loss"] for line in of_run if "loss" in line] for method, of_run in lines.items()}


def difference(losses: list[float], wanted: list[float], steps: int) -> str:
    """Return the largest relative difference of a loss."""
    assert len(losses) == len(wanted) == steps
    return f"{max(abs(loss / one - 1) for loss, one in zip(losses, wanted, strict=True)):.0e}"


def main(settings: SharesBenchmark) -> None:
    if settings.runs is not None:
        for words in json.loads(settings.runs.read_text()):
            AcceleratorState._reset_state(True)  # each run begins with the settings of the launcher
            GradientState._reset_state()
            if code := pretrain(words):
                sys.exit(code)
        return
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        one = {
            size: launch(settings, "ddp", 1, size, Path(folder) / "one" / str(size))
            for size in {size for size, _ in LAUNCHES.values()}
        }
        for engine in settings.engines:
            found = {
                name: launch(settings, engine, processes, size, Path(folder) / engine / name)
                for name, (size, processes) in LAUNCHES.items()
            }
            for method in settings.methods:
                cells = [
                    difference(found[name][method], one[size][method], settings.steps)
                    for name, (size, _) in LAUNCHES.items()
                ]
                rows.append([method, engine, *cells])
                print("  ".join(rows[-1]), flush=True)
    intro = f"{typed_command()}: {machine()}; {settings.steps} steps."
    publish([intro, table(["method", "engine", *LAUNCHES], rows, text=2)], settings.output)


if __name__ == "__main__":
    with exit_on_user_error():
        main(cast(SharesBenchmark, parse(SharesBenchmark)))
