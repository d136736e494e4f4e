"""Metric sinks: outputs for the numbers and pictures of a run. Each kind of output is one class.

All sinks receive the same records. A resumed run repeats the steps after its checkpoint, so each sink makes sure that
no step appears twice.
"""

import contextlib
import csv
import errno
import importlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from tessera.runtime.files import atomic_write
from tessera.runtime.plugins import Registry
from tessera.runtime.settings import Section, flattened

Record = Mapping[str, float | None]
"""Numbers of one step by name. None stands for a value that is not finite."""
PARAMETERS_PER_CALL = 100
"""Largest number of parameters that MLflow accepts in one call."""
LONGEST_PARAMETER = 500
"""Largest length of a parameter's value, in characters, that every version of MLflow accepts."""

log = logging.getLogger(__name__)


class Sink:
    """One output for metrics. Only the main process has sinks."""

    def __init__(self, output: Path, step: int, settings: Mapping[str, Any]) -> None:
        """Open the output of a run that has done `step` steps. Records of later steps are removed or replaced.

        Args:
            output: run folder.
            step: number of steps that the run has done. If it is 0, all records are removed.
            settings: settings of the run, for outputs that store them with the metrics.
        """

    def write(self, step: int, record: Record) -> None:
        """Write the numbers of one step. After an `OSError`, the run continues without this sink."""
        raise NotImplementedError

    def pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        """Write pictures, given as name -> (H, W, 3) uint8. By default nothing is written, because the run folder
        already holds them as PNG files."""

    def close(self) -> None:
        """Write buffered records and close the output."""


class JSONLines(Sink):
    """Sink that writes OUTPUT/metrics.jsonl, with one JSON object per line."""

    def __init__(self, output: Path, step: int, settings: Mapping[str, Any]) -> None:
        self.path = output / "metrics.jsonl"
        keep_lines(self.path, step)
        lines = self.path.read_bytes().splitlines() if step and self.path.exists() else []
        self.last: dict[str, Any] = json.loads(lines[-1]) if lines else {}

    def write(self, step: int, record: Record) -> None:
        if self.last.get("step") == step:  # a resumed run evaluates the step of its checkpoint, which has a line
            keep_lines(self.path, step - 0.5)
            record = self.last | record
        self.last = {}
        append_line(self.path, {"step": step, **record})


class TensorBoard(Sink):
    """Sink that writes TensorBoard event files to OUTPUT/tensorboard."""

    def __init__(self, output: Path, step: int, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # imported here, because the import is slow

        self.folder = output / "tensorboard"
        self.writer = SummaryWriter(self.folder, purge_step=step + 1 if step else 0)

    def write(self, step: int, record: Record) -> None:
        if not self.folder.is_dir():  # the thread of the writer would print a traceback
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder))
        for name, value in finite(record).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        for name, picture in pictures.items():
            self.writer.add_image(name, picture, step, dataformats="HWC")

    def close(self) -> None:
        self.writer.close()


