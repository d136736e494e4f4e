"""Class names of shards: `classes.json` beside the shards lists the names in the order of the class numbers."""

import json
from collections import Counter
from pathlib import Path

from tessera.data.shards import remote
from tessera.data.shards.errors import ShardError
from tessera.data.shards.retry import SourceConfig
from tessera.data.shards.shard import Shard
from tessera.data.shards.shard_list import ShardList

CLASSES = "classes.json"
LARGEST_CLASSES = 2**26  # Maximum size of a classes.json in bytes. The names of 22,000 classes take about 0.5 MB.


def parse_classes(content: bytes, path: str) -> tuple[str, ...]:
    """Parse the content of a `classes.json`.

    Args:
        content: bytes of the file.
        path: name of the file in error messages.

    Raises:
        ShardError: the content is not a list of unique names.
    """
    try:
        names = json.loads(content) if len(content) <= LARGEST_CLASSES else None
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ShardError(f"{path}: not a JSON list of class names. Correct or remove the file.")
    if len({*names}) < len(names):
        ((repeated, _),) = Counter(names).most_common(1)
        raise ShardError(f"{path}: names the class {repeated!r} more than once. Correct the file.")
    return tuple(names)


def read_classes(folder: str, source: SourceConfig) -> tuple[str, ...] | None:
    """Return the class names of a local or remote folder of shards, or None if the folder has no `classes.json`.

    Raises:
        ShardError: the file cannot be read, or is not a list of unique names.
    """
    path = f"{folder}/{CLASSES}" if folder else CLASSES
    if remote.is_remote(path):
        content = remote.read_small(path, source, LARGEST_CLASSES)
    else:
        try:
            content = Path(path).read_bytes()
        except FileNotFoundError:
            content = None
        except OSError as error:
            raise ShardError(f"{path}: {error.strerror}. Correct or remove the file.") from error
    return None if content is None else parse_classes(content, path)


def class_names(opened: ShardList) -> tuple[str, ...] | None:
    """Return the class names of shards in the order of the class numbers, or None if no folder has class names.

    The class names of a folder of images are those of its subfolders. Other folders have a `classes.json`.

    Raises:
        ShardError: the folders of the shards have different class names, only some folders have a `classes.json`, or a
            `classes.json` cannot be used.
    """
    (first, shard), *others = {_folder(shard.path): shard for shard in opened.shards}.items()
    names = _names(first, shard, opened.source)
    for other, shard in others:
        found = _names(other, shard, opened.source)
        if found == names:
            continue
        if found is None or names is None:
            named, unnamed = (first, other) if found is None else (other, first)
            raise ShardError(
                f"{named} has a {CLASSES}, but {unnamed} has none, so their labels cannot be compared. "
                f"If both number the classes alike, copy the {CLASSES}. Otherwise evaluate them separately."
            )
        raise ShardError(
            f"{first} and {other} have different class names in {CLASSES}, so their labels do not mean the same. "
            f"Make one of them again with `--classes` and the {CLASSES} of the other, or evaluate them separately."
        )
    return names


def _folder(path: str) -> str:
    """Return the folder of a shard, or `pipe:` for the output of a command, which lies in no folder."""
    return remote.PIPE if path.startswith(remote.PIPE) else remote.without_query(path).rpartition("/")[0]


def _names(folder: str, shard: Shard, source: SourceConfig) -> tuple[str, ...] | None:
    if shard.is_folder:
        return shard.classes
    return None if folder == remote.PIPE else read_classes(folder, source)
