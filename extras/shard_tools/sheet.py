"""Contact sheets: images in rows and columns with captions, drawn by matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from tessera.data.shards import ShardError, Source
from tessera.runtime.files import atomic_write

LONGEST_CAPTION = 18
"""Maximum number of characters of a caption. The middle of a longer caption is replaced by an ellipsis."""


class Cell(NamedTuple):
    """An image on a contact sheet, with its caption."""

    image: np.ndarray
    """(H, W, 3) uint8."""
    caption: str = ""


def to_bytes(image: Tensor) -> np.ndarray:
    """Convert an image with values from 0 to 1 to bytes: (3, H, W) -> (H, W, 3) uint8."""
    return (image * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()


def caption_of(opened: Source, number: int) -> str:
    """Return the class name of a sample, or `class N` if the class has no name.

    If the sample has no label, return the name of the sample.
    """
    try:
        label = opened.label(number)
    except ShardError:
        return opened.name(number).rpartition("/")[2]
    names = opened.classes or ()
    return names[label] if label < len(names) else f"class {label}"


def write_sheet(path: Path, rows: Sequence[Sequence[Cell]], title: str, *, side: float = 1.1) -> None:
    """Write a sheet as a PNG file, with one row of images for each item of `rows`.

    Args:
        path: file to write. Its folder is created.
        rows: images with captions. Rows may have different lengths.
        title: heading of the sheet.
        side: width and height of a cell in inches, at 150 dots per inch.

    Raises:
        ShardError: the file cannot be written.
    """
    columns = max(len(row) for row in rows)
    with rc_context({"text.parse_math": False, "font.size": 7}):  # show dollar signs in class names as text
        figure = Figure(figsize=(columns * side, len(rows) * side * 1.2 + 0.3), dpi=150, layout="constrained")
        for line, row in zip(figure.subplots(len(rows), columns, squeeze=False), rows, strict=True):
            for axes in line:
                axes.set_axis_off()
            for axes, cell in zip(line, row, strict=False):
                axes.imshow(cell.image)
                axes.set_title(_shortened(cell.caption), pad=3)
        figure.suptitle(title, fontsize=8)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as temporary:
                figure.savefig(temporary, format="png")
        except OSError as error:
            raise ShardError(f"{path} cannot be written: {error.strerror}. Choose another --output.") from error


def _shortened(caption: str) -> str:
    half = LONGEST_CAPTION // 2
    return caption if len(caption) <= LONGEST_CAPTION else f"{caption[: half - 1]}…{caption[-half:]}"
