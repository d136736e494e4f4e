"""The runner of evaluations. Settings and a function `score` become a command.

    class KNNSettings(LabelledSettings):
        k: list[int] = [20]

    def score(settings: KNNSettings, data: LabelledData, accelerator: Accelerator) -> Result: ...

    run, main = make_command("knn", KNNSettings, score)

The runner reads the settings, opens the images, loads the encoder, and computes the features that `score` gets. It then
prints the result and writes it to a file. An evaluation that does not use pooled features of labelled images passes
`open_subject` to `make_command`; its `score` gets the opened images and the encoder.

Shape letters: N training images of this process, M scored images of this process, D features per image.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from accelerate import Accelerator

from tessera import encoders
from tessera.data.shards import Source, describe_remote, open_shards
from tessera.encoders.base import Encoder
from tessera.evaluation.features import (
    PIXELS,
    FeatureSettings,
    LabelledFeatures,
    check_finite,
    extract,
    load_encoder,
    subtract_mean,
)
from tessera.evaluation.results import Evaluation, check_output, write_result
from tessera.evaluation.splits import Flags, check_labels, open_labelled_splits, open_splits
from tessera.runtime import stdio
from tessera.runtime.collectives import all_gather
from tessera.runtime.processes import exit_on_user_error, make_accelerator
from tessera.runtime.settings import Settings, parse


class LabelledSettings(FeatureSettings):
    """Settings of all evaluations that train on features of labelled images and score other images."""

    centre_pixels: ClassVar[bool] = True
    """True if the mean training image is subtracted from the features of `--checkpoint pixels`. Without this
    subtraction, all features point in nearly the same direction."""

    labelled_only: ClassVar[bool] = True

    train: str | list[str]
    """labelled SHARDS to train on"""
    val: str | list[str]
    """labelled SHARDS of the images that are scored; never used to choose hyperparameters"""
    output: str | None = None
    """JSON result file, which must not exist; default: a new file in OUTPUT/evaluation, or next to the encoder"""


class Subject(NamedTuple):
    """An encoder that is evaluated, and the opened images."""

    train_shards: Source
    val_shards: Source
    """Shards of the scored images. Equal to `train_shards` if no scored set is given."""
    encoder: Encoder
    """Encoder in eval mode, on the device of this process."""
    file: Path | None
    """File of the encoder, or None for `pixels` and for `timm:NAME`."""

    def counts(self) -> dict[str, Any]:
        """Return no entries: `score` counts the images that it reads."""
        return {}


class LabelledData(NamedTuple):
    """Features of a training set and of a scored set, and the encoder that computed them."""

    train: LabelledFeatures
    """This process's part of the training set."""
    val: LabelledFeatures
    """This process's part of the scored set. Equal to `train` if no scored set is given."""
    train_shards: Source
    val_shards: Source
    encoder: Encoder
    file: Path | None

    def counts(self) -> dict[str, Any]:
        """Return the numbers of images and classes, for the result file. Collective."""
        labels, targets = (torch.cat(all_gather(part.labels)) for part in (self.train, self.val))
        return {"train_images": len(labels), "val_images": len(targets), "classes": int(labels.max()) + 1}


class Result(NamedTuple):
    """Scores of an encoder, for the result file and for the terminal."""

    entries: dict[str, Any]
    """Entries of the result file: the scores and the name of the protocol."""
    columns: Sequence[str]
    """Headings of the printed table."""
    rows: Sequence[Sequence[Any]]
    """Cells of the printed table. Floats are scores from 0 to 1, printed in percent."""
    facts: Mapping[str, Any] = {}
    """Entries beside the settings of the command, such as the number of training steps."""


SettingsT = TypeVar("SettingsT", bound=Settings)


def run_command(settings: type[SettingsT], run: Callable[[SettingsT], Any]) -> None:
    """Run a command with the settings from its command line."""
    stdio.protect()
    with exit_on_user_error():
        run(parse(settings))


