"""Expansion of shard patterns to paths and URLs."""

import glob
import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from braceexpand import braceexpand
from webdataset.shardlists import envsubst

from tessera.data.shards import index, remote
from tessera.data.shards.errors import MOST_LISTED, ShardError, is_exhausted, unreadable
from tessera.data.shards.folder import holds_images
from tessera.data.shards.index import FOLDER_INDEX, FolderIndex, parse_folder
from tessera.data.shards.retry import DEFAULT, SourceConfig
from tessera.data.shards.shard import ENDINGS
from tessera.data.shards.shard_list import ShardList
from tessera.runtime.errors import CONTROL, printable

MOST_SHARDS = 200_000
"""Maximum number of shards that one pattern may name."""
MOST_BRACES = 16  # maximum number of opening braces of a pattern; the time of the expansion grows with their number
_RANGE = re.compile(r"\{(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.-?[0-9]+)?\}")

log = logging.getLogger(__name__)

Pattern = str | os.PathLike[str]
Shards = Pattern | Sequence[Pattern] | ShardList
"""One pattern, several patterns, or a list of opened shards.

A pattern is a path, a glob, a brace range such as `train-{000000..000099}.tar`, a local folder of shards or of images,
the `index.json` of a folder, or `pipe:COMMAND`. Paths, globs, brace ranges and `index.json` files may be URLs that
fsspec can open, such as `https://`, `s3://` or `gs://`. File names of shards must end in `.tar` or `.tar.gz`."""


class PixelMoments(NamedTuple):
    """Mean and standard deviation of each channel over all pixels, for pixel values in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Listed(NamedTuple):
    """Entry of a shard in the `index.json` of its folder."""

    samples: int
    labelled: int
    """Number of samples with a label, or -1 if unknown."""
    size: int
    """Size of the shard in bytes."""
    sha256: str | None
    written: int
    """Modification time of the `index.json` in nanoseconds since 1970; 0 for a remote `index.json`."""
    moments: PixelMoments | None
    """Pixel statistics of the folder that holds the shard; None if unknown."""


def expand(shards: Shards, source: SourceConfig = DEFAULT) -> list[str]:
    """Expand shard patterns to paths and URLs.

    The result follows the order of the patterns. Matches of a glob and shards of a folder are sorted, and shards of an
    `index.json` keep the order of the file.

    Raises:
        ShardError: a pattern matches nothing or cannot be listed, a folder holds no shards or shards of several sets, a
            shard is named twice, or no shard is named.
    """
    return expand_with(FolderIndices(source), shards)


def expand_with(indices: "FolderIndices", shards: Shards) -> list[str]:
    """Expand shard patterns in the same way as `expand`, and store the contents of each `index.json` in `indices`."""
    if isinstance(shards, ShardList):
        return [shard.path for shard in shards.shards]
    patterns = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    paths = [path for pattern in patterns for path in _matches(os.path.expanduser(os.fspath(pattern)), indices)]
    if hostile := [path for path in paths if CONTROL.search(path)]:
        raise ShardError(
            f"{printable(hostile[0])}: the name of a shard holds control characters. Rename the file or correct the "
            "name."
        )
    if not paths:
        raise ShardError("no shards were named. Give a path, a glob, a brace range or a URL.")
    if repeated := [path for path, count in Counter(paths).items() if count > 1]:
        raise ShardError(
            f"shards are named more than once: {', '.join(repeated[:MOST_LISTED])}. Name each shard once. "
            "To read some shards more often, use weights."
        )
    return paths


def _matches(pattern: str, indices: "FolderIndices") -> list[str]:
    """Return the paths and URLs of the shards that one pattern matches."""
    pattern = pattern.removeprefix("file://")
    if CONTROL.search(pattern):
        raise ShardError(
            f"{printable(pattern)}: the name of a shard holds control characters. Rename the file or correct the name."
        )
    if os.path.exists(pattern):
        return _shards_at(pattern, indices)
    braced = _braces(pattern)
    if pattern.startswith(remote.PIPE):
        return braced
    paths = []
    for path in braced:
        if remote.is_remote(path):
            found = remote.matches(path, indices.source) if "*" in path or "[" in path else [path]
        else:
            found = [_local(one) for one in sorted(glob.glob(path))] if glob.has_magic(path) else [path]
        if not found:
            raise ShardError(f"{pattern}: no file matches. Correct the pattern.")
        for one in found:
            paths += _shards_at(one, indices)
    return paths


def _braces(pattern: str) -> list[str]:
    """Return the paths, URLs or commands of a pattern with brace ranges.

    Raises:
        ShardError: the braces are not valid, or name more than `MOST_SHARDS` shards.
    """
    if pattern.count("{") > MOST_BRACES:
        raise ShardError(f"{printable(pattern)}: has more than {MOST_BRACES} braces. Name fewer ranges at once.")
    escape = not pattern.startswith(remote.PIPE)  # a command keeps its backslashes
    try:
        for first, last in _RANGE.findall(pattern):
            if len(first) > 18 or len(last) > 18 or abs(int(last) - int(first)) >= MOST_SHARDS:
                raise ShardError(
                    f"{printable(pattern)}: the range {first}..{last} names more than {MOST_SHARDS:,} shards. "
                    "Correct the range."
                )
        parts = pattern.split("::") if escape else [pattern]
        expanded = (one for part in parts for one in braceexpand(envsubst(part) if escape else part, escape=escape))
        paths = list(itertools.islice(expanded, MOST_SHARDS + 1))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ShardError):
            raise
        raise ShardError(f"{pattern}: the brace range is not valid ({error}). Correct the braces.") from error
    if len(paths) > MOST_SHARDS:
        raise ShardError(f"{pattern}: the braces name more than {MOST_SHARDS:,} shards. Correct the braces.")
    return paths


def _shards_at(path: str, indices: "FolderIndices") -> list[str]:
    """Return the shards that a path or URL without wildcards names: a shard, a local folder, or an `index.json`."""
    if remote.without_query(path).endswith(FOLDER_INDEX):
        return indices.read(path)
    return _shards_in(path) if not remote.is_remote(path) and os.path.isdir(path) else [path]


def _shards_in(folder: str) -> list[str]:
    """Return the shards in a local folder, sorted by name.

    A folder of images is returned as one shard, whose path ends in a slash.

    Raises:
        ShardError: the folder holds no shards, or shards whose names differ in more than numbers. Such shards may
            belong to different sets, for example to a training set and a validation set.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(ENDINGS) and not name.startswith("."))
    except OSError as error:
        raise unreadable(folder, error, "Correct the path or its permissions.") from error
    patterns = sorted({re.sub(r"[0-9]+", "*", name) for name in names})
    if len(patterns) > 1:
        listed = ", ".join(patterns[:MOST_LISTED]) + (", ..." if len(patterns) > MOST_LISTED else "")
        raise ShardError(
            f"{folder}: holds shards of several sets: {listed}. Name one set, for example "
            f"'{os.path.join(folder, patterns[0])}', or all shards, '{os.path.join(folder, '*.tar')}'."
        )
    if not names and not _tars_below(folder) and holds_images(folder):
        return [os.path.join(folder, "")]
    if not names:
        raise ShardError(f"{folder}: {_describe_folder_without_shards(folder)}")
    return [os.path.join(folder, name) for name in names]


