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
import rasterio
import tifffile
from PIL import Image
from pydicom import dcmread
from pydicom.pixels import apply_rescale, pixel_array

from tessera.data.decoders import DECODERS, decoder_of
from tessera.data.headers import HeaderError

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
    print("\n| file | result | how |\n|---|---|---|")
    for folder, name, kind, how in rows:
        print(f"| {folder}/{name} | {kind} | {' '.join(how.split()).replace('|', '/')} |")


def result(path: Path) -> tuple[str, str]:
    """Return the kind of result for a file, and the form of the image or the reason why it is not read."""
    encoded = path.read_bytes()
    decoder = DECODERS[name := decoder_of(encoded) or ""]
    pages = 1
    try:
        if hasattr(decoder, "count") and (pages := decoder.count(encoded)) > 1:
            files = [decoder.single(encoded, page, **LIMITS) for page in range(min(pages, MOST))]
            found = np.stack([decoder.read(file, **LIMITS).values for file in files])
        else:
            found = decoder.read(encoded, **LIMITS).values
    except HeaderError as error:
        return "refused", str(error).partition(". ")[0][:160]
    except ValueError as error:
        return "refused", f"pages of different sizes: {error}"[:160]
    form = f"{found.dtype} {found.shape}" + (f", {pages} pages" if pages > 1 else "")
    others, problems = [], []
    for reader, read in READERS[name].items():
        try:
            other = read(encoded, path, pages)
        except Exception as error:  # the libraries raise many kinds of errors
            problems.append(f"{reader}: {type(error).__name__}")
            continue
        if other.shape == found.shape and np.array_equal(other, found, equal_nan=other.dtype.kind == "f"):
            return "equal", f"{form}, by {reader}"
        others.append(f"{reader}: {other.dtype} {other.shape}")
    if not others:
        return "no other reader", f"{form}. {'; '.join(problems)}"
    return "different", f"{form}. {'; '.join(others)}"


def by_rasterio(encoded: bytes, path: Path, pages: int) -> np.ndarray:
    """Return the bands of the first page (H, W, bands)."""
    with rasterio.open(path) as file:
        return file.read().transpose(1, 2, 0)


def by_tifffile(encoded: bytes, path: Path, pages: int) -> np.ndarray:
    """Return the images of the first series: (H, W, bands), or (pages, H, W, bands) for several images."""
    with tifffile.TiffFile(path) as file:
        axes = file.series[0].get_axes(squeeze=False)
        values = file.asarray(series=0, squeeze=False)
    others, bands = [one for one in axes if one not in "YXCS"], [one for one in "CS" if one in axes]
    values = values.transpose([axes.index(one) for one in (*others, "Y", "X", *bands)])
    first = len(others)
    images = values.reshape(-1, *values.shape[first : first + 2], int(np.prod(values.shape[first + 2 :])))
    return images[:MOST] if pages > 1 else images[0]


def by_pillow(encoded: bytes, path: Path, pages: int) -> np.ndarray:
    """Return the pixels of the first page as gray, RGB or RGBA (H, W, bands)."""
    image = Image.open(path)
    image.load()
    mode = {"1": "L", "PA": "RGBA"}.get(image.mode, image.mode if image.mode in ("L", "LA", "RGBA") else "RGB")
    values = np.asarray(image.convert(mode))
    return values.reshape(*values.shape[:2], -1)


def by_numpy(encoded: bytes, path: Path, pages: int) -> np.ndarray:
    """Return the array of a file, with an axis for the band of a gray image."""
    found = np.load(path, allow_pickle=False)
    values = found if isinstance(found, np.ndarray) else found[found.files[0]]
    return values[..., None] if values.ndim == 2 else values


def by_pydicom(encoded: bytes, path: Path, pages: int) -> np.ndarray:
    """Return the values of the modality (H, W, bands), or (pages, H, W, bands) for several frames."""
    data = dcmread(path)
    values = pixel_array(data)
    if data.PhotometricInterpretation == "MONOCHROME1":
        values = 2 ** int(data.BitsStored) - 1 - values
    values = apply_rescale(values, data) if data.SamplesPerPixel == 1 else values
    values = values.astype(np.float32) if values.dtype == np.float64 else values
    values = values[..., None] if data.SamplesPerPixel == 1 else values
    return values[:MOST] if pages > 1 else values


READERS: dict[str, dict[str, Callable[[bytes, Path, int], np.ndarray]]] = {
    "tiff": {"rasterio": by_rasterio, "tifffile": by_tifffile, "Pillow": by_pillow},
    "arrays": {"NumPy": by_numpy},
    "dicom": {"pydicom": by_pydicom},
}

if __name__ == "__main__":
    main()
