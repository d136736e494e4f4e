"""The sink `compute`: OUTPUT/compute.jsonl, the processor time of all processes of a run at each record of metrics.

The compute of training is that of the steps, with loading, augmentation and checkpoints. The start of the process,
evaluations and the export are left out: intervals between two records that end with an evaluation are not measured, and
the steps in them count with the mean of the others. Without /proc, as on other systems than Linux, other processes are
not seen, so train there with one process and `--workers 0`.
"""

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tessera.pretrain.monitoring.sinks import Record, Sink, append_line, keep_lines
from tessera.runtime.machine import process_fields, start_time

FILE = "compute.jsonl"
EVALUATED = ("knn_top1", "view_retrieval", "patch_miou", "val_top1")
"""Metrics of which one is in a record if an evaluation took place before it."""
SETTLED = 3
"""Steps that are not measured, because the first ones allocate memory and fill the buffers of the loader."""


class Compute(Sink):
    """Sink that writes OUTPUT/compute.jsonl."""

    def __init__(self, output: Path, step: int, settings: Mapping[str, Any]) -> None:
        self.path, self.start = output / FILE, time.time()
        self.processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.root = os.getppid() if self.processes > 1 else os.getpid()  # the launcher of all processes
        self.began, self.samples = time.monotonic() - seconds_since_start(), settings.get("samples")
        keep_lines(self.path, step)

    def write(self, step: int, record: Record) -> None:
        line = {"step": step, "start": self.start, "evaluated": any(name in record for name in EVALUATED)}
        line |= {"cpu": processor_seconds(self.root), "wall": time.monotonic(), "gpu": torch.cuda.is_available()}
        line |= {"images": record.get("images"), "processes": self.processes}
        line |= {"began": self.began, "samples": self.samples}
        append_line(self.path, line)


class Spent(NamedTuple):
    """Compute of a run in seconds: of all its GPUs if it has some, else of the processors."""

    per_step: float | None
    """Seconds of a training step; None if no interval without an evaluation was recorded."""
    total: float
    """Seconds with starts and evaluations, up to the last record."""
    gpu: bool
    step: int
    """Last recorded step."""
    images: int | None
    """Images of all recorded steps."""
    processes: int
    samples: list[str] | None
    """Hashes of the images of each source; None if the run did not record them."""


def are_others(samples: Sequence[str], before: Sequence[str]) -> bool:
    """Return True if hashes of sources (`Source.samples_hash`) say that the images are others. Hashes of different
    kinds say nothing."""
    known = [(one, two) for one, two in zip(samples, before, strict=False) if one.split(":")[0] == two.split(":")[0]]
    return len(samples) != len(before) or any(one != two for one, two in known)


def seconds_since_start() -> float:
    """Return the time since this process was started, or 0 without /proc."""
    started = start_time(os.getpid())
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK") if started else 0.0


def processor_seconds(root: int | None = None) -> float:
    """Return the user and system time of a process and of all its descendants, also of those that have ended.

    `root` is the id of the process; default: this one.
    """
    root = root or os.getpid()
    if not os.path.isdir("/proc"):
        return sum(os.times()[:4])
    times, children = dict[int, float](), dict[int, list[int]]()
    tick = os.sysconf("SC_CLK_TCK")
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := process_fields(int(name))):
            times[int(name)] = sum(map(int, fields[11:15])) / tick  # with ended children of its own
            children.setdefault(int(fields[1]), []).append(int(name))
    total, found = 0.0, [root]
    while found:
        pid = found.pop()
        total += times.get(pid, 0.0)
        found += children.get(pid, [])
    return total


def spent(run: Path) -> Spent | None:
    """Return the compute of a run, or None if it recorded none."""
    path = run / FILE
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    if not lines:
        return None
    last = lines[-1]
    processes = last.get("processes", 1)
    clock, factor = ("wall", processes) if last["gpu"] else ("cpu", 1)
    seconds, steps, total = 0.0, 0, 0.0
    for _, group in itertools.groupby(lines, lambda line: line["start"]):
        own = list(group)
        total += own[-1]["cpu"] if clock == "cpu" else own[-1]["wall"] - own[0].get("began", own[0]["wall"])
        for before, after in itertools.pairwise(own):
            if not after["evaluated"] and before["step"] >= SETTLED:
                seconds += after[clock] - before[clock]
                steps += after["step"] - before["step"]
    per_step = factor * seconds / steps if steps else None
    facts = (last["gpu"], last["step"], last.get("images"), processes, last.get("samples"))
    return Spent(per_step, factor * total, *facts)
