"""Checks and measurements that need a CUDA device: `python benchmarks/device_check.py --data 'shards/*.tar'`.

1. The losses in bf16 on the device are compared with the losses in float32 on the CPU, for every method with every
   `*_micro` encoder.
2. The speed of ViT-S/16 and ViT-B/16 is measured under every method with its default settings. The table shows images
   per second, peak memory, and the time of cutting and colour augmentation as a share of a step. With --data, the table
   also shows the time that the device waits for the loader.
3. Every method is measured with an encoder of every family (benchmarks/pairs.py).
4. With --cifar, each method that has a preset configs/cifar10_METHOD.yaml trains for a short time. The k-NN accuracy is
   measured before and after this training.

The tables are written to benchmarks/results/. Without CUDA, the script prints a message and exits with code 0.
"""

import atexit
import copy
import functools
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from rich.console import Console
from torch import Tensor

import encoders
from data.augment import to_model_input
from data.batch import Batch
from data.collate import RawBuilder, Transform, collate
from data.dataset import decode_sample
from data.decode import Picture
from data.loader import Reading, training_batches
from data.resample import cut_views
from data.sampler import BatchSampler
from pretrain.methods import METHODS, pretraining_methods
from pretrain.methods.base import Method, RunSize, supported
from pretrain.optim.adamw import OptimConfig, ResolvedOptim, apply_schedules, clip_gradients, parameter_groups
from runtime.settings import Settings, parse

ROOT = Path(__file__).parent.parent


class DeviceCheck(Settings):
    """Check the training and measure its speed on a CUDA device."""

    data: str | None = None
    """SHARDS of full-size images, to measure the wait for the loader; default: the loader is not measured"""
    cifar: str | None = None
    """folder with the CIFAR-10 shards cifar10-{train,test}-*.tar.gz; default: no training on CIFAR-10"""
    steps: int = Field(default=20, ge=1)
    """number of training steps in each measurement"""
    batch_size: int = Field(default=128, ge=2)
    """number of images per step of ViT-S/16; ViT-B/16 takes half of this number"""
    workers: int = Field(default=14, ge=0)
    """number of loader workers"""
    output: Path = ROOT / "benchmarks" / "results" / "device_check.md"
    """Markdown file for the tables"""


def build(
    name: str, variant: str, batch_size: int, steps: int, **settings: Any
) -> tuple[Method, ResolvedOptim, Transform]:
    """Return a method with a new encoder, the resolved optimizer settings, and the transform of the method."""
    torch.manual_seed(0)
    kind = METHODS[name]
    if "teacher" in kind.Config.model_fields:
        settings = {"teacher": untrained_teacher()} | settings
    size = RunSize(50_000, batch_size, steps)
    config, optim = kind.resolve(kind.Config(**settings), OptimConfig(warmup_steps=0), size)
    family = encoders.family(variant)
    defaults = kind.encoder_defaults(config, family, size) | supported(family, {"drop_path": 0.0})
    method = kind(encoders.build(variant, **defaults), config, steps)
    return method, optim, method.transform()


