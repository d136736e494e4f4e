"""Make shards from the images in a folder or a manifest.

    tessera make_shards IMAGES SHARDS [options]

IMAGES is a folder of images or of class folders, or a manifest: a CSV with the columns path and label. An image x.jpg
may have a map of classes or of depth: x.seg.png, x.depth.png or x.depth.npy in the folder of the image, or x.png or
x.npy in the folder given by --maps.
SHARDS is a folder. The command writes the shards NAME-000000.tar and so on to this folder, a table beside each shard,
and these files:

    index.json       sizes, counts, checksums and pixel statistics; a run reads this file first
    left_out.csv     files that were left out, with the reasons
    classes.json     names of the classes, if labels have names; evaluations match classes by these names

Before any shard is written, the images are assigned to shards. The assignment depends only on the settings and on the
list of images. After an interruption, the same command makes the missing shards. The folder SHARDS/.make_shards holds
the settings, and a record of each finished shard.
"""

import csv
import fcntl
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tarfile import BLOCKSIZE

import numpy as np
import PIL
from pydantic import Field
from rich.filesize import decimal

from tessera.data.exclude import leave_out
from tessera.data.failures import ShardError
from tessera.data.shards.access import DEFAULT
from tessera.data.shards.index import (
    CLASSES,
    LARGEST_CLASSES,
    LEFT_OUT,
    PLAN,
    WORK,
    FolderIndex,
    ShardEntry,
    parse_classes,
    write_folder,
)
from tessera.data.shards.listing import NO_LABEL, REASONS, Listing, list_folder
from tessera.data.shards.manifest import MANIFESTS, add_labels, list_file
from tessera.data.shards.open import ENDINGS
from tessera.data.shards.remote import read_small
from tessera.data.shards.tar_index import ARRAYS, IMAGES, MAPS
from tessera.data.statistics import moments
from tessera.data.tools.inputs import find_maps, renumber
from tessera.data.tools.offline import run_command, say, spread
from tessera.data.tools.pack import LeftOut, Recipe, Record, prepare, read, shared_keys, write_shard
from tessera.runtime import stdio
from tessera.runtime.files import atomic_write
from tessera.runtime.machine import cores
from tessera.runtime.settings import Positional, flags, validate

PROGRAM = "tessera make_shards"
MEGABYTE = 10**6
PROBED = 64  # number of images that are encoded to estimate the encoded size of all images
MOST_SHOWN = 3  # maximum number of reasons, and of kinds of other files, that are printed


