"""Encode all images in parts, with facts about each image and a thumbnail. A stopped command goes on at its last part.

FOLDER/work/data-00000.npz, data-00001.npz and so on hold `IMAGES` images each, FOLDER/work/val-00000.npz those of the
validation set. The processes share the parts. All of these arrays come from one pass over the images.

The features of an image are the mean of the features of the image and of its mirror image, both of length 1. An image
and its mirror image have equal features, so that a search finds mirrored copies without a second search.

Shape letters: n images of a part, N images of all parts, B images of a batch, D features per image.
"""

import io
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from PIL import Image
from torch import Tensor

from tessera.data.pictures import as_rgb, quantiles, unit
from tessera.data.shards import Source
from tessera.encoders.base import Encoder, Preprocessing
from tessera.evaluation.embed import UNRELATED, claim
from tessera.evaluation.features import EvaluationError, FeatureSettings, Pixels, extract, pooled
from tessera.extras.explore.thumbnails import SIDE
from tessera.runtime.files import atomic_write
from tessera.runtime.progress import track

IMAGES = 1024
"""Largest number of images in a part."""
QUALITY = 80
"""JPEG quality of thumbnails."""
GRID = 16
"""Side of the grid of pixels that are features. On a finer one, the copies of an image differ more from each other."""
FILLED = 0.01
"""Normalised pixels without data have smaller absolute values. The mean of their band is rounded to the pixel type."""
FACTS = 2
"""Number of facts of each image: standard deviation of its pixels, and share of its pixels with data."""


def mirrored_mean(encoder: Encoder, images: Tensor) -> Tensor:
    """Return the mean of the features of images and of their mirror images: (B, C, S, S) -> (B, D).

    For `Pixels`, the features are the images scaled to `GRID`. A mirrored copy that is read at this size would often be
    shifted by one pixel, because the crop from its centre begins at a whole pixel.
    """
    if isinstance(encoder, Pixels):
        images = F.adaptive_avg_pool2d(images, min(GRID, images.shape[-1]))
    both = [F.normalize(pooled(encoder, one).float(), dim=1) for one in (images, images.flip(-1))]
    return (both[0] + both[1]) / 2


def described(encoder: Encoder, images: Tensor) -> Tensor:
    """Return one row for each image: features, facts, and pixels of the thumbnail: (B, C, S, S) -> (B, K)."""
    absent = _without_data(images, encoder.preprocessing)
    pixels = unit(images, encoder.preprocessing).masked_fill(absent, torch.nan)  # (B, C, S, S)
    present = pixels.isfinite()
    count = present.sum((2, 3)).clamp(min=1)  # (B, C)
    filled = pixels.nan_to_num(0.0)
    mean = filled.sum((2, 3)) / count
    squares = ((filled - mean[..., None, None]) * present).square().sum((2, 3)) / count
    facts = torch.stack([squares.sqrt().amax(1), present.float().mean((1, 2, 3))], 1)
    side = min(SIDE, images.shape[-1])
    shown = as_rgb(pixels) if encoder.preprocessing.low is None else _stretched(pixels)
    small = F.interpolate(shown.nan_to_num(0.0).clamp(0, 1), size=(side, side), mode="bilinear", antialias=True)
    return torch.cat([mirrored_mean(encoder, images), facts, small.flatten(1)], 1)


