"""Measure the peak memory of a run: of its first score, of its training step, and of commands on its encoder.

    python benchmarks/memory.py --data SHARDS [--output benchmarks/results/memory.md]

Each run takes one step of few images with one loader worker. The memory of a process tree is the sum of the
proportional set sizes (PSS) of its processes, read twice a second: a page that processes share counts once.
"""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from tables import machine, publish, table, typed_command

from tessera.runtime.settings import Settings, parse

RUNS = [
    ("vit_small", "dino"),
    ("rope_vit_small", "dinov3"),
    ("swin_tiny", "lejepa"),
    ("twins_svt_small", "mae"),
    ("navit_small", "lejepa"),
    ("vit_small", "mae"),
    ("vit_small", "dinov2"),
    ("vit_small", "lejepa"),
    ("swin_tiny", "dino"),
    ("timm:resnet50", "lejepa"),
    ("sam_vit_b", "mae"),
]
"""Encoder and method of each run, at the default image size of the encoder."""
FLAGS = {"dinov3": ["--dinov3.gram_start", "1"]}
"""Further flags of methods. A Gram teacher from step 0 on would need an earlier run."""
SCORED = "step 0:"
"""Start of the line that a run prints after its first score."""


class Memory(Settings):
    """Measure the peak memory of runs and commands."""

    data: str
    """labelled SHARDS of photographs; the first images are used"""
    images: int = Field(default=40, ge=10)
    """number of images of each score"""
    batch_size: int = Field(default=4, ge=2)
    """number of images in the step"""
    only: list[str] = Field([])
    """encoders to measure; default: all"""
    output: Path | None = None
    """Markdown file to write"""


def tree(process: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    found = [process]
    try:
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    except OSError:
        pass
    return found


def held(process: int) -> int:
    """Return the bytes that a process tree holds: the sum of the PSS."""
    total = 0
    for one in tree(process):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def peaks(command: Sequence[str], folder: Path) -> tuple[int, int]:
    """Run a command, and return its peak memory before and after it prints `SCORED`."""
    most, after = [0, 0], threading.Event()
    env = os.environ | {"OMP_NUM_THREADS": "2", "TESSERA_CACHE": str(folder / "cache")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    lines: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith(SCORED):
                after.set()

    reader = threading.Thread(target=read)
    reader.start()
    while process.poll() is None:
        place = int(after.is_set())
        most[place] = max(most[place], held(process.pid))
        time.sleep(0.5)
    reader.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(lines[-20:])}")
    return most[0], most[1]


def few(data: str, images: int, folder: Path) -> list[str]:
    """Write two shards with `images` images of two classes each, and return their paths."""
    from tessera.data.shards import open_shards

    opened, written = open_shards(data), []
    for part in range(2):
        path = folder / f"part-{part}.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(part * images, (part + 1) * images):
                stored = opened.stored_image(number)
                assert isinstance(stored, bytes)  # as those of tars are
                for name, content in (
                    (f"{number:04d}.jpg", stored),
                    (f"{number:04d}.cls", str(number % 2).encode()),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        written.append(str(path))
    return written


def main(settings: Memory) -> None:
    """Measure all runs and print the table."""
    if unknown := {*settings.only} - {encoder for encoder, _ in RUNS}:
        raise SystemExit(f"Unknown encoder: {', '.join(sorted(unknown))}.")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train, val = few(settings.data, settings.images, folder)
        done: set[str] = set()
        for encoder, method in RUNS:
            if settings.only and encoder not in settings.only:
                continue
            run = folder / f"{encoder}-{method}".replace(":", "-")
            start = ["tessera", "pretrain", "--method", method, "--encoder", encoder, "--data", train, "--steps", "1"]
            start += ["--batch_size", str(settings.batch_size), "--workers", "1", "--output", str(run)]
            start += FLAGS.get(method, [])
            step = max(peaks([*start, "--evaluation.view_images", "0"], folder))
            score, _ = peaks([*start, "--overwrite", "true"], folder)
            row = [encoder, method, f"{step / 1e9:.2f}", f"{score / 1e9:.2f}"]
            both = ["--checkpoint", str(run), "--train", train, "--val", val, "--workers", "1"]
            commands = {
                "embed": ["--checkpoint", str(run), "--data", train, "--output", str(run / "e.npz"), "--workers", "1"],
                "knn": both,
                "linear_probe": [*both, "--no-augment", "--epochs", "2"],
            }
            for command, flags in commands.items() if encoder not in done else ():
                row.append(f"{max(peaks(['tessera', command, *flags], folder)) / 1e9:.2f}")
            done.add(encoder)
            rows.append(row + [""] * (7 - len(row)))
            print(" | ".join(rows[-1]), flush=True)
    headings = ["encoder", "method", "training step, GB", "first score, GB", "embed, GB", "knn, GB", "linear_probe, GB"]
    parts = [
        "# Memory of evaluations",
        f"{typed_command()}: {machine()}.",
        f"One step of {settings.batch_size} images at the default size of the encoder, and evaluations of "
        f"{settings.images} images. Peak of the PSS of all processes, with one loader worker. The training step "
        "is that of a run without a score. All numbers include about 0.5 GB of the libraries.",
        table(headings, rows, text=2),
    ]
    publish(parts, settings.output)


if __name__ == "__main__":
    main(parse(Memory))
