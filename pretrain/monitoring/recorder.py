"""Write the records of a training run: metrics, pictures, skipped samples, and a description of the machine."""

import datetime
import errno
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tessera.pretrain.engines import Engine
from tessera.pretrain.monitoring.sinks import SINKS, JSONLines, MetricsConfig, Sink, append_line, keep_lines
from tessera.runtime.files import read_bounded
from tessera.runtime.machine import processor, versions
from tessera.runtime.user_error import UserError

MACHINE_BYTES = 2**28
"""Largest size of a machine.jsonl in bytes."""

log = logging.getLogger(__name__)


class LostFolderError(UserError):
    """The run folder was moved or deleted during the run."""


class Recorder:
    """Writer of metrics, pictures and skipped samples. Only the main process has a recorder.

    Metrics and pictures go to the chosen sinks. The recorder itself writes pictures and the names of skipped samples to
    the run folder.
    """

    def __init__(
        self, output: Path, step: int, config: MetricsConfig | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        """Open the sinks of a run that has done `step` steps.

        Records of later steps are removed, because the run writes them again. If `step` is 0, all records are removed.

        Args:
            config: metric sinks to use.
            settings: settings of the run, which the sinks wandb and mlflow store with the metrics.
        """
        self.output, self.skips = output, output / "skipped.jsonl"
        keep_lines(self.skips, step)
        self.sinks = [SINKS[name](output, step, settings or {}) for name in (config or MetricsConfig()).sinks]

    def scalars(self, record: dict[str, Any]) -> None:
        """Write the metrics of the step `record["step"]`. A value that is not finite becomes None, because JSON has no
        NaN. Texts, such as the name of the slowest rank, are written to metrics.jsonl only."""
        texts = {name: value for name, value in record.items() if isinstance(value, str)}
        values = {n: v if math.isfinite(v) else None for n, v in record.items() if n != "step" and n not in texts}
        for sink in list(self.sinks):
            with self._surviving(sink):
                sink.write(record["step"], values | texts if isinstance(sink, JSONLines) else values)

    def pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        """Write pictures, given as name -> (H, W, 3) uint8, to the sinks and to OUTPUT/pictures/NAME.png.

        The PNG file replaces the earlier picture of that name.
        """
        for sink in list(self.sinks):
            with self._surviving(sink):
                sink.pictures(step, pictures)
        with self._surviving():
            folder = self.output / "pictures"
            folder.mkdir(exist_ok=True)
            for name, picture in pictures.items():
                Image.fromarray(picture).save(folder / f"{name}.png")

    def skipped(self, step: int, reason: str, keys: list[str]) -> None:
        """Append a step whose loss or gradient was not finite to skipped.jsonl, with the names of its samples."""
        with self._surviving():
            append_line(self.skips, {"step": step, "reason": reason, "samples": keys})

    def close(self) -> None:
        """Close all sinks."""
        for sink in list(self.sinks):
            with self._surviving(sink):
                sink.close()

    @contextmanager
    def _surviving(self, sink: Sink | None = None) -> Iterator[None]:
        """Log a warning after an `OSError` in the context, and write to `sink` no more. A full disk ends the run.

        Raises:
            LostFolderError: the run folder is gone.
        """
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not self.output.is_dir():
                raise LostFolderError(
                    f"The run folder {self.output} was moved or deleted during the run. To continue from its last "
                    "checkpoint, move it back and start again with --resume."
                ) from error
            if sink is None:
                log.warning("%s. The run continues without this record.", error)
                return
            self.sinks.remove(sink)
            log.warning("%s. The run continues without its %s records.", error, type(sink).__name__)


def record_start(output: Path, step: int, engine: Engine, precision: str, contents: dict[str, str | None]) -> None:
    """Append a line to OUTPUT/machine.jsonl. Call this function only on the main process.

    The line holds the time in UTC, the hardware, the number of processes, the engine and the versions of packages.

    Args:
        output: run folder.
        step: number of optimizer steps that the run has done so far.
        engine: engine of the run.
        precision: precision of the forward pass.
        contents: hashes of scored images (`Source.content`), by which reports recognise a data set. The keys are the
            settings that name the images.
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
        "folder": os.getcwd(),  # relative paths of the settings begin here
        **contents,
    }
    append_line(output / "machine.jsonl", line)


def earlier_contents(output: Path) -> dict[str, Any]:
    """Return the newest hash of the scored images for each setting in OUTPUT/machine.jsonl; see `record_start`."""
    found: dict[str, Any] = {}
    with suppress(OSError):  # a new run has no such file
        for line in read_bounded(output / "machine.jsonl", MACHINE_BYTES).splitlines():
            with suppress(ValueError, RecursionError, AttributeError):  # a partial or damaged line
                start = json.loads(line)
                found |= {name: value for name, value in start.items() if "." in name}
    return found
