"""Nearest neighbours and token colours of the same validation images for the encoders of several runs.

Shape letters: N images in which neighbours are searched (the bank), Q shown images, D width of an encoder, T tokens of
the shown images, h x w grid of tokens, S x S pixels.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from rich.console import Console
from rich.progress import track
from torch import Tensor

from tessera.data.augment import to_model_input
from tessera.data.collate import Collator, Sample
from tessera.data.crops import CenterCrop
from tessera.data.dataset import Decoding, EvaluationDataset
from tessera.data.pictures import colours
from tessera.data.shards import ShardError, Source, open_shards
from tessera.encoders import EncoderError
from tessera.encoders.base import Encoder, Preprocessing
from tessera.evaluation.features import (
    EvaluationError,
    FeatureSettings,
    input_size,
    load_encoder,
    resize_size,
    single_view,
)
from tessera.evaluation.reporting.runs import Run
from tessera.evaluation.results import data_name
from tessera.runtime.settings import validate

TILE = 64
"""Largest side in pixels of a shown image. Larger images are shrunk."""
BATCH = 64
"""Number of images per forward pass."""
COMMON = 16
"""Side of the grid on which the tokens of two encoders are compared, in cells."""


@dataclass(frozen=True)
class Options:
    """Options of the pictures that need the encoders."""

    images: int = 6
    """Number of shown images (Q)."""
    neighbours: int = 5
    """Number of neighbours per image."""
    bank: int = 2000
    """Maximum number of images in which neighbours are searched (N)."""
    val: str | list[str] | None = None
    """SHARDS of the images. None selects the validation shards of each run."""


class Tile(NamedTuple):
    """A shown image."""

    pixels: np.ndarray
    """(H, W, 3) uint8."""
    label: str
    """Name of the class, or an empty string."""


class Row(NamedTuple):
    """A shown image with its nearest neighbours, the nearest first."""

    query: Tile
    neighbours: list[Tile]


@dataclass
class Seen:
    """Pictures of the features of one run."""

    run: str
    rows: list[Row]
    tokens: list[np.ndarray]
    """Colours of the tokens of each shown image, (h, w, 3) uint8."""


@dataclass
class Group:
    """Runs that were given the same images."""

    shards: str
    """Short name of the SHARDS of the images."""
    bank: int
    """Number of images in which neighbours were searched."""
    seen: list[Seen]


class _Encoded(NamedTuple):
    """Output of one encoder."""

    run: str
    features: Tensor
    """L2-normalised features of the bank, (N, D)."""
    queries: list[int]
    """Rows of the shown images in the bank."""
    tiles: list[Tile]
    """The images of the bank (N)."""
    projected: Tensor
    """First three principal components of the tokens of the shown images, (Q, 3, h, w)."""


def examine(runs: Sequence[Run], options: Options, accelerator: Accelerator) -> tuple[list[Group], list[str]]:
    """Encode validation images with the encoders of all runs, on one process.

    Return one group for each set of images, and sentences about the runs that are left out.
    """
    by_shards: dict[str, list[Run]] = {}
    problems = []
    for run in runs:
        shards = options.val or run.settings.get("evaluation.val")
        if shards:
            by_shards.setdefault(json.dumps(shards), []).append(run)
        else:
            problems.append(f"{run.name}: neighbours are not shown, because the run has no evaluation.val. Give --val.")
    groups = []
    for key, some in by_shards.items():
        shards = json.loads(key)
        try:
            opened = open_shards(shards, progress=False)
            labelled = opened.all_labelled()
            names = opened.class_names() if labelled else None
        except ShardError as error:
            problems.append(f"{', '.join(run.name for run in some)}: neighbours are not shown. {error}")
            continue
        opened = replace(opened, classes=names)
        encoded = []
        for run in some:
            try:
                encoded.append(_encode(run, opened, labelled, options, accelerator))
            except (EvaluationError, EncoderError, ShardError) as error:
                problems.append(f"{run.name}: neighbours are not shown. {error}")
        if encoded:
            maps = common_colours([one.projected for one in encoded])
            seen = [
                Seen(one.run, _neighbours(one, options.neighbours), [_bytes(image) for image in map_])
                for one, map_ in zip(encoded, maps, strict=True)
            ]
            groups.append(Group(data_name(shards), len(encoded[0].tiles), seen))
    return groups, problems


def evenly_spaced(count: int, total: int) -> np.ndarray:
    """Return `count` numbers from 0 to `total` - 1, evenly spaced; all numbers if `count` is larger than `total`.

    Shards may be sorted by class, so the first images alone could lack classes.
    """
    return np.linspace(0, total - 1, min(count, total)).round().astype(np.int64)


@torch.inference_mode()
def _encode(run: Run, opened: Source, labelled: bool, options: Options, accelerator: Accelerator) -> _Encoded:
    """Encode the images of the bank.

    Raises:
        EvaluationError: the run has no encoder, or no image can be decoded.
    """
    encoder, _ = load_encoder(validate(FeatureSettings, {"checkpoint": str(run.folder)}))
    encoder.to(accelerator.device)
    size = input_size(encoder, None)
    crop = CenterCrop(size, resize=resize_size(size, None))
    dataset = EvaluationDataset(opened, crop, labelled, Decoding(encoder.preprocessing.channels))
    collator = Collator(crop, BATCH, encoder.preprocessing)
    numbers = evenly_spaced(options.bank, opened.images)
    features: list[Tensor] = []
    tiles: list[Tile] = []
    used: list[int] = []  # indices of the images that are not corrupt
    for start in track(range(0, len(numbers), BATCH), f"features of {run.name}", console=Console(stderr=True)):
        some = numbers[start : start + BATCH].tolist()
        samples = list(dataset.__getitems__(some))
        used += [number for number, one in zip(some, samples, strict=True) if isinstance(one, Sample)]
        batch = collator(samples)
        if not batch.keys:
            continue
        view = single_view(to_model_input(batch.to(accelerator.device)))  # (B, C, S, S)
        features.append(F.normalize(encoder(view).pooled.float(), dim=1).cpu())
        labels = [] if batch.labels is None else batch.labels.tolist()
        tiles += _tiles(view, labels, encoder.preprocessing, opened.classes)
    if not features:
        raise EvaluationError("No image of the validation shards can be decoded. Check them with data.check_shards.")
    queries = evenly_spaced(options.images, len(tiles))
    batch = collator(dataset.__getitems__([used[query] for query in queries]))
    shown = single_view(to_model_input(batch.to(accelerator.device)))  # (Q, C, S, S)
    return _Encoded(run.name, torch.cat(features), queries.tolist(), tiles, principal_components(encoder, shown))


def _tiles(
    images: Tensor, labels: list[int], preprocessing: Preprocessing, names: tuple[str, ...] | None
) -> list[Tile]:
    """Return normalised images (B, C, S, S) as tiles of at most `TILE` pixels. `labels` is empty without labels."""
    shown = F.adaptive_avg_pool2d(colours(images, preprocessing), min(images.shape[-1], TILE))  # (B, 3, s, s)
    texts = [names[label] if names and label < len(names) else str(label) for label in labels] or [""] * len(images)
    pixels = shown.permute(0, 2, 3, 1).cpu().numpy()
    return [Tile(_bytes(image), text) for image, text in zip(pixels, texts, strict=True)]


def _bytes(image: np.ndarray) -> np.ndarray:
    return (image * 255).round().astype(np.uint8)


def _neighbours(encoded: _Encoded, count: int) -> list[Row]:
    """Return the shown images with their nearest neighbours by cosine similarity. An image is not its own neighbour."""
    similarity = encoded.features[encoded.queries] @ encoded.features.T  # (Q, N)
    similarity[torch.arange(len(encoded.queries)), encoded.queries] = -torch.inf
    nearest = similarity.topk(min(count, similarity.shape[1] - 1), dim=1).indices.tolist()
    return [
        Row(encoded.tiles[query], [encoded.tiles[number] for number in numbers])
        for query, numbers in zip(encoded.queries, nearest, strict=True)
    ]


@torch.inference_mode()
def principal_components(encoder: Encoder, images: Tensor) -> Tensor:
    """Return the first three principal components of the tokens of all images, each with unit variance.

    (Q, C, S, S) -> (Q, 3, h, w) float64. The components of tokens that are all alike are 0.
    """
    features = encoder(images)
    rows, columns = features.grids[0].tolist()
    tokens = features.tokens.double().cpu()  # (T, D)
    left, values, _ = torch.linalg.svd(tokens - tokens.mean(0), full_matrices=False)
    kept = left[:, :3] * (values[:3] > 1e-9 * max(values[0].item(), 1e-30)) * len(tokens) ** 0.5
    kept = F.pad(kept, (0, 3 - kept.shape[1]))  # (T, 3)
    return kept.unflatten(0, (len(images), rows, columns)).permute(0, 3, 1, 2)


def common_colours(projected: Sequence[Tensor]) -> list[np.ndarray]:
    """Return the tokens of several encoders in one colour space: each (Q, 3, h, w) -> (Q, h, w, 3) in [0, 1].

    The axes of a principal component analysis are arbitrary for each encoder. The components of every encoder are
    therefore rotated or reflected so that they are nearest to those of the first encoder at the same places of the
    same images (orthogonal Procrustes problem, Schoenemann 1966). A rotation keeps all distances between tokens.
    """
    flat = [_common_grid(one) for one in projected]  # (Q * COMMON**2, 3) each
    turned = []
    for one, points in zip(projected, flat, strict=True):
        left, _, right = torch.linalg.svd(points.T @ flat[0])
        turned.append(torch.einsum("qchw,cd->qhwd", one, left @ right))  # (Q, h, w, 3)
    reference = turned[0].flatten(0, 2)
    low, high = reference.quantile(0.02, dim=0), reference.quantile(0.98, dim=0)
    return [((one - low) / (high - low).clamp(min=1e-12)).clamp(0, 1).numpy() for one in turned]


def _common_grid(projected: Tensor) -> Tensor:
    """Resample the tokens of an encoder to the common grid: (Q, 3, h, w) -> (Q * COMMON**2, 3)."""
    resampled = F.interpolate(projected, size=(COMMON, COMMON), mode="bilinear", align_corners=False)
    return resampled.permute(0, 2, 3, 1).flatten(0, 2)
