"""What a run writes down: metrics.jsonl, TensorBoard, pictures, the list of skipped samples."""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from torch.utils.tensorboard.writer import SummaryWriter


class Recorder:
    """Writes into a run folder; made on the main process only."""

    def __init__(self, output: Path, step: int) -> None:
        """`step`: steps done so far. What the run will write again is removed: later steps, all when none is done."""
        self.output = output
        self.path, self.skips = output / "metrics.jsonl", output / "skipped.jsonl"
        for path in (self.path, self.skips):
            if path.exists():
                _keep_until(path, step)
        self.tensorboard = SummaryWriter(output / "tensorboard", purge_step=step + 1 if step else 0)

    def scalars(self, record: dict[str, Any]) -> None:
        """One line; `record` holds `step` and numbers. JSON knows no nan: what is not finite is null."""
        record = {name: value if math.isfinite(value) else None for name, value in record.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        for name, value in record.items():
            if name != "step" and value is not None:
                self.tensorboard.add_scalar(name, value, record["step"])
        self.tensorboard.flush()

    def values(self, name: str) -> list[tuple[int, float]]:
        """Steps and values of all lines so far that have `name`."""
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [(line["step"], line[name]) for line in lines if line.get(name) is not None]

    def pictures(self, pictures: dict[str, np.ndarray], step: int) -> None:
        """`pictures`: name -> (H, W, 3) uint8. To TensorBoard, and to OUTPUT/pictures/NAME.png, the newest of each."""
        folder = self.output / "pictures"
        folder.mkdir(exist_ok=True)
        for name, picture in pictures.items():
            self.tensorboard.add_image(name, picture, step, dataformats="HWC")
            Image.fromarray(picture).save(folder / f"{name}.png")

    def skipped(self, step: int, reason: str, keys: list[str]) -> None:
        """Name the samples of a batch that gave no finite loss or gradient."""
        with self.skips.open("a") as file:
            file.write(json.dumps({"step": step, "reason": reason, "samples": keys}) + "\n")

    def close(self) -> None:
        self.tensorboard.close()


def _keep_until(path: Path, step: int) -> None:
    """Only the lines up to `step`, and none when that is 0: the line of step 0 is the first that a run writes."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            if step and json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            break  # a kill may cut the last line short
    new = path.with_suffix(".part")
    new.write_text("".join(kept))
    os.replace(new, path)


class Progress:
    """A bar with loss, images/s and data wait on a terminal; a line at every record elsewhere (a SLURM log)."""

    def __init__(self, steps: int, done: int, *, enabled: bool) -> None:
        console = Console(stderr=True)
        self.console, self.enabled, self.bar = console, enabled, enabled and console.is_terminal
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self.progress = RichProgress(*columns, console=console, disable=not self.bar)
        self.task = self.progress.add_task("", total=steps, completed=done, numbers="")
        self.steps, self.first, self.started = steps, done, time.perf_counter()

    def __enter__(self) -> "Progress":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def update(self, step: int, loss: float, images_per_second: float, data_wait: float) -> None:
        numbers = f"loss {loss:.4f}  {images_per_second:.0f} images/s  data wait {100 * data_wait:.0f} %"
        self.progress.update(self.task, completed=step, numbers=numbers)

    def line(self, record: dict[str, Any]) -> None:
        """What a log file gets instead of the bar."""
        if not self.enabled or self.bar:
            return
        done = record["step"] - self.first
        left = (time.perf_counter() - self.started) / max(done, 1) * (self.steps - record["step"])
        numbers = {"loss": ".4f", "lr": ".2e", "images_per_second": ".0f", "data_wait": ".0%", "knn_top1": ".3f"}
        shown = "  ".join(f"{name} {record[name]:{form}}" for name, form in numbers.items() if name in record)
        print(f"step {record['step']}/{self.steps}  {shown}  ETA {left:.0f} s", file=sys.stderr, flush=True)
