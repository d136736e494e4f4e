"""Results of evaluations: rank of the true class, paths of result files, and printed tables."""

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from runtime.files import atomic_write

PACKAGES = ("tessera-ssl", "torch", "torchvision", "accelerate", "numpy", "pillow")
UNRANKED = 2**31
"""Rank of a true class without a valid score. This rank is larger than any number of classes."""


def true_class_rank(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the rank of the true class: (B, classes), (B,) -> (B,) int64. The highest score has rank 0.

    Among equal scores, the class with the smaller number ranks first. NaN ranks before all other scores, and a true
    class whose score is NaN gets the rank `UNRANKED`. A diverged classifier is therefore never correct by accident.
    """
    own = scores.gather(1, labels[:, None])  # (B, 1)
    lower = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]  # (B, classes)
    ahead = ~(scores <= own) | ((scores == own) & lower)
    return ahead.sum(1).masked_fill(own.squeeze(1).isnan(), UNRANKED)


def result_path(encoder: Path | None, name: str) -> Path | None:
    """Return the path of the result file of evaluation `name` for an encoder file, or None if `encoder` is None.

    | file `encoder` | path of the result |
    |---|---|
    | encoder of a run | OUTPUT/evaluation/NAME.json |
    | encoder of a checkpoint | OUTPUT/evaluation/step-00001000/NAME.json |
    | any other encoder file | ENCODER.NAME.json in the folder of the encoder file |
    """
    if encoder is None:
        return None
    encoder = encoder.resolve()  # `latest` is a symbolic link to the folder of a step
    folder = encoder.parent
    if folder.parent.name == "checkpoints":
        return folder.parent.parent / "evaluation" / folder.name / f"{name}.json"
    in_run = (folder / "checkpoints").is_dir() or (folder / "config.yaml").is_file()
    if in_run and encoder.name == "encoder.safetensors":
        return folder / "evaluation" / f"{name}.json"
    return folder / f"{encoder.stem}.{name}.json"


def environment() -> dict[str, Any]:
    """Return the current time, the versions of Python and of packages, and the name of the device."""
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


def report(path: Path | None, result: dict[str, Any], columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a result as a table, and write it to `path` together with the return value of `environment`.

    Call this function only on the main process.

    Args:
        path: JSON file to write. With None, the result is only printed.
        result: numbers and settings of the evaluation.
        columns: headings of the table.
        rows: cells of the table. Floats are accuracies from 0 to 1, printed in percent.
    """
    console = Console()
    table = Table(*columns, title=f"{result['protocol']}, {result['val_images']:,} images")
    for row in rows:
        table.add_row(*(f"{100 * cell:.2f} %" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table)
    if path is None:
        console.print("The result was not written to a file. Give --output FILE to keep it.")
        return
    if path.exists():
        console.print(f"This replaces an older result in {path}.", soft_wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result | environment(), indent=2) + "\n"
    with atomic_write(path) as temporary:
        temporary.write_text(text)
    console.print(f"Result written to {path}", soft_wrap=True)
