"""Folder in which shards are made. It holds the finished shards, their records, and a lock."""

import fcntl
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tessera.data.shards.shard import ENDINGS
from tessera.data.tools.command import MakeError
from tessera.runtime.files import atomic_write

WORK = ".make_shards"
"""Name of the subfolder that holds the plan and the records. A command that was stopped continues from these files."""
LOCK_ATTEMPTS = 25  # number of further attempts to get the lock, each after a pause of 0.2 s


@dataclass
class Record:
    """Record of one finished shard."""

    nsamples: int = 0
    labelled: int = 0
    mapped: int = 0
    """Number of samples with a segmentation map."""
    filesize: int = 0
    sha256: str = ""
    sides: Counter[str] = field(default_factory=Counter)
    """Histogram of image sizes. Maps an upper bound of the longer side, a power of two, to the number of images."""
    entries: list[int] = field(default_factory=list)
    """Entries of the listing that the shard stores, in the order of the samples."""
    digests: str = ""
    """Concatenated digests of the files of `entries`, in hexadecimal."""
    left_out: list[tuple[int, str]] = field(default_factory=list)
    """Entries that were left out of the shard, with the reasons."""
    pixels: list[list[int]] | None = None
    """Histogram of the 256 pixel values of each channel; None if the images were not decoded."""

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Read a record from a file."""
        record = cls(**json.loads(path.read_text()))
        record.sides = Counter(record.sides)
        return record

    def write(self, path: Path) -> None:
        """Write the record to a file."""
        with atomic_write(path, sync=True) as temporary:
            temporary.write_text(json.dumps(vars(self)))


class Folder:
    """Folder in which the shards are named NAME-000000.tar and so on."""

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        self.work = self.path / WORK
        self.plan_file = self.work / "plan.json"
        self.duplicates_file = self.work / "duplicates.npy"

    def shard(self, number: int) -> Path:
        """Return the path of the shard with this number."""
        return self.path / f"{self.name}-{number:06d}.tar"

    def record(self, number: int) -> Path:
        """Return the path of the record of the shard with this number."""
        return self.work / f"{self.name}-{number:06d}.json"

    def finished(self, number: int) -> Record | None:
        """Return the record of a shard if the shard is finished, otherwise None."""
        try:
            record = Record.read(self.record(number))
            size = self.shard(number).stat().st_size if record.nsamples else 0
            return record if not record.nsamples or size == record.filesize else None
        except (OSError, ValueError, TypeError):
            return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other commands, and remove temporary files that killed commands have left."""
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / "lock").open("w") as file:
            # Try several times, because workers of a killed command may hold the lock for a moment longer.
            for attempt in range(LOCK_ATTEMPTS + 1):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if attempt == LOCK_ATTEMPTS:
                        raise MakeError(
                            f"another command is writing to {self.path}. Wait for the other command, or stop it."
                        ) from None
                    time.sleep(0.2)
            for temporary in (*self.path.glob(".*.tmp"), *self.work.glob(".*.tmp")):
                temporary.unlink()
            yield

    def foreign_files(self) -> list[str]:
        """Return the names of all shards and index files in the folder that were not made by this command."""
        own = re.compile(rf"{self.name}-\d{{6}}\.tar|index\.json" if self.plan_file.exists() else "(?!)")
        names = (path.name for path in self.path.glob("*"))
        return sorted(n for n in names if n.endswith((*ENDINGS, "index.json")) and not own.fullmatch(n))
