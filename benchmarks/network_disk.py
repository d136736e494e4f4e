"""Measure what a loader worker asks of a network disk: opens, reads and bytes per image, and the time.

    pip install fusepy        # and libfuse 2 of the system; the benchmark mounts a file system, so it needs /dev/fuse
    python benchmarks/network_disk.py [--output benchmarks/results/network_disk.md]

The network disk is simulated by a file system in user space, which waits 1 ms in each open and each read, as a server
of a cluster might. It holds 1,000 shards of 1,281 images of 110 kB, as many as ImageNet-1k has, whose content is made
up when it is read. One process reads the images of one of 64 loader workers in the order of a run: 8 processes with 8
workers, batches of 1,024 images. Read-ahead of the kernel counts as bytes.
"""

import ctypes
import itertools
import multiprocessing
import os
import resource
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from fuse import FUSE, Operations  # pyright: ignore[reportMissingImports] - only this benchmark needs it
from lookup import BATCH, IMAGE, PROCESSES, WORKERS, write_shards
from pydantic import Field
from tables import machine, publish, table, typed_command

from tessera.data.batch_sampler import BatchSampler
from tessera.data.dataset import addresses, in_blocks
from tessera.data.loader import StreamConfig, mixture_sampler
from tessera.data.shards import open_sources
from tessera.runtime.settings import Settings, parse

SHARDS, SAMPLES = 1_000, 1_281
OPENS, READS, BYTES = range(3)
WARM_UP = 5_000
"""Number of images that are read before the measurement, so that most shards were used once."""


class NetworkDiskBenchmark(Settings):
    """Measure what a loader worker asks of a network disk."""

    images: int = Field(default=3_000, ge=1)
    """number of images that are measured, after a warm-up of 5,000 images, which use most of the shards"""
    files: tuple[int, ...] = (1024, 4096)
    """limits of open files of the worker"""
    delay_ms: float = Field(default=1.0, ge=0)
    """time that the disk waits in each open and each read"""
    output: Path | None = None
    """Markdown file for the table"""


class SlowDisk(Operations):
    """Files of a folder whose shards have made-up members, with a delay in each operation, and counters."""

    def __init__(self, folder: Path, counts: Any, delay: float) -> None:
        self.folder, self.counts, self.delay = folder, counts, delay

    def getattr(self, path: str, fh: int | None = None) -> dict[str, float]:
        found = os.lstat(f"{self.folder}{path}")
        return {name: getattr(found, name) for name in ("st_mode", "st_size", "st_mtime", "st_nlink", "st_uid")}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(f"{self.folder}{path}")]

    def open(self, path: str, flags: int) -> int:
        return self._count(OPENS, os.open(f"{self.folder}{path}", os.O_RDONLY))

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        data = bytearray(os.pread(fh, size, offset))
        if path.endswith(".tar"):
            for sample in range(offset // IMAGE, min(-(-(offset + len(data)) // IMAGE), SAMPLES)):
                info = tarfile.TarInfo(f"{sample:08d}.jpg")
                info.size = IMAGE - 512
                start, header = sample * IMAGE - offset, info.tobuf(tarfile.USTAR_FORMAT)
                if 0 <= start <= len(data) - 512:
                    data[start : start + 512] = header
        self.counts[BYTES] += len(data)
        return self._count(READS, bytes(data))

    def _count(self, what: int, result: Any) -> Any:
        time.sleep(self.delay)
        self.counts[what] += 1
        return result


def main(settings: NetworkDiskBenchmark) -> None:
    counts = multiprocessing.get_context("fork").Array(ctypes.c_int64, 3, lock=False)
    with tempfile.TemporaryDirectory() as folder:
        real, mounted = Path(folder, "real"), Path(folder, "mounted")
        real.mkdir()
        mounted.mkdir()
        write_shards(real, [SAMPLES] * SHARDS)
        disk = multiprocessing.get_context("fork").Process(
            target=FUSE,
            args=(SlowDisk(real, counts, settings.delay_ms / 1000), str(mounted)),
            kwargs={"foreground": True, "nothreads": True, "ro": True},
        )
        disk.start()
        try:
            while not os.path.ismount(mounted):
                if not disk.is_alive():
                    raise SystemExit("The simulated disk cannot be mounted; the reason is above.")
                time.sleep(0.1)
            rows = [
                measure(mounted, limit, counts, settings, Path(folder, f"cache-{limit}")) for limit in settings.files
            ]
        finally:
            os.system(f"fusermount -u {mounted}")
            disk.join()
    how = (__doc__ or "").split("\n\n")[-1].strip()
    headings = ["limit of open files", "opens per image", "reads per image", "kB per image", "ms per image"]
    title = f"{typed_command()}: {settings.images:,} images, {settings.delay_ms:g} ms per operation."
    publish(["# Reading from a network disk", title, f"{machine()}.", how, table(headings, rows)], settings.output)


def measure(folder: Path, limit: int, counts: Any, settings: NetworkDiskBenchmark, cache: Path) -> list[str]:
    """Return a row of the table. Modules read the limit when they are loaded, so each row is a new process."""
    ours = resource.getrlimit(resource.RLIMIT_NOFILE)
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.SimpleQueue()
    worker = spawn.Process(target=read_images, args=(str(folder), settings.images, str(cache), queue))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, ours[1]))
    worker.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, ours)
    queue.get()
    before = list(counts)
    seconds = queue.get()
    opens, reads, size = ((after - start) / settings.images for after, start in zip(counts, before, strict=True))
    worker.join()
    return [
        f"{limit:,}",
        f"{opens:.2f}",
        f"{reads:.2f}",
        f"{size / 1000:.0f}",
        f"{1000 * seconds / settings.images:.2f}",
    ]


def read_images(folder: str, images: int, cache: str, queue: Any) -> None:
    """Read the images of a loader worker. Put None into the queue after the warm-up, and then the time of the rest."""
    os.environ["TESSERA_CACHE"] = cache
    sources, weights = open_sources(f"{folder}/index.json", progress=False)
    sampler = mixture_sampler(sources, weights, 0, StreamConfig(), BATCH)
    (source,) = in_blocks(sources, sampler)
    batches = BatchSampler(BATCH, steps=10**6, world_size=PROCESSES)
    positions = (batches.positions(step) for step in itertools.count(0, WORKERS))
    numbers = (address.number for batch in positions for address in addresses([source], sampler, batch))
    for number in itertools.islice(numbers, WARM_UP):
        source.image(number)
    queue.put(None)
    started = time.perf_counter()
    for number in itertools.islice(numbers, images):
        source.image(number)
    queue.put(time.perf_counter() - started)


if __name__ == "__main__":
    main(parse(NetworkDiskBenchmark))
