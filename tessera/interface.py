"""Functions for Python programs and notebooks. Each does what the command of the same name does, in this process.

Shape letters: B images of one batch, N images, C channels, S x S pixels, D features per image.
"""

import gc
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from PIL import Image
from torch import Tensor
from torch.nn import Module

import tessera.evaluation.knn as knn_command
import tessera.evaluation.linear_probe as probe_command
from tessera import encoders
from tessera.data import failures
from tessera.data.augment import to_model_input
from tessera.data.batch import Batch
from tessera.data.python_objects import PREFIX, naming
from tessera.data.shards import DEFAULT, open_shards
from tessera.data.shards.open import with_names
from tessera.data.shards.tar_shard import close_files
from tessera.encoders.base import Encoder
from tessera.encoders.saving import fitting
from tessera.evaluation.features import EvaluationError, LabelledFeatures, extract, resolve_checkpoint
from tessera.evaluation.transform import preparation
from tessera.pretrain import job
from tessera.pretrain.command_line import CODE, from_values
from tessera.pretrain.config import DataConfig, RunConfig
from tessera.runtime import preemption
from tessera.runtime.collectives import world_size
from tessera.runtime.isolation import isolated
from tessera.runtime.processes import make_accelerator
from tessera.runtime.settings import validate
from tessera.runtime.user_error import UserError, escape_controls

log = logging.getLogger(__name__)

ARGUMENTS = {*RunConfig.model_fields, *knn_command.KNNSettings.model_fields, *probe_command.ProbeSettings.model_fields}
"""Names of the settings that are arguments of the functions below."""
_FLAG = re.compile(
    r"`[^`\n]*`|\b(?:tessera [a-z_]+|accelerate launch) [^\n]*"  # a command line stays as it is
    r"|(?<![\w-])--(?P<name>[a-z_]+(?:\.[a-z_]+)*)(?:[ =](?P<value>true|false|[A-Z]+\b|\d+(?:\.\d+)?)"
    r"|=(?P<text>[\w.]*\w))?"
)


@dataclass(frozen=True, init=False)
class Run:
    """The folder of a pretraining run, such as `tessera.Run("runs/photos")`."""

    path: Path
    """Absolute path of the folder. After a dry run, which writes nothing, the folder may not exist."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", Path(path).absolute())

    def __fspath__(self) -> str:
        """Return the folder, so that functions that take a path also take a run."""
        return str(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """All settings of the run, as config.yaml stores them."""
        return yaml.safe_load(self._read("config.yaml"))

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Metrics of the run: one dictionary for each line of metrics.jsonl (docs/monitoring.md)."""
        text = self._read("metrics.jsonl")  # a run that goes on, or was killed, may leave a part of a last line
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def _read(self, name: str) -> str:
        """Return the contents of a file of the run.

        Raises:
            EvaluationError: there is no such file.
        """
        file = self.path / name
        if not file.is_file():
            raise EvaluationError(f"{self.path} holds no {name}. No run was started there: a dry run writes nothing.")
        return file.read_text()

    @property
    def finished(self) -> bool:
        """True if the run has done all of its steps, and False if it was stopped, for example by Ctrl-C."""
        encoder = self.path / "encoder.safetensors"
        return encoder.exists() and (encoders.read_step(encoder) or 0) >= self.config["steps"]

    @property
    def encoder(self) -> Encoder:
        """Encoder in eval mode. If the run has not ended, the weights come from the newest checkpoint."""
        return load(self.path)


@contextmanager
def _process(*, run: bool = False) -> Iterator[None]:
    """Isolate the body from the calling program, and close the files that it keeps open for later reads."""
    failures.forget_warnings()
    with isolated(run=run):
        try:
            yield
        except UserError as error:
            error.args = tuple(in_python(part) if isinstance(part, str) else part for part in error.args)
            raise
        finally:
            close_files()
            if run:
                gc.collect()  # cycles of a run hold indices of shards open


def in_python(message: str) -> str:
    """Return a message in which flags of commands, such as `--resume`, have the form of arguments: `resume=True`.

    Command lines, and flags of the launcher, keep their form.
    """

    def argument(found: re.Match[str]) -> str:
        name, value = found["name"] or "", found["value"]
        value = f'"{found["text"]}"' if found["text"] else value
        section, _, key = name.partition(".")
        if section not in ARGUMENTS:
            return found[0]
        if value is None:
            return f"{name}=True" if name in ("resume", "overwrite", "dry_run") else name
        value = value.capitalize() if value in ("true", "false") else value
        return f'{section}={{"{key}": {value}}}' if key else f"{name}={value}"

    return _FLAG.sub(argument, message)


