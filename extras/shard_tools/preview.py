"""Show images and class names, or the crops and masks of a run, on one sheet.

    tessera preview SHARDS [--output SHEET.png]
    tessera preview SHARDS --method dino|lejepa|mae [settings of the run] [--output SHEET.png]

With `--method` or `--config`, the sheet shows the crops and masks that a run with these settings draws first
(`crop_preview`).
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tessera.data.dataset import Decoding, cure_of
from tessera.data.decode import ImageError, Undecoded, stored_type
from tessera.data.pages import Pages
from tessera.data.pictures import Bands, as_rgb, quantiles, shown_bands
from tessera.data.shards import Access, ShardError, Source, open_shards
from tessera.data.shards.samples import SampleKeys
from tessera.extras.shard_tools.sheet import Cell, caption_of, to_bytes, write_sheet
from tessera.runtime.processes import exit_on_user_error
from tessera.runtime.settings import Positional, Settings, SettingsError, parse
from tessera.runtime.user_error import without_controls

OF_A_RUN = ("--method", "--config")


class PreviewSettings(Settings):
    """Show images and class names of shards on one sheet. With --method or --config, show the crops and masks of a run.
    In this case, the command accepts all settings of pretrain/run.py."""

    shards: Positional[list[str]]
    """SHARDS to show"""
    output: Path = Path("preview.png")
    """PNG file to write; an older file of this name is replaced"""
    images: int = Field(32, ge=1)
    """number of images, evenly spaced over the shards"""
    channels: int = Field(3, ge=1)
    """number of channels of an image"""
    image: str | None = None
    """name of the image in a sample, as for data.image of a run"""
    bands: Bands | None = None
    """numbers of the bands that are shown, counted from 1, such as 4,3,2 for red, green and blue; default: the first
    three; bands of more than 8 bits are shown between their quantiles 2 % and 98 % over the sheet"""
    label: str | None = None
    """name of the label in a sample, as for data.label of a run"""
    labels: str | None = None
    """CSV with the labels of images in folders: columns path and label, paths relative to it"""
    pages: Pages | None = None
    """images of files that hold several, as for data.pages of a run"""


def run(settings: PreviewSettings) -> None:
    """Write the sheet.

    Raises:
        ShardError: the shards cannot be read, none of the images can be read, or the sheet cannot be written.
    """
    shards = settings.shards
    source = Access(keys=SampleKeys(settings.image, settings.label, settings.labels, pages=settings.pages))
    opened = open_shards(shards[0] if len(shards) == 1 else shards, source=source)
    labelled = opened.count_labels() > 0
    opened = replace(opened, classes=opened.class_names() if labelled else None)
    numbers = np.linspace(0, opened.images - 1, min(settings.images, opened.images)).round().astype(int)
    if max(settings.bands or [0]) > settings.channels:
        raise SettingsError(f"--bands names band {max(settings.bands or [0])}. Give --channels, the number of bands.")
    cells, failed = read_cells(opened, numbers, settings.channels, settings.bands, labels=labelled)
    left = ""
    if failed:
        name, reason = next(iter(failed.items()))
        cure = cure_of([*failed.values()], opened, settings.channels, "--channels")
        left = f"{len(failed)} of {len(cells)} images cannot be read. The first is {name}: {reason}. {cure}"
        if len(failed) == len(cells):
            raise ShardError(f"No sheet is written. {left}")
    columns = math.ceil(math.sqrt(2 * len(cells)))
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    title = f"{len(cells)} of {opened.images:,} images"
    classes = f" in {len(opened.classes)} classes" if opened.classes else ""
    write_sheet(settings.output, rows, title + classes)
    print(f"{title} written to {settings.output}")
    if left:
        print(without_controls(left), file=sys.stderr)


def read_cells(
    opened: Source, numbers: np.ndarray, channels: int, bands: Sequence[int] | None = None, *, labels: bool = True
) -> tuple[list[Cell], dict[str, str]]:
    """Return a cell of the sheet for each of the samples `numbers`, which are indices in the source.

    Also return the names of the images that cannot be read, each with the reason.

    The caption is the class, or the name of the sample if the sample has no label or `labels` is false. A corrupt image
    is shown as a white cell whose caption begins with `corrupt`.
    """
    opened.prepare(numbers)
    read, captions, failed = list[Tensor](), list[str](), dict[str, str]()
    for number in numbers.tolist():
        try:
            read.append(read_bands(opened.image(number), channels, bands))
            captions.append(caption_of(opened, number) if labels else opened.name(number).rpartition("/")[2])
        except ImageError as error:
            failed[opened.name(number)] = str(error)
            read.append(torch.full((1, 1, 1), 255, dtype=torch.uint8))
            captions.append(f"corrupt: {opened.name(number)}")
    stretched = [image for image in read if image.dtype != torch.uint8]
    limits = quantiles(stretched) if stretched else None
    cells = []
    for image, caption in zip(read, captions, strict=True):
        shown = as_rgb(image[None] / 255) if image.dtype == torch.uint8 else as_rgb(image[None], limits=limits)
        cells.append(Cell(to_bytes(shown[0]), caption))
    return cells, failed


def read_bands(image: Undecoded, channels: int, bands: Sequence[int] | None) -> Tensor:
    """Return the shown bands of an image, (K, H, W): uint8, or float32 if the image has more than 8 bits.

    Values without data are NaN. Images of more than 256 pixels are shrunk.

    Raises:
        ImageError: the image is damaged, or has another number of bands.
    """
    kind = stored_type(image)
    picture = Decoding(channels, pixel_type=kind, nodata=None if kind == "uint8" else "auto").picture(image)
    shrink = picture_shrink(picture.size)
    if kind == "uint8":
        return shown_bands(picture.pixels(picture.fraction(shrink))[None], bands)[0]
    values = shown_bands(picture.pixels()[None, :, ::shrink, ::shrink], bands)[0].float()
    if picture.absent is not None:
        values[shown_bands(picture.absent[None, :, ::shrink, ::shrink], bands)[0]] = torch.nan
    return values


def picture_shrink(size: tuple[int, int], side: int = 256) -> int:
    """Return the largest factor, 1, 2, 4 or 8, by which an image (H, W) can shrink to sides of at least `side` pixels.

    The factor is 1 if the image is already smaller.
    """
    return next(shrink for shrink in (8, 4, 2, 1) if shrink == 1 or min(size) // shrink >= side)


def main() -> None:
    with exit_on_user_error():
        if any(word.partition("=")[0] in OF_A_RUN for word in sys.argv[1:]):
            from tessera.extras.shard_tools import crop_preview  # imported here, because the import takes seconds

            crop_preview.main(sys.argv[1:])
        else:
            run(parse(PreviewSettings))
