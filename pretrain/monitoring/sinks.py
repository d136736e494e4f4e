"""Metric sinks: outputs for the numbers and pictures of a run. Each kind of output is one class.

Every sink has the three methods of `Sink`. All sinks receive the same records. A resumed run repeats the steps after
its checkpoint, so each sink makes sure that no step appears twice.
"""

import csv
import importlib
import importlib.util
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import Field, field_validator

from tessera.runtime.files import atomic_write
from tessera.runtime.settings import Section, SettingsError, flattened

SinkName = Literal["jsonl", "tensorboard", "csv", "wandb", "mlflow"]
Record = Mapping[str, float | None]
"""Numbers of one step. `step` and `images` are always present. None stands for a value that is not finite."""
EXTRAS = ("wandb", "mlflow")
"""Sinks that need an optional package of the same name."""
PARAMETERS_PER_CALL = 100
"""Largest number of parameters that MLflow accepts in one call."""
LONGEST_PARAMETER = 500
"""Largest length of a parameter's value, in characters, that every version of MLflow accepts."""

log = logging.getLogger(__name__)


def check_installed(sinks: tuple[str, ...]) -> None:
    """Check that the packages of the chosen sinks are installed.

    Raises:
        SettingsError: a package is missing.
    """
    for name in sinks:
        if name in EXTRAS and importlib.util.find_spec(name) is None:
            raise SettingsError(
                f"metrics.sinks names {name}, but the package {name} is not installed. "
                f"Install it with `pip install {name}`, or remove {name} from metrics.sinks."
            )


class MetricsConfig(Section):
    """Settings of the outputs for metrics."""

    sinks: tuple[SinkName, ...] = Field(default=("jsonl", "tensorboard"))
    """outputs for metrics: any of jsonl (metrics.jsonl), tensorboard, csv (metrics.csv), wandb and mlflow"""

    @field_validator("sinks")
    @classmethod
    def _installed(cls, sinks: tuple[SinkName, ...]) -> tuple[SinkName, ...]:
        check_installed(sinks)
        return tuple(dict.fromkeys(sinks))


class Sink(Protocol):
    """Interface of one output for metrics."""

    def scalars(self, record: Record) -> None:
        """Write the numbers of one step."""

    def pictures(self, pictures: Mapping[str, np.ndarray], step: int) -> None:
        """Write pictures, given as name -> (H, W, 3) uint8."""

    def close(self) -> None:
        """Write buffered records and close the output."""


class JSONLines:
    """Sink that writes OUTPUT/metrics.jsonl, with one JSON object per line."""

    def __init__(self, output: Path, step: int) -> None:
        self.path = output / "metrics.jsonl"
        keep_lines(self.path, step)

    def scalars(self, record: Record) -> None:
        append_line(self.path, record)

    def pictures(self, pictures: Mapping[str, np.ndarray], step: int) -> None:
        """Ignore the pictures, because the run folder already holds them as PNG files."""

    def close(self) -> None:
        """Do nothing, because `scalars` closes the file after every line."""


