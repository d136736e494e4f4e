"""Measure how many images per second the loader reads, decodes and crops, compared with Pillow and torchvision.

    python benchmarks/loader.py --data 'shards/*.tar' [--output benchmarks/results/loader.md]

Single stages run in one process with one thread. The whole loader, from shards to batches, runs with worker processes.
In each of several rounds, all rows are measured one after the other, so that other work on the machine affects all rows
alike. The table shows medians over rounds. "ms of a core" is the processor time per image. For rows with workers, it is
the processor time of the workers only. Ratios compare the processor times of two rows within a round.
"""

import multiprocessing
import os
import random
import statistics
import sys
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
from PIL import Image, ImageFilter
from pydantic import Field
from tables import machine, publish, table, typed_command
from torch import Tensor
from torchvision import transforms

from tessera.data.augment import to_model_input
from tessera.data.batch import Batch
from tessera.data.batch_sampler import BatchSampler
from tessera.data.collate import CropBuilder, Transform
from tessera.data.crops import CenterCrop, MultiCrop, MultiCropConfig, NativeCrop, RandomCrop, RandomCropConfig
from tessera.data.dataset import decode_sample
from tessera.data.decode import Picture, decode
from tessera.data.loader import Reading, training_batches
from tessera.data.masking import MaskedCrop
from tessera.data.shards import ShardError, expand
from tessera.encoders.base import IMAGENET
from tessera.runtime.machine import keep_freed_memory, return_freed_memory
from tessera.runtime.settings import Settings, parse

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
BATCH = 32
"""Number of images in a batch. Each pass of a single stage also processes this number of images."""
LARGE = (4000, 3000)
"""Width and height of a large photo, 12 million pixels."""
DECODE, PILLOW_DINO = "decode", "Pillow: decode, all of DINO's augmentation"
PILLOW_MAE, PILLOW_PROBE = "Pillow: decode, MAE's crop", "Pillow: decode, a probe's centre crop"
PILLOW_CROPS = "Pillow: decode, DINO's crops and mirroring, no colours"
PILLOW_LARGE = "12 megapixels: Pillow, DINO's crops and mirroring, no colours"
HEADINGS = ["images/s", "lowest to highest", "ms of a core", "ms of main process", "times Pillow", "of decode"]
"""Headings of the table. "of decode" is the speed relative to decoding alone."""

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
    core: float
    """Seconds of processor time of the workers, or of the only process."""
    main: float | None = None
    """Seconds of processor time of the main process. None if there are no workers."""


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
        raise SystemExit(f"The images of {settings.data} cannot be read. {error}") from None
    if len(files) < BATCH:
        raise SystemExit(
            f"{settings.data} contains {len(files)} images, but at least {BATCH} are needed. Give more shards."
        )
    rows = stages() + loaders(settings) + cameras(files)
    found: dict[str, list[Measured]] = {row.name: [] for row in rows}
    for number in range(settings.rounds):
        some = [files[(number + i * len(files) // BATCH) % len(files)] for i in range(BATCH)]  # evenly spaced
        for row in rows:
            print(f"round {number + 1} of {settings.rounds}: {row.name}", file=sys.stderr)
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


def stages() -> list[Row]:
    """Return the rows of single stages, in one process."""
    rng = np.random.default_rng(0)
    return [
        Row(PILLOW_DINO, each(pillow_dino(colors=True))),
        Row(PILLOW_CROPS, each(pillow_dino(colors=False))),
        Row(PILLOW_MAE, each(pillow_mae())),
        Row(PILLOW_PROBE, each(pillow_probe())),
        Row("Pillow: decode", each(pillow_decode)),
        Row(DECODE, each(decode), "Pillow: decode"),
        Row("header and drawing, DINO", each(lambda file: DINO.draw(Picture(file).size, rng))),
        Row("10 crops of a decoded image", cropping),
        Row("colours of 10 crops, on the CPU", coloring),
    ]


def loaders(settings: LoaderBenchmark) -> list[Row]:
    """Return the rows of the whole loader, from shards to batches."""
    most = settings.workers
    counts = sorted({most, *(2**power for power in range(most.bit_length()) if 2**power < most)})
    return [
        *(Row(f"DINO, workers: {count}", whole(settings.data, DINO, count), PILLOW_CROPS) for count in counts),
        Row("MAE, workers: 1", whole(settings.data, MAE, 1), PILLOW_MAE),
        Row("NaViT's packed native sizes, workers: 1", whole(settings.data, NAVIT, 1)),
        Row("a probe's centre crop, workers: 1", whole(settings.data, CenterCrop(), 1), PILLOW_PROBE),
    ]


def cameras(files: list[bytes]) -> list[Row]:
    """Return the rows for large photos. One row decodes them at the smallest size that the crops allow."""
    large = []
    for file in files[:8]:
        with BytesIO() as encoded:
            pillow_decode(file).resize(LARGE, Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=85)
            large.append(encoded.getvalue())
    rng = np.random.default_rng(0)

    def decoded_whole(file: bytes) -> None:
        picture = Picture(file)
        CropBuilder(DINO.views, 1).add(picture.pixels(), DINO.draw(picture.size, rng))

    def decoded_small(file: bytes) -> None:
        picture = Picture(file)
        _, image, views, *_ = decode_sample("", picture, DINO.draw(picture.size, rng))
        CropBuilder(DINO.views, 1).add(image, views)

    rows: dict[str, Callable[[bytes], object]] = {
        PILLOW_LARGE: pillow_dino(colors=False),
        "12 megapixels: decoded whole, 10 crops": decoded_whole,
        "12 megapixels: decoded as small as 10 crops allow": decoded_small,
    }
    return [
        Row(name, lambda _, seconds, work=work: each(work)(large, seconds), PILLOW_LARGE) for name, work in rows.items()
    ]


def pillow_decode(encoded: bytes) -> Image.Image:
    """Decode an image to RGB."""
    return Image.open(BytesIO(encoded)).convert("RGB")


def pillow_dino(*, colors: bool) -> Callable[[bytes], object]:
    """Return the pipeline of DINO's official code, one crop at a time.

    With `colors`, it also changes the colours and normalises. In this project the training process does this, so the
    pipeline without it is the work of a loader worker.
    """

    def crop(size: int, scale: tuple[float, float], *steps: Callable) -> transforms.Compose:
        box = transforms.RandomResizedCrop(size, scale, interpolation=transforms.InterpolationMode.BICUBIC)
        if not colors:
            return transforms.Compose([box, transforms.RandomHorizontalFlip(0.5), transforms.PILToTensor()])
        jitter = transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)
        changes = [transforms.RandomHorizontalFlip(0.5), jitter, transforms.RandomGrayscale(0.2)]
        model_input = [transforms.ToTensor(), transforms.Normalize(IMAGENET.mean, IMAGENET.std)]
        return transforms.Compose([box, *changes, *steps, *model_input])

    def blur(image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))

    crops = [
        crop(224, (0.4, 1.0), blur),
        crop(224, (0.4, 1.0), transforms.RandomApply([blur], 0.1), transforms.RandomSolarize(128, 0.2)),
        *[crop(96, (0.05, 0.4), transforms.RandomApply([blur], 0.5))] * 8,
    ]

    def work(encoded: bytes) -> list[object]:
        image = pillow_decode(encoded)
        return [crop(image) for crop in crops]

    return work


def pillow_mae() -> Callable[[bytes], object]:
    """Return MAE's pipeline: one random crop."""
    box = transforms.RandomResizedCrop(224, (0.2, 1.0), interpolation=transforms.InterpolationMode.BICUBIC)
    prepare = transforms.Compose([box, transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
    return lambda encoded: prepare(pillow_decode(encoded))


def pillow_probe() -> Callable[[bytes], object]:
    """Return the pipeline of an evaluation: the centre crop."""
    shorter = transforms.Resize(256, transforms.InterpolationMode.BICUBIC)
    prepare = transforms.Compose([shorter, transforms.CenterCrop(224), transforms.PILToTensor()])
    return lambda encoded: prepare(pillow_decode(encoded))


def timed(work: Callable[[], int], seconds: float) -> Measured:
    """Repeat `work` for some seconds, and return the time per image. `work` returns how many images it processed."""
    work()
    done, start, core = 0, time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - start) < seconds or not done:
        done += work()
    return Measured(passed / done, (time.process_time() - core) / done)


def each(work: Callable[[bytes], object]) -> Callable[[list[bytes], float], Measured]:
    """Return a function that measures `work`, which takes one encoded image per call."""
    return lambda files, seconds: timed(lambda: len([work(file) for file in files]), seconds)


def cropping(files: list[bytes], seconds: float) -> Measured:
    """Measure cropping: DINO's crops of decoded images are written to a batch whose memory is reused."""
    build = cropper(files)
    memory = build(None).build()[0].memory
    return timed(lambda: len([build(memory)]) * len(files), seconds)


def coloring(files: list[bytes], seconds: float) -> Measured:
    """Measure DINO's colour changes of a batch of crops, with the settings of memory of a training run."""
    batch, _ = cropper(files)(None).build()
    keep_freed_memory()
    try:
        return timed(lambda: len([to_model_input(batch)]) * len(files), seconds)
    finally:
        return_freed_memory()


def cropper(files: list[bytes]) -> Callable[[Tensor | None], CropBuilder]:
    """Return a function that cuts DINO's crops of the decoded images into a batch, in the given memory."""
    images, rng = [decode(file) for file in files], np.random.default_rng(0)
    drawn = [DINO.draw((image.shape[1], image.shape[2]), rng) for image in images]

    def crops(memory: Tensor | None) -> CropBuilder:
        builder = CropBuilder(DINO.views, BATCH, memory=memory)
        for image, views in zip(images, drawn, strict=True):
            builder.add(image, views)
        return builder

    return crops


def whole(shards: str, transform: Transform, workers: int) -> Callable[[list[bytes], float], Measured]:
    """Return a function that measures the whole loader on training batches, in time per image."""

    def measure(_files: list[bytes], seconds: float) -> Measured:
        sampler = BatchSampler(BATCH, steps=1_000_000)
        batches = training_batches(shards, transform, sampler, seed=0, reading=Reading(workers))
        return running(iter(batches), workers, seconds)

    return measure


def running(batches: Iterator[Batch], workers: int, seconds: float) -> Measured:
    """Measure a loader. Batches that the loader's workers prepared before the measurement are not counted."""
    for _ in range(3 * workers + 1):
        next(batches)
    pids = [child.pid for child in multiprocessing.active_children() if child.pid]
    before, main, start, done = spent(pids), time.process_time(), time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds or not done:
        done += len(next(batches))
    return Measured(passed / done, (spent(pids) - before) / done, (time.process_time() - main) / done)


def spent(pids: list[int]) -> float:
    """Return the total processor time in seconds that some processes have used since their start."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def cells(row: Row, found: dict[str, list[Measured]]) -> list[str]:
    """Return the cells of a row of the table."""
    values, rates = found[row.name], [1 / value.wall for value in found[row.name]]

    def milliseconds(known: list[float | None]) -> str:
        times = [1000 * seconds for seconds in known if seconds is not None]
        return f"{statistics.median(times):.2f}" if times else ""

    def against(name: str | None) -> str:
        ratios = [other.core / value.core for value, other in zip(values, found[name], strict=True)] if name else []
        return f"{statistics.median(ratios):.2f}" if ratios else ""

    spread = f"{min(rates):,.0f}, {max(rates):,.0f}"
    times = (milliseconds([value.core for value in values]), milliseconds([value.main for value in values]))
    decoded = against(DECODE if values[0].main is not None else None)
    return [row.name, f"{statistics.median(rates):,.0f}", spread, *times, against(row.baseline), decoded]


def show(rows: list[Row], found: dict[str, list[Measured]], files: list[bytes], settings: LoaderBenchmark) -> None:
    """Print the table, and write it to a Markdown file if `--output` is given."""
    packages = f"torchvision {torchvision.__version__}, Pillow {PIL.__version__}"
    title = (
        f"{typed_command()}: {len(files)} images of {sum(map(len, files)) / len(files) / 1000:.0f} kB on average; "
        f"medians of {settings.rounds} rounds, {settings.seconds:g} s per row; batches of {BATCH}."
    )
    how = (__doc__ or "").split("\n\n")[-1].strip()
    rates = table(["", *HEADINGS], [cells(row, found) for row in rows])
    publish(["# Loader", title, f"{machine()}, {packages}.", how, rates], settings.output)


if __name__ == "__main__":
    main(parse(LoaderBenchmark))