class MakeShards(Recipe):
    """Make shards from images. After an interruption, the same command continues with the missing shards."""

    images: Positional[Path]
    """folder of images or of class folders, or manifest (.csv, .tsv)"""
    shards: Positional[Path]
    """folder to which shards are written; it must not hold shards made from other images or with other settings"""
    name: str = Field(default="shard", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """beginning of the file names of the shards, which are NAME-000000.tar and so on"""
    shard_size_mb: float = Field(default=256, gt=0)
    """approximate size of a shard in megabytes (10^6 bytes)"""
    shuffle: bool = True
    """true: distribute the images over the shards in random order; false: keep the order of names or of the manifest"""
    seed: int = Field(default=0, ge=0)
    """seed of the shuffle"""
    workers: int = Field(default=cores(), ge=1)
    """number of worker processes"""
    labels: str = "auto"
    """labels of the images in a folder: a CSV (docs/own_images.md); folders: the first folder of a path is the class;
    none: no labels; auto: for a manifest, the labels in the file; for a folder, like `folders` if there are
    several folders and every image is exactly one folder deep, otherwise like `none`; auto refuses a folder with
    subfolders such as train and val, which are sets, not classes"""
    classes: Path | None = None
    """classes.json of other shards, from which the class numbers are taken"""
    maps: Path | None = None
    """folder of maps, such as ADE20K's annotations/training: the map of the image a/x.jpg is a/x.png or a/x.npy;
    default: the map is x.seg.png, x.depth.png or x.depth.npy, in the folder of the image"""
    exclude: str | None = None
    """file with the names of images to leave out, as for data.exclude of a run: FOLDER/PATH, as `tessera embed` writes
    them for a folder"""
    root: Path | None = None
    """folder to which the paths in a manifest are relative; default: the folder of the manifest"""


class Folder:
    """Folder in which the shards are named NAME-000000.tar and so on."""

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        self.work = self.path / WORK
        self.plan = self.path / PLAN

    def shard(self, number: int) -> Path:
        """Return the path of the shard with this number."""
        return self.path / f"{self.name}-{number:06d}.tar"

    def record(self, number: int) -> Path:
        """Return the path of the record of the shard with this number."""
        return self.work / f"{self.name}-{number:06d}.json"

    def finished(self, number: int) -> Record | None:
        """Return the record of a shard if the shard is finished, otherwise None."""
        try:
            record = Record(**json.loads(self.record(number).read_text()))
            size = self.shard(number).stat().st_size if record.nsamples else 0
            return record if not record.nsamples or size == record.filesize else None
        except (OSError, ValueError, TypeError):
            return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder while the context is active. Remove temporary files of killed processes.

        If another command has locked the folder, wait until that command has ended.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting", f"another command is writing to {self.path}")
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                self._remove_temporary_files()
                yield
            finally:
                self._remove_temporary_files()

    def _remove_temporary_files(self) -> None:
        for temporary in (*self.path.glob(".*.tmp"), *self.work.glob(".*.tmp")):
            temporary.unlink()

    def refuse_foreign_files(self) -> None:
        """Raise `ShardError` if the folder holds shards or an index that were not made by this command."""
        found = sorted(path.name for path in self.path.glob("*") if path.name.endswith((*ENDINGS, "index.json")))
        if found and not self.plan.exists():
            raise ShardError(f"{self.path} holds other shards ({found[0]}). Choose an empty folder.")


def make(settings: MakeShards) -> None:
    """Make the missing shards, and write the files beside them.

    Raises:
        ShardError: the images cannot be listed, or the shards cannot be written.
        WorkerError: a worker process was killed.
    """
    folder = Folder(settings.shards, settings.name)
    folder.refuse_foreign_files()
    say("reading", f"{settings.images}")
    listing = _list_images(settings)
    usable = listing.usable
    say("images", f"{len(usable):,} files, {decimal(int(listing.sizes[usable].sum()))}")
    classes = f", {len(listing.classes):,} classes" if listing.classes else ""
    say("labels", f"{int((listing.labels[usable] != NO_LABEL).sum()):,} images{classes}")
    try:
        with folder.locked():
            _write(settings, folder, listing)
    except OSError as error:
        raise ShardError(
            f"cannot write to {settings.shards}: {error.strerror or error}. Free some disk space, correct the "
            "permissions, or choose another folder."
        ) from error


def _write(settings: MakeShards, folder: Folder, listing: Listing) -> None:
    _check_plan(settings, folder, listing)
    order = listing.usable
    if settings.shuffle:
        order = np.random.Generator(np.random.PCG64(settings.seed)).permutation(order)
    ratio = encoded_ratio(listing, settings, settings.workers)
    shards = split(listing, order, settings.shard_size_mb * MEGABYTE, ratio)
    records = {number: found for number in range(len(shards)) if (found := folder.finished(number))}
    missing = [number for number in range(len(shards)) if number not in records]
    existing = f"; {len(records):,} exist already" if records else ""
    say("shards", f"{len(shards):,}{existing}")
    shared = shared_keys(listing)

    def write(number: int) -> tuple[int, Record]:
        record = write_shard(folder.shard(number), shards[number], listing, shared, settings)
        record.write(folder.record(number))
        return number, record

    records |= dict(spread(write, missing, workers=settings.workers, title="writing shards"))
    in_order = [records[number] for number in range(len(shards))]
    left_out = _left_out(listing, in_order)
    _write_files(folder, listing, in_order, left_out)
    _show(settings, listing, in_order, left_out)


def _list_images(settings: MakeShards) -> Listing:
    images = settings.images
    if images.is_dir():
        if settings.root is not None:
            raise ShardError(f"--root is for manifests, but {images} is a folder. Leave the option out.")
        table = settings.labels not in ("auto", "folders", "none")
        listing = list_folder(images, labels="auto" if table else settings.labels, besides=settings.shards)
        if table:
            add_labels(listing, Path(settings.labels))
    elif images.is_file() and images.suffix.lower() in MANIFESTS:
        listing = list_file(images, root=settings.root, labels=settings.labels)
    elif images.exists():
        raise ShardError(f"{images} is neither a folder nor a manifest (.csv, .tsv). Give one of these.")
    else:
        raise ShardError(f"{images} does not exist. Correct the path.")
    if settings.exclude is not None:
        leave_out(listing, settings.exclude, os.path.basename(os.path.abspath(images)))
    # The search calls `stat` for every image, so skip the search if `list_folder` found no maps beside the images.
    if settings.maps is not None or images.is_file() or any(f".{name}" in listing.other_files for name in MAPS):
        find_maps(listing, settings.maps)
    if settings.classes:
        renumber(listing, list(parse_classes(_small(settings.classes), str(settings.classes))))
    return listing


def _small(path: Path) -> bytes:
    """Return the content of a classes.json."""
    if (content := read_small(str(path), DEFAULT.settings, LARGEST_CLASSES)) is None:
        raise ShardError(f"{path} does not exist. Correct --classes.")
    return content


def _check_plan(settings: MakeShards, folder: Folder, listing: Listing) -> None:
    """Compare the settings and a hash of the list of images with `folder.plan`, or write this file if it is missing.

    Raises:
        ShardError: the folder holds shards that were made with other settings or from other images.
    """
    plan = settings.model_dump(
        mode="json", exclude={"images", "shards", "workers", "root", "classes", "maps", "exclude"}
    )
    plan["the version of Pillow"] = None if settings.resize is None else PIL.__version__
    plan["images (names, sizes, dates or labels)"] = listing.fingerprint()
    if not folder.plan.exists():
        with atomic_write(folder.plan, sync=True) as path:
            path.write_text(json.dumps(plan, indent=1))
        return
    stored = json.loads(folder.plan.read_text())
    if changed := [name for name, value in plan.items() if stored.get(name, "") != value]:
        raise ShardError(
            f"{folder.path} holds shards that were made with other {', '.join(changed)}. "
            f"Make these shards in another folder, or remove {folder.path}."
        )


def split(listing: Listing, order: np.ndarray, shard_bytes: float, ratio: float) -> list[np.ndarray]:
    """Divide `order` into shards of nearly equal size. A shard may exceed `shard_bytes` by one image at most.

    Args:
        listing: files with their sizes and labels.
        order: indices of the files in `listing`, in the order of writing.
        shard_bytes: target size of a shard in bytes.
        ratio: expected size of a stored image, divided by the size of its file.
    """
    # Number of tar blocks per sample: the image and one header block, two blocks for a label, and the map and one
    # header block.
    blocks = np.ceil(listing.sizes[order] * (ratio / BLOCKSIZE)).astype(np.int64) + 1
    blocks += np.where(listing.labels[order] != NO_LABEL, 2, 0)
    if listing.maps is not None:
        sizes = listing.maps.sizes[order]
        blocks += np.where(sizes > 0, -(-sizes // BLOCKSIZE) + 1, 0)
    ends = np.cumsum(blocks)
    shards = max(1, int(np.ceil(ends[-1] * BLOCKSIZE / shard_bytes)))
    shard = ((ends - blocks) * shards) // ends[-1]  # index of the shard in which each image begins
    # If an image is larger than a shard, no image begins in the next shard. Such empty shards are left out.
    return np.split(order, np.flatnonzero(np.diff(shard)) + 1)


def encoded_ratio(listing: Listing, recipe: Recipe, workers: int) -> float:
    """Estimate the ratio of stored image sizes to file sizes. The ratio is 1 if images are not encoded again."""
    if recipe.resize is None:
        return 1.0

    def probe(entry: int) -> tuple[int, int]:
        try:
            content = read(listing, entry)
            return len(content), len(prepare(content, recipe).content)
        except LeftOut:
            return 0, 0

    usable = listing.usable
    probed = usable[np.unique(np.linspace(0, len(usable) - 1, PROBED).astype(np.int64))].tolist()
    before, after = np.sum(list(spread(probe, probed, workers=workers, title="estimating sizes")), axis=0)
    return float(after / before) if before else 1.0


def _left_out(listing: Listing, records: list[Record]) -> list[tuple[str, str]]:
    """Return (path, reason) for each file that was left out."""
    found = [(entry, REASONS[int(listing.sizes[entry])]) for entry in np.flatnonzero(listing.sizes <= 0).tolist()]
    found += [one for record in records for one in record.left_out]
    return [(os.fsdecode(listing.path(entry)), reason) for entry, reason in found]


def _write_files(folder: Folder, listing: Listing, records: list[Record], left_out: list[tuple[str, str]]) -> None:
    """Write left_out.csv, classes.json and index.json beside the shards. Write index.json last.

    Raises:
        ShardError: no image could be stored.
    """
    with (
        atomic_write(folder.path / LEFT_OUT) as path,
        path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        csv.writer(file, lineterminator="\n").writerows([("path", "reason"), *left_out])
    entries = [
        ShardEntry(
            url=folder.shard(number).name,
            nsamples=record.nsamples,
            filesize=record.filesize,
            labelled=record.labelled,
            sha256=record.sha256,
        )
        for number, record in enumerate(records)
        if record.nsamples
    ]
    if not entries:
        raise ShardError(f"none of the files is a good image. {folder.path / LEFT_OUT} lists the reasons.")
    if listing.classes is not None:
        with atomic_write(folder.path / CLASSES, sync=True) as path:
            path.write_text(json.dumps(listing.classes, indent=0))
    pixels = [record.pixels for record in records if record.nsamples]
    found = None if None in pixels else moments(np.sum(np.array(pixels, dtype=np.int64), axis=0))
    mean, std = (tuple(found[0]), tuple(found[1])) if found else (None, None)
    kind = "uint8" if found else None
    write_folder(folder.path, FolderIndex(name=folder.name, shardlist=entries, mean=mean, std=std, pixel_type=kind))


def _show(settings: MakeShards, listing: Listing, records: list[Record], left_out: list[tuple[str, str]]) -> None:
    """Print what was stored and what was left out, and a command that trains on the shards."""
    images, labelled, mapped, size = (
        sum(getattr(record, name) for record in records) for name in ("nsamples", "labelled", "mapped", "filesize")
    )
    maps = f", {mapped:,} with a map" if mapped else ""
    say("written", f"{images:,} images, {labelled:,} with a label{maps}, {decimal(size)}")
    if left_out:
        say("left out", f"{len(left_out):,}, listed in {settings.shards / LEFT_OUT}")
        for reason, count in Counter(reason for _, reason in left_out).most_common(MOST_SHOWN):
            say("", f"{count:,}: {reason}")
    if listing.other_files:
        kinds = [f"{count:,} {kind}" for kind, count in listing.other_files.most_common(MOST_SHOWN)]
        say("other files", f"{', '.join(kinds)}; only {', '.join((*IMAGES, *ARRAYS))} are read")
    say("\nnext", f"tessera pretrain --method dino --data {shlex.quote(str(settings.shards))}")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""

    def command() -> int:
        make(validate(MakeShards, flags(MakeShards, sys.argv[1:] if argv is None else argv, PROGRAM)))
        return 0

    advice = "The same command continues with the missing shards."
    return run_command(PROGRAM, command, advice)


if __name__ == "__main__":
    stdio.protect()
    sys.exit(main())
