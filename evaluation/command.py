"""Common steps of the evaluations on labelled images: read settings, compute features, score them, write the result.

The module of an evaluation defines a settings class and a function `score`, and ends like evaluation/knn.py:

    def run(settings: KNNSettings) -> dict[str, Any]:
        return evaluate("knn", settings, score)


    def main() -> None:
        run_command(KNNSettings, run)


    if __name__ == "__main__":
        main()

Shape letters: N training images of this process, M scored images of this process, D features per image.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from accelerate import Accelerator

from tessera.data.shards import Source, describe_remote, open_shards
from tessera.encoders.base import Encoder
from tessera.evaluation.features import (
    PIXELS,
    FeatureSettings,
    LabelledFeatures,
    check_finite,
    extract,
    input_size,
    load_encoder,
    resize_size,
    subtract_mean,
)
from tessera.evaluation.results import Evaluation, check_output, write_result
from tessera.evaluation.splits import Flags, check_labels, open_labelled_splits
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
    val: str | list[str] | None
    """labelled SHARDS of the images that are scored; never used to choose hyperparameters"""
    output: str | None = None
    """JSON result file, which must not exist; default: a new file in OUTPUT/evaluation, or next to the encoder"""


class LabelledData(NamedTuple):
    """Features of a training set and of a scored set, and the encoder that computed them."""

    train: LabelledFeatures
    """This process's part of the training set."""
    val: LabelledFeatures
    """This process's part of the scored set. Equal to `train` if no scored set is given."""
    train_shards: Source
    val_shards: Source
    """Shards of the scored set. Equal to `train_shards` if no scored set is given."""
    encoder: Encoder
    file: Path | None
    """File of the encoder, or None for `pixels` and for `timm:NAME`."""


class Result(NamedTuple):
    """Scores of an encoder, for the result file and for the terminal."""

    entries: dict[str, Any]
    """Entries of the result file: the scores and the name of the protocol."""
    columns: Sequence[str]
    """Headings of the printed table."""
    rows: Sequence[Sequence[Any]]
    """Cells of the printed table. Floats are scores from 0 to 1, printed in percent."""


SettingsT = TypeVar("SettingsT", bound=Settings)
LabelledSettingsT = TypeVar("LabelledSettingsT", bound=LabelledSettings)


def run_command(settings: type[SettingsT], run: Callable[[SettingsT], Any]) -> None:
    """Run a command with the settings from its command line."""
    stdio.protect()
    with exit_on_user_error():
        run(parse(settings))


main = run_command
"""Former name of `run_command`, which evaluations in other packages import."""


def evaluate(
    name: str,
    settings: LabelledSettingsT,
    score: Callable[[LabelledSettingsT, LabelledData, Accelerator], Result],
) -> dict[str, Any]:
    """Compute features of labelled images, score them, print the result and write it to a file.

    Return the contents of the file on the main process, and an empty dictionary on the other processes.

    Args:
        name: name of the evaluation, which is part of the name of the result file.
        settings: settings of the command.
        score: function that scores the features. It is called on all processes.

    Raises:
        ResultError: `settings.output` exists.
        ShardError: the shards cannot be read, or a sample has no label.
        EvaluationError: the encoder cannot be loaded or used, the sets overlap, or a label or a feature is invalid.
    """
    accelerator = make_accelerator()
    check_output(settings.output)
    data = labelled_data(settings, accelerator)
    result = score(settings, data, accelerator)
    labels, targets = (torch.cat(all_gather(part.labels)) for part in (data.train, data.val))
    if not accelerator.is_main_process:
        return {}
    size = input_size(data.encoder, settings.image_size)
    facts = {"image_size": size, "resize": resize_size(size, settings.resize), "processes": accelerator.num_processes}
    entries = {
        "checkpoint": str(data.file or settings.checkpoint),
        "train_images": len(labels),
        "val_images": len(targets),
        "classes": int(labels.max()) + 1,
        "settings": settings.model_dump(mode="json") | facts,
    }
    content = data.val_shards.content()
    evaluation = Evaluation(name, data.file, settings.val or settings.train, settings.output, content)
    return write_result(evaluation, result.entries | entries, result.columns, result.rows)


def labelled_data(
    settings: LabelledSettings, accelerator: Accelerator, names: Flags = ("--train", "--val")
) -> LabelledData:
    """Compute the features of `settings.train` and `settings.val`. Call this function on all processes.

    `names` are the flags of both sets in error messages.

    Raises:
        ShardError: the shards cannot be read, or a sample has no label.
        EvaluationError: the encoder cannot be loaded or used, the sets overlap, or a label or a feature is invalid.
    """
    if settings.val is None:
        access = describe_remote([settings.train], settings.access)
        opened = [open_shards(settings.train, source=access, progress=accelerator.is_main_process)]
        opened[0].require_labels()
    else:
        opened = open_labelled_splits(settings.train, settings.val, settings.access, accelerator, names)
    encoder, file = load_encoder(settings)
    encoder.to(accelerator.device)
    parts = [extract(encoder, shards, accelerator, **settings.options()) for shards in opened]
    train, val = parts[0], parts[-1]
    labels, targets = (torch.cat(all_gather(part.labels)) for part in (train, val))
    check_labels(labels, targets, opened[0].classes)
    check_finite(train.features, val.features)
    if settings.checkpoint == PIXELS and settings.centre_pixels:
        centred = subtract_mean(train.features, val.features)
        train, val = (part._replace(features=one) for part, one in zip((train, val), centred, strict=True))
    return LabelledData(train, val, opened[0], opened[-1], encoder, file)