def open_subject(settings: Any, accelerator: Accelerator, names: Flags = ("--train", "--val")) -> Subject:
    """Open the images of `settings.train` and `settings.val`, and load the encoder. Collective.

    `names` are the flags of both sets in error messages.

    Raises:
        ShardError: the shards cannot be read, or a sample of a labelled set has no label.
        EvaluationError: the encoder cannot be loaded, the sets overlap, or their classes cannot be matched.
    """
    if settings.val is None:
        access = describe_remote([settings.train], settings.access)
        opened = [open_shards(settings.train, source=access, progress=accelerator.is_main_process)]
        if settings.labelled_only:
            opened[0].require_labels()
    else:
        open_both = open_labelled_splits if settings.labelled_only else open_splits
        opened = open_both(settings.train, settings.val, settings.access, accelerator, names)
    encoder, file = load_encoder(settings)
    return Subject(opened[0], opened[-1], encoder.to(accelerator.device), file)


def labelled_data(
    settings: LabelledSettings, accelerator: Accelerator, names: Flags = ("--train", "--val")
) -> LabelledData:
    """Compute the features of `settings.train` and `settings.val`. Call this function on all processes.

    Arguments and errors are those of `open_subject`.

    Raises:
        EvaluationError: the encoder cannot be used, or a label or a feature is invalid.
    """
    subject = open_subject(settings, accelerator, names)
    sets = [subject.train_shards] if settings.val is None else [subject.train_shards, subject.val_shards]
    parts = [extract(subject.encoder, shards, accelerator, **settings.options()) for shards in sets]
    train, val = parts[0], parts[-1]
    labels, targets = (torch.cat(all_gather(part.labels)) for part in (train, val))
    check_labels(labels, targets, subject.train_shards.classes)
    check_finite(train.features, val.features)
    if settings.checkpoint == PIXELS and settings.centre_pixels:
        centred = subtract_mean(train.features, val.features)
        train, val = (part._replace(features=one) for part, one in zip((train, val), centred, strict=True))
    return LabelledData(train, val, *subject)


def evaluate(
    name: str,
    settings: Any,
    score: Callable[[Any, Any, Accelerator], Result],
    prepare: Callable[[Any, Accelerator], Subject | LabelledData] = labelled_data,
) -> dict[str, Any]:
    """Open images, score an encoder on them, print the result and write it to a file.

    Return the contents of the file on the main process, and an empty dictionary on the other processes.

    Args:
        name: name of the evaluation, which is part of the name of the result file.
        settings: settings of the command, with `train`, `val` (None if there is one set) and `output`.
        score: function of the settings, of the return value of `prepare`, and of the accelerator. It is called on all
            processes.
        prepare: function that opens the images and loads the encoder: `labelled_data`, the default, or `open_subject`.

    Raises:
        ResultError: `settings.output` exists.
        ShardError: the shards cannot be read, or a sample has no label.
        EvaluationError: the encoder cannot be loaded or used, the sets overlap, or a label or a feature is invalid.
    """
    accelerator = make_accelerator()
    check_output(settings.output)
    data = prepare(settings, accelerator)
    step = None if data.file is None else encoders.read_step(data.file)
    result = score(settings, data, accelerator)
    counts = data.counts()
    if not accelerator.is_main_process:
        return {}
    facts = settings.facts(data.encoder) | result.facts | {"processes": accelerator.num_processes}
    entries = {
        "checkpoint": str(data.file or settings.checkpoint),
        **counts,
        "settings": settings.model_dump(mode="json") | facts,
    }
    content = data.val_shards.content()
    evaluation = Evaluation(name, data.file, settings.val or settings.train, settings.output, step, content)
    return write_result(evaluation, result.entries | entries, result.columns, result.rows)


def make_command(
    name: str,
    settings: type[SettingsT],
    score: Callable[..., Result],
    prepare: Callable[[Any, Accelerator], Subject | LabelledData] = labelled_data,
) -> tuple[Callable[[SettingsT], dict[str, Any]], Callable[[], None]]:
    """Return `run`, which evaluates with given settings, and `main`, which reads the settings from the command line.

    `settings` is the class of the settings. The other arguments are those of `evaluate`.
    """
    run = partial(evaluate, name, score=score, prepare=prepare)
    return run, partial(run_command, settings, run)
