"""Looks at every member of some shards as a run would, and says what they hold and what a run would refuse.

    python -m data.check_shards SHARDS [options]

Exit status: 0, a run takes all of it; 1, something is wrong, and is named; 2, the command itself was.
"""

import json
import os
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator
from rich.filesize import decimal

from data.shards import LARGEST_FOLDER_INDEX, expand, remote
from data.shards.index import FOLDER_INDEX, REMAKE, REMEDY, FolderIndex, ShardEntry, read_folder, write_folder
from data.shards.retry import DEFAULT, SourceConfig
from data.shards.tar import ShardError
from data.tools.facts import MOST_NAMED, Facts, Look, check_shard, class_names
from data.tools.parallel import Advance, WorkerError, spread
from runtime.settings import Positional, Settings, SettingsError, flags, validate

PROGRAM = "python -m data.check_shards"
MOST_SHOWN = 10


class CheckShards(Settings):
    """Check shards: what they hold, and what a run would refuse."""

    shards: Positional[list[str]]
    """SHARDS: paths, globs, brace ranges, URLs"""
    workers: int = Field(default=os.cpu_count() or 1, ge=1)
    """processes"""
    decode: bool = True
    """decode the images; false: only the headers of the tars, and the labels"""
    sample: int | None = Field(default=None, ge=1)
    """decode only about so many images, evenly spread"""
    max_pixels: int = Field(default=178_956_970, ge=1)
    """images with more count as corrupt"""
    write_index: bool = False
    """write index.json and a table beside each shard, for shards that others made"""
    output: Path | None = None
    """file for all of it, in JSON"""
    source: SourceConfig = DEFAULT

    @model_validator(mode="after")
    def _fit(self) -> "CheckShards":
        if self.sample is not None and not self.decode:
            raise ValueError("sample: says how many images to decode, and decode is false")
        return self


