"""Measure the quality of the shuffle: the distance in an epoch between samples that are neighbours in a shard.

    python benchmarks/shuffle.py

A shard often holds one class or one video, so neighbours in a shard should not share a batch more often than by chance.
The order of this project's sampler is compared with two other orders. The first is a full shuffle of all samples, which
would have to read each sample from a random position. The second is the usual method, which reads shards in random
order and then uses a shuffle buffer of 5,000 samples. The benchmark only computes positions and reads no shards.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tessera.data.sampler import ShuffledSampler
from tessera.runtime.settings import Settings, parse

BUFFER = 5_000
COLUMNS = ("median distance", "nearest 1 %", "same batch", "shards in a batch", "open places", "s")
LEGEND = (
    "For pairs of neighbours in a shard: the median distance in the order, as a part of the epoch; the distance that "
    "1 % of the pairs stay below; the share of pairs in the same batch. Then the number of shards in a batch, the "
    "number of positions that are read at the same time, and the time to compute the order of an epoch."
)


class ShuffleBenchmark(Settings):
    """Measure the distances in the shuffled order between samples that are neighbours in a shard."""

    data_sets: list[tuple[int, int]] = Field(default=[(40, 250), (1000, 1281), (10_000, 1000)])
    """one pair per data set: the number of shards, and the number of samples in each shard"""
    batch_size: int = Field(default=1024, ge=1)
    """number of images in a batch"""
    seed: int = Field(default=0, ge=0)
    """seed of the shuffled orders"""
    output: Path | None = None
    """Markdown file for the table"""


def ours(counts: np.ndarray, seed: int) -> np.ndarray:
    """Return the samples in the order of the sampler's first epoch: (N,) int64."""
    _, shards, samples = ShuffledSampler(counts, seed)(np.arange(counts.sum()))
    return (np.cumsum(counts) - counts)[shards] + samples


def full(counts: np.ndarray, seed: int) -> np.ndarray:
    """Return the samples in a uniformly random order: (N,) int64."""
    return np.random.default_rng(seed).permutation(int(counts.sum()))


def buffered(counts: np.ndarray, seed: int) -> np.ndarray:
    """Return the samples in the order that a shuffle of the shards and a shuffle buffer give: (N,) int64.

    When the buffer is full, each new sample replaces a random sample of the buffer. The replaced sample comes next in
    the order.
    """
    rng = random.Random(seed)
    starts, shards = np.cumsum(counts) - counts, list(range(len(counts)))
    rng.shuffle(shards)
    buffer: list[int] = []
    order: list[int] = []
    for sample in np.concatenate([np.arange(starts[s], starts[s] + counts[s]) for s in shards]).tolist():
        if len(buffer) < BUFFER:
            buffer.append(sample)
            continue
        place = rng.randrange(BUFFER)
        order.append(buffer[place])
        buffer[place] = sample
    rng.shuffle(buffer)
    return np.array(order + buffer)


def measures(order: np.ndarray, counts: np.ndarray, batch_size: int) -> dict[str, float]:
    """Return the quality measures of a shuffled order of N samples."""
    turns = np.empty_like(order)
    turns[order] = np.arange(len(order))  # position of each sample in the epoch
    inside = np.ones(len(order), dtype=bool)
    inside[np.cumsum(counts) - 1] = False  # the last sample of a shard has no neighbour after it
    here, after = turns[inside[: len(turns)]], turns[1:][inside[:-1]]
    distance = np.abs(here - after)
    shards = np.repeat(np.arange(len(counts)), counts)[order]
    batches = shards[: len(order) // batch_size * batch_size].reshape(-1, batch_size)
    return {
        "median": float(np.median(distance)) / len(order),
        "percentile": float(np.percentile(distance, 1)),
        "same_batch": float((here // batch_size == after // batch_size).mean()),
        "shards": float(np.mean([len(np.unique(batch)) for batch in batches[:: max(1, len(batches) // 100)]])),
    }


def places(counts: np.ndarray, name: str) -> str:
    """Return a text that says from how many positions in the shards a shuffle reads at the same time."""
    if name == "full shuffle":
        return f"{counts.sum():,}"
    order = ShuffledSampler(counts, 0)
    return (
        "1 shard"
        if name.startswith("buffer")
        else f"{min(order.images, order.streams * -(-order.buffer // order.block)):,}"
    )


def main(settings: ShuffleBenchmark) -> None:
    orders: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
        "ours": ours,
        "full shuffle": full,
        f"buffer of {BUFFER:,}": buffered,
    }
    table = Table("data set", "order", title=f"batches of {settings.batch_size}")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    lines = [f"| data set | order | {' | '.join(COLUMNS)} |", "|---|---|" + "--:|" * len(COLUMNS)]
    for shards, samples in track(settings.data_sets, "measuring", console=Console(stderr=True)):
        counts = np.full(shards, samples)
        for name, order in orders.items():
            start = time.perf_counter()
            found = order(counts, settings.seed)
            seconds = time.perf_counter() - start
            m = measures(found, counts, settings.batch_size)
            cells = (
                f"{shards:,} x {samples:,}",
                name,
                f"{m['median']:.1%}",
                f"{m['percentile']:,.0f}",
                f"{m['same_batch']:.2%}",
                f"{m['shards']:,.0f}",
                places(counts, name),
                f"{seconds:.1f}",
            )
            table.add_row(*cells)
            lines.append(f"| {' | '.join(cells)} |")
    Console().print(table)
    Console().print(LEGEND)
    if settings.output:
        head = ["# Shuffling", "", f"`python benchmarks/shuffle.py`: batches of {settings.batch_size}, one epoch.", ""]
        settings.output.write_text("\n".join([*head, *lines, "", LEGEND, ""]))


if __name__ == "__main__":
    main(parse(ShuffleBenchmark))
