"""Measure the time and memory of every encoder under every method, and the time that dropping hidden tokens saves.

    python benchmarks/pairs.py [--output benchmarks/results/pairs.md]

A step is a full training step on noise images in memory: colour changes and blur on the device, forward and backward
pass, gradient clipping, AdamW, and the update of the teacher. Every method has its default settings. DINO, DINOv2,
DINOv3 and LeJEPA use 2 crops of 224 pixels and 8 (LeJEPA: 6) crops of 96 pixels. MAE and distillation use one crop of
224 pixels. MAE hides three quarters of the tokens. The teacher of distillation is a ViT-S/16. Drop path is off. The
precision is bf16 on a GPU and float32 on a CPU. Each round measures every row of the table once, so that other work on
the machine affects all rows alike. Each measurement of training steps runs in a new process. The tables show medians.
"""

import multiprocessing
import os
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from device.settings import device, wait
from device.training import Trainer, build, random_batch
from pydantic import Field
from torch import Tensor

from tessera import encoders
from tessera.data.masking import random_mask
from tessera.encoders.base import Encoder
from tessera.encoders.images import Mask
from tessera.pretrain.methods import pretraining_methods
from tessera.pretrain.optim.adamw import adamw
from tessera.runtime.machine import processor
from tessera.runtime.settings import Settings, parse

PUBLISHED = ("vit_small", "rope_vit_small", "swin_tiny", "twins_svt_small", "navit_small", "sam_vit_b")
RATIOS = (0.5, 0.75, 0.9)
IMAGES = {"cpu": 4, "cuda": 64}
"""Default number of images per step for each type of device."""
FORWARD_IMAGES = {"cpu": 8, "cuda": 64}
PASSES = 3
"""Number of timed forward passes for each measurement."""


def one_per_family() -> tuple[str, ...]:
    """Return the variants in `PUBLISHED`, followed by the first variant of every family that is not in `PUBLISHED`."""
    covered = {encoders.family(variant) for variant in PUBLISHED}
    first = {encoders.family(variant): variant for variant in reversed(encoders.VARIANTS)}
    return (*PUBLISHED, *(variant for family, variant in first.items() if family not in covered))


class PairsBenchmark(Settings):
    """Measure the time and memory of a training step of every encoder under every method."""

    encoders: tuple[str, ...] = Field(default_factory=one_per_family)
    """encoder variants; times are also given relative to the first variant; default: one variant per family"""
    methods: tuple[str, ...] = Field(default_factory=pretraining_methods)
    """pretraining methods; with mae, the table of dropped tokens is also measured; default: all"""
    students: tuple[str, ...] = ("swin_tiny",)
    """encoder variants that learn beside the first encoder (`--distill.students`) in one more row of distill; none: no
    such row"""
    dropping: tuple[str, ...] = ("vit_base", "navit_base")
    """encoder variants in the table of dropped tokens"""
    batch_size: int | None = Field(default=None, ge=1)
    """number of images per step; default: 4 on a CPU and 64 on a GPU"""
    steps: int = Field(default=1, ge=1)
    """number of timed steps per row and round, after one warm-up step"""
    rounds: int = Field(default=3, ge=1)
    """number of rounds; each round measures every row once"""
    output: Path | None = None
    """Markdown file for the tables"""


@dataclass(frozen=True)
class Turn:
    """Measurements of one encoder under one method in one round."""

    encoder_parameters: int
    trained_parameters: int
    tokens: str
    """Number of tokens per image in the first view, as text for the table. With masks, the mean number of visible
    tokens comes first."""
    seconds: list[float]
    """Duration of each step in seconds."""
    memory: int
    """Peak memory in bytes."""