def check(settings: CheckShards) -> dict[str, Any]:
    """The command; what was found.

    Raises:
        ShardError: SHARDS names nothing.
        WorkerError: a process was killed.
    """
    paths = expand(settings.shards, settings.source)
    if settings.write_index and (away := [path for path in paths if remote.is_remote(path)]):
        raise ShardError(f"{away[0]}: an index is written beside local shards; copy it to the server afterwards")
    full = settings.decode and settings.sample is None
    most = None if settings.sample is None else -(-settings.sample // len(paths))
    checksum = full or settings.write_index
    look = Look(settings.decode, most, settings.max_pixels, checksum, settings.write_index, settings.source)

    def work(path: str, advance: Advance) -> Facts:
        return check_shard(path, look, advance)

    size = sum(os.path.getsize(path) for path in paths if os.path.exists(path))
    running = spread(work, paths, workers=settings.workers, title="checking", total=size, unit="bytes")
    found = {facts.path: facts for facts in running}
    total = Facts()
    for path in paths:
        total.add(found[path])
    folders: dict[str, list[Facts]] = {}
    for path in paths:
        if not path.startswith(remote.PIPE):
            folders.setdefault(remote.without_query(path).rpartition("/")[0] or ".", []).append(found[path])
    agree = []
    for folder, shards in folders.items():
        if settings.write_index and not total.refused:
            _write_index(Path(folder), shards)
        agree.append(_compare_index(folder, shards, settings.source, total.refused))
    return _report(settings, total, len(paths), agree)


def _entry(facts: Facts) -> ShardEntry:
    return ShardEntry(
        url=remote.without_query(facts.path).rpartition("/")[2],
        nsamples=facts.images,
        filesize=facts.size,
        labelled=facts.labelled,
        sha256=facts.sha256,
    )


def _write_index(folder: Path, shards: list[Facts]) -> None:
    """Writes the index of a folder; what the old one says of other shards that are still there stays."""
    entries = {}
    with suppress(OSError, ShardError):  # what cannot be read is replaced
        there = _read_index(str(folder), DEFAULT)
        entries = {entry.url: entry for entry in there.shardlist if (folder / entry.url).exists()} if there else {}
    named = {entry.url: entry for entry in map(_entry, shards)}
    sides = Counter()
    if not entries.keys() - named.keys():
        for facts in shards:
            sides += facts.sides
    shardlist = [entry for _, entry in sorted({**entries, **named}.items())]
    by_size = {side: sides[side] for side in sorted(sides, key=int)}
    write_folder(folder, FolderIndex(name=folder.resolve().name, shardlist=shardlist, image_sizes=by_size))


def _read_index(folder: str, source: SourceConfig) -> FolderIndex | None:
    path = f"{folder}/{FOLDER_INDEX}"
    if remote.is_remote(folder):
        content = remote.read_small(path, source, LARGEST_FOLDER_INDEX)
    elif os.path.exists(path):
        with open(path, "rb") as file:
            content = file.read(LARGEST_FOLDER_INDEX)
    else:
        content = None
    return None if content is None else read_folder(content, path)


def _compare_index(folder: str, shards: list[Facts], source: SourceConfig, refused: list[str]) -> bool | None:
    """Whether the index of a folder agrees with its shards, None without one; adds to `refused` what differs."""
    try:
        index = _read_index(folder, source)
    except (OSError, ShardError) as error:
        refused.append(str(error))
        return False
    if index is None:
        return None
    there = {entry.url: entry for entry in index.shardlist}
    before = len(refused)
    for entry in (_entry(facts) for facts in shards if facts.images):
        known = there.get(entry.url)
        if known is None:
            refused.append(f"{folder}/{FOLDER_INDEX}: does not name {entry.url}; {REMEDY}")
            continue
        for name, value in entry.model_dump().items():
            said = getattr(known, name)
            if None not in (said, value) and said != value:
                refused.append(
                    f"{folder}/{FOLDER_INDEX}: {name} of {entry.url} is {value}, not {said}: copy "
                    f"or make the shard again; if the index is wrong, {REMAKE}"
                )
    local = not remote.is_remote(folder)
    for missing in sorted(url for url in there if local and not os.path.exists(f"{folder}/{url}")):
        refused.append(f"{folder}/{FOLDER_INDEX}: names {missing}, which is not there; {REMEDY}")
    return len(refused) == before


def _report(settings: CheckShards, total: Facts, shards: int, agree: list[bool | None]) -> dict[str, Any]:
    """What was found, in plain values."""
    keys = np.frombuffer(b"".join(total.keys), dtype=np.uint64)
    good = total.decoded - total.corrupt
    means, deviations = total.moments()
    names = class_names(Path(settings.shards[0]).parent)
    extent = total.extent
    return {
        "shards": shards,
        "bytes": total.size,
        "images": total.images,
        "decoded": total.decoded,
        "refused": total.refused,
        "notes": total.notes,
        "corrupt": total.corrupt,
        "corrupt_images": [f"{name}: {reason}" for name, reason in total.corrupt_names],
        "keys_again": len(keys) - len(np.unique(keys)),
        "formats": dict(total.formats.most_common()),
        "channels": dict(total.channels.most_common()),
        "sizes": {
            "smallest": extent.smallest,
            "largest": extent.largest,
            "mean": [extent.widths / good, extent.heights / good] if good else None,
            "longer_side": {side: total.sides[side] for side in sorted(total.sides, key=int)},
        },
        "pixels": {"mean": means, "std": deviations} if good else None,
        "labelled": total.labelled,
        "bad_labels": total.bad_labels,
        "bad_label_names": [f"{name}: {reason}" for name, reason in total.bad_label_names],
        "classes": {str(label): count for label, count in sorted(total.labels.items())},
        "class_names": {str(label): names[label] for label in sorted(total.labels) if 0 <= label < len(names)},
        "index_agrees": None if None in agree or not agree else all(agree),
        "good": not (total.refused or total.corrupt or total.bad_labels),
    }


def say(name: str, text: str) -> None:
    print(f"{name:<13} {text}")


def show(report: dict[str, Any]) -> None:
    """The report in a few lines."""
    say("shards", f"{report['shards']:,}, {decimal(report['bytes'])}, {report['images']:,} images")
    if report["formats"]:
        say("formats", ", ".join(f"{count:,} {kind}" for kind, count in report["formats"].items()))
        say("channels", ", ".join(f"{count:,} {kind}" for kind, count in report["channels"].items()))
        sizes = report["sizes"]
        small, large, mean = ("{:,.0f} x {:,.0f}".format(*sizes[name]) for name in ("smallest", "largest", "mean"))
        say("sizes", f"{small} to {large} pixels (width x height), mean {mean}")
        say("longer side", ", ".join(f"{count:,} up to {side}" for side, count in sizes["longer_side"].items()))
        for name in ("mean", "std"):
            values = ", ".join(f"{value:.4f}" for value in report["pixels"][name])
            say(name, f"{values}  (R, G, B in [0, 1], over all pixels)")
    say("labels", _labels(report))
    agrees = {None: "no index.json", True: "index.json agrees", False: "index.json differs"}
    say("index", agrees[report["index_agrees"]])
    if report["keys_again"]:
        say("keys", f"{report['keys_again']:,} samples have a name that another one has; a run takes them all")
    for note in report["notes"][:MOST_SHOWN]:
        say("note", note)
    if report["decoded"] < report["images"]:
        say("decoded", f"{report['decoded']:,} of {report['images']:,} images; the others were not looked at")
    print()
    _verdict(report)


def _labels(report: dict[str, Any]) -> str:
    """Classes, and the most and least frequent of them."""
    counts, names = report["classes"], report["class_names"]
    if not counts:
        return "none"
    order = sorted(counts, key=lambda label: (-counts[label], int(label)))
    title = {label: f"{label} ({names[label]})" if label in names else label for label in order}
    largest, least = max(map(int, counts)), order[-1]
    text = f"{len(counts):,} classes from {min(map(int, counts))} to {largest}"
    text += f"; most {counts[order[0]]:,} of {title[order[0]]}, least {counts[least]:,} of {title[least]}"
    if without := report["images"] - report["labelled"]:
        text += f"; {without:,} images have none, and evaluation needs one on each"
    return text


def _verdict(report: dict[str, Any]) -> None:
    if report["good"]:
        most = report["decoded"] < report["images"]
        print(f"a run takes {'what was looked at' if most else 'all of it'}")
        return
    _listed("reasons for a run to stop", report["refused"], len(report["refused"]))
    _listed("corrupt images, which a run leaves out", report["corrupt_images"], report["corrupt"])
    _listed("labels that stop an evaluation", report["bad_label_names"], report["bad_labels"])


def _listed(what: str, lines: list[str], count: int) -> None:
    if count:
        print(f"{count:,} {what}:")
        print("\n".join(f"  {line}" for line in lines[:MOST_SHOWN]))
        if count > MOST_SHOWN:
            print(f"  and {count - MOST_SHOWN:,} more (--output FILE names up to {MOST_NAMED})")


def _argv(argv: list[str]) -> list[str]:
    """A comma in `{a,b}.tar` is part of a name: a list in JSON keeps it."""
    return [json.dumps([word]) if "," in word and not word.startswith(("-", "[")) else word for word in argv]


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    try:
        words = _argv(sys.argv[1:] if argv is None else argv)
        settings = validate(CheckShards, flags(CheckShards, words, PROGRAM))
        report = check(settings)
        if settings.output:
            settings.output.write_text(json.dumps(report, indent=1) + "\n")
    except (SettingsError, ShardError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except (OSError, WorkerError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except MemoryError:
        print(f"{PROGRAM}: out of memory; take fewer --workers, or a lower --max_pixels", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROGRAM}: stopped", file=sys.stderr)
        return 130
    show(report)
    return 0 if report["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
