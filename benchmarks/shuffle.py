"""How well an epoch is shuffled: how far apart samples come that were neighbours in a shard, beside a full shuffle.

    python benchmarks/shuffle.py

Shards often hold one class each, or one film: what lay side by side must not meet in a batch more often than chance
has it. Beside our order stand a full shuffle of all samples, which would read every sample from another place, and the
customary one: shards in random order, then a buffer of 5,000 samples. Only positions are computed; nothing is read.
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

from data.sampler import ShuffledSampler
from runtime.settings import Settings, parse

BUFFER = 5_000
COLUMNS = ("median distance", "nearest 1 %", "same batch", "shards in a batch", "open places", "s")
LEGEND = (
    "Of samples that were neighbours in a shard: the median of how many others come between them, as a part of the "
    "epoch; the distance that 1 % stay below; how many come in one batch. Then how many shards a batch is drawn from, "
    "from how many places of the shards is read at a time, and the time to compute an epoch's order."
)


class ShuffleBenchmark(Settings):
    """Distances of neighbours in the order of an epoch."""

    data_sets: list[tuple[int, int]] = Field(default=[(40, 250), (1000, 1281), (10_000, 1000)])
    """shards and samples in each, one pair a data set"""
    batch_size: int = Field(default=1024, ge=1)
    """images of a batch"""
    seed: int = Field(default=0, ge=0)
    """of the orders"""
    output: Path | None = None
    """file for the table, in Markdown"""


def ours(counts: np.ndarray, seed: int) -> np.ndarray:
    """Numbers of the samples in the order of the first epoch: (N,) int64."""
    _, shards, samples = ShuffledSampler(counts, seed)(np.arange(counts.sum()))
    return (np.cumsum(counts) - counts)[shards] + samples


def full(counts: np.ndarray, seed: int) -> np.ndarray:
    """The same, every order being equally likely."""
    return np.random.default_rng(seed).permutation(int(counts.sum()))


def buffered(counts: np.ndarray, seed: int) -> np.ndarray:
    """The same, of shards in random order through a buffer from which a random sample leaves for each that enters."""
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
    """What a batch sees of an order of N samples."""
    turns = np.empty_like(order)
    turns[order] = np.arange(len(order))  # when each sample comes
    inside = np.ones(len(order), dtype=bool)
    inside[np.cumsum(counts) - 1] = False  # the last of a shard has no neighbour after it
    here, after = turns[inside[: len(turns)]], turns[1:][inside[:-1]]
    distance = np.abs(here - after)
    shards = np.repeat(np.arange(len(counts)), counts)[order]
    batches = shards[: len(order) // batch_size * batch_size].reshape(-1, batch_size)
    return {
        "median": float(np.median(distance)) / len(order),
        "percentile": float(np.percentile(distance, 1)),
        "together": float((here // batch_size == after // batch_size).mean()),
        "shards": float(np.mean([len(np.unique(batch)) for batch in batches[:: max(1, len(batches) // 100)]])),
    }


def places(counts: np.ndarray, name: str) -> str:
    """From how many places of the shards an epoch is read at a time."""
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
                f"{m['together']:.2%}",
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
