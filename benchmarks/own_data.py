"""Measure the processor time per image of the user's data and stages, beside webdataset's own pipeline.

    python benchmarks/own_data.py [--output benchmarks/results/own_data.md]

All rows read the same photographs, decode them, and cut a random crop of 224 pixels with mirroring, in one process with
one thread. In each of several rounds, all rows are measured one after the other. The table shows medians.
"""

# pyright: reportAttributeAccessIssue=false
# webdataset does not declare the names that it exports.
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import webdataset as wds
from PIL import Image
from pyarrow import parquet
from pydantic import Field
from tables import machine, publish, table, typed_command
from torchvision.transforms import v2

from tessera.data.batch_sampler import BatchSampler
from tessera.data.crops import RandomCrop, RandomCropConfig
from tessera.data.loader import Reading, training_batches
from tessera.data.ordered_shards import OrderedShards
from tessera.data.shards import DEFAULT
from tessera.data.shards.access import Access
from tessera.data.user_code import Augment, load_stages
from tessera.runtime.settings import Settings, parse

BATCH = 32
CROP = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor()])


class OwnData(Settings):
    """Measure the user's data and stages beside webdataset's pipeline."""

    images: int = Field(default=256, ge=BATCH)
    """number of generated photographs"""
    rounds: int = Field(default=5, ge=1)
    """number of rounds"""
    output: Path | None = None
    """Markdown file to write"""


def photograph(number: int) -> bytes:
    """Return a JPEG of 500 x 1000 pixels and about 110 kB: coarse shapes with fine noise."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 17, 3), dtype=np.uint8)).resize(
        (1000, 500), Image.Resampling.BICUBIC
    )
    pixels = np.clip(np.asarray(coarse) + rng.normal(0, 9, (500, 1000, 1)), 0, 255).astype(np.uint8)
    encoded = BytesIO()
    Image.fromarray(pixels).save(encoded, "JPEG", quality=80)
    return encoded.getvalue()


class Opened(torch.utils.data.Dataset):
    """Map-style data set that decodes with Pillow, as torchvision's data sets do."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Image.Image, int]:
        return Image.open(BytesIO(self.files[number])).convert("RGB"), 0


def write(folder: Path, files: list[bytes]) -> tuple[str, str]:
    """Write the photographs as a tar and as a Parquet file, and return the paths."""
    tar, table_file = str(folder / "images.tar"), str(folder / "images.parquet")
    with wds.TarWriter(tar) as writer:
        for number, content in enumerate(files):
            writer.write({"__key__": f"{number:05d}", "jpg": content, "cls": b"0"})
    images = pa.array(
        [{"bytes": content, "path": None} for content in files],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    parquet.write_table(pa.table({"image": images}), table_file, row_group_size=100)
    return tar, table_file


def ours(shards: Any, images: int, source: Access = DEFAULT, augment: Augment | None = None) -> Iterator[Any]:
    """Yield the batches of one epoch of this project's loader."""
    crop = RandomCrop(RandomCropConfig(size=224, scale=(0.08, 1.0)))
    return iter(
        training_batches(
            shards,
            crop,
            BatchSampler(BATCH, 0, images // BATCH),
            seed=0,
            reading=Reading(source=source, augment=augment),
        )
    )


def behind(source: Any) -> Iterable[Any]:
    """Return webdataset's pipeline behind a source of samples: decode, crop, batch."""
    stages = (wds.decode("pil"), wds.to_tuple("jpg"), wds.map_tuple(CROP), wds.batched(BATCH, partial=False))
    return wds.DataPipeline(source, *stages)


def rows(tar: str, table_file: str, files: list[bytes]) -> dict[str, Callable[[], Iterable[Any]]]:
    """Return the name of each row, and a function that starts its epoch."""
    images, steps = len(files), len(files) // BATCH
    staged = Access(stages=load_stages([wds.decode("pil")]))
    plain = Access(stages=load_stages([wds.map(lambda sample: sample)]))
    replaced = Augment((v2.Compose(CROP.transforms[:2]),), 0, replaces=True)
    return {
        "webdataset: WebDataset, shuffle(100), decode(pil), crop": lambda: behind(
            wds.WebDataset(tar, shardshuffle=False).shuffle(100)
        ),
        "OrderedShards, decode(pil), crop": lambda: behind(OrderedShards(tar, batch_size=BATCH, steps=steps)),
        "Tessera: stage decode(pil), own crop": lambda: ours(tar, images, staged),
        "Tessera: a stage that changes nothing, own crop": lambda: ours(tar, images, plain),
        "Tessera: no stage, own crop": lambda: ours(tar, images),
        "Tessera: no stage, torchvision's crop (`augment_replaces`)": lambda: ours(tar, images, augment=replaced),
        "Tessera: Parquet, row groups of 100": lambda: ours(table_file, images),
        "Tessera: map-style data set that decodes with Pillow": lambda: ours(Opened(files), images),
    }


def main(argv: list[str] | None = None) -> int:
    settings = parse(OwnData, argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        files = [photograph(number) for number in range(settings.images)]
        tar, table_file = write(Path(folder), files)
        measured: dict[str, list[float]] = {}
        for turn in range(settings.rounds + 1):
            for name, start in rows(tar, table_file, files).items():
                began = time.process_time()
                count = sum(BATCH for _ in start())
                if turn:  # the first round warms up caches
                    measured.setdefault(name, []).append((time.process_time() - began) / count * 1e3)
    base = statistics.median(next(iter(measured.values())))
    lines = [
        (name, f"{statistics.median(ms):.2f}", f"{min(ms):.2f} to {max(ms):.2f}", f"{base / statistics.median(ms):.2f}")
        for name, ms in measured.items()
    ]
    size = sum(map(len, files)) / len(files) / 1e3
    publish(
        [
            "# Data and stages of the user",
            f"{typed_command()}: {settings.images} generated photographs of 1000 x 500 pixels and "
            f"{size:.0f} kB; medians of {settings.rounds} rounds; one process, one thread, batches of {BATCH}.",
            f"{machine()}, webdataset {wds.__version__}.",
            "All rows decode, and cut one random crop of 224 pixels with mirroring.",
            table(["", "ms of a core per image", "lowest to highest", "times webdataset"], lines),
        ],
        settings.output,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