@_process(run=True)
def pretrain(method: str | None = None, data: Any = None, **settings: Any) -> Run:
    """Pretrain an encoder in this process, on one device. To use several, start the program with `accelerate launch`.

    At the first Ctrl-C (in a notebook: Interrupt), the run finishes its step, saves a checkpoint and is returned. Its
    attribute `finished` is then False, and `pretrain(resume=True, output=run.path)` continues it. A second Ctrl-C
    raises `KeyboardInterrupt`. SIGTERM, SIGUSR1 and SIGHUP, which schedulers send, also save a checkpoint, and then end
    the program with exit code 75. With several processes, so does Ctrl-C.

    With `dry_run=True`, the plan of the run is printed and nothing is written, so the returned `Run` has no contents.

    The state of the calling program, such as autocast, the default dtype and the random generators, does not change
    the run, and is the same afterwards. Without a handler of `logging`, the messages of the run are shown on stderr.

    Args:
        method: pretraining method. None for the method of the settings file, or of the run to resume, else `dino`.
        data: SHARDS to train on, as a string, a list, or a mapping from SHARDS to weights. A map-style data set may
            stand in place of SHARDS, also as `evaluation={"val": DATASET}`. None for the data of the settings file, or
            of the run to resume, else the embedded digits.
        settings: further settings, which `tessera pretrain --help all` lists. A section is a dictionary, such as
            `dino={"global_size": 64}`, or a value in its short form, such as `encoder="vit_small"`. `stages` is a
            list of webdataset stages. `augment` is a torchvision v2 transform or a function, or a list of one for each
            view, and `augment_replaces=True` uses it in place of the method's crops and colours (docs/own_data.md).

    Raises:
        SettingsError: a setting is unknown or invalid.
        ShardError: the shards cannot be read.
        BusyError: another run is going on in another thread of this process.
        Preempted: a signal of a scheduler stopped the run, which has saved a checkpoint. It is a `SystemExit`.
    """
    with _log_shown(), preemption.listening(), run_settings(method, data, settings) as config:
        try:
            log.info("Opening the training data.")
            return Run(job.pretrain(config))
        except preemption.Preempted as stop:
            if stop.signal != signal.SIGINT or world_size() > 1:
                print(f"\n{_stopped(stop)}", file=sys.stderr)
                raise
            print(f"\n{_stopped(stop)}")
            return Run(stop.folder)
        except KeyboardInterrupt:
            raise preemption.InterruptedRunError(
                "The run was interrupted without saving. To continue from its last checkpoint, if there is one: "
                f"tessera.pretrain(resume=True, output={config.output or 'FOLDER'!r})"
            ) from None


def training_batches(method: str | None = None, data: Any = None, **settings: Any) -> Iterator[Batch]:
    """Yield the batches that `pretrain` would train on, in the same order, for a custom training loop.

    `batch.views` contains the method's normalised crops and masks, on the device of this process. Arguments and errors
    are the same as for `pretrain`. With `resume=True`, the settings are those of the run in `output`, and the batches
    begin at its first step.
    """
    with isolated(), run_settings(method, data, settings) as config:
        _, opened, device = job.first_batches(config)
        batches = iter(opened)
    while True:
        with isolated():  # the caller's own code runs between two batches
            batch = next(batches, None)
            if batch is None:
                return
            batch = to_model_input(batch.to(device, non_blocking=True))
        yield batch


@isolated()
def load(path: str | os.PathLike[str]) -> Encoder:
    """Return the encoder of a run folder, a checkpoint, an encoder file, a weight file or `timm:NAME`, in eval mode.

    The weights of a published file determine the settings of the encoder, and its images have ImageNet's normalisation.

    Raises:
        EvaluationError: there is no encoder at `path`.
        WeightsError: timm has no weights of this name, or no encoder of this project fits the weights of the file.
    """
    path = os.fspath(path)
    file = Path(path).expanduser()
    if file.is_file() and not (file.suffix == ".safetensors" and file.with_suffix(".json").is_file()):
        return fitting(file, None, {})[0].eval()
    return encoders.load(path if encoders.backbone(path) else resolve_checkpoint(path))


class Embedded(LabelledFeatures):
    """Features, labels and names of the images that could be read, and the names of their classes."""

    classes: tuple[str, ...] | None = None
    """Name of each class number in `labels`; None if no image has a label or the classes have no names."""


