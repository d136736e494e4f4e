"""The folder that shards are made in: what is in it already, and who may write to it."""

import fcntl
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from data.shards.index import write_whole

PART = ".part"
WORK = ".make_shards"
"""folder in the folder of shards, for what the next call has to know"""
PATIENCE = 25  # how often a fifth of a second is waited for a lock


class FolderError(ValueError):
    """A folder that cannot be used. The message is meant for the user."""


@dataclass
class Record:
    """What one shard holds."""

    nsamples: int = 0
    labelled: int = 0
    filesize: int = 0
    sha256: str = ""
    sides: Counter[str] = field(default_factory=Counter)
    """images by their longer side: its upper bound, a power of two"""
    entries: list[int] = field(default_factory=list)
    """entries of the listing, in their order in the shard"""
    digests: str = ""
    """of the files of these entries, one after the other in hexadecimal"""
    left_out: list[tuple[int, str]] = field(default_factory=list)
    """entries that are not in it, and why"""

    @classmethod
    def read(cls, path: Path) -> "Record":
        record = cls(**json.loads(path.read_text()))
        record.sides = Counter(record.sides)
        return record

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(vars(self)).encode())


class Folder:
    """The folder of shards, and what is in it already."""

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        self.work = self.path / WORK
        self.plan_file = self.work / "plan.json"
        self.duplicates_file = self.work / "duplicates.npy"

    def shard(self, number: int) -> Path:
        return self.path / f"{self.name}-{number:06d}.tar"

    def record(self, number: int) -> Path:
        return self.work / f"{self.name}-{number:06d}.json"

    def done(self, number: int) -> Record | None:
        """The record of a shard that is whole."""
        try:
            record = Record.read(self.record(number))
            size = self.shard(number).stat().st_size if record.nsamples else 0
            return record if not record.nsamples or size == record.filesize else None
        except (OSError, ValueError, TypeError):
            return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder against other calls, and removes what killed ones left."""
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / "lock").open("w") as file:
            for wait in (*[0.2] * PATIENCE, None):  # workers of a killed call hold it for a moment
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if wait is None:
                        raise FolderError(f"another call is writing to {self.path}") from None
                    time.sleep(wait)
            for part in (*self.path.glob(f".*{PART}"), *self.work.glob(f".*{PART}")):
                part.unlink()
            yield

    def strangers(self) -> list[str]:
        """Names of shards and indices that this command cannot have made here."""
        made = re.compile(rf"{self.name}-\d{{6}}\.tar|index\.json" if self.plan_file.exists() else "(?!)")
        names = (path.name for path in self.path.glob("*"))
        return sorted(n for n in names if n.endswith((".tar", ".tar.gz", "index.json")) and not made.fullmatch(n))
