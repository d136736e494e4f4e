"""Nearest neighbours and token colours of the same validation images for the encoders of several runs.

Shape letters: N images in which neighbours are searched (the bank), Q shown images, D width of an encoder, T tokens of
the shown images, h x w grid of tokens, S x S pixels.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
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
from tessera.data.shards import Access, ShardError, Source, SourceConfig, open_shards
from tessera.data.shards.samples import SampleKeys
from tessera.encoders.base import Preprocessing
from tessera.evaluation.features import (
    EvaluationError,
    FeatureSettings,
    input_size,
    load_encoder,
    resize_size,
    single_view,
)
from tessera.evaluation.memory import images_at_once
from tessera.evaluation.results import data_name
from tessera.evaluation.token_colours import common_colours, principal_components
from tessera.extras.report.run_folders import RunFolder
from tessera.runtime.settings import validate
from tessera.runtime.user_error import UserError

TILE = 64
"""Largest side in pixels of a shown image. Larger images are shrunk."""
BATCH = 64
"""Number of images per forward pass."""


class Tile(NamedTuple):
    """A shown image."""

    pixels: np.ndarray
    """Pixels of the image, (H, W, 3) uint8."""
    label: str
    """Name or number of the class. Empty if the image has no label."""


class Seen(NamedTuple):
    """Neighbours and token colours of one run."""

    run: str
    rows: list[list[Tile]]
    """One row per shown image: the image, followed by its nearest neighbours, the nearest first."""
    tokens: list[np.ndarray]
    """Colours of the tokens of each shown image, (h, w, 3) uint8."""


class Group(NamedTuple):
    """Neighbours and token colours of all runs that encoded the same images."""

    shards: str
    """Short name of the SHARDS of the images."""
    bank: int
    """Number of images in which neighbours were searched."""
    seen: list[Seen]


def examine(
    runs: Sequence[RunFolder],
    accelerator: Accelerator,
    *,
    val: str | list[str] | None = None,
    images: int = 6,
    neighbours: int = 5,
    bank: int = 2000,
) -> tuple[list[Group], list[str]]:
    """Encode validation images with the encoders of all runs, on one process.

    Return one group for each set of images, and sentences about the runs that are left out.

    Args:
        runs: runs to show.
        accelerator: accelerator of the process.
        val: SHARDS of the images. None selects the validation shards of each run. Their images and labels have the
            names that `data.image` and `data.label` of each run set.
        images: number of shown images (Q).
        neighbours: number of neighbours per image.
        bank: maximum number of images in which neighbours are searched (N).
    """
    by_shards: dict[str, list[RunFolder]] = {}
    problems = []
    for run in runs:
        if shards := val or run.settings.get("evaluation.val"):
            names = [run.settings.get(f"data.{one}") for one in ("image", "label")]
            by_shards.setdefault(json.dumps([shards, *names]), []).append(run)
        else:
            problems.append(f"{run.name}: neighbours are not shown, because the run has no evaluation.val. Give --val.")
    by_content: dict[tuple[str, SampleKeys], tuple[str, Source, list[RunFolder]]] = {}
    for key, some in by_shards.items():
        shards, *names = json.loads(key)
        keys = SampleKeys(*(one if isinstance(one, str) else None for one in names))
        try:
            # the settings of a run may come from a stranger, so that only --val can name a command to run
            access = Access(SourceConfig(commands=None if val else False), keys)
            opened = open_shards(shards, progress=False, source=access)
            opened = replace(opened, classes=opened.class_names() if opened.all_labelled() else None)
        except ShardError as error:
            problems.append(f"{', '.join(run.name for run in some)}: neighbours are not shown. {_line(error)}")
            continue
        by_content.setdefault((opened.content() or key, keys), (data_name(shards), opened, []))[2].extend(some)
    groups = []
    for name, opened, some in by_content.values():
        encoded: dict[str, _Encoded] = {}
        for run in some:
            try:
                encoded[run.name] = _encode(run, opened, images, bank, accelerator)
            except UserError as error:
                problems.append(f"{run.name}: neighbours are not shown. {_line(error)}")
        if encoded:
            colours_of_runs = common_colours([one.projected for one in encoded.values()])
            seen = [
                Seen(run, _neighbours(one, neighbours), [_bytes(image) for image in tokens])
                for (run, one), tokens in zip(encoded.items(), colours_of_runs, strict=True)
            ]
            groups.append(Group(name, len(next(iter(encoded.values())).tiles), seen))
    return groups, problems


def _line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split("\n  "))


def evenly_spaced(count: int, total: int) -> np.ndarray:
    """Return `count` evenly spaced indices from 0 to `total` - 1, or all indices if `count` is larger than `total`.

    Shards may be sorted by class, so the first images alone could lack classes.
    """
    return np.linspace(0, total - 1, min(count, total)).round().astype(np.int64)


class _Encoded(NamedTuple):
    """Output of one encoder."""

    features: Tensor
    """L2-normalised features of the bank, (N, D)."""
    tiles: list[Tile]
    """The images of the bank (N)."""
    queries: list[int]
    """Indices of the shown images in the bank (Q)."""
    projected: Tensor
    """First three principal components of the tokens of the shown images, (Q, 3, h, w)."""


@torch.inference_mode()
def _encode(run: RunFolder, opened: Source, images: int, bank: int, accelerator: Accelerator) -> _Encoded:
    """Encode the images of the bank, and project the tokens of the shown images to three principal components.

    Raises:
        EvaluationError: the run has no encoder, or no image can be decoded.
    """
    encoder, _ = load_encoder(validate(FeatureSettings, {"checkpoint": str(run.folder)}))
    encoder.to(accelerator.device)
    size = input_size(encoder, None)
    crop = CenterCrop(size, resize=resize_size(size, None))
    dataset = EvaluationDataset(opened, crop, opened.all_labelled(), Decoding(encoder.preprocessing.channels))
    blank = torch.zeros(1, encoder.preprocessing.channels, size, size, device=accelerator.device)
    at_once = images_at_once(lambda view: encoder(view).pooled, blank, BATCH)
    collator = Collator(crop, BATCH, encoder.preprocessing)
    numbers = evenly_spaced(bank, opened.images)
    features: list[Tensor] = []
    tiles: list[Tile] = []
    used: list[int] = []  # indices of the images that are not corrupt
    for start in track(range(0, len(numbers), at_once), f"features of {run.name}", console=Console(stderr=True)):
        some = numbers[start : start + at_once].tolist()
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
        raise EvaluationError("No validation image can be decoded. Check the shards with `tessera check_shards`.")
    queries = evenly_spaced(images, len(tiles)).tolist()
    batch = collator(dataset.__getitems__([used[query] for query in queries]))
    shown = single_view(to_model_input(batch.to(accelerator.device)))  # (Q, C, S, S)
    return _Encoded(torch.cat(features), tiles, queries, principal_components(encoder, shown))


def _tiles(
    images: Tensor, labels: list[int], preprocessing: Preprocessing, names: tuple[str, ...] | None
) -> list[Tile]:
    """Return normalised images (B, C, S, S) as tiles of at most `TILE` pixels. `labels` may be empty."""
    shown = F.adaptive_avg_pool2d(colours(images, preprocessing), min(images.shape[-1], TILE))  # (B, 3, s, s)
    texts = [names[label] if names and label < len(names) else str(label) for label in labels] or [""] * len(images)
    pixels = shown.permute(0, 2, 3, 1).cpu().numpy()
    return [Tile(_bytes(image), text) for image, text in zip(pixels, texts, strict=True)]


def _bytes(image: np.ndarray) -> np.ndarray:
    return (image * 255).round().astype(np.uint8)


def _neighbours(encoded: _Encoded, count: int) -> list[list[Tile]]:
    """Return one row per shown image: the image, followed by its `count` nearest neighbours by cosine similarity. The
    neighbours do not include the image itself."""
    similarity = encoded.features[encoded.queries] @ encoded.features.T  # (Q, N)
    similarity[torch.arange(len(encoded.queries)), encoded.queries] = torch.inf  # ranks the image itself first
    nearest = similarity.topk(min(count + 1, similarity.shape[1]), dim=1).indices.tolist()
    return [[encoded.tiles[number] for number in numbers] for numbers in nearest]
