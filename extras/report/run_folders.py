"""Read run folders: settings, metrics, results of evaluations, pictures and hardware.

A missing or damaged file raises no error. `RunFolder.problems` names the files that could not be read.
"""

import glob
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from tessera.encoders import WEIGHTS
from tessera.evaluation.results import data_name
from tessera.runtime.files import read_bounded
from tessera.runtime.settings import SettingsError, flattened, read_yaml
from tessera.runtime.user_error import UserError, printable

SCORES = {
    "top1": "",
    "mean_iou": " (mIoU)",
    "mean_average_precision": " (mAP)",
    "delta1": " (delta1)",
    "auroc": " (AUROC)",
}
"""Keys under which a result file may contain its score (0 to 1), and the text to append to the name of the protocol. If
a file has several of these keys, the first one counts. A file may name another key as its entry `score`."""
ONLINE = {
    "knn_top1": ("evaluation.k", "{}-NN in training", "evaluation.val"),
    "linear_top1": ("evaluation.linear_iterations", "linear probe of {} iterations in training", "evaluation.val"),
    "view_retrieval": ("evaluation.view_images", "view retrieval of {} images in training", "data.shards"),
    "patch_miou": ("evaluation.maps_ignore", "10-NN of patches in training (mIoU)", "evaluation.maps_val"),
}
"""Metrics that are scores of evaluations during training. Each value consists of the name of a setting, of the name of
the evaluation, in which the value of this setting replaces the braces, and of the setting that names the data."""


LARGEST = 1e30
"""Largest absolute value of a number. Larger numbers count as not finite, because charts cannot show them."""
LARGEST_STEP = 2**53
LINES_BYTES, RESULT_BYTES = 2**28, 2**24
"""Largest sizes of a JSON lines file and of a result file, in bytes."""


class ReportError(UserError, ValueError):
    """Raised when a report cannot be made."""


class Test(NamedTuple):
    """An evaluation on a data set."""

    protocol: str
    """Name of the evaluation and its settings, such as `20-NN`."""
    data: str
    """Name of the data set; empty if unknown."""
    content: str | None
    """Hash of the images of the data set (`Source.content`); None if unknown."""


@dataclass(frozen=True)
class RunFolder:
    """The readable contents of a run folder."""

    name: str
    """Last parts of the path that distinguish this run from the other runs of the report."""
    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of config.yaml with dotted names."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl, in the order of the steps."""
    found: dict[Test, dict[int, float]] = field(default_factory=dict)
    """Scores (0 to 1) of result files and of evaluations during training, by the evaluation and by the step."""
    names: dict[Test, str] = field(default_factory=dict)
    """Names of the evaluations, which consist of protocol and data set, such as `20-NN, cifar10-test`."""
    pictures: dict[str, Path] = field(default_factory=dict)
    """Newest pictures by name."""
    machines: list[dict[str, Any]] = field(default_factory=list)
    """Lines of machine.jsonl: hardware, processes and versions of each start."""
    problems: list[str] = field(default_factory=list)
    """Sentences that say which files are missing or damaged."""

    @property
    def method(self) -> str:
        """Name of the method, or `?` if config.yaml does not name it."""
        return str(self.settings.get("method", "?"))

    @property
    def last_step(self) -> int:
        """Step of the newest record of metrics. 0 if there is no record."""
        return int(self.records[-1]["step"]) if self.records else 0

    @property
    def finished(self) -> bool:
        """True if the run has done all its steps."""
        steps = self.settings.get("steps")
        return is_number(steps) and self.last_step >= steps

    @property
    def training_seconds(self) -> float:
        """Duration of training in seconds, without evaluations and checkpoints.

        Each record contains the number of images so far, and the speed since the previous record.
        """
        seconds, images = 0.0, 0
        for record in self.records:
            speed, now = record.get("images_per_second"), record.get("images")
            if is_number(now):
                seconds += (now - images) / speed if is_number(speed) and speed > 0 else 0.0
                images = now
        return seconds

    def curve(self, metric: str) -> dict[int, float]:
        """Return a dictionary from steps to values of a metric. Steps without a finite value are left out.

        So are scores of images that the run no longer scores, because it continued with others.
        """
        since = self._since(ONLINE[metric][2]) if metric in ONLINE else 0
        return {int(r["step"]): r[metric] for r in self.records if r["step"] >= since and is_number(r.get(metric))}

    def _since(self, setting: str) -> float:
        """Return the step from which on a run scores the images that a setting names now."""
        since, before = 0, None
        for line in self.machines:
            content = line.get(setting)
            if content and before and content != before and is_step(line.get("step")):
                since = line["step"]
            before = content or before
        return since

    @property
    def scores(self) -> dict[str, dict[int, float]]:
        """Scores (0 to 1) by the name of the evaluation and by the step."""
        curves: dict[str, dict[int, float]] = {}
        for test, curve in self.found.items():
            curves[self.names[test]] = dict(sorted((curves.get(self.names[test], {}) | curve).items()))
        return curves

    def online(self, metric: str) -> Test:
        """Return the evaluation during training to which a metric of `ONLINE` belongs."""
        setting, name, data = ONLINE[metric]
        val = self.settings.get(data)
        protocol = name.format(self.settings.get(setting, "?"))
        return Test(protocol, data_name(val) if val else "", self.content(data))

    def content(self, setting: str) -> str | None:
        """Return the hash of the images that a setting names, or None if it is unknown."""
        content = next((line[setting] for line in reversed(self.machines) if setting in line), None)
        return content if isinstance(content, str) else None


