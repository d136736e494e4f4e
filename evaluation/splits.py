"""Open the training and validation sets of an evaluation, check that they are disjoint, and match their classes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from accelerate import Accelerator
from torch import Tensor

from tessera.data.shards import ShardError, Shards, Source, SourceConfig, describe_remote, open_shards
from tessera.evaluation.features import EvaluationError
from tessera.runtime.collectives import gather_objects, run_on_all_ranks

MOST_COMPARED = 64
"""Maximum number of image pairs with equal names and sizes whose contents are compared."""


Flags = tuple[str, str]
"""Flags of the training set and of the validation set, for messages."""


def open_splits(
    train: Shards, val: Shards, source: SourceConfig, accelerator: Accelerator, flags: Flags = ("--train", "--val")
) -> tuple[Source, Source]:
    """Open the shards of the training set and of the validation set, and check that no image is in both. Collective.

    Raises:
        ShardError: a shard cannot be used.
        EvaluationError: a shard or an image is in both sets.
    """
    source = describe_remote([train, val], source)
    opened, other = (open_shards(one, source=source, progress=accelerator.is_main_process) for one in (train, val))
    if not source.allow_overlap:
        check_disjoint(opened, other, flags)
    return opened, other


def open_labelled_splits(
    train: Shards, val: Shards, source: SourceConfig, accelerator: Accelerator, flags: Flags = ("--train", "--val")
) -> tuple[Source, Source]:
    """Open the labelled shards of the training set and of the validation set, and match their classes by name.

    If both sets have class names (classes.json), the labels of the validation set are converted to the class indices of
    the training set. If neither set has class names, the labels are read unchanged. Call this function on all
    processes.

    Raises:
        ShardError: a shard cannot be used, or a sample has no label.
        EvaluationError: a shard or an image is in both sets, a class of the validation set is not in the training set,
            only one of the two sets has class names, or the processes read different class names.
        RankError: a classes.json cannot be used, or the folders of one set have different class names.
    """
    opened = open_splits(train, val, source, accelerator, flags)
    names = run_on_all_ranks(lambda: [one.class_names() for one in opened])
    for one in opened:
        one.require_labels()
    if any(other != names for other in gather_objects(names)):
        raise EvaluationError(
            "The processes read different class names. Copy the same shards, with their classes.json, to all nodes."
        )
    train_names, val_names = names
    if train_names is None and val_names is None:
        return opened
    if train_names is None or val_names is None:
        named, unnamed = flags[::-1] if train_names is None else flags
        raise EvaluationError(
            f"The shards of {named} have a classes.json, but those of {unnamed} have none, so their classes cannot "
            f"be matched by name. If both sets number the classes alike, copy the classes.json of {named} beside the "
            f"shards of {unnamed}. Otherwise write the class names of {unnamed} to a classes.json beside its "
            "shards, as a JSON list in the order of the class numbers."
        )
    numbers = {name: number for number, name in enumerate(train_names)}
    if missing := [name for name in val_names if name not in numbers]:
        of_train, of_val = flags
        raise EvaluationError(
            f"The class {missing[0]!r} of {of_val} is not in {of_train} ({len(missing)} of {len(val_names)} classes of "
            f"{of_val} are missing there). Leave these classes out of {of_val}, or add images of them to {of_train}."
        )
    return (
        replace(opened[0], classes=train_names, numbers=tuple(range(len(train_names)))),
        replace(opened[1], classes=train_names, numbers=tuple(numbers[name] for name in val_names)),
    )


def check_disjoint(train: Source, val: Source, flags: Flags = ("--train", "--val")) -> None:
    """Check that the validation set has no image of the training set.

    Two shards count as equal if they have the same path, are the same file (such as a link), or have the same SHA-256
    in `index.json`. Pairs of images are compared only if their names and their sizes in bytes are equal. At most
    `MOST_COMPARED` of these pairs are read.

    Raises:
        EvaluationError: both sets contain equal shards, or equal images with the same name.
        ShardError: the index of a shard cannot be read.
    """
    of_train, of_val = flags
    remedy = f"Choose other shards for {of_val}, or allow this with --source.allow_overlap true."
    known = {identity: shard.path for shard in train.shards for identity in shard.identities()}
    for shard in val.shards:
        if same := [known[identity] for identity in shard.identities() if identity in known]:
            name = "" if same[0] == shard.path else f" Its path in {of_train} is {same[0]}."
            raise EvaluationError(f"{shard.path} is in both {of_train} and {of_val}.{name} {remedy}")
    numbers = {sample: number for number, sample in _samples(val)}
    pairs = list({numbers[sample]: number for number, sample in _samples(train) if sample in numbers}.items())
    for number, other in pairs[:: max(-(-len(pairs) // MOST_COMPARED), 1)]:
        try:
            equal = val.stored_image(number) == train.stored_image(other)
        except ShardError:
            continue  # skip the pair, because the evaluation itself reports or skips unreadable shards
        if equal:
            raise EvaluationError(
                f"The image {val.name(number)} of {of_val} is also in {of_train}, as {train.name(other)}. Images with "
                f"equal names and sizes in both sets: {len(pairs):,}. {remedy}"
            )


def _samples(opened: Source) -> Iterator[tuple[int, tuple[bytes, int]]]:
    """Yield the index of each sample in the source, and the name and the size in bytes of its image."""
    firsts = np.cumsum(opened.counts) - opened.counts  # index of the first sample of each shard
    for first, shard in zip(firsts.tolist(), opened.shards, strict=True):
        try:
            index = shard.index()
        except ShardError:
            if opened.config.unreadable == "stop":
                raise
            continue  # the loader skips the shard
        names, start = index.keys.tobytes(), 0  # samples of a map-style data set have no names to compare
        for number, (end, size) in enumerate(
            zip(index.ends.tolist(), index.images[: len(index.ends), 1].tolist(), strict=True), first
        ):
            yield number, (names[start:end], size)
            start = end


def check_labels(train: Tensor, val: Tensor, classes: Sequence[str] | None = None) -> None:
    """Check the labels of the training set and the validation set.

    Args:
        train: labels (N,) of the training images of all processes.
        val: labels (M,) of the validation images of all processes.
        classes: class names of both sets. None if the classes have no names. In this case, the largest labels of both
            sets must be equal, because a set without images of some class may number its classes differently.

    Raises:
        EvaluationError: a set is empty, a label is negative, a class of `val` is not in `train`, or the classes have no
            names and the sets differ in their largest label.
    """
    for name, labels in (("train", train), ("val", val)):
        if not len(labels):
            raise EvaluationError(f"--{name} has no readable image. Check its images with `tessera check_shards`.")
        if int(labels.min()) < 0:
            raise EvaluationError(f"--{name} has the label {int(labels.min())}. Number the classes from 0.")
    missing = sorted(set(val.unique().tolist()) - set(train.unique().tolist()))
    if missing:
        example = str(missing[0]) if classes is None else repr(classes[missing[0]])
        raise EvaluationError(
            f"{len(missing)} classes of --val are not in --train, for example {example}. "
            "Check that --train and --val belong to the same data set."
        )
    largest, other = int(train.max()), int(val.max())
    if classes is None and largest != other:
        raise EvaluationError(
            f"The largest label is {largest} in --train, but {other} in --val, and no classes.json contains the class "
            "names. The sets may number their classes differently. Write the class names of each set, as a JSON list "
            "in the order of the class numbers, to a classes.json beside its shards."
        )
