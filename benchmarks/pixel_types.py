"""Measure how fast the loader is with images of each pixel type, how much memory a batch takes, and which levels stay.

    python benchmarks/pixel_types.py --data 'shards/*.tar' [--output benchmarks/results/pixel_types.md]

The same photographs are made into images of 8 bits, of 12 bits in uint16, and of reflectances in float32. All types get
the same crops. The time is the processor time of one thread. In each of several rounds, all rows are measured one after
the other, and the table shows medians.
"""

import statistics
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from tables import machine, publish, table, typed_command
from torch import Tensor

from tessera.data.augment import to_model_input
from tessera.data.collate import Collator, Transform
from tessera.data.crops import CenterCrop, MultiCrop, MultiCropConfig, RandomCrop, RandomCropConfig
from tessera.data.dataset import Decoding, decode_sample
from tessera.data.decode import Undecoded, decode
from tessera.data.shards import open_shards
from tessera.encoders.base import PIXEL_TYPES, PixelType, Preprocessing
from tessera.runtime.machine import keep_freed_memory
from tessera.runtime.settings import Settings, parse

BATCH = 32
TRANSFORMS: dict[str, Transform] = {
    "DINO": MultiCrop(MultiCropConfig()),
    "MAE": RandomCrop(RandomCropConfig()),
    "centre crop": CenterCrop(224),
}
RANGES: dict[PixelType, tuple[float, float]] = {"uint8": (0, 255), "uint16": (0, 4095), "float32": (0, 1)}
CHANNELS = (1, 3, 13)


class TypesBenchmark(Settings):
    """Measure the loader's images per second for each pixel type."""

    data: str
    """shards of photographs"""
    seconds: float = Field(default=1.0, gt=0)
    """duration of the measurement of a row in a round, in seconds"""
    rounds: int = Field(default=5, ge=1)
    """number of rounds"""
    output: Path | None = None
    """Markdown file for the table"""


def main(settings: TypesBenchmark) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as loader workers do
    photographs = open_shards(settings.data)
    numbers = np.linspace(0, photographs.images - 1, BATCH).astype(int).tolist()
    twelve_bits = [levels(decode(photographs.image(number))) for number in numbers]
    rows: dict[tuple[str, PixelType], Callable[[], object]] = {}
    inputs: dict[tuple[str, PixelType], Callable[[], Tensor]] = {}
    for pixel_type in RANGES:
        for channels in CHANNELS:
            given, images = preprocessing(pixel_type, channels), typed(twelve_bits, pixel_type, channels)
            for name, transform in TRANSFORMS.items():
                key = f"{name}, {channels} {'channel' if channels == 1 else 'channels'}", pixel_type
                rows[key] = batch_of(images, transform, given)
            inputs[f"{channels}", pixel_type] = input_of(images[:1], given)
        if pixel_type != "float32":
            given = preprocessing(pixel_type, 3)
            files = [encoded(image) for image in typed(twelve_bits, pixel_type, 3)]
            rows["DINO, from PNGs in RGB", pixel_type] = batch_of(files, TRANSFORMS["DINO"], given)
    found: dict[tuple[str, PixelType], list[float]] = {key: [] for key in rows}
    for _ in range(settings.rounds):
        for key, work in rows.items():
            found[key].append(seconds_of(work, settings.seconds) / BATCH)
    show(found, rows, inputs, settings)


def levels(photograph: Tensor) -> np.ndarray:
    """Return a photograph (H, W, 3) of 4,096 levels. A smooth part fills the levels between those of 8 bits."""
    pixels = photograph.permute(1, 2, 0).numpy().astype(np.float64)
    height, width, _ = pixels.shape
    waves = np.sin(np.arange(height) / 17)[:, None, None] + np.sin(np.arange(width) / 23)[None, :, None]
    return np.clip(np.rint((pixels + waves / 4) * 4095 / 255), 0, 4095).astype(np.uint16)


