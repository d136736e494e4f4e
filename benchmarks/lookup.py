"""Measure the processor time in which a loader worker finds samples among many shards: shard, name and byte position.

    python benchmarks/lookup.py [--output benchmarks/results/lookup.md]

The shards have index.json and tables, but no content (sparse files), so that only the search is measured. One process
looks up the samples of one of 64 loader workers, in the order of a run: 8 processes with 8 workers, batches of 1,024
images of 110 kB. "warm-up" is the mean over the first 10,000 samples, in which the worker uses most tables for the
first time. The other columns are medians over the rounds after it.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from pydantic import Field
from tables import machine, publish, table, typed_command

from tessera.data.dataset import addresses, in_blocks
from tessera.data.loader import StreamConfig, mixture_sampler
from tessera.data.shards import open_sources
from tessera.data.shards.index import FolderIndex, ShardEntry, write_folder, write_table
from tessera.data.shards.tar_index import Index
from tessera.runtime.settings import Settings, parse

BATCH, PROCESSES, WORKERS = 1024, 8, 8
IMAGE = 110_080
"""Size of an image with its tar header in bytes."""
WARM_UP = 10_000
"""Number of samples that are looked up before the rounds."""
SETS = {
    "10 shards of 1,000 samples": [1_000] * 10,
    "1,000 shards of 1,000 samples": [1_000] * 1_000,
    "1,000 shards of 10,000 samples": [10_000] * 1_000,
    "1 shard of 1,000,000 samples, 999 of 1,000": [1_000_000, *[1_000] * 999],
}


class LookupBenchmark(Settings):
    """Measure the time in which a loader worker finds samples among many shards."""

    rounds: int = Field(default=5, ge=1)
    """number of rounds"""
    samples: int = Field(default=5_000, ge=1)
    """number of samples of a round"""
    output: Path | None = None
    """Markdown file for the table"""


def main(settings: LookupBenchmark) -> None:
    rows = []
    for name, counts in SETS.items():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TESSERA_CACHE"] = f"{folder}/cache"
            write_shards(Path(folder), counts)
            rows.append([name, *measure(f"{folder}/index.json", settings)])
    how = (__doc__ or "").split("\n\n")[-1].strip()
    headings = ["", "ms per sample, warm-up", "ms per sample", "lowest to highest"]
    title = f"{typed_command()}: {settings.rounds} rounds of {settings.samples:,} samples."
    publish(
        ["# Finding samples among many shards", title, f"{machine()}.", how, table(headings, rows)], settings.output
    )


def write_shards(folder: Path, counts: list[int]) -> None:
    """Write index.json, tables and sparse shards."""
    entries = []
    for shard, count in enumerate(counts):
        path, size = folder / f"shard-{shard:06d}.tar", count * IMAGE + 10_240
        path.touch()
        os.truncate(path, size)
        names = [b"%08d" % number for number in range(count)]
        offsets = np.arange(count, dtype=np.int64) * IMAGE + 512
        places = np.stack([offsets, np.full(count, IMAGE - 512)], axis=1)
        ends, labels = np.cumsum([len(name) for name in names]), np.full((count, 2), -1)
        summary = np.array([count, 0, size])
        write_table(path, Index(np.frombuffer(b"".join(names), dtype=np.uint8), ends, places, labels, summary))
        entries.append(ShardEntry(url=path.name, nsamples=count, filesize=size, labelled=0))
    write_folder(folder, FolderIndex(shardlist=entries))


def measure(index: str, settings: LookupBenchmark) -> list[str]:
    """Return the cells of a row: mean time per sample in the warm-up, median and range of the rounds."""
    sources, weights = open_sources(index, progress=False)
    sampler = mixture_sampler(sources, weights, 0, StreamConfig(), BATCH)
    (source,) = in_blocks(sources, sampler)
    step = 0

    def look_up(samples: int) -> float:
        nonlocal step
        spent = found = 0.0
        while found < samples:
            positions = np.arange(BATCH // PROCESSES) + step * BATCH
            numbers = [address.number for address in addresses([source], sampler, positions)]
            start = time.process_time()
            for number in numbers:
                source.name(number)
            spent += time.process_time() - start
            found, step = found + len(numbers), step + WORKERS
        return 1000 * spent / found

    first = look_up(WARM_UP)
    times = [look_up(settings.samples) for _ in range(settings.rounds)]
    return [f"{first:.3f}", f"{statistics.median(times):.3f}", f"{min(times):.3f} to {max(times):.3f}"]


if __name__ == "__main__":
    main(parse(LookupBenchmark))
