"""How many images a second one core decodes, crops and changes, beside Pillow and torchvision doing all on the CPU.

    python benchmarks/loader.py --data 'shards/*.tar'

Every row is DINO's augmentation (2104.14294), 2 crops of 224 and 8 of 96 pixels, or a part of it, in one process with
one thread. The rows take turns in rounds, so that other work on the machine hits all of them; medians are shown.
"""

import os
import platform
import random
import statistics
import tarfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL
import torch
import torchvision
from PIL import Image, ImageFilter
from pydantic import Field
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchvision import transforms

from data.augment import IMAGENET_MEAN, IMAGENET_STD, photometric
from data.batch import collate
from data.crops import MultiCrop, MultiCropConfig
from data.decode import decode
from data.loader import training_batches
from data.settings import Settings, parse
from data.shards import ShardError, expand

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
BASELINE = "Pillow, all augmentation"
OURS = "ours: decode, crops, drawing"
BATCH = 32
"""images of a pass of a row, and of a batch"""

Row = tuple[str, Callable[[list[bytes], float], float]]
"""name, and what measures its images a second on some files for some seconds"""


class LoaderBenchmark(Settings):
    """Images a second of the parts of the loader, per core."""

    data: str
    """shards: a path, a glob or a brace range"""
    seconds: float = Field(default=5.0, gt=0)
    """how long each row is measured, all rounds together"""
    rounds: int = Field(default=10, ge=1)
    """how often the rows take turns"""
    workers: int = Field(default=os.cpu_count() or 1, ge=0)
    """most worker processes of the whole loader"""
    output: Path | None = None
    """file for the table, in Markdown"""


def main(settings: LoaderBenchmark) -> None:
    torch.set_num_threads(1)
    try:
        files = read(expand(settings.data))
    except (ShardError, OSError, tarfile.TarError) as error:
        raise SystemExit(f"cannot measure without images: {error}") from None
    if len(files) < BATCH:
        raise SystemExit(f"{settings.data} holds {len(files)} images; at least {BATCH} are needed")
    rows: list[Row] = [
        ("Pillow decode", each(pillow_decode)),
        ("our decode", each(decode)),
        (BASELINE, each(PillowMultiCrop())),
        (OURS, each(worker(MultiCrop(MultiCropConfig())))),
        (f"ours: photometric part on {device().type}", photometric_part),
    ]
    for count in worker_counts(settings.workers):
        rows.append((f"ours: loader, {count} workers", whole_loader(settings.data, count)))
    rates: dict[str, list[float]] = {name: [] for name, _ in rows}
    seconds = settings.seconds / settings.rounds
    for number in range(settings.rounds):
        some = [files[(number * BATCH + i) % len(files)] for i in range(BATCH)]
        for name, measure in rows:
            rates[name].append(measure(some, seconds))
    show(rates, files, settings)


def read(paths: list[str]) -> list[bytes]:
    """Image files in some tar files."""
    files = []
    for path in paths:
        with tarfile.open(path) as shard:
            for member in shard:
                file = shard.extractfile(member) if member.name.lower().endswith(ENDINGS) else None
                if file is not None:
                    files.append(file.read())
    return files


def timed(work: Callable[[], int], seconds: float) -> float:
    """Images a second of `work`, which returns how many it did, repeated for some seconds."""
    done, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds or not done:
        done += work()
    return done / passed


def each(work: Callable[[bytes], object]) -> Callable[[list[bytes], float], float]:
    """Measures work on one file after the other."""

    def measure(files: list[bytes], seconds: float) -> float:
        def once() -> int:
            for file in files:
                work(file)
            return len(files)

        once()
        return timed(once, seconds)

    return measure


def pillow_decode(encoded: bytes) -> Image.Image:
    return Image.open(BytesIO(encoded)).convert("RGB")


