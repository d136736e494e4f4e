"""The loader with one keyword per setting, and other helpers for tests of images, crops and batches."""

import struct
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.data.batch import Batch, Colors
from tessera.data.batch_sampler import BatchSampler
from tessera.data.batches import Batches
from tessera.data.collate import CropBuilder, PackBuilder, Transform, collate
from tessera.data.colors import Blur, ColorConfig, Grayscale, Jitter, Solarize, color_operations, draw_colors
from tessera.data.decoders import DECODERS
from tessera.data.loader import LoaderConfig, Reading, StreamConfig
from tessera.data.loader import evaluation_batches as _evaluation_batches
from tessera.data.loader import training_batches as _training_batches
from tessera.data.sampler import BUFFER, STREAMS
from tessera.data.shards import DEFAULT, Shards, WeightedShards
from tessera.data.shards.access import Access
from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.encoders.images import PackedImages


def training_batches(
    shards: WeightedShards,
    transform: Transform,
    *,
    batch_size: int,
    seed: int,
    steps: int,
    first_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    accumulation: int = 1,
    workers: int = 0,
    streams: int = STREAMS,
    block: int | None = None,
    window: int = BUFFER,
    window_gb: float | None = None,
    source: Access = DEFAULT,
    config: LoaderConfig = LoaderConfig(),  # noqa: B008 - frozen
    preprocessing: Preprocessing = IMAGENET,
    classes: int | None = None,
    growth: tuple[tuple[int, int, int], ...] | None = None,
    skipped: tuple[range, ...] = (),
) -> Batches:
    """Batches of `data.loader.training_batches`."""
    return _training_batches(
        shards,
        transform,
        BatchSampler(batch_size, first_step, steps, rank, world_size, accumulation, streams, skipped),
        seed=seed,
        stream=StreamConfig(block=block, window=window, window_gb=window_gb, growth=growth),
        reading=Reading(workers, config, source, preprocessing, classes),
    )


def evaluation_batches(
    shards: Shards,
    transform: Transform,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    labels: bool = True,
    source: Access = DEFAULT,
    config: LoaderConfig = LoaderConfig(),  # noqa: B008 - frozen
    preprocessing: Preprocessing = IMAGENET,
) -> Batches:
    """Batches of `data.loader.evaluation_batches`."""
    reading = Reading(workers, config, source, preprocessing)
    part = (rank, world_size)
    return _evaluation_batches(shards, transform, batch_size, part=part, labels=labels, reading=reading)


def step_positions(
    step: int,
    batch_size: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    accumulation: int = 1,
    micro: int = 0,
    streams: int = STREAMS,
) -> np.ndarray:
    """Positions of one forward pass."""
    return BatchSampler(batch_size, 0, 1, rank, world_size, accumulation, streams).positions(step, micro)


def build(builder: CropBuilder | PackBuilder, keys: Sequence[str] = ()) -> Batch:
    """Batch of a builder, with names where there are some."""
    batch, order = builder.build()
    return replace(batch, keys=[keys[i] for i in order] if keys else [])


def collated(
    transform: Transform,
    images: Sequence[torch.Tensor],
    rngs: Sequence[np.random.Generator],
    keys: Sequence[str] = (),
    preprocessing: Preprocessing = IMAGENET,
) -> Batch:
    """Batch of decoded images with names; a packed batch may have the images in another order."""
    return replace(collate(transform, images, rngs, preprocessing), keys=list(keys))


def pixels(batch: Batch) -> list[torch.Tensor]:
    """Images of each view as one tensor: crops, or flat patches."""
    return [view.images.patches if isinstance(view.images, PackedImages) else view.images for view in batch.views]


NAMES = ("brightness", "contrast", "saturation", "hue", "order", "grayscale", "blur", "solarize")
"""Names of the numbers of DINO's colour changes."""


def by_name(colors: Colors) -> dict[str, np.ndarray]:
    """Numbers of DINO's colour changes for each crop, (N,) or (N, 4) for the order."""
    drawn = {type(operation): numbers for operation, numbers in colors}
    jitter, grayscale, blur, solarize = (drawn[one] for one in (Jitter, Grayscale, Blur, Solarize))
    return dict(zip(NAMES, (*jitter[:, :4].T, jitter[:, 4:], grayscale, blur, solarize), strict=True))


def from_names(numbers: dict[str, np.ndarray]) -> Colors:
    """DINO's colour changes with these numbers."""
    jitter = np.column_stack([numbers[name] for name in NAMES[:5]]).astype(np.float32)
    return [
        (Jitter(0, 0, 0, 0, 0), jitter),
        (Grayscale(0), numbers["grayscale"]),
        (Blur((), (0, 0)), numbers["blur"]),
        (Solarize(()), numbers["solarize"]),
    ]


STRONG = ColorConfig(brightness=0.8, contrast=0.8, saturation=1.5, hue=0.5, jitter=0.9, grayscale=0.3)


def draw(config: ColorConfig, blur: list[float], solarize: list[float], seed: int = 0, **options) -> Colors:
    return draw_colors(rng(seed), color_operations(config, blur, solarize, **options), len(blur))


def drawn(n: int, config: ColorConfig = STRONG, seed: int = 0) -> Colors:
    return draw(config, [0.6] * n, [0.4] * n, seed, blur_sigma=(0.1, 3))


def same_colors(one: Colors, other: Colors) -> bool:
    return len(one) == len(other) and all(
        a[0] == b[0] and np.array_equal(a[1], b[1]) for a, b in zip(one, other, strict=True)
    )


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def noise(height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Image of noise (3, H, W), in the memory order of decoded images."""
    return torch.from_numpy(rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)).permute(2, 0, 1)


def saved(image: Image.Image | np.ndarray, kind: str, **options: Any) -> bytes:
    """File of an image."""
    file = BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, kind, **options)
    return file.getvalue()


def tiff(values: np.ndarray, **options: Any) -> bytes:
    """TIFF file of an array. A test of the core that needs one is skipped without the extra."""
    if "tiff" not in DECODERS:
        pytest.skip("the extra tiff is deleted")
    file = BytesIO()
    pytest.importorskip("tifffile").imwrite(file, values, **options)
    return file.getvalue()


def write_tar(
    path: Path, members: Iterable[tuple[str | tarfile.TarInfo, bytes]], format: int = tarfile.USTAR_FORMAT
) -> str:
    """Write a tar of (name or header, content), compressed if its name says so, and return its path."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w", format=format) as archive:
        for name, content in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            if info.isreg():
                info.size = len(content)
            archive.addfile(info, BytesIO(content))
    return str(path)


def chunk(name: bytes, body: bytes) -> bytes:
    """Chunk of a PNG."""
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(
    width: int, height: int, raw: bytes = b"", color: int = 2, depth: int = 8, extra: bytes = b"", interlaced: int = 0
) -> bytes:
    """PNG written by hand, whose pixel data need not fit its size, with `extra` chunks before them."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
    body = chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
