"""Compare the device with the CPU: colours, losses and gradients. Check a step for waits, and train in fp16."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from device.runner import Row, attempt
from torch import Tensor
from training import device, loader_batch, make_config, make_run, train, training_step

from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.data.batch import Batch
from tessera.data.crops import MultiCrop, MultiCropConfig
from tessera.pretrain.build import build_method
from tessera.pretrain.methods import METHODS, pretraining_methods
from tessera.pretrain.methods.method import Method
from tessera.pretrain.step import finish_step, start_step, to_device
from tessera.pretrain.training_run import TrainingRun

PIXELS = 1e-3
"""Largest allowed difference between CPU and device of a normalised pixel after the colour changes."""
LIMITS = {"float32": (1e-4, 5e-3), "bf16": (0.03, 0.3)}
"""Largest allowed relative differences of loss and gradient from those on the CPU in float32, by precision."""
IMAGES, SIZE = 16, (32, 40)
"""Number of images of a step, and their height and width in pixels."""


def equality(small: bool) -> Iterator[Row]:
    """Yield one row per check. `small` selects fewer and smaller checks, for a rehearsal."""
    yield attempt({"colours": "eager"}, lambda: colours(4 if small else 64, compile=False))
    for name in ("dino", "mae"):
        yield attempt({"step without waits": name}, lambda name=name: step_without_waits(name))
    precision = "bf16" if small else "fp16"
    yield attempt({"50 steps in": precision}, lambda: steps_in(precision))
    variants = [variant for variant in encoders.VARIANTS if variant.endswith("_micro")]
    for number, method in enumerate(pretraining_methods()):
        for variant in [variants[number % len(variants)]] if small else variants:
            yield attempt({"method": method, "encoder": variant}, lambda m=method, v=variant: gradients(m, v))


def colours(images: int, *, compile: bool) -> Row:
    """Return the largest difference between CPU and device of the normalised views after the colour changes."""
    batch = loader_batch(MultiCrop(MultiCropConfig()), images)
    expected, found = to_model_input(batch), to_model_input(batch.to(device()), compile=compile)
    pairs = [(a.images, b.images) for a, b in zip(expected.views, found.views, strict=True)]
    worst = max(float((a - b.cpu()).abs().max()) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))
    return {"images": images, "largest difference": worst, "ok": worst <= PIXELS}


def gradients(name: str, variant: str) -> Row:
    """Return the loss on the CPU, and the relative differences of loss and gradient between the device and the CPU."""
    own = METHODS[name].small_settings
    config = make_config(name, variant, IMAGES, own=own, encoder={"drop_path": 0.0}, steps=10)
    torch.manual_seed(0)
    method = build_method(config, fresh=False)
    batch = loader_batch(method.transform(), IMAGES, size=SIZE)
    expected, right = loss_and_gradient(method, to_model_input(batch), bf16=False)
    found: Row = {"loss on the CPU": expected, "ok": True}
    for precision, (loss_limit, gradient_limit) in LIMITS.items():
        moved = copy.deepcopy(method).to(device())
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            loss, gradient = loss_and_gradient(moved, to_model_input(batch.to(device())), bf16=precision == "bf16")
        by_loss = abs(loss - expected) / abs(expected)
        by_gradient = float((gradient - right).norm() / right.norm())
        found |= {f"loss, {precision}": by_loss, f"gradient, {precision}": by_gradient}
        found["ok"] &= by_loss <= loss_limit and by_gradient <= gradient_limit
    return found


def loss_and_gradient(method: Method, batch: Batch, *, bf16: bool) -> tuple[float, Tensor]:
    """Return the loss of a batch, and the gradients of all parameters as one vector on the CPU."""
    method.zero_grad()
    with torch.autocast(next(method.parameters()).device.type, torch.bfloat16, enabled=bf16):
        loss, _ = method(batch, 0)
    loss.backward()
    parts = [p.grad.flatten().cpu() for p in method.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat(parts)


def small_run(name: str, **settings: Any) -> TrainingRun:
    """Return a run of a method with the smallest ViT."""
    return make_run(make_config(name, "vit_micro", IMAGES, own=METHODS[name].small_settings, **settings))


def step_without_waits(name: str) -> Row:
    """Start a training step in which every wait for the device is an error, and finish it afterwards."""
    run = small_run(name, steps=10, precision="bf16")
    batch = loader_batch(run.method.transform(), IMAGES, size=SIZE)
    training_step(run, batch)  # the first step may wait, because it sets up libraries
    with waits("error"):
        running = start_step(run, run.state.step, [to_device(run, batch)])
    step = finish_step(run, running)
    return {"loss": step.loss, "ok": step.updated}


@contextmanager
def waits(mode: str) -> Iterator[None]:
    """Return a context that sets the reaction to a wait of the CPU for the GPU. `mode` is default, warn or error."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def steps_in(precision: str) -> Row:
    """Train for 50 steps in a precision. At most 15 steps may be skipped because a gradient overflows."""
    run = small_run("dino", steps=50, record_every=50, precision=precision)
    (record,) = train(run, loader_batch(run.method.transform(), IMAGES, size=SIZE))
    scale = run.accelerator.scaler.get_scale() if run.accelerator.scaler else 1.0
    ok = record["skipped_steps"] <= 15 and record["loss"] == record["loss"] and scale >= 1
    return {"loss": record["loss"], "skipped": record["skipped_steps"], "scale": scale, "ok": ok}