def read_runs(folders: Sequence[str | Path]) -> tuple[list[RunFolder], list[str]]:
    """Read run folders and folders that contain run folders. Return the runs, and sentences about folders without runs.

    Raises:
        ReportError: no folder is or contains a run folder.
    """
    found: dict[Path, None] = {}
    problems = []
    for given in map(Path, folders):
        inside = [given] if is_run(given) else sorted(one for one in given.glob("*") if is_run(one))
        if not inside:
            kind = "is not a run folder" if given.is_dir() else "is not a folder"
            problems.append(f"{given} {kind}. A run folder has a config.yaml or a metrics.jsonl.")
        found |= dict.fromkeys(one.resolve() for one in inside)
    if not found:
        raise ReportError(" ".join(problems) or "No run was given. Give one or more run folders.")
    names = short_names(list(found))
    runs = [read_run(folder, name) for folder, name in zip(found, names, strict=True)]
    tests = test_names([test for run in runs for test in run.found])
    for run in runs:
        run.names.update((test, tests[test]) for test in run.found)
    return runs, problems


def test_names(tests: Sequence[Test]) -> dict[Test, str]:
    """Return the names of evaluations, for example `20-NN, cifar10-test`.

    A data set has one name, which is the first of its names in `tests`, whatever its path is in each run. If different
    data sets have the same name, the beginning of their hashes is added. A data set without a hash is recognised by its
    name.
    """
    known: dict[str, str] = {}  # name of each data set, by its hash
    for test in tests:
        if test.content:
            known.setdefault(test.content, test.data)
    ambiguous = {name for name in known.values() if list(known.values()).count(name) > 1}
    named = {}
    for test in tests:
        data = known.get(test.content, test.data) if test.content else test.data
        if test.content and data in ambiguous:
            data += f" ({test.content[:6]})"
        named[test] = test.protocol + (f", {data}" if data else "")
    return named


def is_number(value: Any) -> TypeGuard[float]:
    """Return True for a finite number of at most `LARGEST`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_step(value: Any) -> TypeGuard[float]:
    """Return True for a number of steps."""
    return is_number(value) and 0 <= value <= LARGEST_STEP


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text, with escaped control characters and surrogates.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return _printable(json.loads(content.decode(errors="replace")))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {printable(str(key)): _printable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(one) for one in value]
    return printable(value) if isinstance(value, str) else value


def is_run(folder: Path) -> bool:
    """Return True if a folder is a run folder."""
    return any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl"))


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the last n parts of each path, with the smallest n for which all names differ."""
    count = 1
    while len({folder.parts[-count:] for folder in folders}) < len(folders):
        count += 1
    return [printable("/".join(folder.parts[-count:])) for folder in folders]


