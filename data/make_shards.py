"""Shards of a folder of images, or of those that a list or a manifest names.

    python -m data.make_shards IMAGES SHARDS [options]

IMAGES is a folder (of class folders or not), a text file with a path a line and perhaps a tab and a label, or a CSV or
Parquet manifest. SHARDS is a folder, which then holds NAME-000000.tar and so on, a table beside each, and

    index.json       what a run reads first: sizes, counts, checksums, a histogram of image sizes
    report.json      counts; left_out.csv and duplicates.csv name the files
    classes.json     names of the classes, where labels have names

What is where follows from the listing and the settings. After a stop the same command makes the missing shards.
"""

import csv
import io
import json
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL
from pydantic import Field, model_validator
from rich.filesize import decimal

from data.shards.index import FolderIndex, ShardEntry, write_folder, write_whole
from data.shards.tar import IMAGES
from data.tools.listing import REASONS, Links, Listing, ListingError, list_file, list_folder, renumber
from data.tools.pack import DIGEST, Format, Recipe, WriteError, shared_keys, write_shard
from data.tools.parallel import Advance, WorkerError, spread
from data.tools.shard_folder import PART, Folder, FolderError
from data.tools.split import encoded_ratio, find_duplicates, same, shuffled, split
from runtime.settings import Positional, Settings, SettingsError, flags, validate

PROGRAM = "python -m data.make_shards"
SPARED = 2**28  # bytes of disk to leave free
MEGABYTE = 10**6
MOST_REASONS = 100  # that are counted apart
MOST_SHOWN = 3


class MakeError(ValueError):
    """Shards that cannot be made. The message is meant for the user."""


class MakeShards(Settings):
    """Make shards of images. The same command goes on after a stop."""

    images: Positional[Path]
    """folder of images, or of class folders; or a list (.txt), or a manifest (.csv, .parquet)"""
    shards: Positional[Path]
    """folder for the shards, without shards of other images or settings"""
    name: str = Field(default="shard", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """shards are NAME-000000.tar and so on"""
    shard_size_mb: float = Field(default=256, gt=0)
    """megabytes (10^6 bytes) of a shard, about; all get nearly the same"""
    shuffle: bool = True
    """mix the images over all shards; false keeps the order of names, or of the list"""
    seed: int = Field(default=0, ge=0)
    """of the shuffle"""
    workers: int = Field(default=os.cpu_count() or 1, ge=1)
    """processes"""
    labels: Literal["auto", "folders", "none"] = "auto"
    """folders: the first folder of a path is its class; auto: so where all images lie one folder deep"""
    classes: Path | None = None
    """classes.json of other shards, for the same numbers"""
    path_column: str | None = None
    """column of a manifest with the paths; without it, `path`"""
    label_column: str | None = None
    """column of a manifest with the labels; without it, `label` where there is one"""
    root: Path | None = None
    """folder that the paths in a list or manifest start from; without it, its own"""
    links: Links = "inside"
    """symbolic links to follow: those to files in the folder of images, or all"""
    format: Format = "keep"
    """encode what has another format; keep: leave the bytes as they are"""
    resize: int | None = Field(default=None, ge=8)
    """most pixels of the shorter side; larger images are made smaller and encoded again"""
    quality: int | None = Field(default=None, ge=1, le=100)
    """of JPEG and WebP that is encoded again; without it, 90"""
    verify: bool = True
    """decode every image, and leave out what a run could not read"""
    max_pixels: int = Field(default=178_956_970, ge=1)
    """images with more are left out before they are decoded"""
    duplicates: Literal["report", "drop"] = "report"
    """drop: of files with the same bytes keep the first; reads all files twice"""

    @model_validator(mode="after")
    def _fit(self) -> "MakeShards":
        encodes = self.format != "keep" or self.resize is not None
        if self.quality is not None and (not encodes or self.format == "png"):
            raise ValueError("quality is for images that are encoded as JPEG or WebP: set resize or format")
        if encodes and not self.verify:
            raise ValueError("verify: resize and format decode every image anyway; leave it out")
        return self

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.format, self.resize, self.quality or 90, self.verify, self.max_pixels, self.links)