def main(settings: PairsBenchmark) -> None:
    try:
        for variant in (*settings.encoders, *settings.students, *settings.dropping):
            encoders.family(variant)
        if unknown := set(settings.methods) - set(pretraining_methods()):
            raise ValueError(f"Unknown method {min(unknown)!r}. Choose from: {', '.join(pretraining_methods())}.")
    except ValueError as error:
        raise SystemExit(str(error)) from None
    batch_size = settings.batch_size or IMAGES[device().type]
    started = time.perf_counter()
    tables = {f"Every encoder under every method, {batch_size} images a step": pair_rows(settings, batch_size)}
    if "mae" in settings.methods:
        images = FORWARD_IMAGES[device().type]
        tables[f"Dropping hidden tokens: forward pass of {images} images, no gradient"] = dropping_rows(settings)
    show(tables, settings, time.perf_counter() - started)


def pair_rows(settings: PairsBenchmark, batch_size: int) -> list[list[str]]:
    """Return the table of training steps: the headings, then a row for each method and encoder."""
    pairs = [(method, variant) for method in settings.methods for variant in settings.encoders]
    if "distill" in settings.methods and settings.students:
        pairs.append(("distill", " + ".join((settings.encoders[0], *settings.students))))
    turns: dict[tuple[str, str], list[Turn]] = {pair: [] for pair in pairs}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        for number in range(1, settings.rounds + 1):
            for method, variant in pairs:
                turn = processes.submit(take_turn, method, variant, batch_size, settings.steps).result()
                turns[method, variant].append(turn)
                said = f"{statistics.median(turn.seconds):.3f} s a step, {turn.memory / 2**30:.2f} GiB"
                print(f"round {number} of {settings.rounds}: {method} {variant}, {said}", flush=True)
    first = settings.encoders[0]
    headings = ["method", "encoder", "parameters", "trained in all", "tokens an image", "ms a step", "images/s"]
    rows = [[*headings, f"time / {first}", "peak memory"]]
    for (method, variant), taken in turns.items():
        seconds = statistics.median(s for turn in taken for s in turn.seconds)
        ratio = statistics.median(
            statistics.median(turn.seconds) / statistics.median(base.seconds)
            for turn, base in zip(taken, turns[method, first], strict=True)
        )
        cells = [method, variant, f"{taken[0].encoder_parameters:,}", f"{taken[0].trained_parameters:,}"]
        cells += [taken[0].tokens, f"{1000 * seconds:,.0f}", f"{batch_size / seconds:,.2f}", f"{ratio:.2f}"]
        rows.append([*cells, f"{statistics.median(turn.memory for turn in taken) / 2**30:.2f} GiB"])
    return rows


def take_turn(method_name: str, variant: str, batch_size: int, steps: int) -> Turn:
    """Measure some training steps of one encoder under one method. Call this function in a new process.

    `variant` is the encoder variant, or several variants of students of one teacher, joined by ` + `.
    """
    main, *others = variant.split(" + ")
    students = {"students": others} if others else {}
    method, optim, transform = build(method_name, main, batch_size, steps + 1, **students)
    method.to(device())
    optimizer = adamw(method, optim, method.frozen())
    trainer = Trainer(method, optimizer, optim, steps + 1, bf16=device().type == "cuda")
    batch = random_batch(transform, batch_size, seed=0)
    weights = sum(t.nbytes for t in [*method.parameters(), *method.buffers()])
    before = peak_memory(0)
    seconds = []
    for number in range(steps + 1):
        start = time.perf_counter()
        trainer.step(batch, number)
        wait()
        seconds.append(time.perf_counter() - start)
    encoder, view = method.trained_encoder(), batch.views[0]
    tokens = str(int(encoder.grids(view.images)[0].prod()))
    for mask in view.masks:
        how = "dropped" if method.drop else "in place"
        tokens = f"{float(mask.lengths.float().mean()):.0f} of {tokens}, {how}"
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad)
    exported = (encoder, *method.other_encoders().values())
    count = sum(p.numel() for one in exported for p in one.parameters())
    return Turn(count, trained, tokens, seconds[1:], peak_memory(before) + (weights if device().type == "cpu" else 0))


