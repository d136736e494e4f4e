"""Open sources: expand the patterns that a user gives, check that the shards can be read, and count their samples.

`shard_at` chooses the subclass of `Shard` for an address.
"""

import glob
import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from braceexpand import braceexpand

from tessera.data.failures import (
    CORRECT_INDEX,
    MAKE_SHARD_AGAIN,
    MOST_LISTED,
    ResourceError,
    ShardError,
    unreadable,
    warn_once,
)
from tessera.data.python_objects import naming
from tessera.data.sampler import Weight
from tessera.data.shards import index, remote
from tessera.data.shards.access import DEFAULT, Access, SourceConfig
from tessera.data.shards.folder import ImageFolder
from tessera.data.shards.index import (
    FOLDER_INDEX,
    LEFT_OUT,
    MOST_SHARDS,
    PLAN,
    WORK,
    FolderIndex,
    ShardEntry,
    Statistics,
    parse_folder,
)
from tessera.data.shards.listing import holds_files
from tessera.data.shards.manifest import MANIFESTS
from tessera.data.shards.notes import (
    ABSENT,
    OTHER_IMAGES,
    PARTS,
    Note,
    describe,
    named_notes,
    shown_classes,
    valid_notes,
)
from tessera.data.shards.registry import OBJECTS, SOURCES, endings, scheme_of, source_of
from tessera.data.shards.shard import Shard
from tessera.data.shards.source import Source
from tessera.data.shards.tar_index import ARRAYS, IMAGES
from tessera.data.shards.tar_shard import GZIPPED, LocalTar, PackedTar, RemoteTar, Tar, folder_of
from tessera.runtime import collectives
from tessera.runtime.progress import track
from tessera.runtime.user_error import CONTROL, printable

ENDINGS = (".tar", ".tar.gz", ".tgz")
"""File name endings of tars."""
MOST_BRACES = 16  # maximum number of opening braces in a pattern, because each brace adds to the expansion time
THREADS = 16
IMAGE_FILES = (*IMAGES, *ARRAYS)
IMAGE_ENDINGS = tuple(f".{extension}" for extension in IMAGES)
MOST_BESIDE = 10_000  # maximum number of files beside shards that are looked at
_PART = re.compile(r"(.*-)([0-9]{1,9})-of-([0-9]{1,9})(\..*)")
_RANGE = re.compile(r"\{(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.-?[0-9]+)?\}")

log = logging.getLogger(__name__)

Pattern = str | os.PathLike[str]
MapStyleData = Any
"""A map-style data set, or the name of one (`data.python_objects`)."""
Shards = Pattern | MapStyleData | Sequence[Pattern | MapStyleData] | Source
"""One pattern, several patterns, or an opened source. A map-style data set may stand in place of a pattern.

A pattern is a path, a glob, a brace range such as `train-{000000..000099}.tar`, a local folder of shards or of images,
the `index.json` of a folder, or `pipe:COMMAND`. Paths, globs, brace ranges and `index.json` files may be URLs that
fsspec can open, such as `https://`, `s3://` or `gs://`. File names of shards must end in `.tar`, `.tar.gz`,
`.tgz` or, for local files, in an ending of the registry such as `.parquet` (`data.shards.registry`)."""


class Sources(NamedTuple):
    """Opened sources of a data mixture, with their weights."""

    lists: list[Source]
    weights: list[Weight]


WeightedShards = Shards | Mapping[Any, Weight] | Sources
"""Shards without weights, or a mixture. A mixture is a dict that maps each shard pattern to its share of the samples,
which may depend on the step (`Weight`), or a `Sources` with opened sources."""


class _Listed(NamedTuple):
    """Entry of a shard in the `index.json` of its folder."""

    entry: ShardEntry
    folder: FolderIndex


class _Opened(NamedTuple):
    """An opened shard with its size and counts."""

    shard: Shard
    samples: int
    labelled: int
    """Number of samples with a label, or -1 if unknown."""
    size: int
    """Size of the shard in bytes."""
    statistics: Statistics = Statistics()
    """Statistics of the pixels of the folder."""
    digest: int | None = None
    """Hash of the samples (`Header.digest`); None for a shard that `index.json` lists."""
    notes: tuple[Note, ...] = ()