def make(settings: MakeShards) -> None:
    """The command.

    Raises:
        MakeError, ListingError, FolderError, WriteError, WorkerError: what is wrong, for the user.
    """
    folder = Folder(settings.shards, settings.name)
    _refuse_strangers(folder)
    say("reading", f"{settings.images}")
    listing = _listing(settings)
    usable = listing.usable
    say("images", f"{len(usable):,} files, {decimal(int(listing.sizes[usable].sum()))}")
    for count, reason in listing.unusable():
        say("", f"{count:,} more are left out: {reason}")
    say("labels", f"{_classes(listing)}{listing.note}")
    try:
        with folder.locked():
            _refuse_strangers(folder)
            _write(settings, folder, listing)
    except OSError as error:
        raise MakeError(f"cannot write to {settings.shards}: {error.strerror or error}") from error


def say(name: str, text: str) -> None:
    print(f"{name:<13} {text}", flush=True)


def _refuse_strangers(folder: Folder) -> None:
    if there := folder.strangers():
        raise MakeError(f"{folder.path} holds other shards ({there[0]}); choose an empty folder")


def _write(settings: MakeShards, folder: Folder, listing: Listing) -> None:
    """Writes what is missing."""
    duplicates, ratio = _agree(settings, folder, listing)
    order = np.setdiff1d(listing.usable, duplicates[:, 0]) if settings.duplicates == "drop" else listing.usable
    order = shuffled(order, settings.seed) if settings.shuffle else order
    plan = split(listing, order, settings.shard_size_mb * MEGABYTE, ratio)
    missing = [number for number in range(len(plan)) if folder.done(number) is None]
    _need_space(folder.path, int(plan.bytes[missing].sum()))
    there = f"; {len(plan) - len(missing):,} are there already" if len(missing) < len(plan) else ""
    say("shards", f"{len(plan):,} of about {decimal(int(plan.bytes.mean()))}{there}")
    shared, recipe = shared_keys(listing), settings.recipe

    def write(number: int, advance: Advance) -> None:
        record = write_shard(folder.shard(number), plan.entries(number), listing, shared, recipe, advance)
        record.write(folder.record(number))

    total = sum(len(plan.entries(number)) for number in missing)
    list(spread(write, missing, workers=settings.workers, title="writing", total=total))
    Report(settings, folder, listing, duplicates).write(len(plan))


def _listing(settings: MakeShards) -> Listing:
    """What IMAGES names."""
    images = settings.images
    if images.is_dir():
        if given := [name for name in ("path_column", "label_column", "root") if getattr(settings, name) is not None]:
            raise MakeError(f"--{given[0]} is for lists and manifests, and {images} is a folder")
        if images.resolve() == settings.shards.resolve():
            raise MakeError("the shards need a folder of their own")
        listing = list_folder(images, labels=settings.labels, links=settings.links, besides=settings.shards)
    elif images.is_file() and images.suffix.lower() in (".txt", ".csv", ".parquet"):
        listing = list_file(
            images,
            root=settings.root,
            path_column=settings.path_column or "path",
            label_column=settings.label_column,
            labels=settings.labels,
            links=settings.links,
        )
    elif images.exists():
        raise MakeError(f"{images} is no folder, and no list (.txt) or manifest (.csv, .parquet)")
    else:
        raise MakeError(f"{images} does not exist")
    if settings.classes:
        renumber(listing, read_classes(settings.classes))
    return listing