def peak_memory(before: int) -> int:
    """Return the peak memory in bytes.

    On a GPU, this is the memory allocated by torch. On a CPU, this is the peak resident memory of the process minus
    `before`.
    """
    if device().type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before


def dropping_rows(settings: PairsBenchmark) -> list[list[str]]:
    """Return the table of dropped tokens: the headings, then a row for each encoder and share of hidden tokens."""
    rounds = settings.rounds
    count = FORWARD_IMAGES[device().type]
    images = torch.randn(count, 3, 224, 224, device=device())
    cases: list[tuple[str, Encoder, dict[float, Mask]]] = []
    for variant in settings.dropping:
        encoder = build("mae", variant, count, 1)[0].trained_encoder().to(device()).eval()
        cases.append((variant, encoder, {ratio: masks(encoder, images, ratio) for ratio in RATIOS}))
    seconds: dict[tuple[str, float], list[float]] = {(v, r): [] for v in settings.dropping for r in (0.0, *RATIOS)}
    for number in range(1, rounds + 1):
        for variant, encoder, hidden in cases:
            for ratio in (0.0, *RATIOS):
                seconds[variant, ratio].append(forward_seconds(encoder, images, hidden.get(ratio)))
        print(f"round {number} of {rounds}: forward passes", flush=True)
    rows = [["encoder", "hidden", "tokens", "all tokens, ms", "visible tokens, ms", "times faster"]]
    for variant, encoder, hidden in cases:
        tokens = int(encoder.grids(images)[0].prod())
        for ratio, mask in hidden.items():
            full, some = seconds[variant, 0.0], seconds[variant, ratio]
            faster = statistics.median(a / b for a, b in zip(full, some, strict=True))
            times = [f"{1000 * statistics.median(s):,.0f}" for s in (full, some)]
            rows.append([variant, f"{ratio:.0%}", f"{int(mask.lengths[0])} of {tokens}", *times, f"{faster:.2f}"])
    return rows


def masks(encoder: Encoder, images: Tensor, ratio: float) -> Mask:
    """Return a mask that hides the fraction `ratio` of the tokens of each image, chosen at random."""
    rng, grids = np.random.default_rng(0), encoder.grids(images)
    hidden = [random_mask((int(rows), int(columns)), ratio, rng).flatten() for rows, columns in grids]
    return Mask.from_hidden(torch.from_numpy(np.concatenate(hidden)), grids).to(device())


@torch.no_grad()
def forward_seconds(encoder: Encoder, images: Tensor, mask: Mask | None) -> float:
    """Return the median time of `PASSES` forward passes, after one warm-up pass."""
    seconds = []
    for _ in range(PASSES + 1):
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=device().type == "cuda"):
            encoder(images, mask, drop=mask is not None)
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def show(tables: dict[str, list[list[str]]], settings: PairsBenchmark, seconds: float) -> None:
    """Print the tables as Markdown, and write them to a file if `--output` is given."""
    cuda = device().type == "cuda"
    threads = f"{os.cpu_count()} cores, threads of torch: {torch.get_num_threads()}"
    machine = torch.cuda.get_device_name() if cuda else f"{processor()}, {threads}"
    machine += f", torch {torch.__version__}, {'bf16' if cuda else 'float32'}"
    how = f"medians of {settings.rounds} rounds, steps timed in each: {settings.steps}"
    command = " ".join(["python benchmarks/pairs.py", *sys.argv[1:]])
    lines = ["# Pairs", "", f"`{command}`: {machine}; {how}, {seconds / 60:.0f} minutes in all.", ""]
    for title, (headings, *rows) in tables.items():
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        lines += [f"## {title}", ""]
        for cells in (headings, [f"{'-' * (width - 1)}:" for width in widths], *rows):
            lines.append("| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |")
        lines.append("")
    print("\n" + "\n".join(lines))
    if settings.output:
        settings.output.write_text("\n".join(lines))


if __name__ == "__main__":
    main(parse(PairsBenchmark))