def open_sources(shards: WeightedShards, *, progress: bool = True, source: Access = DEFAULT) -> Sources:
    """Open the sources of a mixture. Shards without weights form one source of weight 1.

    Raises:
        ShardError: the mixture is empty, or the shards of a source cannot be opened by `open_shards`.
    """
    if isinstance(shards, Sources):
        return shards
    with naming() as name:
        shards = with_names(shards, name)
        if not isinstance(shards, Mapping):
            return Sources([open_shards(shards, progress=progress, source=source)], [1.0])
        if not shards:
            raise ShardError("the mixture is empty. Give at least one pattern with a weight.")
        lists = [open_shards(one, progress=progress, source=source) for one in shards]
        return Sources(lists, [w if isinstance(w, Mapping) else float(w) for w in shards.values()])


def open_shards(shards: Shards, *, progress: bool = True, source: Access = DEFAULT) -> Source:
    """Open a source: open its shards and count their samples.

    The counts come from `index.json`, from the cache, from the tables beside the shards, or from the tar headers.

    Args:
        shards: shard patterns (see `Shards`), or an opened source, which is returned unchanged.
        progress: if True, show a progress bar while many shards are opened.
        source: settings for access to shards.

    Raises:
        ShardError: a pattern is wrong, or a shard cannot be used. The message lists the first 20 unusable shards with
            the reasons.
    """
    if isinstance(shards, Source):
        return shards
    if isinstance(shards, Mapping):
        raise ShardError(
            "a mixture with weights was given, but weights are possible for training data only. "
            "Give a path, a pattern, or a list of paths and patterns."
        )
    with naming() as name:
        return _open_patterns(with_names(shards, name), progress, source)


def with_names(shards: Any, name: Callable[[Any], str]) -> Any:
    """Return SHARDS in which each map-style data set is replaced by its name, which `name` returns.

    Raises:
        ShardError: an object is no map-style data set, for example because it is an iterable.
    """
    if isinstance(shards, str | os.PathLike | Source | Sources):
        return shards
    if isinstance(shards, Mapping):
        if wrong := [key for key, weight in shards.items() if not isinstance(weight, int | float | Mapping)]:
            raise ShardError(
                f"data: a dictionary maps SHARDS to weights, but {wrong[0]!r:.100} has no weight. To use one of "
                f"several data sets, give data=DATASETS[{wrong[0]!r:.100}]."
            )
        return {with_names(one, name): weight for one, weight in shards.items()}
    if isinstance(shards, list) and shards and all(isinstance(one, tuple) and len(one) == 2 for one in shards):
        if isinstance(shards[0][0], str | os.PathLike):
            raise ShardError(
                "data: a list is read as SHARDS, and this list holds pairs of a path and a label. Write them to a CSV "
                "with the columns path and label, and give the CSV."
            )
        return name(shards)  # images with their labels
    if isinstance(shards, list | tuple):
        return [with_names(one, name) for one in shards]
    SOURCES[OBJECTS].check_object(shards)
    return name(shards)


def _open_patterns(shards: Shards, progress: bool, source: Access) -> Source:
    """Open a source whose data sets have names, as `open_shards` describes."""
    paths, indices = _listed(shards, source)
    opened, errors = _open_all(paths, indices, progress)
    if len(paths) == 1 and errors and (paths[0].endswith("/") or paths[0].lower().endswith(MANIFESTS)):
        raise errors[0]  # a folder of images or a manifest, which is no list of shards for the user
    if errors:
        raise _unusable(errors, len(paths))
    found = [opened[place] for place in range(len(paths))]
    _check_pages([one.shard for one in found], source)
    counts, labelled, sizes = np.array([[one.samples, one.labelled, one.size] for one in found], dtype=np.int64).T
    statistics = {one.statistics for one in found}
    # The source has statistics only if all folders of its shards have the same statistics.
    kinds = {one.pixel_type for one in statistics}
    own = statistics.pop() if len(statistics) == 1 else Statistics(pixel_type=kinds.pop() if len(kinds) == 1 else None)
    notes = (*missing_parts(paths), *indices.absent(paths), *itertools.chain.from_iterable(one.notes for one in found))
    if os.environ.get("RANK", "0") == "0":
        for line in describe(notes):
            warn_once(f"{shown_paths(paths)}: {line}")
        for shard in (one.shard for one in found):
            if isinstance(shard, ImageFolder) and (counted := shard.class_counts):
                classes = f"{len(counted):,} classes: {shown_classes(counted)}"
                warn_once(f"{shard.path}: {classes}", level=logging.INFO)
    return Source(
        [one.shard for one in found],
        counts,
        labelled,
        sizes,
        access=source,
        digests=tuple(one.digest for one in found),
        notes=notes,
        statistics=own,
    )


