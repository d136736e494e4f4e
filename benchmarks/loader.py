"""Measure how many images per second the loader reads, decodes and crops, compared with Pillow and torchvision.

    python benchmarks/loader.py --data 'shards/*.tar' [--output benchmarks/results/loader.md]

Single stages run in one process with one thread. The whole loader, from shards to batches, runs with worker processes.
In each of several rounds, all rows are measured one after the other, so that other work on the machine affects all rows
alike. The table shows medians over rounds. "ms of a core" is the processor time per image. With workers, this is only
the time of the workers. Ratios compare the processor times of two rows within a round.
"""

import multiprocessing
import os
import platform
import statistics
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL
import torch
import torchvision
from device.settings import device
from PIL import Image
from pillow_pipelines import PillowMultiCrop, pillow_decode, pillow_mae, pillow_probe
from pydantic import Field
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tessera.data.augment import augment_colors
from tessera.data.batch import Batch
from tessera.data.collate import CropBuilder, Transform
from tessera.data.crops import CenterCrop, MultiCrop, MultiCropConfig, NativeCrop, RandomCrop, RandomCropConfig
from tessera.data.dataset import decode_sample
from tessera.data.decode import Picture, decode
from tessera.data.loader import Reading, training_batches
from tessera.data.masking import MaskedCrop
from tessera.data.sampler import BatchSampler
from tessera.data.shards import ShardError, expand, open_shards
from tessera.runtime.machine import processor
from tessera.runtime.settings import Settings, parse

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
BATCH = 32
"""Number of images in a batch. Each pass of a single stage also processes this number of images."""
LARGE = (4000, 3000)
"""Width and height of a large photo, 12 million pixels."""
DECODE, PILLOW_DINO = "decode", "Pillow: decode, all of DINO's augmentation"
PILLOW_MAE, PILLOW_PROBE = "Pillow: decode, MAE's crop", "Pillow: decode, a probe's centre crop"
PILLOW_LARGE = "12 megapixels: Pillow, all of DINO's augmentation"
HEADINGS = [
    "images/s",
    "lowest to highest",
    "ms of a core",
    "ms of main process",
    "kB moved",
    "times Pillow",
    "of decode",
]
"""Headings of the table. "kB moved" is the size of a batch divided by its number of images. "of decode" is the speed
relative to decoding alone."""

DINO, MAE = MultiCrop(MultiCropConfig()), MaskedCrop(RandomCrop(RandomCropConfig()), 16, "random", 0.75)
NAVIT = MaskedCrop(NativeCrop(RandomCropConfig(), 16, 128, 1024), 16, "random", 0.75)


class LoaderBenchmark(Settings):
    """Measure the images per second of the loader's stages and of the whole loader."""

    data: str
    """shards: a path, a glob or a brace range"""
    seconds: float = Field(default=5.0, gt=0)
    """duration of the measurement of a row in seconds, summed over all rounds"""
    rounds: int = Field(default=5, ge=1)
    """number of rounds"""
    workers: int = Field(default=os.cpu_count() or 1, ge=1)
    """largest number of worker processes with which the whole loader is measured"""
    output: Path | None = None
    """Markdown file for the table"""


@dataclass
class Measured:
    """Measurement of one row in one round. All values are per image."""

    wall: float
    """Seconds of wall-clock time."""
    core: float | None = None
    """Seconds of processor time of the workers, or of the only process. None if a GPU does the work."""
    main: float | None = None
    """Seconds of processor time of the main process. None if there are no workers."""
    moved: float | None = None
    """Size of a batch in bytes, divided by its number of images. The main process copies each batch once."""


@dataclass
class Row:
    """One line of the table."""

    name: str
    measure: Callable[[list[bytes], float], Measured]
    """Function that takes encoded images and a number of seconds, and measures the row's work for this time."""
    baseline: str | None = None
    """Name of the row in which Pillow does the same work, or None."""


