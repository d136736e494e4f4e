"""Show the crops and masks of the first batch of a run, without starting the run.

    tessera preview SHARDS --method dino|lejepa|mae [settings of the run] [--output SHEET.png] [--images N]

All settings of pretrain/run.py are flags, and derived settings get the same values as in the run. The sheet shows the
first images of the first batch, with the seed and the transform of the run, for a run on one process. Each row holds
the whole image and then its crops as the encoder receives them. The hidden tokens of a mask are gray. If the crop sizes
are drawn for each step, the crops have the sizes of the first step.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tessera.data.augment import to_model_input
from tessera.data.batch import Batch, View
from tessera.data.collate import Sample, Skipped
from tessera.data.dataset import TrainDataset
from tessera.data.pictures import Bands, as_rgb, colours, limits
from tessera.data.shards import Sources
from tessera.encoders.base import Preprocessing
from tessera.encoders.images import Mask, PackedImages
from tessera.extras.shard_tools.sheet import Cell, caption_of, to_bytes, write_sheet
from tessera.pretrain.command_line import load
from tessera.pretrain.config import RunConfig
from tessera.pretrain.job import first_batches
from tessera.runtime.settings import Settings, SettingsError, help_text, validate

log = logging.getLogger(__name__)
HIDDEN = 0.5
"""Gray level of hidden tokens."""


class SheetSettings(Settings):
    """Settings of the sheet. All other flags are settings of the run."""

    output: Path = Path("preview.png")
    """PNG file to write; an older file of this name is replaced"""
    images: int = Field(8, ge=1)
    """number of images"""
    bands: Bands | None = None
    """numbers of the bands that are shown, counted from 1, such as 4,3,2; default: evaluation.bands of the run"""


def split(argv: Sequence[str]) -> tuple[SheetSettings, list[str]]:
    """Split a command line into the settings of the sheet and the command line of the run.

    SHARDS before the first flag become `--data SHARDS`.

    Raises:
        SettingsError: a flag has no value, or a value is invalid.
    """
    own: dict[str, str] = {}
    first = next((place for place, word in enumerate(argv) if word.startswith("--")), len(argv))
    rest = ["--data", *argv[:first]] if first else []
    words = list(argv[first:])
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag.removeprefix("--") not in SheetSettings.model_fields:
            rest.append(word)
        elif equals or words:
            own[flag.removeprefix("--")] = value if equals else words.pop(0)
        else:
            raise SettingsError(f"{flag} expects a value")
    return validate(SheetSettings, own), rest


def first_images(config: RunConfig, images: int) -> tuple[Batch, list[Sample], list[str]]:
    """Return the first images of a run on one process: a batch as the method receives it, the decoded samples, and
    their captions.

    Samples and captions have the order of the batch.

    Raises:
        UserError: the shards cannot be read, or the settings do not fit together.
    """
    prepared, batches, device = first_batches(config)
    dataset = batches.dataset
    assert isinstance(dataset, TrainDataset)
    positions = np.asarray(next(iter(batches.batches)))[:images]
    read = list(dataset.__getitems__(positions))
    if skipped := [one.reason for one in read if isinstance(one, Skipped)]:
        log.warning("%d images cannot be read, and others take their places. The first is %s", len(skipped), skipped[0])
    samples = {one.key: one for one in read if isinstance(one, Sample)}
    captions = _captions(dataset, prepared.sources, positions)
    batch = to_model_input(batches.collator(samples.values()).to(device))
    ordered = [samples[key] for key in batch.keys]  # packing changes the order of the images
    return batch, ordered, [captions.get(one.key, one.key.rpartition("/")[2]) for one in ordered]


def _captions(dataset: TrainDataset, opened: Sources, positions: np.ndarray) -> dict[str, str]:
    """Return a dictionary from sample names to captions. It has no entry for a sample that replaces a corrupt image."""
    named = [replace(one, classes=one.class_names()) for one in opened.lists]
    found = {}
    for source, shard, sample in zip(*dataset.sampler(positions), strict=True):
        number = int(named[source].number(shard, sample))
        found[named[source].name(number)] = caption_of(named[source], number)
    return found


def shown_limits(batch: Batch, bands: Sequence[int] | None) -> Tensor | None:
    """Return the limits of the shown bands over the first view of a batch (`data.pictures.limits`)."""
    images = batch.views[0].images
    return limits(images.unpack() if isinstance(images, PackedImages) else images, batch.preprocessing, bands)


def image_cell(sample: Sample, caption: str, preprocessing: Preprocessing, bands: Any, found: Tensor | None) -> Cell:
    """Return a cell with the whole image of a sample."""
    low, high = (torch.tensor(values)[:, None, None] for values in preprocessing.range)
    values = ((sample.image.float() - low) / (high - low)).clamp(0, 1)
    return Cell(to_bytes(as_rgb(values[None], bands, found)[0]), caption)


def crop_cells(batch: Batch, number: int, bands: Sequence[int] | None = None) -> list[Cell]:
    """Return one cell per crop of the image at index `number`. After a crop with masks, add one cell per mask."""
    cells, found = [], shown_limits(batch, bands)
    for place, view in enumerate(batch.views):
        kind = view_name(batch, place)
        for crop in range(view.crops):
            index = crop * len(batch) + number
            images = view.images.unpack() if isinstance(view.images, PackedImages) else view.images
            shown = colours(images[index][None], batch.preprocessing, bands, found)[0]  # (3, H, W)
            name = f"{kind} {crop + 1}" if view.crops > 1 else kind
            height, width = shown.shape[1:]
            size = f"{width} px" if width == height else f"{width} x {height}"
            cells.append(Cell(to_bytes(shown), f"{name}, {size}"))
            for mask in view.masks:
                hidden = hidden_tokens(view, mask, index)
                pixels = F.interpolate(hidden[None, None].float(), size=shown.shape[1:])[0].bool()  # (1, H, W)
                caption = f"{100 * hidden.float().mean():.0f} % hidden"
                cells.append(Cell(to_bytes(shown.masked_fill(pixels, HIDDEN)), caption))
    return cells


def view_name(batch: Batch, place: int) -> str:
    """Return the name of the view at index `place`.

    View 0 holds the global crops. A view with larger crops is the input of the Gram teacher of DINOv3.
    """
    if len(batch.views) == 1:
        return "crop"
    sides = [view.images.shape[-1] for view in batch.views if isinstance(view.images, Tensor)]
    if place == 0:
        return "global"
    return "Gram teacher" if sides[place] > sides[0] else "local"


def hidden_tokens(view: View, mask: Mask, index: int) -> Tensor:
    """Return a bool tensor (h, w) that is True for the hidden tokens of the crop at index `index` of `view`."""
    if isinstance(view.images, PackedImages):
        rows, columns = view.images.grids[index].tolist()
        return mask.hidden.split(view.images.lengths.tolist())[index].view(rows, columns)
    height, width = view.images.shape[-2:]
    tokens = mask.hidden.view(len(view.images), -1)[index]
    rows = round(math.sqrt(len(tokens) * height / width))  # tokens are square
    return tokens.view(rows, -1)


def main(argv: Sequence[str]) -> None:
    """Write the sheet. With `--help`, print the flags of the sheet and of the run instead."""
    if {"-h", "--help"} & set(argv):
        print(help_text(SheetSettings, "preview.py SHARDS"), end="\n\nsettings of the run:\n\n")
    settings, rest = split(argv)
    config = load(rest)
    batch, samples, captions = first_images(config, settings.images)
    bands, channels = settings.bands or config.evaluation.bands, batch.preprocessing.channels
    if max(bands or [0]) > channels:
        raise SettingsError(f"--bands names band {max(bands or [0])}, but the images have {channels}.")
    found = shown_limits(batch, bands)
    rows = [
        [image_cell(sample, caption, batch.preprocessing, bands, found), *crop_cells(batch, number, bands)]
        for number, (sample, caption) in enumerate(zip(samples, captions, strict=True))
    ]
    write_sheet(settings.output, rows, f"first images of a run: {config.method}, seed {config.seed}")
    print(f"{len(rows)} images with their crops written to {settings.output}")