@functools.cache
def untrained_teacher() -> str:
    """Save a new ViT-S/16 to a temporary folder, for methods that learn from a frozen encoder, and return its path."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    path = Path(folder) / "teacher.safetensors"
    encoders.save(encoders.build("vit_small"), path)
    return str(path)


def random_batch(transform: Transform, images: int, seed: int) -> Batch:
    """Return a batch of noise images in the format of the loader: uint8 tensors on the CPU."""
    rng = np.random.default_rng(seed)
    pictures = [torch.from_numpy(rng.integers(0, 256, (3, 256, 256), dtype=np.uint8)) for _ in range(images)]
    return collate(transform, pictures, [rng] * images)


def whole_images(transform: Transform, images: int) -> Batch:
    """Return a batch of uncropped noise images of 375 x 500 pixels. The crops are cut later, on the device."""
    rng, builder = np.random.default_rng(0), RawBuilder()
    for _ in range(images):
        with BytesIO() as file:
            Image.fromarray(rng.integers(0, 256, (375, 500, 3), dtype=np.uint8)).save(file, "JPEG")
            picture = Picture(file.getvalue())
        _, image, views, *_ = decode_sample("", picture, transform.draw(picture.size, rng))
        builder.add(image, views)
    return builder.build()[0]


def milliseconds(work: Callable[[], object], times: int) -> float:
    """Return the median time in milliseconds of a call that runs on the device, after three warm-up calls."""
    taken = []
    for _ in range(times + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - start))
    return float(np.median(taken[3:]))


@dataclass(frozen=True)
class Trainer:
    """Method and optimizer that train in a single process, without a distributed engine."""

    method: Method
    optimizer: torch.optim.Optimizer
    optim: ResolvedOptim
    steps: int
    """Number of steps in the run."""
    bf16: bool
    """True if the forward pass runs in bfloat16 autocast."""

    def step(self, batch: Batch, number: int) -> Tensor:
        """Train on a batch that comes from the loader, and return the loss, a scalar."""
        device = next(self.method.parameters()).device
        return self.train(to_model_input(batch.to(device, non_blocking=True)), number)

    def train(self, batch: Batch, number: int) -> Tensor:
        """Train on a normalised batch that is already on the device, and return the loss, a scalar."""
        method = self.method
        apply_schedules(self.optimizer, self.optim, number, self.steps, 256)
        with torch.autocast(next(method.parameters()).device.type, torch.bfloat16, enabled=self.bf16):
            loss, _ = method(batch, number)
        loss.backward()
        parts = [[p.grad for p in part.parameters() if p.grad is not None] for part in method.trained_parts()]
        clip_gradients(parts, self.optim.clip, self.optim.clip_by)
        self.optimizer.step()
        self.optimizer.zero_grad()
        method.after_step(number)
        return loss.detach()


def agreement(settings: DeviceCheck) -> list[str]:
    """Return a table that compares losses in bf16 on the device with losses in float32 on the CPU."""
    lines = ["| method | encoder | steps | first loss, CPU | largest difference |", "|---|---|---|---|---|"]
    for name in pretraining_methods():
        for variant in (variant for variant in encoders.VARIANTS if variant.endswith("_micro")):
            method, optim, transform = build(name, variant, 16, settings.steps, **METHODS[name].small_settings)
            losses = []
            for device, bf16 in (("cpu", False), ("cuda", True)):
                twin = copy.deepcopy(method).to(device)
                optimizer = torch.optim.AdamW(parameter_groups(twin, {}), lr=0.0)
                batches = [random_batch(transform, 16, seed) for seed in range(settings.steps)]
                trainer = Trainer(twin, optimizer, optim, settings.steps, bf16)
                losses.append([trainer.step(batch, number).item() for number, batch in enumerate(batches)])
            worst = max(abs(a - b) for a, b in zip(*losses, strict=True))
            lines.append(f"| {name} | {variant} | {settings.steps} | {losses[0][0]:.4f} | {worst:.4f} |")
    return lines


def throughput(settings: DeviceCheck) -> list[str]:
    """Return a table of training speed, with the time of cutting and colour augmentation as a share of a step."""
    lines = [
        "| method | encoder | images | images/s | ms a step | copy and cut | photometric | peak memory | data wait |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in pretraining_methods():
        for variant, images in (("vit_small", settings.batch_size), ("vit_base", settings.batch_size // 2)):
            method, optim, transform = build(name, variant, images, settings.steps)
            method.to("cuda")
            optimizer = torch.optim.AdamW(parameter_groups(method, {}), lr=0.0, fused=True)
            pinned = whole_images(transform, images).pin_memory()
            cut = cut_views(pinned.to("cuda", non_blocking=True))
            done = to_model_input(cut)
            torch.cuda.reset_peak_memory_stats()
            numbers = itertools.count()
            total = settings.steps + 3

            trainer = Trainer(method, optimizer, optim, total, bf16=True)

            def once() -> None:
                trainer.train(done, next(numbers))  # noqa: B023

            each = milliseconds(once, settings.steps)
            cutting = milliseconds(lambda: cut_views(pinned.to("cuda", non_blocking=True)), settings.steps)  # noqa: B023
            colours = milliseconds(lambda: to_model_input(cut), settings.steps)  # noqa: B023
            peak = torch.cuda.max_memory_allocated() / 2**30
            wait = data_wait(settings, trainer, transform, images)
            shares = (f"{cutting / each:.1%}", f"{colours / each:.1%}", f"{peak:.1f} GiB", wait)
            cells = (name, variant, images, f"{1000 * images / each:.0f}", f"{each:.1f}", *shares)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def data_wait(settings: DeviceCheck, trainer: "Trainer", transform: Transform, images: int) -> str:
    """Return as text the share of time in which the device waits for the loader, or `-` if no shards are given."""
    if settings.data is None:
        return "-"
    steps = settings.steps + 5
    sampler, reading = BatchSampler(images, steps=steps), Reading(workers=settings.workers)
    batches = training_batches(settings.data, transform, sampler, seed=0, reading=reading)
    waited = 0.0
    start = before = time.perf_counter()
    for number, batch in enumerate(batches):
        if number == 5:  # measure only once the loader workers are running
            start, waited = before, 0.0
        waited += time.perf_counter() - before
        replace(trainer, steps=steps).step(batch, number).item()
        before = time.perf_counter()
    return f"{waited / (time.perf_counter() - start):.0%} with {settings.workers} workers"


def pairs(settings: DeviceCheck) -> list[str]:
    """Return the table of benchmarks/pairs.py: every method with an encoder of every family at 224 pixels."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "pairs.md"
        subprocess.run([sys.executable, str(ROOT / "benchmarks" / "pairs.py"), "--output", str(table)], check=True)
        return table.read_text().splitlines()[2:]


