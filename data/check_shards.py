"""Check every member of the shards as a pretraining run checks it.

The report names the contents and everything that a run would refuse.

    tessera check_shards SHARDS [options]

Exit status: 0 if a run accepts all shards, 1 if the report names a problem, 2 if the command line or a pattern is
wrong.
"""

import json
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator
from rich.filesize import decimal

from tessera.data.maps import IGNORED
from tessera.data.shards.errors import MAKE_INDEX_AGAIN, REPLACE_INDEX, ShardError
from tessera.data.shards.index import CLASSES, FOLDER_INDEX, FolderIndex, ShardEntry, write_folder
from tessera.data.shards.open import expand, load_folder_index
from tessera.data.shards.remote import PIPE, is_remote
from tessera.data.shards.source import DEFAULT, SourceConfig
from tessera.data.shards.tars import folder_of, name_of, read_classes
from tessera.data.statistics import moments
from tessera.data.tools.command import run_command, say, spread
from tessera.data.tools.facts import NAMED_IMAGES, Checks, Facts, check_shard
from tessera.runtime import streams
from tessera.runtime.errors import printable
from tessera.runtime.files import atomic_write
from tessera.runtime.settings import Positional, Settings, flags, validate

PROGRAM = "tessera check_shards"
MOST_SHOWN = 10  # maximum number of printed problems of each kind


class CheckShards(Settings):
    """Check shards, and report their contents and everything that a run would refuse."""

    shards: Positional[list[str]]
    """shards to check: paths, folders, globs, brace ranges, URLs"""
    workers: int = Field(default=os.cpu_count() or 1, ge=1)
    """number of worker processes"""
    decode: bool = True
    """true: decode the images; false: read only the tar headers and the labels"""
    sample: int | None = Field(default=None, ge=1)
    """approximate number of images to decode, evenly spread over all shards; default: all images"""
    max_pixels: int = Field(default=178_956_970, ge=1)
    """maximum number of pixels of an image; larger images count as corrupt"""
    channels: int = Field(default=3, ge=1)
    """number of channels of decoded images; images that cannot be converted count as corrupt"""
    write_index: bool = False
    """write an index.json in each folder and a table beside each shard, for example for shards of another tool"""
    output: Path | None = None
    """JSON file to which the complete report is written"""
    source: SourceConfig = DEFAULT

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.sample is not None and not self.decode:
            raise ValueError("sample sets the number of images to decode, but decode is false. Remove one setting")
        return self


