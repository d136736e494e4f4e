"""Make data sets of a satellite from photographs, and compare what is learned from their types of pixels.

    python benchmarks/satellite.py --photos 'FOLDER/imagenette5-{split}-*.tar' --sets SETS
    python benchmarks/satellite.py --photos ... --sets SETS --steps 300 --output benchmarks/results/satellite.md

The first command writes four data sets, folders of images whose shorter side has `side` pixels, with `train/CLASS` and
`val/CLASS`. Three have equal content. A value v of the photograph, from 0 to 255, is

    uint8         v                   PNG
    uint16        16 v                TIFF, 12 bits: 0 to 4080
    float32       0.02 + 0.8 v / 255  TIFF, a reflectance: 0.02 to 0.82
    sentinel2     13 bands            TIFF of uint16, with clouds and pixels without data

With `--steps`, LeJEPA and DINO are trained on the first three with the same settings and seed, one after the other, and
a table of the 20-NN accuracies is written. A run that is complete is not repeated.

The bands of the fourth are mixed from red, green and blue, and have the mean and the standard deviation of the bands of
Sentinel-2 (level 1C) that SSL4EO-S12 (Wang et al., 2211.07044) publishes. Bands of 20 and 60 m are blurred. Half of the
images have clouds, which also show in the cirrus band B10. A quarter lie at the edge of the swath: outside of it, all
bands are 0, which the GDAL tag names as nodata.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
import tifffile
from PIL import Image
from pydantic import Field
from scipy import ndimage
from tables import machine, publish, table, typed_command

from tessera.data.decode import Undecoded
from tessera.data.shards import open_shards
from tessera.runtime.settings import Settings, parse

BANDS = ("B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08", "B8A", "B09", "B10", "B11", "B12")
MEAN = (1605.6, 1390.8, 1314.9, 1363.5, 1549.4, 2091.7, 2371.7, 2299.9, 2560.3, 830.1, 22.1, 2177.1, 1524.1)
"""Mean of each band of SSL4EO-S12, level 1C, in units of 1e-4 of the reflectance."""
STD = (786.8, 850.3, 875.1, 1138.8, 1122.2, 1161.6, 1274.4, 1248.4, 1345.5, 577.3, 51.2, 1336.1, 1136.5)
"""Standard deviation of each band of SSL4EO-S12, level 1C."""
METRES = (60, 10, 10, 10, 20, 20, 20, 10, 20, 60, 60, 20, 20)
"""Ground resolution of each band. A pixel of the photograph stands for 10 m."""
MIXED = (
    *((0.0, 0.2, 0.8), (0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.8, 0.4, -0.2)),
    *((0.3, 1.0, -0.5), (0.2, 1.1, -0.7), (0.2, 1.2, -0.8), (0.2, 1.2, -0.9), (0.3, 0.8, -0.5)),
    *((0.0, 0.0, 0.0), (1.0, 0.3, -0.6), (1.2, -0.1, -0.5)),
)
"""Weights of red, green and blue in each band: the visible colours, then vegetation, then soil. B10 sees no ground."""
CIRRUS = BANDS.index("B10")
KINDS = ("uint8", "uint16", "float32")
METHODS = ("lejepa", "dino")


class Satellite(Settings):
    """Make data sets of a satellite from photographs, and compare what is learned from their types of pixels."""

    photos: str
    """shards of photographs with classes, a path with {split} for train and val, and perhaps a brace range"""
    sets: Path
    """folder of the data sets; those that exist are kept"""
    side: int = Field(default=96, ge=1)
    """shorter side of the images in pixels"""
    kinds: tuple[Literal["uint8", "uint16", "float32", "sentinel2"], ...] = (*KINDS, "sentinel2")
    """data sets to make"""
    most: int | None = Field(default=None, ge=1)
    """number of images of each split; default: all"""
    processes: int = Field(default=1, ge=1)
    """number of processes that write images"""
    steps: int = Field(default=0, ge=0)
    """length of the runs in steps of 64 images; 0: only make the data sets"""
    encoder: str = "vit_mini"
    """encoder of the runs"""
    runs: Path = Path("runs/satellite")
    """folder of the runs"""
    output: Path | None = None
    """Markdown file to write"""


def photographs(path: str, side: int, most: int | None) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield key, class and pixels (H, W, 3) uint8 of the photographs of some shards."""
    source = open_shards(path)
    for number in range(min(source.images, most or source.images)):
        key = source.name(number).replace(".tar/", "-").rpartition("/")[2]
        yield key, str(source.label(number)), _resized(source.image(number), side)


