"""Open the training and validation sets of an evaluation, check that they are disjoint, and match their classes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from accelerate import Accelerator
from torch import Tensor

from tessera.data.shards import Access, ShardError, Shards, Source, describe_remote, open_shards
from tessera.data.shards.folder import ImageFolder
from tessera.data.shards.shard import Shard
from tessera.data.shards.tar_index import ARRAYS, IMAGES, Index
from tessera.evaluation.features import EvaluationError
from tessera.runtime.collectives import broadcast_object, first_rank, run_on_all_ranks

MOST_COMPARED = 64
"""Maximum number of image pairs with equal names and sizes whose contents are compared."""


Flags = tuple[str, str]
"""Flags of the training set and of the validation set, for messages."""


def open_splits(
    train: Shards, val: Shards, source: Access, accelerator: Accelerator, flags: Flags = ("--train", "--val")
) -> tuple[Source, Source]:
    """Open the shards of the training set and of the validation set, and check that no image is in both. Collective.

    Raises:
        ShardError: a shard cannot be used.
        EvaluationError: a shard or an image is in both sets.
    """
    source = describe_remote([train, val], source)
    opened, other = (open_shards(one, source=source, progress=accelerator.is_main_process) for one in (train, val))
    if not source.settings.allow_overlap:
        check_disjoint(opened, other, flags)
    return opened, other


def open_labelled_splits(
    train: Shards, val: Shards, source: Access, accelerator: Accelerator, flags: Flags = ("--train", "--val")
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
    if first_rank(broadcast_object(names) != names) is not None:
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


def check_training_images(data: Sequence[Source], val: Source, flag: str) -> None:
    """Check that the images on which an encoder is trained are not those on which it is scored.

    Remote training shards are compared as wholes only, because their images would have to be downloaded.

    Args:
        data: sources of the training.
        val: scored images.
        flag: flag of `val`, for messages.

    Raises:
        EvaluationError: as `check_disjoint`.
        ShardError: the index of a shard cannot be read.
    """
    if not val.access.settings.allow_overlap:
        for one in data:
            check_disjoint(one, val, ("--data", flag), download=False)


def check_disjoint(train: Source, val: Source, flags: Flags = ("--train", "--val"), *, download: bool = True) -> None:
    """Check that the validation set has no image of the training set.

    Two shards count as equal if they have the same path, are the same file (such as a link), or have the same SHA-256
    in `index.json`. Two images of folders or manifests count as equal if they are the same file, whatever their names.
    Other pairs of images are compared only if their names and their sizes in bytes are equal. At most `MOST_COMPARED`
    of these pairs are read. If a set is a folder or a manifest, names are also compared without folders and extensions.
    Items of data sets in Python are equal if both sets take them from the same object, for example with `Subset`. If
    `download` is false, the images in remote training shards are not compared.

    Raises:
        EvaluationError: both sets contain equal shards, the same file, or equal images with the same name.
        ShardError: the index of a shard cannot be read.
    """
    of_train, of_val = flags
    of_files = any(isinstance(shard, ImageFolder) for one in (train, val) for shard in one.shards)
    remedy = f"Choose other shards for {of_val}, or allow this with --source.allow_overlap true."
    if of_files and of_train == "--data":
        remedy = (
            "Give a CSV of the other images: --data=train.csv (columns path and label). If pretraining on the scored "
            "images is intended, allow it with --source.allow_overlap true. A self-supervised method then sees these "
            "images without their labels: say so where you report the scores."
        )
    elif of_files:
        remedy = f"To keep images out of {of_train}, give a CSV that lists the others: {of_train} train.csv. {remedy}"
    known = {identity: shard.path for shard in train.shards for identity in shard.identities()}
    for shard in val.shards:
        if same := [known[identity] for identity in shard.identities() if identity in known]:
            name = "" if same[0] == shard.path else f" Its path in {of_train} is {same[0]}."
            raise EvaluationError(f"{shard.path} is in both {of_train} and {of_val}.{name} {remedy}")

    def refuse(pairs: list[tuple[int, int]], what: str, number: int, other: int) -> None:
        raise EvaluationError(
            f"The image {val.name(number)} of {of_val} is also in {of_train}, as {train.name(other)}. {what} in both "
            f"sets: {len(pairs):,}. {remedy}"
        )

    for kind_of_part, count in _same_items(train, val):
        raise EvaluationError(f"{count:,} items of {kind_of_part} are in both {of_train} and {of_val}. {remedy}")
    if same_files := _same_files(train, val):
        refuse(same_files, "Image files", *same_files[0])
    for name in (bytes, _stem) if of_files else (bytes,):
        numbers = {(name(key), size): number for number, key, size in _samples(val)}
        of_names = ((numbers.get((name(key), size)), number) for number, key, size in _samples(train, download))
        pairs = list({number: other for number, other in of_names if number is not None}.items())
        for number, other in pairs[:: max(-(-len(pairs) // MOST_COMPARED), 1)]:
            try:
                equal = val.stored_image(number) == train.stored_image(other)
            except ShardError:
                continue  # skip the pair, because the evaluation itself reports unreadable shards
            if equal:
                refuse(pairs, "Images with equal names and sizes", number, other)


def _stem(key: bytes) -> bytes:
    """Return the name of a sample without its folders and its extension."""
    name, dot, extension = key.rpartition(b"/")[2].rpartition(b".")
    return name if dot and extension.lower().decode(errors="replace") in (*IMAGES, *ARRAYS) else name + dot + extension


def _indices(opened: Source, download: bool = True) -> Iterator[tuple[int, Shard, Index, np.ndarray]]:
    """Yield the number of the first sample of each shard, the shard, its index, and its samples (S,) in their order.

    Samples without names, as those of a map-style data set, are left out. If `download` is false, so are remote shards.
    """
    firsts = np.cumsum(opened.counts) - opened.counts
    for place, (first, shard) in enumerate(zip(firsts.tolist(), opened.shards, strict=True)):
        if shard.is_remote and not download:
            continue
        index = shard.index()
        samples = opened.numbered(place, np.arange(len(index.images)))
        yield first, shard, index, samples[samples < len(index.ends)]


def _samples(opened: Source, download: bool = True) -> Iterator[tuple[int, bytes, int]]:
    """Yield the index of each sample in the source, its name, and the size in bytes of its image."""
    for first, _, index, samples in _indices(opened, download):
        names, ends, sizes = index.keys.tobytes(), index.ends[samples], index.images[samples, 1]
        starts = np.where(samples > 0, index.ends[samples - 1], 0)
        for number, (start, end, size) in enumerate(
            zip(*(x.tolist() for x in (starts, ends, sizes)), strict=True), first
        ):
            yield number, names[start:end], size


def _same_items(train: Source, val: Source) -> Iterator[tuple[str, int]]:
    """Yield the kind of each data set in Python of which both sources read the same items, and their number."""

    def items(source: Source) -> dict[int, tuple[str, list[np.ndarray]]]:
        found: dict[int, tuple[str, list[np.ndarray]]] = {}
        for shard in source.shards:
            for key, kind, numbers in shard.items():
                found.setdefault(key, (kind, []))[1].append(numbers)
        return found

    known = items(val)
    for key, (name, numbers) in (items(train) if known else {}).items():
        if key in known and (same := np.intersect1d(np.concatenate(numbers), np.concatenate(known[key][1]))).size:
            yield name, same.size


def _same_files(train: Source, val: Source) -> list[tuple[int, int]]:
    """Return the indices in `val` and in `train` of each image file that is in both: paths, links or hard links.

    The index of a folder has the time and the size of each file. Only files whose time and size are in both sets are
    looked up on the disk.
    """
    facts = np.dtype([("modified", np.int64), ("size", np.int64)])
    sets = [
        [
            (first, shard, index, samples, np.ascontiguousarray(index.images[samples]).view(facts)[:, 0])
            for first, shard, index, samples in _indices(one)
            if isinstance(shard, ImageFolder)
        ]
        for one in (val, train)
    ]
    if not all(sets):
        return []
    both = np.intersect1d(*(np.concatenate([found for *_, found in one]) for one in sets))
    files: list[dict[tuple[int, int], int]] = [{}, {}]
    for known, one in zip(files, sets, strict=True):
        for first, shard, index, samples, found in one:
            for place in np.flatnonzero(np.isin(found, both)).tolist():
                if (identity := shard.file_identity(index, int(samples[place]))) is not None:
                    known[identity] = first + place
    of_val, of_train = files
    return [(number, of_train[identity]) for identity, number in of_val.items() if identity in of_train]


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
