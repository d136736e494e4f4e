"""Manifest of a checkpoint: the sizes and SHA-256 checksums of its files.

Each process computes the checksums of the files that it writes. Before a checkpoint is loaded, each process checks a
share of the files.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from tessera.runtime.files import read_bounded

NAME = "manifest.json"
MAX_BYTES = 2**26
"""Largest size of a manifest in bytes."""
Files = dict[str, dict[str, int | str]]


def describe(paths: Iterable[Path]) -> Files:
    """Return a dict from the name of each file to its size in bytes and its SHA-256 checksum."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(paths)}


def write(folder: Path, files: Files) -> None:
    """Write `files` as the manifest of `folder`."""
    (folder / NAME).write_text(json.dumps({"files": dict(sorted(files.items()))}, indent=1))


def wrong_sizes(folder: Path) -> list[str]:
    """Compare the names and sizes of the files in `folder` with its manifest.

    Return one message for each file that is missing, that the manifest does not list, or that has the wrong size.
    """
    try:
        files = _read(folder)
        found = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    except OSError as error:
        return [f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return [f"{NAME} does not contain a list of files"]
    faults = [f"{name} is missing" for name in files if name not in found]
    faults += [
        f"{name} has {found[name]} bytes and should have {size}"
        for name, (size, _) in files.items()
        if found.get(name, size) != size
    ]
    return faults + [f"{name} is not listed in {NAME}" for name in sorted(found.keys() - files.keys() - {NAME})]


def wrong_checksums(folder: Path, rank: int = 0, processes: int = 1) -> list[str]:
    """Compare the checksums of a share of the files in `folder` with its manifest. Each process checks one share.

    Return one message for each file whose checksum differs from the manifest. Call `wrong_sizes` first, because this
    function expects that all files exist.
    """
    faults = []
    for name, (_, checksum) in list(_read(folder).items())[rank::processes]:
        try:
            if _sha256(folder / name) != checksum:
                faults.append(f"the checksum of {name} differs from {NAME}")
        except OSError as error:
            faults.append(f"{name} cannot be read ({error.strerror})")
    return faults


def _read(folder: Path) -> dict[str, tuple[int, str]]:
    """Return the size in bytes and the SHA-256 checksum of each file in the manifest of `folder`."""
    listed = json.loads(read_bounded(folder / NAME, MAX_BYTES))["files"]
    return {name: (int(of["bytes"]), str(of["sha256"])) for name, of in sorted(dict(listed).items())}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
