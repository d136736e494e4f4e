"""Match the classes of a training set and of a validation set by name."""

from dataclasses import replace

from accelerate import Accelerator

from tessera.data.shards import Shards, Source, SourceConfig
from tessera.evaluation.features import EvaluationError, open_labelled
from tessera.evaluation.overlap import check_contents, check_disjoint
from tessera.runtime.collectives import gather_objects, run_on_all_ranks


def open_labelled_pair(
    train: Shards, val: Shards, source: SourceConfig, accelerator: Accelerator
) -> tuple[Source, Source]:
    """Open the shards of the training set and of the validation set, and match their classes by name.

    If both sets have class names (classes.json), the labels that are read from the validation set are the class numbers
    of the training set. If neither set has class names, the labels are read unchanged. Call this function on all
    processes.

    Raises:
        ShardError: a shard cannot be used, or a sample has no label.
        EvaluationError: a shard or an image is in both sets, a class of the validation set is not in the training set,
            only one of the two sets has class names, or the processes see different class names.
        RankError: a classes.json cannot be used, or the folders of one set have different class names.
    """
    check_disjoint(train, val, source)
    opened = [open_labelled(shards, source, accelerator) for shards in (train, val)]
    check_contents(*opened)
    names = run_on_all_ranks(lambda: [one.class_names() for one in opened])
    if any(other != names for other in gather_objects(names)):
        raise EvaluationError(
            "The processes see different class names. Copy the same shards, with their classes.json, to all nodes."
        )
    train_names, val_names = names
    if train_names is None and val_names is None:
        return opened[0], opened[1]
    if train_names is None or val_names is None:
        named, unnamed = ("val", "train") if train_names is None else ("train", "val")
        raise EvaluationError(
            f"The shards of --{named} have a classes.json, but those of --{unnamed} have none, so their classes cannot "
            f"be matched by name. If both sets number the classes alike, copy the classes.json of --{named} beside the "
            f"shards of --{unnamed}. Otherwise write the class names of --{unnamed} to a classes.json beside its "
            "shards, as a JSON list in the order of the class numbers."
        )
    numbers = {name: number for number, name in enumerate(train_names)}
    if missing := [name for name in val_names if name not in numbers]:
        raise EvaluationError(
            f"The class {missing[0]!r} of --val is not in --train ({len(missing)} of {len(val_names)} classes of --val "
            "are missing there). Leave these classes out of --val, or add images of them to --train."
        )
    return (
        replace(opened[0], classes=train_names, numbers=tuple(range(len(train_names)))),
        replace(opened[1], classes=train_names, numbers=tuple(numbers[name] for name in val_names)),
    )