class PillowMultiCrop:
    """DINO's recipe as its authors run it: PIL images and tensors of one crop at a time, all in the worker."""

    def __init__(self) -> None:
        jitter = [
            transforms.RandomHorizontalFlip(0.5),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
            transforms.RandomGrayscale(0.2),
        ]
        finish = [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]

        def crop(size: int, scale: tuple[float, float], *steps: Callable) -> transforms.Compose:
            box = transforms.RandomResizedCrop(size, scale, interpolation=transforms.InterpolationMode.BICUBIC)
            return transforms.Compose([box, *jitter, *steps, *finish])

        self.crops = [
            crop(224, (0.4, 1.0), self.blur),
            crop(224, (0.4, 1.0), transforms.RandomApply([self.blur], 0.1), transforms.RandomSolarize(128, 0.2)),
            *[crop(96, (0.05, 0.4), transforms.RandomApply([self.blur], 0.5))] * 8,
        ]

    @staticmethod
    def blur(image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))

    def __call__(self, encoded: bytes) -> list[object]:
        image = pillow_decode(encoded)
        return [crop(image) for crop in self.crops]


def worker(transform: MultiCrop) -> Callable[[bytes], object]:
    """All that a worker process does with one image."""
    rng = np.random.default_rng(0)
    return lambda encoded: transform(decode(encoded), rng)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def photometric_part(files: list[bytes], seconds: float) -> float:
    """Measures the change of pixels of one batch, copied to the device before."""
    rng, transform = np.random.default_rng(0), MultiCrop(MultiCropConfig())
    batch = collate([transform(decode(file), rng) for file in files], transform.crops, [""] * len(files))
    pairs = [
        (view.to(device()), p)
        for view, p in zip(batch.views, batch.photometric, strict=True)
        if p and isinstance(view, Tensor)
    ]

    def once() -> int:
        for view, p in pairs:
            photometric(view, p)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return len(files)

    once()
    return timed(once, seconds)


def worker_counts(most: int) -> list[int]:
    """0, the powers of two below `most`, and `most`."""
    return sorted({0, most, *(2**power for power in range(most.bit_length()))})


def whole_loader(shards: str, workers: int) -> Callable[[list[bytes], float], float]:
    """Measures the loader from shards to batches, once its workers are at work."""

    def measure(_files: list[bytes], seconds: float) -> float:
        transform = MultiCrop(MultiCropConfig())
        loader = training_batches(shards, transform, batch_size=BATCH, seed=0, steps=1_000_000, workers=workers)
        batches = iter(loader)
        for _ in range(2 * workers + 1):  # those that workers made before the clock starts
            next(batches)
        return timed(lambda: next(batches).images, seconds)

    return measure


def show(rates: dict[str, list[float]], files: list[bytes], settings: LoaderBenchmark) -> None:
    """Print the table, and write it as Markdown when asked."""
    size = sum(map(len, files)) / len(files) / 1000
    machine = (
        f"{processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}, "
        f"torchvision {torchvision.__version__}, Pillow {PIL.__version__}"
    )
    title = (
        f"{len(files)} images of {size:.0f} kB on average; medians of {settings.rounds} rounds, "
        f"{settings.seconds:g} s a row"
    )
    table = Table("one core unless said otherwise", title=title, caption=machine)
    lines = [
        f"{title}.",
        "",
        machine + ".",
        "",
        "| | images/s | lowest, highest | against Pillow |",
        "|---|--:|--:|--:|",
    ]
    for heading in ("images/s", "lowest, highest", "against Pillow"):
        table.add_column(heading, justify="right")
    for name, values in rates.items():
        ratio = statistics.median(v / base for v, base in zip(values, rates[BASELINE], strict=True))
        cells = (
            name,
            f"{statistics.median(values):,.0f}",
            f"{min(values):,.0f}, {max(values):,.0f}",
            f"{ratio:.1f}",
        )
        table.add_row(*cells)
        lines.append(f"| {' | '.join(cells)} |")
    Console().print(table)
    if settings.output:
        settings.output.write_text("\n".join(["# Loader", "", *lines, ""]))


def processor() -> str:
    """Name of the CPU, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main(parse(LoaderBenchmark))
