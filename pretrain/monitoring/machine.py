"""The record of where a run trained: OUTPUT/machine.jsonl has one line for each start and each resumption."""

import datetime
import os
from pathlib import Path
from typing import Any

import torch

from tessera.pretrain.engines import Engine
from tessera.pretrain.monitoring.sinks import append_line
from tessera.runtime.machine import processor, versions


def record_start(output: Path, step: int, engine: Engine, precision: str) -> None:
    """Append a line to OUTPUT/machine.jsonl. Call this function only on the main process.

    The line holds the time in UTC, the hardware, the number of processes, the engine and the versions of packages.

    Args:
        output: run folder.
        step: number of optimizer steps that the run has done so far.
        engine: engine of the run.
        precision: precision of the forward pass.
    """
    device = engine.accelerator.device
    line: dict[str, Any] = {
        "step": step,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": engine.accelerator.num_processes,
        "processor": processor(),
        "cores": os.cpu_count(),  # of the main process's node
        "threads": torch.get_num_threads(),  # of the main process
        "engine": engine.name,
        "precision": precision,
        "versions": versions(),
    }
    append_line(output / "machine.jsonl", line)