class TensorBoard:
    """Sink that writes TensorBoard event files to OUTPUT/tensorboard."""

    def __init__(self, output: Path, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # imported here, because the import is slow

        self.writer = SummaryWriter(output / "tensorboard", purge_step=step + 1 if step else 0)

    def scalars(self, record: Record) -> None:
        for name, value in record.items():
            if name != "step" and value is not None:
                self.writer.add_scalar(name, value, record["step"])
        self.writer.flush()

    def pictures(self, pictures: Mapping[str, np.ndarray], step: int) -> None:
        for name, picture in pictures.items():
            self.writer.add_image(name, picture, step, dataformats="HWC")

    def close(self) -> None:
        self.writer.close()


class CSV:
    """Sink that writes OUTPUT/metrics.csv, with one row per step and one column per metric. A missing value becomes an
    empty cell."""

    def __init__(self, output: Path, step: int) -> None:
        self.path = output / "metrics.csv"
        self.columns: list[str] = []
        if not self.path.exists():
            return
        text = self.path.read_text()
        whole_lines = text[: text.rfind("\n") + 1]  # a killed process may have left a partial last line in the file
        rows = list(csv.DictReader(whole_lines.splitlines()))
        self._rewrite([row for row in rows if step and int(row["step"]) <= step])

    def scalars(self, record: Record) -> None:
        row = {name: "" if value is None else str(value) for name, value in record.items()}
        if new := [name for name in row if name not in self.columns]:
            rows = list(csv.DictReader(self.path.read_text().splitlines())) if self.path.exists() else []
            self.columns += new
            self._rewrite([*rows, row])
            return
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        self.columns = list(dict.fromkeys([*self.columns, *(name for row in rows for name in row)]))
        with atomic_write(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def pictures(self, pictures: Mapping[str, np.ndarray], step: int) -> None:
        """Ignore the pictures, because the run folder already holds them as PNG files."""

    def close(self) -> None:
        """Do nothing, because `scalars` closes the file after every row."""


class WandB:
    """Sink that logs to Weights & Biases. `WANDB_PROJECT`, `WANDB_MODE` and its other environment variables apply.

    The name of the run in Weights & Biases is the name of the run folder. A resumed run continues the same
    Weights & Biases run, and the service drops steps that it already has.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.wandb = importlib.import_module("wandb")
        known = read_run(output, "wandb")
        self.run = self.wandb.init(
            id=known.get("id"), name=known.get("name", output.resolve().name), resume="allow", dir=str(output)
        )
        self.run.config.update(dict(settings), allow_val_change=True)
        write_run(output, "wandb", self.run.id, self.run.name)

    def scalars(self, record: Record) -> None:
        numbers = {name: value for name, value in record.items() if name != "step" and value is not None}
        self.run.log(numbers, step=record["step"])

    def pictures(self, pictures: Mapping[str, np.ndarray], step: int) -> None:
        self.run.log({name: self.wandb.Image(picture) for name, picture in pictures.items()}, step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """Sink that logs to MLflow. The environment variables `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME` apply.

    The name of the run in MLflow is the name of the run folder. A resumed run continues the same MLflow run, and does
    not write steps that MLflow already has. If the tracking server fails during training, only a warning is logged.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.mlflow = importlib.import_module("mlflow")
        known = read_run(output, "mlflow")
        self.last_step = -1
        name = output.resolve().name
        run = self.mlflow.start_run(run_id=known.get("id"), run_name=known.get("name", name))
        if known:
            written = self.mlflow.MlflowClient().get_metric_history(run.info.run_id, "images")
            self.last_step = max((metric.step for metric in written), default=-1)
            return
        write_run(output, "mlflow", run.info.run_id, name)
        parameters = list(flattened(settings).items())
        for start in range(0, len(parameters), PARAMETERS_PER_CALL):
            some = parameters[start : start + PARAMETERS_PER_CALL]
            self.mlflow.log_params({key: str(value)[:LONGEST_PARAMETER] for key, value in some})

    def scalars(self, record: Record) -> None:
        step = int(record["step"] or 0)
        if step > self.last_step:
            numbers = {name: value for name, value in record.items() if name != "step" and value is not None}
            self._send(lambda: self.mlflow.log_metrics(numbers, step=step))

    def pictures(self, pictures: Mapping[str, np.ndarray], step: int) -> None:
        for name, picture in pictures.items():
            file = f"pictures/{name}-{step:08d}.png"
            self._send(lambda picture=picture, file=file: self.mlflow.log_image(picture, file))

    def _send(self, call: Callable[[], object]) -> None:
        try:
            call()
        except self.mlflow.exceptions.MlflowException as error:
            log.warning("a record could not be sent to MLflow: %s", error)

    def close(self) -> None:
        self.mlflow.end_run()


def open_sinks(config: MetricsConfig, output: Path, step: int, settings: Mapping[str, Any]) -> list[Sink]:
    """Open the chosen sinks of a run that has done `step` steps.

    Records of later steps are removed. If `step` is 0, all records are removed. Weights & Biases and MLflow also store
    `settings`.
    """
    makers: dict[str, Callable[[], Sink]] = {
        "jsonl": lambda: JSONLines(output, step),
        "tensorboard": lambda: TensorBoard(output, step),
        "csv": lambda: CSV(output, step),
        "wandb": lambda: WandB(output, settings),
        "mlflow": lambda: MLflow(output, settings),
    }
    return [makers[name]() for name in config.sinks]


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Append one JSON object as a line to a JSON lines file."""
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


def keep_lines(path: Path, step: int) -> None:
    """Remove from a JSON lines file the lines of all steps after `step`. Remove all lines if `step` is 0."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if step and json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            break  # a killed process may have left a partial last line in the file
    with atomic_write(path) as temporary:
        temporary.write_text("".join(kept))


def read_run(output: Path, service: str) -> dict[str, str]:
    """Return the id and name under which a tracking service knows this run folder, or an empty dict if none is
    stored."""
    path = output / "tracking.json"
    return json.loads(path.read_text()).get(service, {}) if path.exists() else {}


def write_run(output: Path, service: str, run_id: str, name: str) -> None:
    """Write the id and name under which a tracking service knows this run folder to OUTPUT/tracking.json."""
    path = output / "tracking.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(known | {service: {"id": run_id, "name": name}}, indent=2) + "\n")
