"""Name and write the result files of evaluations, and print results as tables."""

import datetime
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from tessera.runtime.files import atomic_write
from tessera.runtime.machine import versions
from tessera.runtime.user_error import UserError

SPLITS = ("train", "training", "val", "valid", "validation", "test", "held-out")
"""File names that contain only the split. `data_name` puts the name of the folder before them."""


class ResultError(UserError, ValueError):
    """Raised when a result cannot be written where the user asked for it."""


class Evaluation(NamedTuple):
    """The properties of an evaluation that determine the name of its result file."""

    name: str
    """Name of the evaluation, such as `knn`."""
    encoder: Path | None
    """File of the encoder. None for `pixels` and for `timm:NAME`."""
    data: str | Sequence[str]
    """SHARDS of the images that are scored."""
    output: str | None
    """Path of the result file (`--output`). None selects the path that `result_path` returns."""
    step: int | None = None
    """Step of the encoder, read when it was loaded: its file may be replaced or removed before the evaluation ends."""
    content: str | None = None
    """Hash of the images that are scored (`Source.content`), by which reports recognise a data set; None if unknown."""


def check_output(output: str | None) -> None:
    """Check that the file `output` does not exist. Call this function first, because encoding images takes long.

    Raises:
        ResultError: the file exists.
    """
    if output is not None and Path(output).exists():
        raise ResultError(f"--output {output} exists. Results are never overwritten. Choose another file.")


def result_path(evaluation: Evaluation, time: datetime.datetime) -> Path | None:
    """Return the path of a new result file, or None if the encoder has no file (`pixels` and `timm:NAME`).

    The name of the file is NAME-DATA-STEP-TIME.json, such as knn-cifar10-test-step-00005000-20261124T101530Z.json. DATA
    is the return value of `data_name`. STEP is left out if the encoder file does not contain its training step. TIME is
    the end of the evaluation in UTC. If a file of this name exists, a number is appended to the name, because results
    are never overwritten.

    | file of the encoder | path of the result |
    |---|---|
    | encoder of a run or of its checkpoint | OUTPUT/evaluation/NAME-....json |
    | any other encoder file | ENCODER-NAME-....json in the folder of the encoder file |
    """
    if evaluation.encoder is None:
        return None
    # `latest` is a symbolic link to the folder of a step; a link to the file itself, as in caches, keeps its name
    encoder, step = evaluation.encoder.parent.resolve() / evaluation.encoder.name, evaluation.step
    parts = [evaluation.name, data_name(evaluation.data), *([] if step is None else [f"step-{step:08d}"])]
    stem = "-".join([*parts, time.strftime("%Y%m%dT%H%M%SZ")])
    folder = encoder.parent
    # Checkpoints are in OUTPUT/checkpoints/step-..., and launch/status.py links their encoders into
    # OUTPUT/evaluation/step-...
    of_a_step = folder.name.startswith("step-") and folder.parent.name in ("checkpoints", "evaluation")
    run = folder.parent.parent if of_a_step else folder
    in_run = of_a_step or (run / "checkpoints").is_dir() or (run / "config.yaml").is_file()
    if in_run and encoder.name == "encoder.safetensors":
        path = run / "evaluation" / f"{stem}.json"
    else:
        path = folder / f"{encoder.stem}-{stem}.json"
    others = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], others) if not one.exists())


def data_name(shards: str | Sequence[str]) -> str:
    """Return a short name of a data set for file names, such as `cifar10-test` for `data/cifar10-test-*.tar.gz`.

    The name is the common prefix of the shards' file names. If the prefix is empty or names only the split
    (`val-*.tar`), the name of the folder is put before it. The names of several patterns are joined by `+`.
    """
    patterns = [shards] if isinstance(shards, str) else shards
    return "+".join(dict.fromkeys(_pattern_name(pattern) for pattern in patterns))[:60]


def _pattern_name(pattern: str) -> str:
    folder, _, file = pattern.rpartition("/")
    beginning = re.sub(r"\.(tar|tar\.gz|tgz|json|parquet|csv)$", "", re.split(r"[*?\[{]", file)[0])
    beginning = re.sub(r"([-_.]\d*)?$", "", beginning)  # remove the index of the shard
    if beginning in ("", "index", *SPLITS):
        named = [part for part in re.split(r"[/:]", folder) if part and not re.search(r"[*?\[{]", part)]
        beginning = "-".join([*named[-1:], *([beginning] if beginning in SPLITS else [])]) or "data"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", beginning)


def write_result(
    evaluation: Evaluation, result: dict[str, Any], columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Print a result as a table, write it to a new file, and return the contents of the file.

    The file contains `result`, the name of the evaluation, the name and hash of the data set, the step of the encoder,
    the time, the versions of Python and of packages, and the name of the device. In a run folder, a second file with a
    short name, such as `evaluation/knn.json`, always contains the newest result. If the encoder has no file and
    `--output` is not given, no file is written. Call this function only on the main process.

    Args:
        evaluation: evaluation that determines the name of the file.
        result: scores and settings of the evaluation.
        columns: headings of the table.
        rows: cells of the table. Floats are scores from 0 to 1, printed in percent.
    """
    console = Console()
    shown = [name != "top-5" or (result.get("classes") or 6) > 5 for name in columns]  # top-5 of 5 classes is 100 %
    columns, rows = list(itertools.compress(columns, shown)), [list(itertools.compress(row, shown)) for row in rows]
    images = f", {result['val_images']:,} images" if "val_images" in result else ""
    table = Table(*columns, title=f"{result['protocol']}{images}")
    for row in rows:
        table.add_row(*(f"{100 * cell:.2f} %" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table)
    time = datetime.datetime.now(datetime.UTC)
    content = {
        "evaluation": evaluation.name,
        "data": data_name(evaluation.data),
        "data_content": evaluation.content,
        "step": evaluation.step,
        **result,
        "time": time.isoformat(timespec="seconds"),
        "versions": versions(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    path = Path(evaluation.output) if evaluation.output else result_path(evaluation, time)
    if path is None:
        console.print("The result was not written to a file. Give --output FILE to keep it.")
        return content
    text = json.dumps(content, indent=2) + "\n"
    in_run = not evaluation.output and path.parent.name == "evaluation"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in (path, path.with_name(f"{evaluation.name}.json")) if in_run else (path,):
            with atomic_write(file) as temporary:
                temporary.write_text(text)
    except OSError as error:
        print(text, flush=True)  # the evaluation may have taken hours
        raise ResultError(f"Cannot write {path}: {error.strerror}. The result is printed above.") from error
    console.print(f"Result written to {path}", soft_wrap=True)
    return content
