"""Measure the time and memory that `data.make_shards` needs for a million files.

    python benchmarks/make_shards.py [--files 1000000] [--output benchmarks/results/make_shards.md]

The benchmark writes two folders of class folders and removes them at the end. The first folder holds empty files and
one JPEG. The second folder holds hard links to a few small JPEGs. The table has these columns:

- "to the first shard": time from the start of the command until it starts to write the first shard. This time includes
  imports, listing, labels, split and names.
- "whole": time of the whole command, including the report, which lists every empty file.
- "memory": largest resident set of any process.
- "imports": resident set of a process that only imports the command.
"""

import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from pydantic import Field
from rich.console import Console
from rich.table import Table

from tessera.runtime.settings import Settings, parse

HEADINGS = ("files", "kind", "to the first shard", "whole", "files a second", "memory", "imports")
FOLDERS = 1000
PICTURES = 25
SIDE = 32  # pixels


class MakeShardsBenchmark(Settings):
    """Measure the time and memory of `data.make_shards`."""

    files: int = Field(default=1_000_000, ge=1000)
    """number of files in each of the two folders"""
    folder: Path = Path(tempfile.gettempdir())
    """folder in which the files are created; each file takes an inode or a directory entry"""
    workers: int = Field(default=os.cpu_count() or 1, ge=1)
    """number of worker processes of `data.make_shards`"""
    output: Path | None = None
    """Markdown file for the table"""


def main(settings: MakeShardsBenchmark) -> None:
    scratch = Path(tempfile.mkdtemp(dir=settings.folder, prefix="make-shards-"))
    try:
        _, _, imports = run([sys.executable, "-c", "import tessera.data.make_shards"], Path("/nonexistent"))
        rows = []
        pictures = photos(scratch / "pictures")
        for kind, linked in (("empty", []), ("JPEG, 32 x 32", pictures)):
            fill(scratch / "images", settings.files, linked)
            shutil.copy(pictures[0], scratch / "images" / "class0000" / "one.jpg")
            command = [sys.executable, "-m", "tessera.data.make_shards", scratch / "images", scratch / "shards"]
            first, whole, memory = run([*command, f"--workers={settings.workers}"], scratch / "shards")
            rate = f"{settings.files / (whole - first):,.0f}"
            memories = (f"{memory / 1e6:,.0f} MB", f"{imports / 1e6:,.0f} MB")
            rows.append((f"{settings.files:,}", kind, f"{first:.1f} s", f"{whole:.1f} s", rate, *memories))
            for name in ("images", "shards"):
                shutil.rmtree(scratch / name, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    show(rows, settings)


def photos(folder: Path) -> list[Path]:
    """Write a few JPEGs of noise and return their paths."""
    folder.mkdir()
    paths = [folder / f"{n}.jpg" for n in range(PICTURES)]
    for n, path in enumerate(paths):
        pixels = np.random.default_rng(n).integers(0, 256, (SIDE // 4, SIDE // 4, 3), dtype=np.uint8)
        file = BytesIO()
        Image.fromarray(pixels).resize((SIDE, SIDE)).save(file, "JPEG")
        path.write_bytes(file.getvalue())
    return paths


def fill(folder: Path, files: int, pictures: list[Path]) -> None:
    """Write class folders of empty files, or of hard links to `pictures`.

    A few pictures are needed for many links, because ext4 allows at most 65,000 links to a file.
    """
    for n in range(files):
        path = folder / f"class{n % FOLDERS:04d}" / f"photo_{n:08d}.jpg"
        if n < FOLDERS:
            path.parent.mkdir(parents=True, exist_ok=True)
        if pictures:
            os.link(pictures[n % len(pictures)], path)
        else:
            path.touch()


def run(command: list[str | Path], shards: Path) -> tuple[float, float, int]:
    """Run the command. Return the seconds to the first shard and to the end, and the largest resident set in bytes."""
    start, first = time.monotonic(), 0.0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if not first and (any(shards.glob(".*.tar.*.tmp")) or any(shards.glob("*.tar"))):
            first = time.monotonic() - start
        time.sleep(0.05)
    return first, time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def show(rows: list[tuple[str, ...]], settings: MakeShardsBenchmark) -> None:
    """Print the table, and write it to a Markdown file if `--output` is given."""
    table = Table(*HEADINGS, title=f"data.make_shards, {settings.workers} workers")
    for cells in rows:
        table.add_row(*cells)
    Console().print(table)
    if settings.output:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
        lines = [
            "# Making shards",
            "",
            f"`python benchmarks/make_shards.py`, {settings.workers} workers, {machine}.",
            "",
        ]
        lines += ["| " + " | ".join(cells) + " |" for cells in (HEADINGS, ["--:"] * len(HEADINGS), *rows)]
        settings.output.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(parse(MakeShardsBenchmark))