def _tars_below(folder: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), "*", "*.tar*"))


def _describe_folder_without_shards(folder: str) -> str:
    """Return the end of an error message: what a folder without shards holds, and what to do."""
    if subfolders := {os.path.dirname(path) for path in _tars_below(folder)}:
        listed = ", ".join(sorted(subfolders)[:MOST_LISTED])
        return f"holds no shards, but its subfolders may: {listed}. Name one of them."
    return "holds no shards (.tar, .tar.gz) and no images. Correct the path."


def _local(name: str) -> str:
    """Return the path of a local file. Put `./` before a file name that looks like a command or a URL."""
    return f"./{name}" if remote.is_remote(name) else name


def load_folder_index(path: str, source: SourceConfig) -> FolderIndex | None:
    """Read an `index.json`. Return None if the file does not exist.

    Raises:
        ShardError: the file is not a valid `index.json`, or its server does not answer.
    """
    found = _read_index_file(path, source)
    return None if found is None else parse_folder(found[0], path)


def _read_index_file(path: str, source: SourceConfig) -> tuple[bytes, int] | None:
    """Return the content of an `index.json` and its modification time in nanoseconds (0 for a remote file).

    Return None if the file does not exist or cannot be read.
    """
    if remote.is_remote(path):
        content = remote.read_small(path, source, index.LARGEST_FOLDER_INDEX)
        return None if content is None else (content, 0)
    try:
        with open(path, "rb") as file:
            return file.read(index.LARGEST_FOLDER_INDEX + 1), os.fstat(file.fileno()).st_mtime_ns
    except OSError as error:
        if is_exhausted(error):
            raise unreadable(path, error) from error
        return None


class FolderIndices:
    """Contents of the `index.json` files of all folders. Each file is read once."""

    def __init__(self, source: SourceConfig):
        self.source = source
        self.entries: dict[str, Listed] = {}
        """Maps the path or URL of each listed shard to its entry."""
        self._visited: set[str] = set()

    def read(self, path: str) -> list[str]:
        """Return the shards that the index at `path` lists.

        Raises:
            ShardError: the file does not exist or is not a valid `index.json`.
        """
        self._visited.add(path)
        found = _read_index_file(path, self.source)
        if found is None:
            raise ShardError(f"{path}: not found. Name shards, or the index.json of a folder of shards.")
        return self._add(path, parse_folder(found[0], path), found[1])

    def read_beside(self, shard: str) -> None:
        """Read the `index.json` in the folder of a shard, if the file exists.

        If the file has the format of another tool, it is ignored and a warning is logged.

        Raises:
            ShardError: the server does not answer, and the settings do not skip unreadable shards.
        """
        folder = remote.without_query(shard).rpartition("/")[0]
        path = f"{folder}/{FOLDER_INDEX}" if folder else FOLDER_INDEX
        of_images = shard.endswith("/") and not remote.is_remote(shard)
        if of_images or shard.startswith(remote.PIPE) or shard in self.entries or path in self._visited:
            return
        self._visited.add(path)
        try:
            found = _read_index_file(path, self.source)
        except ShardError as error:
            if self.source.unreadable == "stop":
                raise
            log.warning("not used: %s", error)
            return
        if found is None:
            return
        try:
            self._add(path, parse_folder(found[0], path), found[1])
        except ShardError as error:
            log.warning("not used: %s", error)

    def _add(self, path: str, folder: FolderIndex, written: int) -> list[str]:
        prefix, slash, _ = remote.without_query(path)[: -len(FOLDER_INDEX)].rpartition("/")
        moments = None if folder.mean is None or folder.std is None else PixelMoments(folder.mean, folder.std)
        entries = {
            prefix + slash + entry.url: Listed(
                samples=entry.nsamples,
                labelled=-1 if entry.labelled is None else entry.labelled,
                size=entry.filesize,
                sha256=entry.sha256,
                written=written,
                moments=moments,
            )
            for entry in folder.shardlist
        }
        if not slash:
            entries = {_local(path): entry for path, entry in entries.items()}
        self.entries |= entries
        return list(entries)