def _check_pages(shards: Sequence[Shard], source: Access) -> None:
    """Raise `ShardError` if the pages of files cannot be samples as `data.pages` says."""
    if source.keys.pages is None:
        return
    if source.stages is not None:
        raise ShardError("data.pages is set, but stages get complete files. Let a stage choose the page instead.")
    others = [shard.path for shard in shards if not isinstance(shard, Tar | ImageFolder)]
    if source.keys.pages == "each" and others:
        raise ShardError(
            f"data.pages is each, but only tars and folders of images count the pages of their files, not {others[0]}. "
            "Set data.pages to first or max."
        )


def shown_paths(paths: Sequence[str]) -> str:
    """Return a name of several shards for messages: the path of one, or the folder of all."""
    return paths[0] if len(paths) == 1 else (os.path.dirname(paths[0]) or f"{len(paths):,} shards")


def missing_parts(paths: Sequence[str]) -> list[Note]:
    """Return a note for each set of files NAME-00000-of-00010.EXTENSION of which some parts are not among `paths`."""
    numbers: dict[tuple[str, str, int], set[int]] = {}
    for path in paths:
        if (matched := _PART.fullmatch(remote.without_query(path))) is not None:
            before, number, total, after = matched.groups()
            numbers.setdefault((before, f"-of-{total}{after}", int(total)), set()).add(int(number))
    return [
        Note(PARTS, total - len(found), group=f"{os.path.basename(before)}*{after}")
        for (before, after, total), found in numbers.items()
        if len(found) < total
    ]


def _listed(shards: Shards, source: Access) -> tuple[list[str], "_FolderIndices"]:
    """Expand shard patterns, and read the `index.json` beside each shard."""
    indices = _FolderIndices(source)
    paths = _expand(shards, indices)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(indices.read_beside, {folder_of(path): path for path in reversed(paths)}.values()))
    return paths, indices


def describe_remote(shards: Sequence[WeightedShards], source: Access) -> Access:
    """Return the settings with the size and version of each remote shard that no `index.json` lists. Collective.

    Rank 0 asks the servers, one request per shard. Otherwise every process would ask for every shard when it opens the
    shards with these settings.

    Raises:
        RankError: a pattern cannot be expanded.
    """
    patterns = [pattern for one in shards for pattern in _remote_patterns(one)]
    if not patterns or collectives.world_size() == 1:
        return source

    def ask() -> dict[str, tuple[int, str] | ShardError]:
        if collectives.rank():
            return {}
        paths, indices = _listed(list(dict.fromkeys(patterns)), source)
        unknown = [path for path in paths if remote.is_remote(path) and path not in indices.entries]
        with ThreadPoolExecutor(THREADS) as pool:
            return dict(zip(unknown, pool.map(lambda path: _description(path, source), unknown), strict=True))

    with collectives.patient_group() as group:
        found = collectives.run_on_all_ranks(ask, group)
        return replace(source, described=collectives.broadcast_object(found, group))


def _remote_patterns(shards: WeightedShards) -> list[str]:
    """Return the patterns that are URLs."""
    if isinstance(shards, str):
        is_url = remote.is_remote(shards) and not shards.startswith(remote.PIPE) and scheme_of(shards) is None
        return [shards] if is_url else []
    if isinstance(shards, Mapping | list | tuple) and not isinstance(shards, Sources):
        return [pattern for one in shards for pattern in _remote_patterns(one)]
    return []


def _description(url: str, source: Access) -> tuple[int, str] | ShardError:
    try:
        return remote.describe(url, source.settings)
    except ResourceError:
        raise
    except ShardError as error:
        return error


