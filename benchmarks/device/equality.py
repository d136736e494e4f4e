"""Equality of the CPU and the device: colours, losses and gradients; a step without waits; steps in fp16."""

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from device.settings import DeviceCheck, device
from device.training import (
    attempt,
    build,
    float32_products,
    loader_batch,
    make_run,
    on_device,
    random_batch,
    train,
)
from tessera.data.augment import to_model_input
from tessera.data.batch import Batch
from tessera.data.crops import MultiCrop, MultiCropConfig
from tessera.encoders.images import PackedImages
from tessera.pretrain import loop
from tessera.pretrain.methods import METHODS, pretraining_methods
from tessera.pretrain.methods.base import Method

LIMITS = {"float32": 5e-3, "bf16": 0.3}
"""Largest relative difference of a gradient from the gradient on the CPU in float32."""
LOSS_LIMITS = {"float32": 1e-4, "bf16": 0.03}
"""Largest relative difference of a loss from the loss on the CPU in float32."""
Row = dict[str, Any]


def equality(check: DeviceCheck) -> Iterator[Row]:
    """Yield the differences between the CPU and the device."""
    transform = MultiCrop(MultiCropConfig())
    images = 4 if check.small else 64
    batch = loader_batch(transform, images)
    for precision in ("highest", "high"):  # "high" allows TF32, as a program around this project may do
        with float32_products(precision):
            yield attempt({"colours": precision, "images": images}, lambda: colours(batch))
    precisions = ("bf16",) if check.small else tuple(LIMITS)
    for name, (number, precision) in itertools.product(pretraining_methods(), enumerate(precisions)):
        row = {"method": name, "precision": precision}
        yield attempt(
            row, lambda name=name, precision=precision, number=number: gradients(name, precision, number, images)
        )
    for name in ("dino", "mae"):
        yield attempt({"step without waits": name}, lambda name=name: step_without_waits(name))
    precision = "bf16" if check.small else "fp16"
    yield attempt({"50 steps in": precision}, lambda: steps_in(precision))


def colours(batch: Batch) -> Row:
    """Return the differences of normalised views after the colour changes.

    Compiled colour changes are compared on a GPU only, because the compilation takes long on a CPU.
    """
    expected = pixels(to_model_input(batch))
    found = {"eager": pixels(to_model_input(batch.to(device())))}
    if torch.cuda.is_available():
        found["compiled"] = pixels(to_model_input(batch.to(device()), compile=True))
    differences = {
        name: float(torch.stack([(a - b.cpu()).abs().max() for a, b in zip(views, expected, strict=True)]).max())
        for name, views in found.items()
    }
    return {**differences, "ok": all(value <= 1e-3 for value in differences.values())}


def pixels(batch: Batch) -> list[Tensor]:
    """Return the pixels of all views."""
    images = [view.images for view in batch.views]
    return [one.patches if isinstance(one, PackedImages) else one for one in images]


def gradients(name: str, precision: str, seed: int, images: int) -> Row:
    """Return the loss on the CPU, and how far loss and gradient on the device differ from those on the CPU."""
    method, _, transform = build(name, "vit_micro", images, 10, **METHODS[name].small_settings)
    batch = random_batch(transform, images, seed)
    expected, right = loss_and_gradient(method, to_model_input(batch), bf16=False)
    moved = copy.deepcopy(method).to(device())
    with float32_products("highest"):
        loss, gradient = loss_and_gradient(moved, on_device(batch), bf16=precision == "bf16")
    by_loss = abs(loss - expected) / abs(expected)
    by_gradient = float((gradient - right).norm() / right.norm())
    ok = by_loss <= LOSS_LIMITS[precision] and by_gradient <= LIMITS[precision]
    return {"loss on the CPU": expected, "loss": by_loss, "gradient": by_gradient, "ok": ok}


def loss_and_gradient(method: Method, batch: Batch, *, bf16: bool) -> tuple[float, Tensor]:
    """Return the loss of a batch, and its gradient on the CPU as one vector."""
    method.zero_grad()
    with torch.autocast(next(method.parameters()).device.type, torch.bfloat16, enabled=bf16):
        loss, _ = method(batch, 0)
    loss.backward()
    parts = [p.grad.flatten().cpu() for p in method.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat(parts)


def step_without_waits(name: str) -> Row:
    """Run a training step in which each wait for the device, except the step's one read of its result, is an error."""
    small = METHODS[name].small_settings
    run = make_run(name, "vit_micro", 16, own=small, steps=10, precision="bf16")
    batch = loader_batch(run.method.transform(), 16, size=(32, 40))
    agree = loop._agree

    def allowed(*args: Any) -> Any:
        with waits("default"):
            return agree(*args)

    loop.training_step(run, [on_device(batch)])  # the first step sets up libraries
    with mock.patch.object(loop, "_agree", allowed), waits("error"):
        step = loop.training_step(run, [on_device(batch)])
    return {"loss": step.loss, "ok": step.updated}


@contextmanager
def waits(mode: str) -> Iterator[None]:
    """Set what happens when the CPU waits for the GPU within the block: default, warn or error."""
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
    """Train for 50 steps in a precision. Few of them may be skipped because a gradient overflows."""
    run = make_run(
        "dino", "vit_micro", 16, own=METHODS["dino"].small_settings, steps=50, record_every=50, precision=precision
    )
    (record,) = train(run, loader_batch(run.method.transform(), 16, size=(32, 40)))
    scale = run.accelerator.scaler.get_scale() if run.accelerator.scaler else 1.0
    ok = record["skipped_steps"] <= 15 and record["loss"] == record["loss"] and scale >= 1
    return {"loss": record["loss"], "skipped": record["skipped_steps"], "scale": scale, "ok": ok}
