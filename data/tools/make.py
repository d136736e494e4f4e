"""Make shards from images that a folder holds, or that a list or a manifest names.

    tessera make_shards IMAGES SHARDS [options]

IMAGES is a folder of images or of class folders, a list, or a CSV or Parquet manifest. A list is a text file with one
path per line, optionally followed by a tab and a label. An image x.jpg may have a segmentation map: x.seg.png in the
folder of the image, or x.png in the folder --maps. SHARDS is a folder. The command writes the shards NAME-000000.tar
and so on to this folder, a table beside each shard, and these files:

    index.json       sizes, counts, checksums, image sizes and pixel statistics; a run reads this file first
    report.json      counts of stored, left-out and duplicate files
    left_out.csv     files that were left out, with the reasons
    duplicates.csv   duplicate files, each with the first file of the same content
    classes.json     names of the classes, if labels have names; evaluations match classes by these names

The distribution of images over shards depends only on the listing and the settings. After an interruption, the same
command makes the missing shards.
"""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import PIL
from pydantic import Field, model_validator
from rich.filesize import decimal

from tessera.data.shards.cache import SPARE_BYTES
from tessera.data.shards.classes import parse_classes
from tessera.data.shards.errors import ShardError
from tessera.data.shards.listing import (
    MISSING,
    UNUSED_MAPS,
    Links,
    Listing,
    find_maps,
    list_folder,
    renumber,
    separate_sets,
)
from tessera.data.tools.command import MakeError, run_command, say
from tessera.data.tools.make_report import show_report, write_reports
from tessera.data.tools.manifest import Columns, list_file
from tessera.data.tools.pack import Format, Recipe, shared_keys, write_shard
from tessera.data.tools.parallel import Advance, spread
from tessera.data.tools.shard_folder import Folder
from tessera.data.tools.split import encoded_ratio, find_duplicates, shuffled, split
from tessera.runtime.files import atomic_write
from tessera.runtime.settings import Positional, Settings, flags, validate

PROGRAM = "tessera make_shards"
MEGABYTE = 10**6


