"""Sizes and checksums of a checkpoint's files. Each process reads the files it wrote, and a part of those it loads."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

NAME = "manifest.json"


def describe(files: Iterable[Path]) -> dict[str, dict[str, int | str]]:
    """Bytes and SHA-256 of each file, by name."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(files)}


def write(folder: Path, files: dict[str, dict[str, int | str]]) -> None:
    (folder / NAME).write_text(json.dumps({"files": dict(sorted(files.items()))}, indent=1))


def faults(folder: Path, rank: int = 0, processes: int = 1) -> list[str]:
    """What is wrong with the files in `folder`, in plain words; of the checksums, process `rank` looks at its share."""
    try:
        files = json.loads((folder / NAME).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return [f"{NAME}, which lists its files, cannot be read ({error})"]
    found = []
    for number, (name, wanted) in enumerate(files.items()):
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != wanted["bytes"]:
            found.append(f"{name} has {path.stat().st_size} bytes and should have {wanted['bytes']}")
        elif number % processes == rank and _sha256(path) != wanted["sha256"]:
            found.append(f"{name} is not what was written (another checksum)")
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
