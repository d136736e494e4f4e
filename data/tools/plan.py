"""The plan of `make_shards`: which images go to which shard, and the folder that remembers it.

The plan depends on file sizes, the settings and a seed, and is made before any shard is written. A command that was
stopped continues from the plan and the records in the folder.
"""

import fcntl
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tarfile import BLOCKSIZE
from typing import Any

import numpy as np

from tessera.data.shards.errors import ShardError
from tessera.data.shards.listing import NO_LABEL, Listing
from tessera.data.shards.open import ENDINGS
from tessera.data.tools.command import spread
from tessera.data.tools.pack import DIGEST, LeftOut, Recipe, Record, digest, prepare, read
from tessera.runtime.files import atomic_write

WORK = ".make_shards"
"""Name of the subfolder that holds the plan and the records."""
LOCK_ATTEMPTS = 25  # number of further attempts to get the lock, each after a pause of 0.2 s
PROBED = 64  # number of images that are encoded to estimate the encoded size of all images
IMAGES_PER_TASK = 256


class Folder:
    """Folder in which the shards are named NAME-000000.tar and so on."""

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        self.work = self.path / WORK
        self._plan = self.work / "plan.json"
        self._duplicates = self.work / "duplicates.npy"

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
                        raise ShardError(
                            f"another command is writing to {self.path}. Wait for the other command, or stop it."
                        ) from None
                    time.sleep(0.2)
            for temporary in (*self.path.glob(".*.tmp"), *self.work.glob(".*.tmp")):
                temporary.unlink()
            yield

    def refuse_foreign_files(self) -> None:
        """Raise `ShardError` if the folder holds shards or index files that were not made by this command."""
        own = re.compile(rf"{self.name}-\d{{6}}\.tar|index\.json" if self._plan.exists() else "(?!)")
        names = (path.name for path in self.path.glob("*"))
        found = sorted(n for n in names if n.endswith((*ENDINGS, "index.json")) and not own.fullmatch(n))
        if found:
            raise ShardError(f"{self.path} holds other shards ({found[0]}). Choose an empty folder.")

    def load_plan(self, plan: dict[str, Any]) -> tuple[np.ndarray, float] | None:
        """Return the dropped duplicates and the ratio of the stored plan, or None if there is no plan yet.

        Raises:
            ShardError: the stored plan is damaged, or was made for other settings or images than `plan`.
        """
        if not self._plan.exists():
            return None
        try:
            stored = json.loads(self._plan.read_text())
            duplicates, ratio = np.load(self._duplicates), float(stored["ratio"])
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(f"{self._plan} is damaged ({error}). Remove the folder {self.path}.") from error
        remedy = f"Make these shards in another folder, or remove {self.path}."
        old, new = stored.get("settings", {}), plan["settings"]
        changed = [f"--{name} {new[name]} (there: {old.get(name)})" for name in new if new[name] != old.get(name)]
        if changed or stored.get("version") != plan["version"]:
            raise ShardError(f"{self.path} holds shards made with other settings: {', '.join(changed)}. {remedy}")
        if stored.get("images") != plan["images"]:
            before, now = (f"{one.get('files'):,} files of {one.get('bytes'):,} bytes" for one in (stored, plan))
            if before == now:
                now = "the same numbers, but other paths, dates or labels"
            raise ShardError(
                f"the images have changed since {self.path} was first written: then {before}, now {now}. {remedy}"
            )
        return duplicates, ratio

    def store_plan(self, plan: dict[str, Any], duplicates: np.ndarray, ratio: float) -> None:
        """Store a plan with the dropped duplicates and the ratio."""
        with atomic_write(self._duplicates, sync=True) as path, path.open("wb") as file:
            np.save(file, duplicates)
        with atomic_write(self._plan, sync=True) as path:
            path.write_text(json.dumps({**plan, "ratio": ratio}, indent=1))


@dataclass
class Split:
    """Assignment of M images to S shards."""

    order: np.ndarray
    """Entries of the listing in the order of writing: (M,) int64."""
    starts: np.ndarray
    """Index in `order` at which each shard begins, and the end of the last shard: (S + 1,) int64."""
    bytes: np.ndarray
    """Expected size of each shard in bytes: (S,) int64."""

    def __len__(self) -> int:
        return len(self.bytes)

    def entries(self, shard: int) -> np.ndarray:
        """Return the entries of the listing that one shard stores."""
        return self.order[self.starts[shard] : self.starts[shard + 1]]