def shard_at(path: str, access: Access = DEFAULT) -> Shard:
    """Return the shard at a path, a URL or `pipe:COMMAND`.

    Other kinds of storage come in by the registry `data.shards.registry.SOURCES`.

    Raises:
        ShardError: the file does not exist, is empty, or has a name that does not end in `.tar`, `.tar.gz`,
            `.tgz` or an ending of the registry; the server does not respond; or a folder of images cannot be used.
    """
    source = source_of(path)
    if (
        source is None
        and not remote.is_remote(path)
        and (os.path.isdir(path) or (path.lower().endswith(MANIFESTS) and os.path.exists(path)))
    ):
        return ImageFolder.at(path, access)
    if access.keys.labels is not None:
        raise ShardError(f"--labels is for folders of images, but {path} is none. It stores its own labels.")
    if source is not None:
        return source.at(path, access)
    if path.startswith(remote.PIPE):
        return RemoteTar(path, 0, "", access)
    if not remote.without_query(path).endswith(ENDINGS):
        if not remote.is_remote(path) and not os.path.exists(path):
            where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
            raise ShardError(f"{path} does not exist{where}. Check the name of the file or folder.")
        if remote.is_remote(path):
            folder = remote.without_query(path).rstrip("/")
            raise ShardError(
                f"{path} is no tar, and remote folders are not listed. Give the tars, such as {folder}/*.tar on S3 or "
                f"Google Storage, {folder}/train-{{000..099}}.tar, or {folder}/{FOLDER_INDEX}."
            )
        known = (*ENDINGS, *endings())
        raise ShardError(
            f"{path}: the file name must end in {', '.join(known[:-1])} or {known[-1]}. Rename the file, or remove it "
            "from the list."
        )
    if remote.is_remote(path):
        found = access.described.get(path) or remote.describe(path, access.settings)
        if isinstance(found, ShardError):
            raise found
        return RemoteTar(path, *found, access)
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if not status.st_size:
        raise ShardError(f"{path} has 0 bytes. {MAKE_SHARD_AGAIN}")
    # A file that replaces the shard may have the same modification time. Programs cannot set the change time, so the
    # version includes both times.
    version = f"{status.st_mtime_ns}\n{status.st_ctime_ns}"
    kind = PackedTar if path.endswith(GZIPPED) else LocalTar
    return kind(path, status.st_size, version, access, modified=status.st_mtime_ns)


def _open_all(
    paths: list[str], indices: "_FolderIndices", progress: bool
) -> tuple[dict[int, _Opened], dict[int, ShardError]]:
    """Open all shards.

    Return a dict of opened shards and a dict of errors for unusable shards. The keys are indices into `paths`.
    """
    opened: dict[int, _Opened] = {}
    errors: dict[int, ShardError] = {}
    for place, path in enumerate(paths):
        if path in indices.entries and remote.is_remote(path):
            opened[place] = _from_index(path, indices.entries[path], indices.access)
    unknown = [place for place in range(len(paths)) if place not in opened]
    with ThreadPoolExecutor(THREADS) as pool:
        futures = {pool.submit(_open, paths[place], indices): place for place in unknown}
        shown = progress and len(unknown) > THREADS
        try:
            for future in track(as_completed(futures), "reading shards", total=len(unknown), shown=shown):
                try:
                    opened[futures[future]] = future.result()
                except ShardError as error:
                    errors[futures[future]] = error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    _probe_servers([one.shard for one in opened.values()])
    return opened, errors


def _open(path: str, indices: "_FolderIndices") -> _Opened:
    listed = indices.entries.get(path)
    shard = shard_at(path, indices.access)
    if listed is not None and isinstance(shard, Tar):
        if listed.entry.filesize != shard.size:
            raise ShardError(
                f"{path} has {shard.size} bytes, but {FOLDER_INDEX} lists {listed.entry.filesize}. The shard may have "
                f"been truncated. Copy or make the shard again. {CORRECT_INDEX}"
            )
        return _counted(replace(shard, sha256=listed.entry.sha256), listed)
    header = shard.header()
    samples, labelled, size = map(int, header.summary)
    notes = (*shard.notes, *named_notes(shard.name, header.notes))
    return _Opened(shard, samples, labelled, shard.size or size, digest=header.digest, notes=notes)


