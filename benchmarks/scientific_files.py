"""Compare the values of TIFF, NumPy and DICOM files with those that other libraries read.

    python benchmarks/scientific_files.py FOLDER ... > table.md

Each FOLDER holds files. A file is read by its decoder (`data.decoders`), and by an independent reader: rasterio, or
tifffile for files of several pages; Pillow for colours that the decoder leaves to Pillow; pydicom; NumPy. A result is
`equal` only if shape, type and every value are equal. Needs rasterio, and the extras tiff and dicom.
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import rasterio  # pyright: ignore[reportMissingImports]
import tifffile
from PIL import Image
from pydicom import dcmread
from pydicom.pixels.processing import apply_rescale
from pydicom.pixels.utils import pixel_array

from tessera.data.decode import ImageError
from tessera.data.decoders import DECODERS, decoder_of
from tessera.data.headers import HeaderError
from tessera.data.nodata import missing
from tessera.data.pages import count_pages, single_page
from tessera.data.values import fitted, type_of

LIMITS = {"most_bands": 4096, "max_pixels": 178_956_970}
MOST = 8  # maximum number of pages of a file that are compared


def main() -> None:
    """Print the table of the files of all folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    warnings.simplefilter("ignore")
    rows = [
        (folder.name, path.name, *result(path))
        for folder in parser.parse_args().folders
        for path in sorted(folder.iterdir())
        if decoder_of(path.read_bytes()) is not None
    ]
    kinds = ("equal", "refused", "no other reader", "different")
    print(f"| files of | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
    for folder in dict.fromkeys(row[0] for row in rows):
        counts = Counter(row[2] for row in rows if row[0] == folder)
        print(f"| {folder} | {' | '.join(str(counts[kind]) for kind in kinds)} |")
    print("\n| files | result | the first |\n|---|---|---|")
    groups: dict[str, list[str]] = {}
    for folder, name, kind, how in rows:
        reason = how.partition(": ")[0] if kind == "equal" else " ".join(how.split()).replace("|", "/")
        groups.setdefault(f"{kind}, {reason}", []).append(f"{folder}/{name}")
    for group, names in sorted(groups.items()):
        print(f"| {len(names)} | {group} | {names[0]} |")


def result(path: Path) -> tuple[str, str]:
    """Return the kind of result for a file, and the form of the image or the reason why it is not read."""
    encoded = path.read_bytes()
    name = decoder_of(encoded) or ""
    try:
        pages = count_pages(encoded)
        files = [single_page(encoded, page) for page in range(min(pages, MOST))]
        found = [DECODERS[name].read(file, **LIMITS).values for file in files]
        for values in found:
            fitted(values, type_of(values), missing(values, None))
    except (HeaderError, ImageError) as error:
        return "refused", str(error).partition(". ")[0][:160]
    shapes = " ".join(dict.fromkeys(f"{values.dtype} {values.shape}" for values in found))
    form = shapes + (f", {pages} pages" if pages > 1 else "")
    others, readers = [], dict.fromkeys(range(len(found)), "")
    for reader, read in READERS[name].items():
        try:
            other = read(path, len(found))
        except Exception as error:  # the libraries raise many kinds of errors
            others.append(f"{reader}: {type(error).__name__}")
            continue
        others.append(f"{reader}: {' '.join(dict.fromkeys(f'{one.dtype} {one.shape}' for one in other))}")
        for page, (one, values) in enumerate(zip(other, found, strict=False)):
            readers[page] = readers[page] or (reader if equal(one, values) else "")
    if all(readers.values()):
        return "equal", f"by {' and '.join(sorted({*readers.values()}))}: {form}"
    readable = any("(" in one for one in others)
    return "different" if readable else "no other reader", f"{form}. {'; '.join(others)}"


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Return True if the shapes and all values are equal. NaN equals NaN."""
    return one.shape == other.shape and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def by_rasterio(path: Path, pages: int) -> list[np.ndarray]:
    """Return the bands of the first pages of a TIFF (H, W, bands)."""
    found = []
    for page in range(pages):
        with rasterio.open(path if pages == 1 else f"GTIFF_DIR:{page + 1}:{path}") as file:
            found.append(file.read().transpose(1, 2, 0))
    return found


def by_tifffile(path: Path, pages: int) -> list[np.ndarray]:
    """Return the first images (H, W, bands) of all series of a TIFF, in the order of their axes."""
    found: list[np.ndarray] = []
    with tifffile.TiffFile(path) as file:
        for series in file.series:
            axes = series.get_axes(squeeze=False)
            values = series.asarray(squeeze=False)
            others, bands = [one for one in axes if one not in "YXCS"], [one for one in "CS" if one in axes]
            values = values.transpose([axes.index(one) for one in (*others, "Y", "X", *bands)])
            first = len(others)
            found += [*values.reshape(-1, *values.shape[first : first + 2], int(np.prod(values.shape[first + 2 :])))]
    return found[:pages]


def by_pillow(path: Path, pages: int) -> list[np.ndarray]:
    """Return the pixels of the first pages as gray, RGB or RGBA (H, W, bands)."""
    found = []
    with Image.open(path) as image:
        for page in range(pages):
            image.seek(page)
            kept = image.mode if image.mode in ("L", "LA", "RGBA") else "RGB"
            values = np.asarray(image.convert({"1": "L", "PA": "RGBA"}.get(image.mode, kept)))
            found.append(values.reshape(*values.shape[:2], -1))
    return found


def by_numpy(path: Path, pages: int) -> list[np.ndarray]:
    """Return the array of a file, with an axis for the band of a gray image."""
    found = np.load(path, allow_pickle=False)
    values = found if isinstance(found, np.ndarray) else found[found.files[0]]
    return [values[..., None] if values.ndim == 2 else values]


def by_pydicom(path: Path, pages: int) -> list[np.ndarray]:
    """Return the values of the modality of the first frames (H, W, bands)."""
    data = dcmread(path)
    values = pixel_array(data)
    if data.PhotometricInterpretation == "MONOCHROME1":
        values = 2 ** int(data.BitsStored) - 1 - values
    values = apply_rescale(values, data) if data.SamplesPerPixel == 1 else values
    values = values.astype(np.float32) if values.dtype == np.float64 else values
    values = values[..., None] if data.SamplesPerPixel == 1 else values
    return [*values[:pages]] if int(data.get("NumberOfFrames") or 1) > 1 else [values]


READERS: dict[str, dict[str, Callable[[Path, int], list[np.ndarray]]]] = {
    "tiff": {"rasterio": by_rasterio, "tifffile": by_tifffile, "Pillow": by_pillow},
    "arrays": {"NumPy": by_numpy},
    "dicom": {"pydicom": by_pydicom},
}

if __name__ == "__main__":
    main()