def _without_data(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Return the mask of pixels without data: (B, C, S, S) -> (B, 1, S, S).

    The reader sets them to the mean of their band, which is about 0 after normalisation. NaN is a missing channel.
    """
    if preprocessing.nodata is None and preprocessing.pixel_type != "float32":
        return torch.zeros_like(images[:, :1], dtype=torch.bool)
    return (images.abs() < FILLED).all(1, keepdim=True)


def _stretched(pixels: Tensor) -> Tensor:
    """Return images of more than 8 bits as RGB, each between its own quantiles: (B, C, S, S) -> (B, 3, S, S)."""
    shown = [one[None, :3] for one in pixels]
    blank = [bool(one.isfinite().sum() == 0) for one in shown]
    return torch.cat(
        [
            as_rgb(one.nan_to_num(0.0)) if empty else as_rgb(one, limits=quantiles([one[0]]).nan_to_num(0.0))
            for one, empty in zip(shown, blank, strict=True)
        ]
    )


def embed_set(
    name: str, settings: FeatureSettings, encoder: Encoder, shards: Source, accelerator: Accelerator, folder: Path
) -> list[Path]:
    """Write the parts of a set that are missing. Return the paths of all parts. Collective.

    Raises:
        EvaluationError: the folder belongs to other settings or images, or cannot be written.
        ShardError: the shards cannot be read.
    """
    rank, processes = accelerator.process_index, accelerator.num_processes
    parts = ceil(shards.images / IMAGES)
    paths = [folder / f"{name}-{number:05d}.npz" for number in range(parts)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own = settings.model_dump(mode="json", exclude=UNRELATED | {"val", "output"}) | {"images_per_part": IMAGES}
        claim(folder / f"{name}.json", own, encoder, shards, ".npz", main=rank == 0)
        labelled = shards.count_labels() > 0
        opened = replace(shards, optional_labels=True)
        missing = [number for number in range(rank, parts, processes) if not paths[number].exists()]
        title = f"features of {shards.images:,} images, parts"
        for number in track(missing, title, total=len(missing), shown=rank == 0):
            arrays = _part(settings, encoder, opened, accelerator, (number, parts), labelled=labelled)
            with atomic_write(paths[number]) as temporary, temporary.open("wb") as file:
                np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
    except OSError as error:
        raise EvaluationError(f"Cannot write to {folder}: {error.strerror}. Choose another --output.") from error
    accelerator.wait_for_everyone()
    return paths


def _part(
    settings: FeatureSettings,
    encoder: Encoder,
    shards: Source,
    accelerator: Accelerator,
    part: tuple[int, int],
    *,
    labelled: bool,
) -> dict[str, np.ndarray]:
    """Return the arrays of one part. `part` is its index, and the number of parts."""
    options = settings.options() | {"part": part, "labels": labelled, "feature": described, "progress": False}
    found = extract(encoder, shards, accelerator, **options)
    side = min(SIDE, settings.facts(encoder)["image_size"])
    features, facts, small = found.features.split(
        [found.features.shape[1] - FACTS - 3 * side**2, FACTS, 3 * side**2], 1
    )
    pixels = (small.view(-1, 3, side, side) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    encoded = [_jpeg(one) for one in pixels]
    sizes = _stored_bytes(shards, part)
    return {
        "features": features.numpy(),
        "deviation": facts[:, 0].numpy(),
        "present": facts[:, 1].numpy(),
        "labels": found.labels.numpy(),
        "keys": np.array(found.keys, dtype=str),
        "bytes": np.array([sizes[key] for key in found.keys], np.int64),
        "thumbnails": np.frombuffer(b"".join(encoded), np.uint8),
        "lengths": np.array([len(one) for one in encoded], np.int64),
    }


def _jpeg(pixels: np.ndarray) -> bytes:
    """Return pixels (H, W, 3) uint8 as a JPEG."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def _stored_bytes(shards: Source, part: tuple[int, int]) -> dict[str, int]:
    """Return the size in bytes of each encoded image of a part by name; 0 for an image that is not stored as a file."""
    number, parts = part
    indices = {}
    found = {}
    for image in range(number * shards.images // parts, (number + 1) * shards.images // parts):
        shard, sample = shards.place(image)
        if shard not in indices:
            indices[shard] = shards.shards[shard].index()
        found[shards.name(image)] = int(indices[shard].images[sample, 1])
    return found


def read_parts(paths: list[Path], *names: str) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield some arrays of each part in order."""
    for path in paths:
        with np.load(path) as arrays:
            yield tuple(arrays[name] for name in names)


def joined(paths: list[Path], name: str) -> np.ndarray:
    """Return an array of all parts."""
    return np.concatenate([one for (one,) in read_parts(paths, name)])


def pack_thumbnails(paths: list[Path], folder: Path) -> None:
    """Write the thumbnails of all parts to FOLDER/thumbnails.bin and their positions to thumbnails.npy."""
    lengths = []
    with atomic_write(folder / "thumbnails.bin") as temporary, temporary.open("wb") as file:
        for thumbnails, sizes in read_parts(paths, "thumbnails", "lengths"):
            file.write(thumbnails.tobytes())
            lengths.append(sizes)
    positions = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))
    with atomic_write(folder / "thumbnails.npy") as temporary, temporary.open("wb") as file:
        np.save(file, positions)