def read_classes(path: Path) -> list[str]:
    """Names of classes, in the order of their numbers.

    Raises:
        MakeError: not a list of names.
    """
    try:
        names = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise MakeError(f"cannot read --classes {path}: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise MakeError(f"--classes {path} must be a list of different names, as in the classes.json of other shards")
    return names


def _classes(listing: Listing) -> str:
    """`10 classes, airplane to truck, `, or nothing."""
    names = listing.classes
    if names is None:
        return ""
    return f"{len(names):,} classes, {names[0]} to {names[-1]}, " if len(names) > 1 else f"1 class, {names[0]}, "


def _agree(settings: MakeShards, folder: Folder, listing: Listing) -> tuple[np.ndarray, float]:
    """Duplicates to drop and the ratio of sizes: those of the plan that is there already, or new ones.

    Raises:
        MakeError: the plan that is there is of other settings or images.
    """
    usable = listing.usable
    options = settings.model_dump(mode="json", exclude={"images", "shards", "workers", "root", "classes"})
    options["pillow"] = PIL.__version__ if settings.recipe.encodes else None
    count = {"files": len(usable), "bytes": int(listing.sizes[usable].sum())}
    wanted = {"version": 1, "settings": options, **count, "images": listing.fingerprint()}
    if folder.plan_file.exists():
        try:
            there = json.loads(folder.plan_file.read_text())
            dropped, ratio = np.load(folder.duplicates_file), float(there["ratio"])
        except (ValueError, KeyError, TypeError) as error:
            raise MakeError(f"{folder.plan_file} is damaged ({error}); remove {folder.path}") from error
        _refuse_other(wanted, there, folder.path)
        return dropped, ratio
    duplicates = np.empty((0, 2), dtype=np.int64)
    if settings.duplicates == "drop":
        duplicates = find_duplicates(listing, settings.recipe, settings.workers)
    ratio = encoded_ratio(listing, usable, settings.recipe, settings.workers)
    content = io.BytesIO()
    np.save(content, duplicates)
    write_whole(folder.duplicates_file, content.getvalue())
    write_whole(folder.plan_file, json.dumps({**wanted, "ratio": ratio}, indent=1).encode())
    return duplicates, ratio


def _refuse_other(wanted: dict[str, Any], there: dict[str, Any], path: Path) -> None:
    """Compares a plan with the one in the folder."""
    remedy = f"make these in another folder, or remove {path}"
    old, new = there.get("settings", {}), wanted["settings"]
    different = [f"--{name} {new.get(name)} (there {old.get(name)})" for name in new if new.get(name) != old.get(name)]
    if different or there.get("version") != wanted["version"]:
        raise MakeError(f"{path} holds shards made with other settings: {', '.join(different)}; {remedy}")
    if there.get("images") != wanted["images"]:
        numbers = [f"{plan.get('files'):,} files of {plan.get('bytes'):,} bytes" for plan in (there, wanted)]
        if numbers[0] == numbers[1]:
            numbers = ["others", "as many, but other paths, dates or labels"]
        raise MakeError(
            f"the images have changed since {path} was begun: {numbers[0]} then, {numbers[1]} now; {remedy}"
        )


def _need_space(path: Path, size: int) -> None:
    free = shutil.disk_usage(path).free - SPARED
    if size > free:
        raise MakeError(f"{path} needs about {decimal(size)} and has {decimal(max(free, 0))} free")


class Report:
    """What was made, read from the records of the shards."""

    def __init__(self, settings: MakeShards, folder: Folder, listing: Listing, dropped: np.ndarray):
        self.settings, self.folder, self.listing, self.dropped = settings, folder, listing, dropped
        self.left_out: Counter[str] = Counter()
        self.sides: Counter[str] = Counter()
        self.shards: list[ShardEntry] = []

    def write(self, shards: int) -> None:
        """Writes the reports and, as the last, the index."""
        folder, listing = self.folder, self.listing
        entries, digests = [np.empty(0, np.int64)], [b""]
        with self._rows("left_out.csv", "path", "reason") as left_out:
            for entry in np.flatnonzero(listing.sizes <= 0):
                self._leave_out(left_out, int(entry), REASONS[int(listing.sizes[entry])])
            for number in range(shards):
                record = folder.done(number)
                if record is None:
                    raise MakeError(f"{folder.shard(number)} has vanished; the same command makes it again")
                for entry, reason in record.left_out:
                    self._leave_out(left_out, entry, reason)
                entries.append(np.array(record.entries, dtype=np.int64))
                digests.append(bytes.fromhex(record.digests))
                self.sides += record.sides
                if record.nsamples:
                    self.shards.append(
                        ShardEntry(
                            url=folder.shard(number).name,
                            nsamples=record.nsamples,
                            filesize=record.filesize,
                            labelled=record.labelled,
                            sha256=record.sha256,
                        )
                    )
        table = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST)
        pairs = self.dropped if self.settings.duplicates == "drop" else same(np.concatenate(entries), table)
        with self._rows("duplicates.csv", "path", "same_as") as duplicates:
            for entry, first in pairs.tolist():
                duplicates.writerow([os.fsdecode(listing.path(entry)), os.fsdecode(listing.path(first))])
        self._finish(pairs)

    @contextmanager
    def _rows(self, name: str, *heading: str) -> Iterator[Any]:
        """Rows of a CSV file that is there when it is whole."""
        part = self.folder.path / f".{name}{PART}"
        with part.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(heading)
            yield rows
        part.replace(self.folder.path / name)

    def _leave_out(self, rows: Any, entry: int, reason: str) -> None:
        rows.writerow([os.fsdecode(self.listing.path(entry)), reason])
        self.left_out[reason if len(self.left_out) < MOST_REASONS or reason in self.left_out else "other reasons"] += 1

    def _finish(self, pairs: np.ndarray) -> None:
        folder, listing, settings = self.folder, self.listing, self.settings
        labels = listing.labels[pairs]
        report = {
            "images": sum(shard.nsamples for shard in self.shards),
            "labelled": sum(shard.labelled or 0 for shard in self.shards),
            "shards": len(self.shards),
            "bytes": sum(shard.filesize for shard in self.shards),
            "left_out": dict(self.left_out.most_common()),
            "duplicates": {
                "found": len(pairs),
                "with_another_label": int((labels[:, 0] != labels[:, 1]).sum()),
                "dropped": settings.duplicates == "drop",
            },
            "other_files": dict(listing.aside.most_common()),
            "image_sizes": _by_size(self.sides),
            "settings": settings.model_dump(mode="json", exclude={"shards", "workers"}),
        }
        write_whole(folder.path / "report.json", json.dumps(report, indent=1).encode())
        if not self.shards:
            raise MakeError(f"no image is good; {folder.path}/left_out.csv says why")
        if listing.classes is not None:
            write_whole(folder.path / "classes.json", json.dumps(listing.classes, indent=0).encode())
        write_folder(
            folder.path, FolderIndex(name=settings.name, shardlist=self.shards, image_sizes=_by_size(self.sides))
        )
        show(report, folder)


