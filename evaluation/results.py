"""Results of an evaluation: where they lie, how they are written and shown."""

import datetime
import importlib.metadata
import json
import os
import platform
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

PACKAGES = ("tessera-ssl", "torch", "torchvision", "accelerate", "numpy", "pillow")
NEVER = 2**31
"""place of a class that was not named at all"""


def places(scores: Tensor, labels: Tensor) -> Tensor:
    """Place of the true class among all, 0 being the first: (B, classes), (B,) -> (B,) int64.

    The lower class wins a tie. A score that is not a number is at `NEVER`, and ahead of others, so a diverged
    classifier is not right by accident.
    """
    own = scores.gather(1, labels[:, None])  # (B, 1)
    lower = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]  # (B, classes)
    ahead = ~(scores <= own) | ((scores == own) & lower)
    return ahead.sum(1).masked_fill(own.squeeze(1).isnan(), NEVER)


def result_path(encoder: Path | None, name: str) -> Path | None:
    """Where the result `name` of an encoder.safetensors belongs; None for an encoder that is no file.

    OUTPUT/evaluation/NAME.json for the encoder of a run, OUTPUT/evaluation/step-00001000/NAME.json for one of its
    checkpoints, ENCODER.NAME.json beside an encoder elsewhere.
    """
    if encoder is None:
        return None
    encoder = encoder.resolve()  # `latest` is a link to its step
    folder = encoder.parent
    if folder.parent.name == "checkpoints":
        return folder.parent.parent / "evaluation" / folder.name / f"{name}.json"
    if encoder.name == "encoder.safetensors" and (
        (folder / "checkpoints").is_dir() or (folder / "config.yaml").is_file()
    ):
        return folder / "evaluation" / f"{name}.json"
    return folder / f"{encoder.stem}.{name}.json"


def surroundings() -> dict[str, Any]:
    """When, with which software and on what a result was made."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_result(path: str | Path, result: dict[str, Any]) -> None:
    """Writes JSON at once: a reader meets the old file or the new one, never half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(path)
    part.write_text(json.dumps(result, indent=2) + "\n")
    part.replace(path)


def part_of(path: Path) -> Path:
    """A fresh name beside `path` to write to before it is renamed."""
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")


def report(path: Path | None, result: dict[str, Any], columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Shows the `rows` of a result and writes it with its surroundings, saying where. Called on the main process.

    Numbers in `rows` that are floats are accuracies, 0 to 1, and shown in percent.
    """
    console = Console()
    table = Table(*columns, title=f"{result['protocol']}, {result['val_images']:,} images")
    for row in rows:
        table.add_row(*(f"{100 * cell:.2f} %" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table)
    if path is None:
        console.print("not written: give --output FILE to keep it")
        return
    if path.exists():
        console.print(f"replaces an older result in {path}", soft_wrap=True)
    write_result(path, result | surroundings())
    console.print(f"written to {path}", soft_wrap=True)