def check(settings: CheckShards) -> dict[str, Any]:
    """Check shards and return the report.

    Raises:
        ShardError: a pattern matches no shards or a folder of images, or `write_index` is set and a shard is remote.
        WorkerError: a worker process was killed.
    """
    paths = expand(settings.shards, settings.source)
    if of_images := [path for path in paths if os.path.isdir(path)]:
        raise ShardError(
            f"{of_images[0]}: holds images, but no shards. Make shards with "
            f"`tessera make_shards {shlex.quote(of_images[0])} SHARDS`, and name the folder SHARDS."
        )
    if settings.write_index and (urls := [path for path in paths if is_remote(path)]):
        raise ShardError(
            f"{urls[0]}: an index cannot be written beside a remote shard. "
            "Write the index beside a local copy of the shards, and upload the index."
        )
    full = settings.decode and settings.sample is None
    checks = Checks(
        decode=settings.decode,
        most=None if settings.sample is None else -(-settings.sample // len(paths)),
        max_pixels=settings.max_pixels,
        channels=settings.channels,
        checksum=full or settings.write_index,
        write_table=settings.write_index,
        source=settings.source,
    )
    running = spread(lambda path: check_shard(path, checks), paths, workers=settings.workers, title="checking")
    found = {facts.path: facts for facts in running}
    total = Facts()
    folders: dict[str, list[Facts]] = {}
    for path in paths:
        total.add(found[path])
        folders.setdefault(folder_of(path) or ".", []).append(found[path])
    folders.pop(PIPE, None)
    agree, names = [], []
    for folder, shards in folders.items():
        if settings.write_index and not total.refused:
            _write_index(Path(folder), shards)
        agree.append(_compare_index(folder, shards, settings.source, total.refused))
        names.append(_check_classes(folder, shards, settings.source, total.refused))
    if len(set(names)) > 1:
        total.notes.append(
            f"the folders have different class names in {CLASSES}; an evaluation does not accept their labels together"
        )
    return _report(total, len(paths), agree, names[0] if len(set(names)) == 1 else None)


def _entry(facts: Facts) -> ShardEntry:
    return ShardEntry(
        url=name_of(facts.path),
        nsamples=facts.images,
        filesize=facts.size,
        labelled=facts.labelled,
        sha256=facts.sha256,
    )


def _write_index(folder: Path, shards: list[Facts]) -> None:
    """Write the `index.json` of a folder. Keep the old entries of shards that exist but were not checked."""
    entries = {}
    with suppress(ShardError):  # an old index that cannot be read is replaced
        old = load_folder_index(f"{folder}/{FOLDER_INDEX}", DEFAULT)
        entries = {entry.url: entry for entry in old.shardlist if (folder / entry.url).exists()} if old else {}
    checked = {entry.url: entry for entry in map(_entry, shards)}
    # Pixel statistics need the images of all shards, so write statistics only if all shards of the index were checked.
    all_checked = not entries.keys() - checked.keys()
    found = moments(sum(facts.pixels for facts in shards)) if all_checked else None
    index = FolderIndex(
        name=folder.resolve().name,
        shardlist=[entry for _, entry in sorted({**entries, **checked}.items())],
        mean=tuple(found[0]) if found else None,
        std=tuple(found[1]) if found else None,
    )
    write_folder(folder, index)


def _compare_index(folder: str, shards: list[Facts], source: SourceConfig, refused: list[str]) -> bool | None:
    """Return True if the `index.json` of a folder agrees with its shards, and None if there is no `index.json`.

    Otherwise, return False and append the differences to `refused`.
    """
    path = f"{folder}/{FOLDER_INDEX}"
    try:
        index = load_folder_index(path, source)
    except ShardError as error:
        refused.append(str(error))
        return False
    if index is None:
        return None
    listed = {entry.url: entry for entry in index.shardlist}
    before = len(refused)
    for entry in (_entry(facts) for facts in shards if facts.images):
        if entry.url not in listed:
            refused.append(f"{path}: does not list the shard {entry.url}. {REPLACE_INDEX}")
            continue
        for name, value in entry.model_dump().items():
            expected = getattr(listed[entry.url], name)
            if None not in (expected, value) and expected != value:
                refused.append(
                    f"{path}: {name} of {entry.url} is {value}, not {expected}. Copy or make the shard again. "
                    f"If the index is wrong: {MAKE_INDEX_AGAIN}"
                )
    missing = sorted(url for url in listed if os.path.isdir(folder) and not os.path.exists(f"{folder}/{url}"))
    refused += [f"{path}: lists the shard {url}, which does not exist. {REPLACE_INDEX}" for url in missing]
    return len(refused) == before


def _check_classes(
    folder: str, shards: list[Facts], source: SourceConfig, refused: list[str]
) -> tuple[str, ...] | None:
    """Return the class names of a folder, or None if there is no usable `classes.json`.

    If the `classes.json` cannot be used, or does not name the classes of all labels, append the reason to `refused`.
    """
    try:
        names = read_classes(folder, source)
    except ShardError as error:
        refused.append(str(error))
        return None
    largest = max((label for facts in shards for label in facts.labels), default=-1)
    if names is not None and largest >= len(names):
        refused.append(
            f"{folder}/{CLASSES}: names {len(names)} classes, from 0 to {len(names) - 1}, but the largest label is "
            f"{largest}. Add the missing names at the end of the file, or remove the file."
        )
    return names


def _report(total: Facts, shards: int, agree: list[bool | None], names: tuple[str, ...] | None) -> dict[str, Any]:
    """Return the report as a dict that can be written as JSON. `names` are the class names, or None without names."""
    pixels = moments(total.pixels)
    names = names or ()
    return {
        "shards": shards,
        "bytes": total.size,
        "images": total.images,
        "decoded": total.decoded,
        "refused": total.refused,
        "notes": total.notes,
        "corrupt": total.corrupt,
        "corrupt_images": total.corrupt_images[:NAMED_IMAGES],
        "formats": dict(total.formats.most_common()),
        "channels": dict(total.channels.most_common()),
        "longer_side": {str(side): count for side, count in sorted(total.sides.items())},
        "pixels": {"mean": pixels[0], "std": pixels[1]} if pixels else None,
        "labelled": total.labelled,
        "bad_labels": total.bad_labels,
        "bad_label_names": total.bad_label_names[:NAMED_IMAGES],
        "classes": {str(label): count for label, count in sorted(total.labels.items())},
        "class_names": {str(label): names[label] for label in sorted(total.labels) if 0 <= label < len(names)},
        "mapped": total.mapped,
        "bad_maps": total.bad_maps,
        "bad_map_names": total.bad_map_names[:NAMED_IMAGES],
        "map_values": {str(value): int(total.map_values[value]) for value in np.flatnonzero(total.map_values)},
        "index_agrees": None if None in agree or not agree else all(agree),
        "good": not (total.refused or total.corrupt or total.bad_labels or total.bad_maps),
    }


def _show(report: dict[str, Any]) -> None:
    """Print the report in a few lines."""
    say("shards", f"{report['shards']:,}, {decimal(report['bytes'])}, {report['images']:,} images")
    if report["formats"]:
        say("formats", ", ".join(f"{count:,} {kind}" for kind, count in report["formats"].items()))
        say("channels", ", ".join(f"{count:,} {kind}" for kind, count in report["channels"].items()))
        sides = ", ".join(f"{count:,} up to {side}" for side, count in report["longer_side"].items())
        say("longer side", f"{sides} pixels")
        for name in ("mean", "std"):
            values = ", ".join(f"{value:.4f}" for value in report["pixels"][name])
            say(name, f"{values}  (each channel, in [0, 1], over all pixels)")
    say("labels", _describe_labels(report))
    if report["mapped"]:
        say("maps", _describe_maps(report))
    agrees = {None: "no index.json", True: "index.json agrees", False: "index.json differs"}
    say("index", agrees[report["index_agrees"]])
    for note in report["notes"][:MOST_SHOWN]:
        say("note", note)
    if report["decoded"] < report["images"]:
        say("decoded", f"{report['decoded']:,} of {report['images']:,} images; the others were not checked")
    print()
    if report["good"]:
        accepted = "everything that was checked" if report["decoded"] < report["images"] else "all of it"
        print(f"a run accepts {accepted}")
    _show_problems("reasons for a run to stop", report["refused"], len(report["refused"]))
    _show_problems("corrupt images, which a run leaves out", report["corrupt_images"], report["corrupt"])
    _show_problems("labels that stop an evaluation", report["bad_label_names"], report["bad_labels"])
    _show_problems("segmentation maps that stop an evaluation", report["bad_map_names"], report["bad_maps"])


def _show_problems(title: str, lines: list[str], count: int) -> None:
    if count:
        print(f"{count:,} {title}:")
        print("\n".join(f"  {printable(line)}" for line in lines[:MOST_SHOWN]))
        if count > MOST_SHOWN:
            print(f"  and {count - MOST_SHOWN:,} more (--output FILE names up to {NAMED_IMAGES})")


def _describe_labels(report: dict[str, Any]) -> str:
    """Return one line with the number of classes, the most frequent class and the least frequent class."""
    counts, names = report["classes"], report["class_names"]
    if not counts:
        return "none"
    order = sorted(counts, key=lambda label: (-counts[label], int(label)))
    title = {label: f"{label} ({names[label]})" if label in names else label for label in order}
    largest, least = max(map(int, counts)), order[-1]
    text = f"{len(counts):,} classes from {min(map(int, counts))} to {largest}"
    text += f"; most {counts[order[0]]:,} of {title[order[0]]}, least {counts[least]:,} of {title[least]}"
    if without := report["images"] - report["labelled"]:
        text += f"; {without:,} images have no label, but evaluation needs a label for each image"
    return text


def _describe_maps(report: dict[str, Any]) -> str:
    """Return one line with the number of segmentation maps, their classes and their ignored pixels."""
    text = f"{report['mapped']:,} of {report['images']:,} images have a segmentation map"
    values = {int(value): count for value, count in report["map_values"].items()}
    ignored, pixels = values.pop(IGNORED, 0), sum(report["map_values"].values())
    if values:
        text += f"; {len(values):,} classes from {min(values)} to {max(values)}"
    if pixels:
        text += f"; {100 * ignored / pixels:.1f} % of the pixels are ignored ({IGNORED})"
    return text


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""

    def command() -> int:
        words = sys.argv[1:] if argv is None else argv
        settings = validate(CheckShards, flags(CheckShards, words, PROGRAM))
        report = check(settings)
        if settings.output:
            with atomic_write(settings.output) as path:
                path.write_text(json.dumps(report, indent=1) + "\n")
        _show(report)
        return 0 if report["good"] else 1

    return run_command(PROGRAM, command, refused=2)


if __name__ == "__main__":
    streams.protect()
    sys.exit(main())
