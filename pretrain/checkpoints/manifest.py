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
    """Put the manifest in `folder`, whose `files` are described."""
    (folder / NAME).write_text(json.dumps({"files": dict(sorted(files.items()))}, indent=1))


def faults(folder: Path) -> list[str]:
    """What is wrong with the names and sizes of the files in `folder`, in plain words."""
    try:
        files = _read(folder)
        there = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    except OSError as error:
        return [f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"]
    except (ValueError, TypeError, KeyError):
        return [f"{NAME}, which lists its files, is no such list"]
    found = [f"{name} is missing" for name in files if name not in there]
    found += [
        f"{name} has {there[name]} bytes and should have {size}"
        for name, (size, _) in files.items()
        if there.get(name, size) != size
    ]
    return found + [f"{name} does not belong to it" for name in sorted(there.keys() - files.keys() - {NAME})]


def altered(folder: Path, rank: int = 0, processes: int = 1) -> list[str]:
    """Files in `folder`, of which `faults` knows nothing wrong, that do not hold what was written, in plain words;
    process `rank` looks at its share of them."""
    found = []
    for name, (_, checksum) in list(_read(folder).items())[rank::processes]:
        try:
            if _sha256(folder / name) != checksum:
                found.append(f"{name} is not what was written (another checksum)")
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
    return found


def _read(folder: Path) -> dict[str, tuple[int, str]]:
    """Bytes and SHA-256 by name."""
    listed = json.loads((folder / NAME).read_text())["files"]
    return {name: (int(of["bytes"]), str(of["sha256"])) for name, of in sorted(dict(listed).items())}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
