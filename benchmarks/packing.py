"""Measure how well images of any aspect ratio fill NaViT's sequences, which have a fixed budget of tokens.

    python benchmarks/packing.py --data 'shards/*.tar' [--output benchmarks/results/packing.md]

The crops are those of MAE with `--mae.native true`: patches of 16 pixels, an area of 224 x 224 pixels, and scales from
0.2 to 1. "Fill" is the number of tokens divided by the product of the budget and the number of sequences. "One a
sequence" is the fill without packing, with one image per sequence. The last sequence of a batch is rarely full, so
larger batches have a better fill.
"""

from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.table import Table

from tessera.data.crops import NativeCrop, RandomCropConfig
from tessera.data.loader import Reading, training_batches
from tessera.data.sampler import BatchSampler
from tessera.data.shards import ShardError
from tessera.encoders.images import PackedImages, best_fit, first_fit
from tessera.runtime.settings import Settings, parse

PATCH, SIZE = 16, 224
LARGEST = (SIZE // PATCH) ** 2
"""Number of tokens of the largest image. Budgets are multiples of this number."""
HEADINGS = ("images a batch", "sizes", "budget", "best fit", "first fit", "one a sequence", "tokens an image")


class PackingBenchmark(Settings):
    """Measure the share of the token budget that packed sequences use."""

    data: str
    """shards: a path, a glob or a brace range"""
    images: int = Field(default=1536, ge=256)
    """number of images with which each row of the table is measured"""
    output: Path | None = None
    """Markdown file for the table"""


def main(settings: PackingBenchmark) -> None:
    rows = []
    for smallest in (SIZE, 128):
        for batch_size in (64, 256):
            lengths = [batch.lengths.tolist() for batch in batches(settings, smallest, batch_size)]
            for images in (1, 2, 3, 5, 10):
                rows.append(row(lengths, batch_size, smallest, images * LARGEST))
    show(rows, settings)


def batches(settings: PackingBenchmark, smallest: int, batch_size: int) -> list[PackedImages]:
    """Return packed batches of the loader.

    Each image has the area of a square whose side is between `smallest` and `SIZE` pixels.
    """
    crop = NativeCrop(RandomCropConfig(size=SIZE), PATCH, smallest, LARGEST)
    steps = settings.images // batch_size
    try:
        loader = training_batches(
            settings.data, crop, BatchSampler(batch_size, steps=steps), seed=0, reading=Reading(workers=1)
        )
    except (ShardError, ValueError) as error:
        raise SystemExit(f"The images for the benchmark cannot be read: {error}") from None
    return [view.images for batch in loader for view in batch.views if isinstance(view.images, PackedImages)]


def row(lengths: list[list[int]], batch_size: int, smallest: int, budget: int) -> list[str]:
    tokens = sum(map(sum, lengths))
    sequences = {fit: sum(len(fit(batch, budget)) for batch in lengths) for fit in (best_fit, first_fit)}
    fills = [tokens / (budget * n) for n in (sequences[best_fit], sequences[first_fit], sum(map(len, lengths)))]
    sizes = f"{smallest} to {SIZE}" if smallest < SIZE else str(SIZE)
    return [
        str(batch_size),
        sizes,
        str(budget),
        *(f"{100 * f:.1f} %" for f in fills),
        f"{tokens / sum(map(len, lengths)):.0f}",
    ]


def show(rows: list[list[str]], settings: PackingBenchmark) -> None:
    """Print the table, and write it to a Markdown file if `--output` is given."""
    table = Table(*HEADINGS, title=f"fill of sequences, {settings.images} images at their own aspect ratio")
    for cells in rows:
        table.add_row(*cells)
    Console().print(table)
    if settings.output:
        lines = ["# Packing", "", f"`python benchmarks/packing.py`, {settings.images} images a row.", ""]
        lines += ["| " + " | ".join(cells) + " |" for cells in (HEADINGS, ["--:"] * len(HEADINGS), *rows)]
        settings.output.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(parse(PackingBenchmark))