def split(listing: Listing, order: np.ndarray, shard_bytes: float, ratio: float) -> Split:
    """Divide `order` into shards of nearly equal size. A shard may exceed `shard_bytes` by one image at most.

    Args:
        listing: files with their sizes and labels.
        order: entries of the listing in the order of writing.
        shard_bytes: target size of a shard in bytes.
        ratio: expected size of a stored image, divided by the size of its file.
    """
    # Number of tar blocks of each sample: the blocks of the image, one block for its header, two for a label, and those
    # of a segmentation map with its header.
    blocks = np.ceil(listing.sizes[order] * (ratio / BLOCKSIZE)).astype(np.int64) + 1
    blocks += np.where(listing.labels[order] != NO_LABEL, 2, 0)
    if listing.maps is not None:
        sizes = listing.maps.sizes[order]
        blocks += np.where(sizes > 0, -(-sizes // BLOCKSIZE) + 1, 0)
    ends = np.cumsum(blocks)
    shards = max(1, int(np.ceil(ends[-1] * BLOCKSIZE / shard_bytes)))
    shard = ((ends - blocks) * shards) // ends[-1]  # number of the shard in which each image begins
    starts = np.searchsorted(shard, np.arange(shards + 1))
    starts = np.unique(starts)  # remove empty shards, which follow an image that is larger than a shard
    bounds = np.concatenate([[0], ends])[starts]
    return Split(order, starts, np.diff(bounds) * BLOCKSIZE)


def encoded_ratio(listing: Listing, recipe: Recipe, workers: int) -> float:
    """Estimate the ratio of stored image sizes to file sizes. The ratio is 1 if images are not encoded again."""
    if not recipe.encodes:
        return 1.0

    def probe(entry: int) -> tuple[int, int]:
        try:
            content = read(listing, entry, recipe.links)
            return len(content), len(prepare(content, recipe).content)
        except LeftOut:
            return 0, 0

    usable = listing.usable
    probed = usable[np.unique(np.linspace(0, len(usable) - 1, PROBED).astype(np.int64))].tolist()
    before, after = np.sum(list(spread(probe, probed, workers=workers, title="estimating sizes")), axis=0)
    return float(after / before) if before else 1.0


def find_duplicates(listing: Listing, recipe: Recipe, workers: int) -> np.ndarray:
    """Return pairs of a duplicate and the first entry with the same content: (K, 2) int64.

    A file whose size is unique is not read, because it cannot be a duplicate.
    """
    usable = listing.usable
    _, places, counts = np.unique(listing.sizes[usable], return_inverse=True, return_counts=True)
    candidates = usable[counts[places] > 1]
    tasks = [candidates[start : start + IMAGES_PER_TASK] for start in range(0, len(candidates), IMAGES_PER_TASK)]

    def hash_files(task: np.ndarray) -> tuple[np.ndarray, bytes]:
        found = []
        for entry in map(int, task):
            try:
                found.append(digest(read(listing, entry, recipe.links)))
            except LeftOut:  # an unreadable file gets a unique digest and is reported later
                found.append(digest(b"%d" % entry + listing.path(entry)))
        return task, b"".join(found)

    return same(list(spread(hash_files, tasks, workers=workers, title="duplicates")))


def same(digests: list[tuple[np.ndarray, bytes]]) -> np.ndarray:
    """Return pairs of a duplicate and the first entry with the same digest: (K, 2) int64, sorted by duplicate.

    `digests` holds arrays of entries of the listing, each with the concatenated digests of their contents.
    """
    entries = np.concatenate([np.empty(0, dtype=np.int64), *(some for some, _ in digests)])  # (M,)
    order = np.argsort(entries)
    contents = np.frombuffer(b"".join(some for _, some in digests), dtype=f"V{DIGEST}")[order]  # (M,)
    _, first, which = np.unique(contents, return_index=True, return_inverse=True)
    pairs = np.stack([entries[order], entries[order][first[which]]], axis=1)
    return pairs[pairs[:, 0] != pairs[:, 1]]