def cifar(settings: DeviceCheck) -> list[str]:
    """Pretrain on CIFAR-10 with each method that has a preset configs/cifar10_METHOD.yaml, and return a table."""
    if settings.cifar is None:
        return ["not run; give --cifar FOLDER"]
    lines = ["| method | step | images | loss | 20-NN | s, evaluations included |", "|---|---|---|---|---|---|"]
    for method in pretraining_methods():
        preset = ROOT / "configs" / f"cifar10_{method}.yaml"
        if not preset.is_file():
            continue
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "run"
            command = [sys.executable, str(ROOT / "pretrain" / "run.py"), "--config", str(preset)]
            command += ["--data", f"{settings.cifar}/cifar10-train-*.tar.gz", "--output", str(output)]
            command += ["--evaluation.val", f"{settings.cifar}/cifar10-test-*.tar.gz"]
            start = time.perf_counter()
            subprocess.run([*command, "--workers", str(settings.workers)], check=True)
            seconds = time.perf_counter() - start
            records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        for r in records:
            if "knn_top1" in r:
                loss = f"{r['loss']:.3f}" if "loss" in r else "-"
                cells = (method, r["step"], r["images"], loss, f"{r['knn_top1']:.3f}", f"{seconds:.0f}")
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main(settings: DeviceCheck) -> None:
    if not torch.cuda.is_available():
        print("This machine has no CUDA device. Nothing was checked or measured.")
        return
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    lines = ["# Device check", "", f"`python benchmarks/device_check.py` on {machine}.", ""]
    parts = {
        "bf16 on the device compared with float32 on the CPU": agreement,
        "Speed and memory, bf16, default settings of each method": throughput,
        "Every method with every encoder": pairs,
        "CIFAR-10": cifar,
    }
    for title, part in parts.items():
        lines += [f"## {title}", "", *part(settings), ""]
        settings.output.parent.mkdir(parents=True, exist_ok=True)
        settings.output.write_text("\n".join(lines))
    Console().print("\n".join(lines))


if __name__ == "__main__":
    main(parse(DeviceCheck))