def _from_index(path: str, listed: _Listed, access: Access) -> _Opened:
    """Return a remote shard from its entry in `index.json`, without a request to the server."""
    size, sha256 = listed.entry.filesize, listed.entry.sha256
    return _counted(RemoteTar(path, size, sha256 or "", access, sha256), listed)


def _counted(shard: Shard, listed: _Listed) -> _Opened:
    entry, folder = listed.entry, listed.folder
    labelled = -1 if entry.labelled is None else entry.labelled
    notes = named_notes(shard.name, valid_notes(entry.notes or ()))
    return _Opened(shard, entry.nsamples, labelled, entry.filesize, folder.statistics, notes=notes)


def _probe_servers(shards: list[Shard]) -> None:
    """Check whether the web servers of shards support byte ranges. Forked loader workers inherit the results."""
    for shard in {remote.host(shard.path): shard for shard in shards if isinstance(shard, RemoteTar)}.values():
        _ = shard.supports_ranges


def _unusable(errors: dict[int, ShardError], total: int) -> ShardError:
    """Return the error that lists the unusable shards."""
    lines = [str(errors[place]) for place in sorted(errors)]
    listed = "\n  ".join(lines[:MOST_LISTED])
    more = f"\n  and {len(lines) - MOST_LISTED} more" if len(lines) > MOST_LISTED else ""
    return ShardError(f"{len(errors)} of {total} shards cannot be used:\n  {listed}{more}")


def expand(shards: Shards, source: Access = DEFAULT) -> list[str]:
    """Expand shard patterns to paths and URLs. The path of a folder of images ends in a slash.

    The result follows the order of the patterns. Matches of a glob and shards of a folder are sorted, and shards of an
    `index.json` keep the order of the file.

    Raises:
        ShardError: a pattern matches nothing or cannot be listed; a folder holds no shards, or shards of several sets;
            a shard occurs twice; or no pattern is given.
    """
    return _expand(shards, _FolderIndices(source))


def _expand(shards: Shards, indices: "_FolderIndices") -> list[str]:
    """Expand shard patterns in the same way as `expand`, and store the contents of each `index.json` in `indices`."""
    if isinstance(shards, Source):
        return [shard.path for shard in shards.shards]
    patterns = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    paths = [path for pattern in patterns for path in _matches(os.path.expanduser(os.fspath(pattern)), indices)]
    for path in paths:
        _refuse_controls(path)
    if not paths:
        raise ShardError("no shards were given. Give a path, a glob, a brace range or a URL.")
    if repeated := [path for path, count in Counter(paths).items() if count > 1]:
        raise ShardError(
            f"shards are given more than once: {', '.join(repeated[:MOST_LISTED])}. Give each shard once. "
            "To read some shards more often, use weights."
        )
    return paths


def _refuse_controls(path: str) -> None:
    if CONTROL.search(path):
        raise ShardError(
            f"{printable(path)}: the name of a shard holds control characters. Rename the file or correct the name."
        )


def _matches(pattern: str, indices: "_FolderIndices") -> list[str]:
    """Return the paths and URLs of the shards that one pattern matches."""
    if scheme_of(pattern) is not None:
        return [pattern]
    pattern = pattern.removeprefix("file://").removeprefix("file:")
    _refuse_controls(pattern)
    if os.path.exists(pattern):
        return _shards_at(pattern, indices)
    braced = _braces(pattern)
    if pattern.startswith(remote.PIPE):
        return braced
    paths = []
    for path in braced:
        if remote.is_remote(path):
            found = _remote_matches(path, indices.access.settings)
        elif glob.has_magic(path) and not os.path.exists(path):
            found = [_local(one) for one in sorted(glob.glob(path))]
        else:
            found = [path]
        if not found:
            raise ShardError(f"no file matches {pattern}. Correct the pattern.")
        for one in found:
            paths += _shards_at(one, indices)
    return paths


def _remote_matches(url: str, config: SourceConfig) -> list[str]:
    """Return the URLs that a URL matches, which may be a glob. The query of a URL is no part of a glob."""
    path = remote.without_query(url)
    if "*" in path:
        return remote.matches(url, config)
    if "[" not in path or path.startswith(("http://", "https://")):
        return [url]
    return remote.matches(url, config) or [url]  # `a[1].tar` may be the name of a file


