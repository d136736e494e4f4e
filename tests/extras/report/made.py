"""Run folders as a run writes them, without a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

MACHINE = {
    "step": 0,
    "time": "2026-11-22T10:00:00+00:00",
    "device": "cpu",
    "processes": 2,
    "processor": "Some CPU",
    "cores": 4,
    "engine": "ddp",
    "precision": "fp32",
    "versions": {"python": "3.11.7", "torch": "2.15.0"},
}


def record(step: int, loss: float, speed: float = 32.0, **metrics: float) -> dict[str, Any]:
    """Return a line of metrics.jsonl of a run with 64 images per step."""
    return {"step": step, "images": 64 * step, "loss": loss, "images_per_second": speed, **metrics}


def make_run(folder: Path, records: list[dict[str, Any]], **settings: Any) -> Path:
    """Write a run folder with a picture and a line about the machine. `settings` are added to config.yaml."""
    (folder / "pictures").mkdir(parents=True)
    (folder / "evaluation").mkdir()
    defaults = {"method": "dino", "steps": 20, "seed": 0, "evaluation": {"val": "val.tar", "k": 20}}
    (folder / "config.yaml").write_text(yaml.safe_dump(defaults | settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    (folder / "machine.jsonl").write_text(json.dumps(MACHINE) + "\n")
    pixels = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "pictures" / "attention.png")
    return folder


def add_result(run: Path, file: str, **result: Any) -> None:
    """Write a result file below RUN/evaluation."""
    path = run / "evaluation" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