def main(settings: LoaderBenchmark) -> None:
    torch.set_num_threads(1)
    try:
        files = read(expand(settings.data))
    except (ShardError, OSError, tarfile.TarError) as error:
        raise SystemExit(f"The images cannot be read: {error}") from None
    if len(files) < BATCH:
        raise SystemExit(
            f"{settings.data} holds {len(files)} images, but at least {BATCH} are needed. Name more shards."
        )
    rows = stages(settings.data) + loaders(settings) + cameras(files)
    found: dict[str, list[Measured]] = {row.name: [] for row in rows}
    console = Console(stderr=True)
    for number in range(settings.rounds):
        some = [files[(number + i * len(files) // BATCH) % len(files)] for i in range(BATCH)]  # evenly spread
        for row in rows:
            console.print(f"round {number + 1} of {settings.rounds}: {row.name}")
            found[row.name].append(row.measure(some, settings.seconds / settings.rounds))
    show(rows, found, files, settings)


def read(paths: list[str]) -> list[bytes]:
    """Return the encoded images of some tar files."""
    files = []
    for path in paths:
        with tarfile.open(path) as shard:
            for member in shard:
                file = shard.extractfile(member) if member.name.lower().endswith(ENDINGS) else None
                if file is not None:
                    files.append(file.read())
    return files


def stages(shards: str) -> list[Row]:
    """Return the rows of single stages, in one process."""
    return [
        Row(PILLOW_DINO, each(PillowMultiCrop())),
        Row(PILLOW_MAE, each(pillow_mae())),
        Row(PILLOW_PROBE, each(pillow_probe())),
        Row("Pillow: decode", each(pillow_decode)),
        Row("read from a shard", reading(shards)),
        Row(DECODE, each(decode), "Pillow: decode"),
        Row("header and drawing, DINO", each(drawing())),
        Row("10 crops of a decoded image", putting(lambda memory: CropBuilder(DINO.views, BATCH, memory=memory))),
        Row("collate: the rest of a batch", collating),
        Row(f"colour changes, on {device().type}", device_part(change)),
    ]


def loaders(settings: LoaderBenchmark) -> list[Row]:
    """Return the rows of the whole loader, from shards to batches."""
    rows = []
    for count in worker_counts(settings.workers):
        rows.append(Row(f"DINO, workers: {count}", whole(settings.data, DINO, count), PILLOW_DINO))
    rows.append(Row("MAE, workers: 1", whole(settings.data, MAE, 1), PILLOW_MAE))
    rows.append(Row("NaViT's packed native sizes, workers: 1", whole(settings.data, NAVIT, 1)))
    probe = whole(settings.data, CenterCrop(), 1)
    return [*rows, Row("a probe's centre crop, workers: 1", probe, PILLOW_PROBE)]


def cameras(files: list[bytes]) -> list[Row]:
    """Return the rows for large photos. One row decodes them at a reduced size, as small as the crops allow."""
    large = []
    for file in files[:8]:
        with BytesIO() as encoded:
            pillow_decode(file).resize(LARGE, Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=85)
            large.append(encoded.getvalue())

    def one(fraction: bool) -> Callable[[bytes], object]:
        rng = np.random.default_rng(0)

        def work(file: bytes) -> None:
            picture, builder = Picture(file), CropBuilder(DINO.views, 1)
            views = DINO.draw(picture.size, rng)
            if fraction:
                _, image, views, *_ = decode_sample("", picture, views)
            else:
                image = picture.pixels()
            builder.add(image, views)

        return work

    rows = {
        PILLOW_LARGE: PillowMultiCrop(),
        "12 megapixels: decoded whole, 10 crops": one(False),
        "12 megapixels: decoded as small as 10 crops allow": one(True),
    }
    return [
        Row(name, lambda _, seconds, work=work: each(work)(large, seconds), PILLOW_LARGE) for name, work in rows.items()
    ]


def timed(work: Callable[[], int], seconds: float) -> Measured:
    """Repeat `work` for some seconds, and return the time per image. `work` returns the number of its images."""
    work()
    done, start, core = 0, time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - start) < seconds or not done:
        done += work()
    return Measured(passed / done, (time.process_time() - core) / done)


def each(work: Callable[[bytes], object]) -> Callable[[list[bytes], float], Measured]:
    """Return a function that measures `work` on encoded images, one at a time."""

    def measure(files: list[bytes], seconds: float) -> Measured:
        def once() -> int:
            for file in files:
                work(file)
            return len(files)

        return timed(once, seconds)

    return measure


def drawing() -> Callable[[bytes], object]:
    """Return a function that reads the header of an image and draws augmentation parameters."""
    rng = np.random.default_rng(0)
    return lambda file: DINO.draw(Picture(file).size, rng)


def reading(shards: str) -> Callable[[list[bytes], float], Measured]:
    """Return a function that measures the time to read the first images of a shard from the page cache."""
    opened = open_shards(shards)
    count = min(int(opened.counts[0]), BATCH)
    return lambda _, seconds: timed(lambda: len([opened.image(number) for number in range(count)]), seconds)


def putting(make: Callable[[Tensor | None], CropBuilder]) -> Callable[[list[bytes], float], Measured]:
    """Return a function that measures how long a builder takes to add decoded images to a batch in reused memory."""

    def measure(files: list[bytes], seconds: float) -> Measured:
        images, rng = [decode(file) for file in files], np.random.default_rng(0)
        drawn = [DINO.draw((image.shape[1], image.shape[2]), rng) for image in images]

        def put(memory: Tensor | None) -> CropBuilder:
            builder = make(memory)
            for image, views in zip(images, drawn, strict=True):
                builder.add(image, views)
            return builder

        memory = put(None).build()[0].memory
        return timed(lambda: len([put(memory)]) * len(files), seconds)

    return measure


def filled(builder: CropBuilder, files: list[bytes]) -> CropBuilder:
    """Add DINO's crops of some encoded images to a builder, and return the builder."""
    rng = np.random.default_rng(0)
    for file in files:
        picture = Picture(file)
        _, image, views, *_ = decode_sample("", picture, DINO.draw(picture.size, rng))
        builder.add(image, views)
    return builder


def collating(files: list[bytes], seconds: float) -> Measured:
    """Measure the time to complete a batch after all crops have been cut."""
    builder = filled(CropBuilder(DINO.views, BATCH), files)
    return timed(lambda: len(builder.build()[0]), seconds)


def change(batch: Batch) -> None:
    """Apply the colour changes of a batch to its images."""
    for view in batch.views:
        if isinstance(view.images, Tensor):
            augment_colors(view.images, view.colors)


def device_part(work: Callable[[Batch], object]) -> Callable[[list[bytes], float], Measured]:
    """Return a function that measures `work` on a batch of crops on the device."""

    def measure(files: list[bytes], seconds: float) -> Measured:
        batch = filled(CropBuilder(DINO.views, BATCH), files).build()[0].to(device())

        def once() -> int:
            work(batch)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return len(files)

        measured = timed(once, seconds)
        return Measured(measured.wall) if torch.cuda.is_available() else measured

    return measure


def worker_counts(most: int) -> list[int]:
    """Return the powers of two below `most`, followed by `most`."""
    return sorted({most, *(2**power for power in range(most.bit_length()) if 2**power < most)})


def whole(shards: str, transform: Transform, workers: int) -> Callable[[list[bytes], float], Measured]:
    """Return a function that measures the whole loader on training batches, in time per image."""

    def measure(_files: list[bytes], seconds: float) -> Measured:
        sampler, reading = BatchSampler(BATCH, steps=1_000_000), Reading(workers)
        return running(iter(training_batches(shards, transform, sampler, seed=0, reading=reading)), workers, seconds)

    return measure


def running(batches: Iterator[Batch], workers: int, seconds: float) -> Measured:
    """Measure a loader. Batches that the loader's workers prepared before the measurement are not counted."""
    batch = next(batches)
    for _ in range(3 * workers):
        next(batches)
    pids = [child.pid for child in multiprocessing.active_children() if child.pid]
    before, main, start, done = spent(pids), time.process_time(), time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds or not done:
        done += len(next(batches))
    assert batch.memory is not None
    moved = batch.memory.numel() / len(batch)
    return Measured(passed / done, (spent(pids) - before) / done, (time.process_time() - main) / done, moved)


def spent(pids: list[int]) -> float:
    """Return the total processor time in seconds that some processes have used since their start."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def cells(row: Row, found: dict[str, list[Measured]]) -> list[str]:
    """Return the cells of a row of the table."""
    values, rates = found[row.name], [1 / value.wall for value in found[row.name]]

    def median(name: str, unit: float, digits: int) -> str:
        known = [getattr(value, name) for value in values if getattr(value, name) is not None]
        return f"{unit * statistics.median(known):.{digits}f}" if known else ""

    def against(name: str | None) -> str:
        others = found[name] if name else []
        ratios = [other.core / value.core for value, other in zip(values, others) if other.core and value.core]  # noqa: B905
        return f"{statistics.median(ratios):.2f}" if ratios else ""

    spread = f"{min(rates):,.0f}, {max(rates):,.0f}"
    times = (median("core", 1000, 2), median("main", 1000, 2), median("moved", 1e-3, 0))
    decoded = against(DECODE if values[0].main is not None else None)
    return [row.name, f"{statistics.median(rates):,.0f}", spread, *times, against(row.baseline), decoded]


def show(rows: list[Row], found: dict[str, list[Measured]], files: list[bytes], settings: LoaderBenchmark) -> None:
    """Print the table, and write it to a Markdown file if `--output` is given."""
    machine = (
        f"{processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}, "
        f"torchvision {torchvision.__version__}, Pillow {PIL.__version__}"
    )
    title = (
        f"{len(files)} images of {sum(map(len, files)) / len(files) / 1000:.0f} kB on average; medians of "
        f"{settings.rounds} rounds, {settings.seconds:g} s per row; batches of {BATCH}"
    )
    table = Table("", title=title, caption=machine)
    lines = ["# Loader", "", f"{title}.", "", f"{machine}.", "", *(__doc__ or "").splitlines()[4:], ""]
    lines += [f"| | {' | '.join(HEADINGS)} |", "|---" + "|--:" * len(HEADINGS) + "|"]
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*cells(row, found))
        lines.append(f"| {' | '.join(cells(row, found))} |")
    Console().print(table)
    if settings.output:
        settings.output.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(parse(LoaderBenchmark))