@_process()
def embed(
    encoder: Encoder,
    data: Any,
    *,
    labels: bool | str | os.PathLike[str] = True,
    classes: Sequence[str] | None = None,
    **options: Any,
) -> Embedded:
    """Encode the images in SHARDS: `features` (N, D), `labels` (N,), names `keys` of the images, and `classes`.

    Each call numbers the classes of its own SHARDS. To compare the labels of two calls, give the class names of the
    first: `tessera.embed(encoder, "val.csv", classes=first.classes)`.

    A key is `SOURCE/PATH`: the name of the folder, CSV or tar, and the path of the image relative to the folder of the
    CSV, such as `val.csv/plates/a.png`, or the name of the sample in the tar. Images that cannot be decoded are left
    out, with a warning that counts them, so N may be smaller than the number of rows of a CSV. Join by `keys`.

    Args:
        encoder: encoder of the images.
        data: SHARDS of the images.
        labels: CSV with the labels of the images in folders, as for `pretrain` and `knn`. True reads the labels of
            SHARDS, and False reads none. Labels are class numbers in the order of the class names. Missing labels
            are -1.
        classes: class names in the order of the class numbers. None numbers the classes of SHARDS.
        options: arguments of `evaluation.features.extract`, such as `batch_size`.

    Raises:
        ShardError: the shards cannot be read.
        EvaluationError: `encoder` is not an encoder, or does not accept images of this size; or `classes` lacks a class
            of SHARDS, or the classes of SHARDS have no names.
    """
    if not isinstance(encoder, Encoder):
        given = "run.encoder" if isinstance(encoder, Run) else "tessera.load(PATH)"
        raise EvaluationError(f"embed needs an encoder, not a {type(encoder).__name__}. Give {given}.")
    accelerator = make_accelerator()
    source = options.pop("source", DEFAULT)
    if not isinstance(labels, bool):
        source = replace(source, keys=source.keys._replace(labels=os.fspath(labels)))
    shards = replace(open_shards(data, source=source), optional_labels=True)
    read = labels is not False and shards.count_labels() > 0
    names = shards.class_names() if read else None
    if read and classes is not None:
        shards = replace(shards, classes=tuple(classes), numbers=_numbers(names, classes))
        names = shards.classes
    found = Embedded(*extract(encoder.to(accelerator.device), shards, accelerator, labels=read, **options))
    found.classes = names
    count = min(options.get("images") or shards.images, shards.images)
    if (skipped := count - len(found.keys)) and accelerator.num_processes == 1 and "part" not in options:
        log.warning(f"{len(found.keys):,} of {count:,} images; {skipped:,} skipped")
    return found


def _numbers(own: Sequence[str] | None, classes: Sequence[str]) -> tuple[int, ...]:
    """Return the index in `classes` of each of the class names `own`.

    Raises:
        EvaluationError: `classes` lacks a name, or there are no names.
    """
    if own is None:
        raise EvaluationError("The labels are numbers without names, so they are not renumbered. Leave out classes.")
    places = {name: number for number, name in enumerate(classes)}
    if unknown := [name for name in own if name not in places]:
        raise EvaluationError(
            f"The class {unknown[0]!r} is not in classes ({len(unknown)} of {len(own)} classes are missing there). "
            "Add its name at the end of classes, or leave its images out."
        )
    return tuple(places[name] for name in own)


@_process()
def knn(checkpoint: str | os.PathLike[str], train: Any, val: Any, **settings: Any) -> dict[str, Any]:
    """Return the result of the command `knn`: `result["top1"]` is the 20-NN accuracy, from 0 to 1.

    Like the command, the function also writes the result to a file.

    Args:
        checkpoint: run, run folder, checkpoint in a run folder, exported encoder, `timm:NAME`, or `pixels`
            (with `image_size`) to use the pixels as features.
        train: labelled SHARDS in which neighbours are searched.
        val: labelled SHARDS that are classified.
        settings: further settings, which `tessera knn --help` lists.

    Raises:
        UserError: a setting is wrong, the encoder cannot be used, or the shards cannot be read.
    """
    with _named(checkpoint, train, val, settings) as given:
        return knn_command.run(validate(knn_command.KNNSettings, given))


@_process()
def linear_probe(checkpoint: str | os.PathLike[str], train: Any, val: Any, **settings: Any) -> dict[str, Any]:
    """Return the result of the command `linear_probe`: `result["top1"]` is the accuracy, from 0 to 1.

    Like the command, the function also writes the result to a file. Arguments and errors are the same as
    for `knn`.
    """
    with _named(checkpoint, train, val, settings) as given:
        return probe_command.run(validate(probe_command.ProbeSettings, given))