def _by_size(sides: Counter[str]) -> dict[str, int]:
    return {side: sides[side] for side in sorted(sides, key=int)}


def show(report: dict[str, Any], folder: Folder) -> None:
    """What was made, and what to do with it."""
    path, duplicates = folder.path, report["duplicates"]
    say("written", f"{report['images']:,} images, {report['labelled']:,} with a label, {decimal(report['bytes'])}")
    sides = [f"{count:,} up to {side}" for side, count in report["image_sizes"].items()]
    say("longer side", f"{', '.join(sides)} pixels")
    if left_out := sum(report["left_out"].values()):
        say("left out", f"{left_out:,}, named in {path}/left_out.csv")
        for reason, count in [*report["left_out"].items()][:MOST_SHOWN]:
            say("", f"{count:,}: {reason}")
    if duplicates["found"]:
        other = f", {duplicates['with_another_label']:,} with another label" if duplicates["with_another_label"] else ""
        verb = "dropped" if duplicates["dropped"] else "kept (--duplicates drop leaves them out)"
        say("duplicates", f"{duplicates['found']:,}{other}, {verb}, named in {path}/duplicates.csv")
    if report["other_files"]:
        kinds = [f"{count:,} {kind}" for kind, count in [*report["other_files"].items()][:MOST_SHOWN]]
        say("other files", f"{', '.join(kinds)}; only {', '.join(IMAGES)} are read")
    pattern = shlex.quote(f"{path}/{folder.name}-*.tar")
    say("\nnext", f"accelerate launch pretrain/run.py --method dino --data {pattern}")


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    try:
        settings = validate(MakeShards, flags(MakeShards, sys.argv[1:] if argv is None else argv, PROGRAM))
    except SettingsError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    try:
        make(settings)
    except (MakeError, ListingError, FolderError, WriteError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except WorkerError as error:
        print(f"{PROGRAM}: {error}; the same command goes on", file=sys.stderr)
        return 1
    except MemoryError:
        print(f"{PROGRAM}: out of memory; take fewer --workers, or a lower --max_pixels", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROGRAM}: stopped; whole shards stay, and the same command makes the others", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
