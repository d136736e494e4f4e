"""Every method with every encoder: losses in bf16 on the device beside the CPU, and the speed of the usual sizes."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from pairs import one_per_family, take_turn

from device.settings import DeviceCheck, device
from device.training import Trainer, attempt, build, random_batch
from tessera import encoders
from tessera.pretrain.methods import METHODS, pretraining_methods
from tessera.pretrain.optim.adamw import adamw

LIMIT = 0.1
"""Largest relative difference of a loss in bf16 on the device from the loss in float32 on the CPU."""
Row = dict[str, Any]


def pairings(check: DeviceCheck) -> Iterator[Row]:
    """Train each smallest encoder under each method for some steps, on the CPU and on the device, and yield losses."""
    variants = [variant for variant in encoders.VARIANTS if variant.endswith("_micro")]
    for number, name in enumerate(pretraining_methods()):
        for variant in [variants[number % len(variants)]] if check.small else variants:
            row = {"method": name, "encoder": variant}
            yield attempt(row, lambda name=name, variant=variant: agreement(name, variant, 1 if check.small else 3))


def agreement(name: str, variant: str, steps: int) -> Row:
    """Return the first loss on the CPU, and the largest relative difference of a loss on the device."""
    method, optim, transform = build(name, variant, 16, steps, **METHODS[name].small_settings)
    losses = []
    for place, bf16 in ((torch.device("cpu"), False), (device(), True)):
        twin = copy.deepcopy(method).to(place)
        optimizer = adamw(twin, optim, twin.frozen())
        trainer = Trainer(twin, optimizer, optim, steps, bf16)
        batches = [random_batch(transform, 16, seed) for seed in range(steps)]
        losses.append([trainer.step(batch, number).item() for number, batch in enumerate(batches)])
    worst = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    return {"steps": steps, "loss on the CPU": losses[0][0], "largest difference": worst, "ok": worst <= LIMIT}


def pairs(check: DeviceCheck) -> Iterator[Row]:
    """Yield the speed and the memory of a step of each method with an encoder of each family, and with ViT-B/16."""
    names = ["vit_tiny"] if check.small else [*one_per_family(), "vit_base"]
    images, steps = (1, 1) if check.small else (64, 5)
    for name in ("mae",) if check.small else pretraining_methods():
        for variant in names:
            row = {"method": name, "encoder": variant, "images": images}
            yield attempt(row, lambda name=name, variant=variant: turn(name, variant, images, steps))


def turn(name: str, variant: str, images: int, steps: int) -> Row:
    """Measure some steps of one pair, as benchmarks/pairs.py does."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    taken = take_turn(name, variant, images, steps)
    seconds = sorted(taken.seconds)[len(taken.seconds) // 2]
    return {"images/s": images / seconds, "ms a step": 1000 * seconds, "GiB": taken.memory / 2**30}