class CSV(Sink):
    """Sink that writes OUTPUT/metrics.csv, with one row per step and one column per metric. A missing value becomes an
    empty cell."""

    def __init__(self, output: Path, step: int, settings: Mapping[str, Any]) -> None:
        self.path = output / "metrics.csv"
        self.columns: list[str] = []
        self.last = -1
        if self.path.exists():
            kept = [row for row in self._rows() if step and int(row["step"]) <= step]
            self.last = int(kept[-1]["step"]) if kept else -1
            self._rewrite(kept)

    def write(self, step: int, record: Record) -> None:
        row = {"step": str(step)} | {name: "" if value is None else str(value) for name, value in record.items()}
        if set(row) - set(self.columns) or step == self.last:
            rows = self._rows()
            if rows and step == self.last:  # as in `JSONLines`
                row = rows.pop() | row
            self.last = -1
            self._rewrite([*rows, row])
            return
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)

    def _rows(self) -> list[dict[str, str]]:
        """Return the rows of the file. Damaged rows are left out with a warning, and a partial last line without."""
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        header, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, StopIteration, csv.Error):
                row = dict(zip(next(csv.reader([header])), next(csv.reader([line])), strict=True))
                int(row["step"])
                rows.append(row)
        _warn_of_damage(self.path, len(lines) - len(rows))
        return rows

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        self.columns = list(dict.fromkeys([*self.columns, *(name for row in rows for name in row)]))
        with atomic_write(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


class WandB(Sink):
    """Sink that logs to Weights & Biases. The environment variables of wandb apply, such as `WANDB_PROJECT`.

    The name of the run in Weights & Biases is the name of the run folder. A resumed run continues the same
    Weights & Biases run, and the service drops steps that it already has.
    """

    def __init__(self, output: Path, step: int, settings: Mapping[str, Any]) -> None:
        self.wandb = importlib.import_module("wandb")
        known = tracked_run(output, "wandb")
        self.run = self.wandb.init(
            id=known.get("id"), name=known.get("name", output.resolve().name), resume="allow", dir=str(output)
        )
        self.run.config.update(dict(settings), allow_val_change=True)
        track_run(output, "wandb", self.run.id, self.run.name)

    def write(self, step: int, record: Record) -> None:
        self.run.log(finite(record), step=step)

    def pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        self.run.log({name: self.wandb.Image(picture) for name, picture in pictures.items()}, step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow(Sink):
    """Sink that logs to MLflow. The environment variables `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME` apply.

    The name of the run in MLflow is the name of the run folder. A resumed run continues the same MLflow run, and does
    not write steps that MLflow already has. If the tracking server fails during training, only a warning is logged.
    """

    def __init__(self, output: Path, step: int, settings: Mapping[str, Any]) -> None:
        self.mlflow = importlib.import_module("mlflow")
        known = tracked_run(output, "mlflow")
        self.last_step = -1
        name = output.resolve().name
        run = self.mlflow.start_run(run_id=known.get("id"), run_name=known.get("name", name))
        if known:
            written = self.mlflow.MlflowClient().get_metric_history(run.info.run_id, "images")
            self.last_step = max((metric.step for metric in written), default=-1)
            return
        track_run(output, "mlflow", run.info.run_id, name)
        parameters = [(key, str(value)[:LONGEST_PARAMETER]) for key, value in flattened(settings).items()]
        for start in range(0, len(parameters), PARAMETERS_PER_CALL):
            self.mlflow.log_params(dict(parameters[start : start + PARAMETERS_PER_CALL]))

    def write(self, step: int, record: Record) -> None:
        if step > self.last_step:
            self._send(self.mlflow.log_metrics, finite(record), step=step)

    def pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        for name, picture in pictures.items():
            self._send(self.mlflow.log_image, picture, f"pictures/{name}-{step:08d}.png")

    def _send(self, call: Callable[..., object], *arguments: Any, **options: Any) -> None:
        try:
            call(*arguments, **options)
        except self.mlflow.exceptions.MlflowException as error:
            log.warning("A record could not be sent to MLflow: %s", error)

    def close(self) -> None:
        self.mlflow.end_run()


SINKS: Registry[type[Sink]] = Registry(
    "sink",
    {
        "jsonl": JSONLines,
        "tensorboard": TensorBoard,
        "csv": CSV,
        "wandb": WandB,
        "mlflow": MLflow,
    },
    group="tessera.sinks",
    expected="a subclass of tessera.pretrain.monitoring.sinks.Sink",
    valid=lambda value: isinstance(value, type) and issubclass(value, Sink),
)
"""Sinks by their names in `metrics.sinks`, with those of other packages (docs/extending.md)."""
OPTIONAL_PACKAGES = ("wandb", "mlflow")
"""Sinks that need an optional package of the same name."""


class MetricsConfig(Section):
    """Settings of the outputs for metrics."""

    sinks: tuple[str, ...] = Field(default=("jsonl", "tensorboard"))
    """outputs for metrics: any of jsonl (metrics.jsonl), tensorboard, csv (metrics.csv), wandb and mlflow"""

    @field_validator("sinks")
    @classmethod
    def _known_and_installed(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        for name in sinks:
            if name not in SINKS:
                raise ValueError(
                    f"There is no sink of this name. Choose any of {', '.join(SINKS.names())}. {SINKS.elsewhere}"
                )
            _ = SINKS[name]  # import the sink of another package now, because an error stops the run before it starts
            if name in OPTIONAL_PACKAGES and importlib.util.find_spec(name) is None:
                raise ValueError(
                    f"The package {name} is not installed. Install it with `pip install {name}`, or remove {name} from "
                    "metrics.sinks."
                )
        return tuple(dict.fromkeys(sinks))


def finite(record: Record) -> dict[str, float]:
    """Return the finite values of a record."""
    return {name: value for name, value in record.items() if value is not None}


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Append one JSON object as a line to a JSON lines file."""
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


def keep_lines(path: Path, step: float) -> None:
    """Remove the lines of all steps after `step` from a JSON lines file. Remove all lines if `step` is 0.

    Damaged lines are removed with a warning. A partial last line, which a killed process may have left, is removed
    without a warning.
    """
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    steps = [_step_of(line) for line in lines]
    _warn_of_damage(path, sum(found is None and bool(line) for line, found in zip(lines[:-1], steps, strict=False)))
    kept = [
        line + b"\n" for line, found in zip(lines, steps, strict=True) if step and found is not None and found <= step
    ]
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"".join(kept))


def _step_of(line: bytes) -> float | None:
    """Return the step of a line of a JSON lines file, or None if the line is damaged."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int | float) else None


def _warn_of_damage(path: Path, count: int) -> None:
    if count:
        log.warning("%s: %d damaged line(s) were removed.", path, count)


def tracked_run(output: Path, service: str) -> dict[str, str]:
    """Return the id and name that this run has in a tracking service, or an empty dict if none is stored."""
    path = output / "tracking.json"
    return json.loads(path.read_text()).get(service, {}) if path.exists() else {}


def track_run(output: Path, service: str, run_id: str, name: str) -> None:
    """Store the id and name that this run has in a tracking service, in OUTPUT/tracking.json."""
    path = output / "tracking.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(known | {service: {"id": run_id, "name": name}}, indent=2) + "\n")