class MakeShards(Settings):
    """Make shards from images. After an interruption, the same command continues with the missing shards."""

    images: Positional[Path]
    """folder of images or of class folders, list (.txt), or manifest (.csv, .parquet)"""
    shards: Positional[Path]
    """folder to which shards are written; it must not hold shards that were made from other images or settings"""
    name: str = Field(default="shard", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """beginning of the file names of the shards, which are NAME-000000.tar and so on"""
    shard_size_mb: float = Field(default=256, gt=0)
    """approximate size of a shard in megabytes (10^6 bytes)"""
    shuffle: bool = True
    """true: distribute the images over the shards in random order; false: keep the order of names or of the list"""
    seed: int = Field(default=0, ge=0)
    """seed of the shuffle"""
    workers: int = Field(default=os.cpu_count() or 1, ge=1)
    """number of worker processes"""
    labels: Literal["auto", "folders", "none"] = "auto"
    """folders: the first folder of a path is the class; none: no labels; auto: for a list or manifest, the labels in
    the file; for a folder, like `folders` if every image is exactly one folder deep, otherwise like `none`; auto
    refuses a folder with subfolders such as train and val, which are sets and not classes"""
    classes: Path | None = None
    """classes.json of other shards, from which the class numbers are taken"""
    maps: Path | None = None
    """folder of segmentation maps, such as ADE20K's annotations/training: the map of the image a/x.jpg is a/x.png;
    default: the map is x.seg.png, in the folder of the image"""
    path_column: str | None = None
    """column of the manifest that holds the paths; default: `path`"""
    label_column: str | None = None
    """column of the manifest that holds the labels; default: `label` if this column exists"""
    root: Path | None = None
    """folder to which the paths in a list or manifest are relative; default: the folder of the list or manifest"""
    links: Links = "inside"
    """symbolic links that are followed; inside: only links to files in the folder of images; all: all links"""
    format: Format = "keep"
    """format in which images are stored; images of other formats are converted; keep: keep the format of each image"""
    resize: int | None = Field(default=None, ge=8)
    """maximum length of the shorter side in pixels; larger images are made smaller and are encoded again"""
    quality: int | None = Field(default=None, ge=1, le=100)
    """quality of JPEG and WebP images that are encoded again; default: 90"""
    verify: bool = True
    """decode every image, leave out damaged images, and compute pixel statistics"""
    max_pixels: int = Field(default=178_956_970, ge=1)
    """maximum number of pixels of an image; larger images are left out and are not decoded"""
    duplicates: Literal["report", "drop"] = "report"
    """files of equal content; report: keep and list all files; drop: keep only the first file (takes more time)"""

    @model_validator(mode="after")
    def _fit(self) -> Self:
        encodes = self.format != "keep" or self.resize is not None
        if self.quality is not None and (not encodes or self.format == "png"):
            raise ValueError("quality is only for encoding to JPEG or WebP. Set resize or format, or leave quality out")
        if encodes and not self.verify:
            raise ValueError("resize and format decode every image, so verify cannot be false. Leave verify out")
        return self

    @property
    def recipe(self) -> Recipe:
        """Settings for checking and encoding each image."""
        return Recipe(self.format, self.resize, self.quality or 90, self.verify, self.max_pixels, self.links)


def make(settings: MakeShards) -> None:
    """Make the missing shards, and write the reports.

    Raises:
        MakeError: the images cannot be listed, or the shards cannot be written.
        WorkerError: a worker process was killed.
    """
    folder = Folder(settings.shards, settings.name)
    _refuse_foreign_files(folder)
    say("reading", f"{settings.images}")
    listing = _list_images(settings)
    usable = listing.usable
    say("images", f"{len(usable):,} files, {decimal(int(listing.sizes[usable].sum()))}")
    for count, reason in listing.unusable():
        say("", f"{count:,} more are left out: {reason}")
    say("labels", f"{_describe_classes(listing.classes)}{listing.note}")
    if listing.maps is not None:
        say("maps", f"{int((listing.maps.sizes != MISSING).sum()):,} images have a segmentation map")
    try:
        with folder.locked():
            _refuse_foreign_files(folder)
            _write(settings, folder, listing)
    except OSError as error:
        raise MakeError(
            f"cannot write to {settings.shards}: {error.strerror or error}. Choose another folder."
        ) from error


def _refuse_foreign_files(folder: Folder) -> None:
    if found := folder.foreign_files():
        raise MakeError(f"{folder.path} holds other shards ({found[0]}). Choose an empty folder.")


def _write(settings: MakeShards, folder: Folder, listing: Listing) -> None:
    duplicates, ratio = _load_or_make_plan(settings, folder, listing)
    dropped = settings.duplicates == "drop"
    order = np.setdiff1d(listing.usable, duplicates[:, 0]) if dropped else listing.usable
    order = shuffled(order, settings.seed) if settings.shuffle else order
    shards = split(listing, order, settings.shard_size_mb * MEGABYTE, ratio)
    missing = [number for number in range(len(shards)) if folder.finished(number) is None]
    _check_space(folder.path, int(shards.bytes[missing].sum()))
    existing = f"; {len(shards) - len(missing):,} exist already" if len(missing) < len(shards) else ""
    say("shards", f"{len(shards):,} of about {decimal(int(shards.bytes.mean()))}{existing}")
    shared, recipe = shared_keys(listing), settings.recipe

    def write(number: int, advance: Advance) -> None:
        record = write_shard(folder.shard(number), shards.entries(number), listing, shared, recipe, advance)
        record.write(folder.record(number))

    total = sum(len(shards.entries(number)) for number in missing)
    list(spread(write, missing, workers=settings.workers, title="writing", total=total))
    options = settings.model_dump(mode="json", exclude={"shards", "workers"})
    show_report(write_reports(folder, listing, len(shards), duplicates if dropped else None, options), folder)


def _list_images(settings: MakeShards) -> Listing:
    images = settings.images
    if images.is_dir():
        if given := [name for name in ("path_column", "label_column", "root") if getattr(settings, name) is not None]:
            raise MakeError(f"--{given[0]} is for lists and manifests, but {images} is a folder. Leave the option out.")
        if images.resolve() == settings.shards.resolve():
            raise MakeError(f"{images} holds the images, but shards need a separate folder. Choose another folder.")
        if settings.labels == "auto":
            _refuse_several_sets(images, settings.shards)
        listing = list_folder(images, labels=settings.labels, links=settings.links, besides=settings.shards)
    elif images.is_file() and images.suffix.lower() in (".txt", ".csv", ".parquet"):
        columns = Columns(settings.path_column or "path", settings.label_column)
        listing = list_file(images, root=settings.root, columns=columns, labels=settings.labels, links=settings.links)
    elif images.exists():
        raise MakeError(f"{images} is not a folder, a list (.txt) or a manifest (.csv, .parquet). Name one of these.")
    else:
        raise MakeError(f"{images} does not exist. Correct the path.")
    # a folder of images has been searched for maps already
    if settings.maps is not None or images.is_file() or UNUSED_MAPS in listing.other_files:
        find_maps(listing, settings.maps, settings.links)
    if settings.classes:
        renumber(listing, _read_classes(settings.classes))
    return listing


def _refuse_several_sets(images: Path, shards: Path) -> None:
    """Raise `MakeError` if a folder has a subfolder for training images and a subfolder for held-out images."""
    if not (sets := separate_sets(images)):
        return
    commands = [
        shlex.join([*PROGRAM.split(), str(path), str(shards / path.name), "--name", path.name]) for path in sets
    ]
    raise MakeError(
        f"{images} holds the folders {', '.join(path.name for path in sets)}, which look like separate sets of images, "
        "not like classes. Make shards of each set:\n  " + "\n  ".join(commands) + "\n"
        "To make shards of all images together, add --labels none, or --labels folders if these folders are classes."
    )


def _read_classes(path: Path) -> list[str]:
    """Read the class names from `classes.json`, in the order of the class numbers."""
    try:
        return list(parse_classes(path.read_bytes(), str(path)))
    except (OSError, ShardError) as error:
        raise MakeError(f"cannot read --classes {path}: {error} Name the classes.json of other shards.") from error


def _describe_classes(names: list[str] | None) -> str:
    """Return a summary of the class names such as `10 classes, airplane to truck, `; an empty string without names."""
    if names is None:
        return ""
    return f"{len(names):,} classes, {names[0]} to {names[-1]}, " if len(names) > 1 else f"1 class, {names[0]}, "


def _load_or_make_plan(settings: MakeShards, folder: Folder, listing: Listing) -> tuple[np.ndarray, float]:
    """Return the duplicates to drop, and the ratio of stored sizes to file sizes.

    Both are loaded from the plan in the folder. If the folder has no plan yet, both are computed and stored.

    Raises:
        MakeError: the folder holds a damaged plan, or a plan that was made for other settings or images.
    """
    usable = listing.usable
    options = settings.model_dump(mode="json", exclude={"images", "shards", "workers", "root", "classes", "maps"})
    options["pillow"] = PIL.__version__ if settings.recipe.encodes else None
    count = {"files": len(usable), "bytes": int(listing.sizes[usable].sum())}
    plan = {"version": 1, "settings": options, **count, "images": listing.fingerprint()}
    if folder.plan_file.exists():
        try:
            existing = json.loads(folder.plan_file.read_text())
            dropped, ratio = np.load(folder.duplicates_file), float(existing["ratio"])
        except (ValueError, KeyError, TypeError) as error:
            raise MakeError(f"{folder.plan_file} is damaged ({error}). Remove the folder {folder.path}.") from error
        _refuse_other_plan(plan, existing, folder.path)
        return dropped, ratio
    duplicates = np.empty((0, 2), dtype=np.int64)
    if settings.duplicates == "drop":
        duplicates = find_duplicates(listing, settings.recipe, settings.workers)
    ratio = encoded_ratio(listing, usable, settings.recipe, settings.workers)
    with atomic_write(folder.duplicates_file, sync=True) as path, path.open("wb") as file:
        np.save(file, duplicates)
    with atomic_write(folder.plan_file, sync=True) as path:
        path.write_text(json.dumps({**plan, "ratio": ratio}, indent=1))
    return duplicates, ratio


def _refuse_other_plan(plan: dict[str, Any], existing: dict[str, Any], path: Path) -> None:
    """Raise `MakeError` if the existing plan of the folder was made for other settings or images."""
    remedy = f"Make these shards in another folder, or remove {path}."
    old, new = existing.get("settings", {}), plan["settings"]
    different = [f"--{name} {new.get(name)} (there: {old.get(name)})" for name in new if new.get(name) != old.get(name)]
    if different or existing.get("version") != plan["version"]:
        raise MakeError(f"{path} holds shards made with other settings: {', '.join(different)}. {remedy}")
    if existing.get("images") != plan["images"]:
        before, now = (f"{one.get('files'):,} files of {one.get('bytes'):,} bytes" for one in (existing, plan))
        if before == now:
            now = "the same numbers, but other paths, dates or labels"
        raise MakeError(f"the images have changed since {path} was first written: then {before}, now {now}. {remedy}")


def _check_space(path: Path, size: int) -> None:
    free = shutil.disk_usage(path).free - SPARE_BYTES
    if size > free:
        raise MakeError(
            f"{path} has {decimal(max(free, 0))} free, but the shards need about {decimal(size)}. Free some disk space."
        )


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""

    def command() -> int:
        make(validate(MakeShards, flags(MakeShards, sys.argv[1:] if argv is None else argv, PROGRAM)))
        return 0

    return run_command(PROGRAM, command, resume="The same command continues with the missing shards.")
