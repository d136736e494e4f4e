"""Compare the pixels of `data.decode` with those of Pillow for all JPEGs, PNGs, WebPs and TIFFs in folders.

    python benchmarks/other_images.py FOLDER ...

The folders may hold the test images of other projects. Every image is decoded to RGB over white, with 16-bit gray
values divided by 257. Exit status: 1 if an image differs from Pillow's, or if decoding raises another error than
`ImageError`.
"""

import logging
import sys
import warnings
from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from tessera.data.decode import FORMATS, ImageError, decode
from tessera.data.decoders import decoder_of
from tessera.data.headers import is_jpeg, is_png
from tessera.data.levels import eight_bits

KINDS = ("equal", "equal up to one level", "different", "refused", "refused, as by Pillow", "crash")


def by_pillow(encoded: bytes) -> np.ndarray:
    """Return Pillow's pixels (H, W, 3) of an encoded image."""
    image = Image.open(BytesIO(encoded), formats=(*FORMATS, "TIFF"))
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = Image.fromarray(eight_bits(np.asarray(image)))
    if image.mode in ("LA", "PA", "RGBA") or image.info.get("transparency") is not None:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))


def compare(encoded: bytes) -> tuple[str, str]:
    """Return one of `KINDS` and a reason for an encoded image."""
    try:
        expected = by_pillow(encoded)
    except Exception:  # Pillow raises many kinds of errors
        expected = None
    try:
        pixels = decode(encoded).permute(1, 2, 0).numpy().astype(int)
    except ImageError as error:
        return "refused" if expected is not None else "refused, as by Pillow", str(error)
    except Exception as error:
        return "crash", repr(error)
    if expected is None or pixels.shape != expected.shape:
        return "different", f"{pixels.shape}, but Pillow's shape is {None if expected is None else expected.shape}"
    largest = np.abs(pixels - expected).max()
    return KINDS[min(largest, 2)], f"by {largest} levels"


def main(folders: list[str]) -> int:
    """Print the images that are not equal, and a table."""
    warnings.simplefilter("ignore")
    logging.disable()
    rows = []
    for folder in folders:
        counts: Counter[str] = Counter()
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            encoded = path.read_bytes()
            if is_jpeg(encoded) or is_png(encoded) or decoder_of(encoded) or encoded[8:12] == b"WEBP":
                kind, reason = compare(encoded)
                counts[kind] += 1
                if kind != "equal":
                    print(f"{kind}: {path}: {reason}")
        rows.append((Path(folder).name, counts))
    print("\n| | images | " + " | ".join(KINDS) + " |\n|---|" + "--:|" * (len(KINDS) + 1))
    for name, counts in rows:
        print(f"| {name} | {counts.total()} | " + " | ".join(str(counts[kind]) for kind in KINDS) + " |")
    return int(not rows or any(counts["different"] or counts["crash"] or not counts for _, counts in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