def read_run(folder: Path, name: str) -> RunFolder:
    """Read one run folder. Missing and damaged files become sentences in `RunFolder.problems`."""
    problems: list[str] = []
    settings: dict[str, Any] = {}
    try:
        settings = _printable(flattened(read_yaml(folder / "config.yaml")))
    except SettingsError as error:
        problems.append(f"The settings are not shown: {error}.")
    for data in {data for _, _, data in ONLINE.values()}:
        val = settings.get(data)
        if val is not None and not all(isinstance(one, str) for one in (val if isinstance(val, list) else [val])):
            problems.append(f"{data} in config.yaml is neither a text nor a list of texts. It is left out.")
            del settings[data]
    records = [line for line in read_lines(folder / "metrics.jsonl", problems) if is_step(line.get("step"))]
    if not records:
        problems.append(f"{folder / 'metrics.jsonl'} contains no metrics, so no curve is shown.")
    run = RunFolder(
        name=name,
        folder=folder,
        settings=settings,
        records=sorted(records, key=lambda record: record["step"]),
        pictures={path.stem: path for path in sorted((folder / "pictures").glob("*.png"))},
        machines=list(read_lines(folder / "machine.jsonl", problems)),
        problems=problems,
    )
    found: dict[Test, dict[int, float]] = {}
    for _, test, step, score in sorted(read_results(folder, problems), key=lambda result: result[0]):
        # A score without a step is assigned to the last step of the run. A newer score replaces an older one.
        found.setdefault(test, {})[run.last_step if step is None else step] = score
    found |= {run.online(metric): curve for metric in ONLINE if (curve := run.curve(metric))}
    run.found.update({test: dict(sorted(curve.items())) for test, curve in found.items()})
    run.names.update(test_names(list(run.found)))
    return run


def read_lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file. Nothing is yielded if the file does not exist.

    A damaged line is left out, and a sentence is added to `problems`. A damaged last line is left out silently, because
    a killed run may leave an incomplete line.
    """
    try:
        lines = read_bounded(path, LINES_BYTES).splitlines() if path.exists() else []
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}.")
        return
    for number, line in enumerate(lines, 1):
        try:
            value = parse_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            yield value
        elif number < len(lines):
            problems.append(f"Line {number} of {path} is not a JSON object. The line is left out.")


def read_results(folder: Path, problems: list[str]) -> Iterator[tuple[str, Test, int | None, float]]:
    """Yield time, evaluation, step and score of the results in the JSON files below RUN/evaluation.

    The time is ISO 8601 text, or an empty string if the file has no time. The step is None if it cannot be determined.
    A damaged file adds a sentence to `problems`.
    """
    for path in sorted((folder / "evaluation").rglob("*.json")):
        if path.with_suffix(WEIGHTS.removeprefix("encoder")).exists():
            continue  # the file contains the settings of an encoder and no result
        try:
            text = read_bounded(path, RESULT_BYTES)
            others = path.parent.glob(f"{glob.escape(path.stem)}-*.json")
            if any(one.stat().st_size == len(text) and read_bounded(one, RESULT_BYTES) == text for one in others):
                continue  # the file is a copy of the newest result, such as knn.json for knn-....json
            found = parse_json(text)
        except (OSError, ValueError) as error:
            problems.append(f"{path} is not a JSON file: {error}. The result is left out.")
            continue
        found = found if isinstance(found, dict) else {}
        own = found.get("score")
        key = next(
            (key for key in ([own] if own else SCORES) if isinstance(key, str) and is_number(found.get(key))), None
        )
        if key is None:
            wanted = f"no number {printable(str(own)[:100])}" if own else f"none of the scores {', '.join(SCORES)}"
            problems.append(f"{path} contains {wanted}. The result is left out.")
            continue
        if own and not 0 <= found[key] <= 1:
            problems.append(f"{path}: the score {printable(key[:100])} is not from 0 to 1. The result is left out.")
            continue
        protocol = str(found.get("protocol") or found.get("evaluation") or path.stem)
        if is_number(train := found.get("train_images")):
            protocol += f" of {int(train):,} images"
        data, content = (one if isinstance(one, str) else "" for one in (found.get("data"), found.get("data_content")))
        test = Test(protocol + (f" ({key})" if own else SCORES[key]), data, content or None)
        yield str(found.get("time", "")), test, _step(found, path), float(found[key])


def _step(found: dict[str, Any], path: Path) -> int | None:
    """Return the step of a result, or None if the step is unknown.

    The step is an entry of the result file, or part of the path of the checkpoint or of the name of the file's folder.
    """
    if is_step(found.get("step")):
        return int(found["step"])
    named = re.findall(r"step-(\d{1,15})", f"{found.get('checkpoint', '')} {path.parent.name}")
    return int(named[-1]) if named else None