def transform(encoder: Encoder, image_size: int | None = None) -> Callable[[Image.Image], Tensor]:
    """Return a function that converts a Pillow image to the encoder's input: a normalised tensor (3, S, S) float32.

    The function prepares an image in the same way as the evaluations.

    Args:
        encoder: encoder whose mean and standard deviation normalise the image.
        image_size: side S of the crop in pixels; None for the size that the encoder was built for.

    Raises:
        ValueError: the encoder does not have 3 input channels.
    """
    return preparation(encoder, image_size)


def _stopped(stop: preemption.Preempted) -> str:
    """Return a message that says why a run stopped, and how to continue it from Python."""
    why = "another process received a signal" if stop.signal is None else f"it received {stop.signal.name}"
    again = ", data=..." if PREFIX in (stop.folder / "config.yaml").read_text() else ""
    text = f"The run stopped because {why}. Step {stop.step} is done and saved. To continue: "
    return f"{text}tessera.pretrain(resume=True, output={str(stop.folder)!r}{again})"


@contextmanager
def _log_shown() -> Iterator[None]:
    """Show the messages of a run on stderr, as the command does, if the program has no handlers of `logging`."""
    logger = logging.getLogger("tessera")
    if logger.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    handler.addFilter(_python_names)
    handler.addFilter(escape_controls)
    logger.addHandler(handler)
    logger.setLevel(level or logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _python_names(record: logging.LogRecord) -> bool:
    """Replace the flags in a log message by arguments, as a filter of a handler."""
    record.msg, record.args = in_python(record.getMessage()), None
    return True


@contextmanager
def run_settings(method: str | None, data: Any, settings: dict[str, Any]) -> Iterator[RunConfig]:
    """Yield the settings of a run from the arguments of `pretrain`. Data sets and functions keep their names
    meanwhile."""
    with naming() as name:
        yield from_values(_values(method, data, settings, name))


def _values(method: str | None, data: Any, settings: dict[str, Any], name: Callable[[Any], str]) -> dict[str, Any]:
    """Return the settings of a run. `name` gives names to data sets, which settings cannot hold."""
    is_section = isinstance(data, Mapping) and DataConfig.model_fields.keys() & data.keys()
    section = dict(data) if is_section else {} if data is None else {"shards": data}
    section |= {key: settings.pop(key) for key in (*CODE, "augment_replaces") if key in settings}
    section |= _with_names(section, ("shards",), name)
    section |= _code_names(section, CODE, name)
    if section:
        settings["data"] = section
    if isinstance(evaluation := settings.get("evaluation"), Mapping):
        settings["evaluation"] = {**evaluation, **_with_names(evaluation, ("train", "val"), name)}
    return _texts(settings if method is None else {"method": method, **settings})


def _texts(value: Any) -> Any:
    """Return settings with texts in place of the paths that they contain."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {_texts(key): _texts(one) for key, one in value.items()}
    return type(value)(map(_texts, value)) if type(value) in (list, tuple) else value


@contextmanager
def _named(
    checkpoint: str | os.PathLike[str], train: Any, val: Any, settings: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the settings of an evaluation. Data sets and functions keep their names meanwhile."""
    if isinstance(checkpoint, Module):
        raise EvaluationError(
            "An encoder in memory was given. Give a run folder, a run or a file. For an encoder in memory, use "
            "tessera.embed(encoder, SHARDS), and classify its features."
        )
    with naming() as name:
        given = {"checkpoint": checkpoint, "train": with_names(train, name), "val": with_names(val, name), **settings}
        yield _texts(given | _code_names(settings, ("stages",), name))


def _code_names(settings: Mapping[str, Any], keys: Sequence[str], name: Callable[[Any], str]) -> dict[str, list[str]]:
    """Return the settings `keys`, which contain functions of the user, with a name in place of each function."""
    given = {key: settings[key] for key in keys if settings.get(key) is not None}
    lists = {key: value if isinstance(value, list | tuple) else [value] for key, value in given.items()}
    return {key: [one if isinstance(one, str) else name(one) for one in value] for key, value in lists.items()}


def _with_names(section: Mapping[str, Any], keys: Sequence[str], name: Callable[[Any], str]) -> dict[str, Any]:
    return {key: with_names(section[key], name) for key in keys if section.get(key) is not None}