def _resized(encoded: Undecoded, side: int) -> np.ndarray:
    assert isinstance(encoded, bytes)
    photo = Image.open(BytesIO(encoded)).convert("RGB")
    scale = side / min(photo.size)
    width, height = (round(length * scale) for length in photo.size)
    return np.asarray(photo.resize((width, height), Image.Resampling.BICUBIC))


def scene(pixels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return bands of any scale (H, W, 13), and which pixels hold no data (H, W)."""
    rgb = (pixels / 255 - 0.45) / 0.27  # about the mean and the standard deviation of photographs
    bands = rgb @ np.array(MIXED).T + rng.normal(0, 0.05, (*pixels.shape[:2], 13))
    for band, metres in enumerate(METRES):
        if metres > 10:
            bands[..., band] = ndimage.uniform_filter(bands[..., band], metres // 10)
    height, width = pixels.shape[:2]
    if rng.random() < 0.5:
        coarse = np.asarray(ndimage.zoom(rng.normal(0, 1, (5, 5)), (height / 5, width / 5), order=3))[:height, :width]
        cover = np.clip((coarse - rng.uniform(0.3, 1.2)) / 0.6, 0, 1)[..., None]
        bands = (1 - cover) * bands + cover * (np.full(13, 3.0) + 6 * (np.arange(13) == CIRRUS))
    outside = np.zeros((height, width), dtype=bool)
    if rng.random() < 0.25:
        angle, rows, columns = rng.uniform(0, 2 * np.pi), *np.mgrid[-0.5 : 0.5 : height * 1j, -0.5 : 0.5 : width * 1j]
        outside = np.cos(angle) * rows + np.sin(angle) * columns > rng.uniform(0, 0.35)
    return bands, outside


def band_scale(path: str, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return factor and offset of each band with which scenes of 300 photographs have the published statistics."""
    values = []
    for key, _, pixels in photographs(path, side, 300):
        bands, outside = scene(pixels, generator(key))
        values.append(bands[~outside])
    joined = np.concatenate(values)
    factor = np.array(STD) / joined.std(0)
    return factor, np.array(MEAN) - factor * joined.mean(0)


def generator(key: str) -> np.random.Generator:
    """Return the random generator of a photograph."""
    return np.random.default_rng(list(key.encode()))


def write(
    one: tuple[str, str, np.ndarray], kind: str, folder: Path, scale: tuple[np.ndarray, np.ndarray] | None
) -> None:
    """Write one photograph as an image of a data set."""
    key, label, pixels = one
    path = folder / label / key
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "uint8":
        Image.fromarray(pixels).save(f"{path}.png")
    elif kind == "uint16":
        tifffile.imwrite(f"{path}.tif", 16 * pixels.astype(np.uint16), photometric="rgb")
    elif kind == "float32":
        tifffile.imwrite(f"{path}.tif", (0.02 + 0.8 * (pixels / 255)).astype(np.float32), photometric="rgb")
    else:
        assert scale is not None
        bands, outside = scene(pixels, generator(key))
        values = np.clip(np.rint(bands * scale[0] + scale[1]), 1, 10000).astype(np.uint16)
        values[outside] = 0
        tag = (42113, "s", 2, "0", False)  # GDAL_NODATA
        tifffile.imwrite(f"{path}.tif", values, photometric="minisblack", planarconfig="contig", extratags=[tag])


def make(settings: Satellite) -> None:
    """Write the data sets that do not exist."""
    scale = None
    for kind in settings.kinds:
        if (settings.sets / kind).exists():
            continue
        part = settings.sets / f"{kind}.part"
        for split in ("train", "val"):
            path = settings.photos.replace("{split}", split)
            if kind == "sentinel2" and scale is None:
                scale = band_scale(path, settings.side)
            writer = partial(write, kind=kind, folder=part / split, scale=scale)
            with ProcessPoolExecutor(settings.processes) as pool:
                written = sum(1 for _ in pool.map(writer, photographs(path, settings.side, settings.most), chunksize=8))
            print(f"{kind} {split}: {written:,} images", flush=True)
        part.rename(settings.sets / kind)


def folder(settings: Satellite, method: str, kind: str) -> Path:
    """Return the folder of a run. A run with another encoder, length or size has another one."""
    encoder = settings.encoder.replace(":", "_")
    return settings.runs / f"{method}-{kind}-{encoder}-{settings.steps}-{settings.side}"


def command(settings: Satellite, method: str, kind: str) -> list[str]:
    """Return the command of a run. All runs measure the mean and the standard deviation of their images."""
    data = settings.sets / kind
    words = ["tessera", "pretrain", "--method", method, f"--{method}.global_size", "64", "--encoder", settings.encoder]
    words += ["--steps", str(settings.steps), "--batch_size", "64", "--data.mean", "auto", "--data.std", "auto"]
    words += ["--data", str(data / "train"), "--evaluation.val", str(data / "val"), "--precision", "fp32"]
    return [*words, "--evaluate_every", str(settings.steps), "--output", str(folder(settings, method, kind))]


def scores(settings: Satellite, method: str, kind: str) -> tuple[float, float, float]:
    """Return the 20-NN accuracies of raw pixels, and of the encoder before and after a run. Train if needed."""
    file = folder(settings, method, kind) / "metrics.jsonl"

    def found() -> list[dict]:
        records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [record for record in records if "knn_top1" in record]

    if not found() or found()[-1]["step"] < settings.steps:
        words = command(settings, method, kind)
        print("$", *words, flush=True)
        subprocess.run([*words, "--resume"] if file.exists() else words, check=True)
    first, *_, last = found()
    return first["knn_pixels"], first["knn_top1"], last["knn_top1"]


def compare(settings: Satellite) -> str:
    """Train on the three data sets of equal content, and return the table."""
    images = sum(1 for _ in (settings.sets / "uint8" / "val").rglob("*.png"))
    rows = []
    for method in METHODS:
        for kind in KINDS:
            pixels, start, end = scores(settings, method, kind)
            error = 100 * (end * (1 - end) / images) ** 0.5
            cells = [f"{100 * pixels:.1f}", f"{100 * start:.1f}", f"{100 * end:.1f} ± {error:.1f}"]
            rows.append([f"{method}, {kind}", *cells])
    return table(["run", "raw pixels", "start", f"after {settings.steps:,} steps"], rows)


def main() -> None:
    settings = parse(Satellite)
    make(settings)
    if settings.steps:
        lines = [
            "# Types of pixels",
            f"{typed_command()}: five classes of Imagenette as 8 bits, as 12 bits in uint16 and as "
            f"reflectances in float32, with a shorter side of {settings.side} pixels and crops of 64. {machine()}",
            "20-NN accuracy in percent, with one standard error of the validation images. The runs of a method have "
            "the same seed, settings and crops. They differ by the rounding of resized values.",
            compare(settings),
            "```bash\n" + "\n".join(" ".join(command(settings, m, k)) for m in METHODS for k in KINDS) + "\n```",
        ]
        publish(lines, settings.output)


if __name__ == "__main__":
    sys.exit(main())