def _braces(pattern: str) -> list[str]:
    """Expand the brace ranges of a pattern. Return paths, URLs or commands.

    Raises:
        ShardError: the braces are not valid, or expand to more than `MOST_SHARDS` shards.
    """
    if pattern.count("{") > MOST_BRACES:
        raise ShardError(f"{printable(pattern)} has more than {MOST_BRACES} opening braces. Use fewer ranges.")
    escape = not pattern.startswith(remote.PIPE)  # a command keeps its backslashes
    try:
        for first, last in _RANGE.findall(pattern):
            if len(first) > 18 or len(last) > 18 or abs(int(last) - int(first)) >= MOST_SHARDS:
                raise ShardError(
                    f"{printable(pattern)}: the range {first}..{last} covers more than {MOST_SHARDS:,} shards. "
                    "Correct the range."
                )
        paths = list(itertools.islice(braceexpand(pattern, escape=escape), MOST_SHARDS + 1))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ShardError):
            raise
        raise ShardError(f"{pattern}: the brace range is not valid ({error}). Correct the braces.") from error
    if len(paths) > MOST_SHARDS:
        raise ShardError(f"{pattern}: the braces expand to more than {MOST_SHARDS:,} shards. Correct the braces.")
    return paths


def _shards_at(path: str, indices: "_FolderIndices") -> list[str]:
    """Return the shards at a path or URL without wildcards: a shard, a local folder, or an `index.json`."""
    if remote.without_query(path).endswith(FOLDER_INDEX):
        return indices.read(path)
    if path.endswith(endings()) and remote.is_remote(path):
        raise ShardError(f"{path}: such files are read from a local disk only. Download the file.")
    if remote.is_remote(path) and not path.startswith(remote.PIPE):
        remote.split_url(path)
    return _shards_in(path) if not remote.is_remote(path) and os.path.isdir(path) else [path]