def typed(twelve_bits: list[np.ndarray], pixel_type: PixelType, channels: int) -> list[np.ndarray]:
    """Return the images with `channels` bands, in a type."""
    images = [np.ascontiguousarray(np.tile(image, (1, 1, 5))[..., :channels]) for image in twelve_bits]
    if pixel_type == "uint8":
        return [(image >> 4).astype(np.uint8) for image in images]
    return images if pixel_type == "uint16" else [(image / 4095).astype(np.float32) for image in images]


def preprocessing(pixel_type: PixelType, channels: int) -> Preprocessing:
    low, high = RANGES[pixel_type]
    lows, highs = (None, None) if pixel_type == "uint8" else ((low,) * channels, (high,) * channels)
    return Preprocessing((0.5,) * channels, (0.25,) * channels, pixel_type, lows, highs)


def encoded(image: np.ndarray) -> bytes:
    """Return an RGB image as a PNG of 8 or 16 bits. Pillow writes no 16-bit colours."""
    if image.dtype == np.uint8:
        file = BytesIO()
        Image.fromarray(image).save(file, "PNG")
        return file.getvalue()
    import imagecodecs

    return bytes(imagecodecs.png_encode(image))


def batch_of(images: list, transform: Transform, given: Preprocessing) -> Callable[[], object]:
    """Return a function that decodes and crops the images, as a loader worker does."""
    decoding, collator = Decoding.of(given), Collator(transform, len(images), given)

    def sample(number: int, image: Undecoded) -> object:
        picture = decoding.picture(image)
        return decode_sample("", picture, transform.draw(picture.size, np.random.default_rng(number)))

    return lambda: collator(sample(number, image) for number, image in enumerate(images))  # pyright: ignore


def input_of(images: list, given: Preprocessing) -> Callable[[], Tensor]:
    """Return a function that prepares the whole of one image as an encoder receives it."""
    side = min(images[0].shape[:2])
    batch = batch_of(images, CenterCrop(side, side), given)
    return lambda: to_model_input(batch()).views[0].images  # pyright: ignore


def seconds_of(work: Callable[[], object], seconds: float) -> float:
    """Return the processor time of a call, over about `seconds`."""
    work()
    calls, start = 0, time.process_time()
    while time.process_time() - start < seconds or not calls:
        work()
        calls += 1
    return (time.process_time() - start) / calls


def show(
    found: dict[tuple[str, PixelType], list[float]],
    rows: dict[tuple[str, PixelType], Callable[[], object]],
    inputs: dict[tuple[str, PixelType], Callable[[], Tensor]],
    settings: TypesBenchmark,
) -> None:
    lines = []
    for (name, pixel_type), times in found.items():
        ratios = [a / b for a, b in zip(times, found[name, "uint8"], strict=True)]
        memory = rows[name, pixel_type]().memory.nbytes / BATCH  # pyright: ignore
        middle = statistics.median(times)
        lines.append([name, pixel_type, f"{1 / middle:,.0f}", f"{statistics.median(ratios):.2f}", f"{memory:,.0f}"])
    lines.sort(key=lambda line: (line[0], PIXEL_TYPES.index(line[1])))  # pyright: ignore
    kept = [
        [channels, pixel_type, f"{max(len(band.unique()) for band in prepare()[0]):,}"]
        for (channels, pixel_type), prepare in inputs.items()
    ]
    publish(
        [
            "# Pixel types",
            f"{typed_command()}: medians of {settings.rounds} rounds, processor time of one thread, {BATCH} images.",
            f"{machine()}.",
            (__doc__ or "").split("\n\n")[2],
            table(["", "type", "images/s", "times uint8", "bytes per image in a batch"], lines, text=2),
            "Levels of an image of 12 bits that reach the encoder:",
            table(["channels", "type", "levels"], kept, text=2),
        ],
        settings.output,
    )


if __name__ == "__main__":
    main(parse(TypesBenchmark))