def sets_in(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the shards in a local folder, and their sets: the names with `*` in place of numbers.

    Raises:
        OSError: the folder cannot be read.
    """
    listed = (name for name in os.listdir(folder) if name.endswith((*ENDINGS, *endings())))
    names = sorted(name for name in listed if not name.startswith("."))
    sets = {re.sub(r"[0-9]+", "*", name) for name in names}
    return names, sorted(sets, key=lambda name: (not name.endswith(ENDINGS), name))


def _shards_in(folder: str) -> list[str]:
    """Return the shards in a local folder, sorted by name.

    A folder of images is returned as one shard, whose path ends in a slash.

    Raises:
        ShardError: the folder cannot be read, holds neither shards nor images, or holds shards whose names differ in
            more than numbers. Such shards may belong to different sets, such as a training set and a validation set.
    """
    try:
        names, patterns = sets_in(folder)
    except OSError as error:
        raise unreadable(folder, error, "Correct the path or its permissions.") from error
    if len(patterns) > 1:
        listed = ", ".join(patterns[:MOST_LISTED]) + (", ..." if len(patterns) > MOST_LISTED else "")
        raise ShardError(
            f"{folder} holds shards of several sets: {listed}. Give one set, for example "
            f"'{os.path.join(folder, patterns[0])}', or all shards with '{os.path.join(folder, '*.tar')}'."
        )
    within = os.path.join(glob.escape(folder), "*", "*")
    if names:
        beside = itertools.islice(itertools.chain(os.listdir(folder), glob.iglob(within)), MOST_BESIDE)
        if any(name.lower().endswith(IMAGE_ENDINGS) for name in beside):
            warn_once(f"{folder} holds shards ({names[0]}) and images. Only the shards are read.")
    else:
        below = {os.path.dirname(path) for end in (".tar*", ".tgz", *endings()) for path in glob.glob(within + end)}
        if below:
            listed = ", ".join(sorted(below)[:MOST_LISTED])
            raise ShardError(
                f"{folder} holds no shards, but its subfolders may: {listed}. Give one of these. To read the images of "
                f"{folder} instead, move the shards away."
            )
        if holds_files(folder, IMAGE_FILES):
            return [os.path.join(folder, "")]
        cure = "Convert its images to PNG." if holds_files(folder, OTHER_IMAGES) else "Correct the path."
        known = ", ".join((*ENDINGS, *endings()))
        raise ShardError(f"{folder} holds no shards ({known}) and no images. {cure}")
    return [os.path.join(folder, name) for name in names]


def _local(name: str) -> str:
    """Return the path of a local file. Put `./` before a file name that looks like a command or a URL."""
    return f"./{name}" if remote.is_remote(name) else name


def load_folder_index(path: str, source: SourceConfig) -> FolderIndex | None:
    """Read an `index.json`. Return None if the file does not exist.

    Raises:
        ShardError: the file cannot be read or is not a valid `index.json`, or its server does not answer.
    """
    content = remote.read_small(path, source, index.LARGEST_FOLDER_INDEX)
    return None if content is None else parse_folder(content, path)


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder or os.curdir)
    except OSError:
        return []


def check_complete(folder: str) -> None:
    """Raise `ShardError` if `make_shards` was interrupted before it had written all shards of a local folder."""
    begun, *ended = (os.path.exists(os.path.join(folder, name)) for name in (PLAN, FOLDER_INDEX, LEFT_OUT))
    if begun and not any(ended):
        raise ShardError(
            f"{folder or os.curdir} is not complete, because `tessera make_shards` was interrupted. Start the same "
            f"command again. To use the shards as they are, remove {os.path.join(folder, WORK)}."
        )


class _FolderIndices:
    """Contents of the `index.json` files of all folders. Each file is read once."""

    def __init__(self, access: Access):
        self.access = access
        self.entries: dict[str, _Listed] = {}
        """Maps the path or URL of each listed shard to its entry."""
        self._visited: set[str] = set()

    def absent(self, paths: Sequence[str]) -> list[Note]:
        """Return a note on local shards that an `index.json` lists, but that do not exist."""
        others = sorted(path for path in self.entries.keys() - {*paths} if not remote.is_remote(path))
        there = {folder: set(_names_in(folder)) for folder in {os.path.dirname(path) for path in others}}
        gone = [path for path in others if os.path.basename(path) not in there[os.path.dirname(path)]]
        return [Note(ABSENT, len(gone), gone[0])] if gone else []

    def read(self, path: str) -> list[str]:
        """Return the shards that the index at `path` lists.

        Raises:
            ShardError: the file does not exist, cannot be read or is not a valid `index.json`.
        """
        found = self._content(path)
        if found is None:
            raise ShardError(f"{path} was not found. Give shards, or the index.json of a folder of shards.")
        return self._add(path, found)

    def read_beside(self, shard: str) -> None:
        """Read the `index.json` in the folder of a shard, if the file exists.

        An invalid file, such as the `index.json` of another tool, is ignored with a warning.

        Raises:
            ShardError: the file cannot be read, or `make_shards` was interrupted before it wrote the file.
        """
        folder = folder_of(shard)
        path = f"{folder}/{FOLDER_INDEX}" if folder else FOLDER_INDEX
        no_tar = os.path.isdir(shard) or (
            remote.is_remote(shard) and not remote.without_query(shard).endswith(ENDINGS)  # `shard_at` refuses it
        )
        if (
            scheme_of(shard) is not None
            or no_tar
            or folder == remote.PIPE
            or shard in self.entries
            or path in self._visited
        ):
            return
        try:
            found = self._content(path)
        except ShardError as error:
            if remote.is_remote(shard):
                raise type(error)(f"{shard} cannot be used, because its folder cannot be read. {error}") from error
            raise
        if found is None:
            check_complete(folder)
        try:
            if found is not None:
                self._add(path, found)
        except ShardError as error:
            log.warning("the index is not used: %s", error)

    def _content(self, path: str) -> bytes | None:
        """Return the content of an `index.json`."""
        self._visited.add(path)
        return remote.read_small(path, self.access.settings, index.LARGEST_FOLDER_INDEX)

    def _add(self, path: str, content: bytes) -> list[str]:
        folder = parse_folder(content, path)
        prefix, slash, _ = remote.without_query(path)[: -len(FOLDER_INDEX)].rpartition("/")
        entries = {
            prefix + slash + entry.url if slash else _local(entry.url): _Listed(entry, folder)
            for entry in folder.shardlist
        }
        keys = self.access.keys
        if keys.image is keys.label is None and keys.pages != "each":  # the counts are those of the usual members
            self.entries |= entries
        return list(entries)
