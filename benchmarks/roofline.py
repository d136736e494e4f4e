"""Count the work of a training step on a GPU, and compute an upper bound of the images per second. No GPU is needed.

    python benchmarks/roofline.py [--method dino] [--encoder vit_small] [--batch_size 512] [--gpu h200]
        [--settings '{SETTING: VALUE, ...}'] [--encoder_settings '{SETTING: VALUE, ...}']

The step is that of a run: the loader's batch is copied to the device, its colours are changed, and
`pretrain.step.start_step` runs on it through the engine. The tensors on the device are fake
(`fake_device.py`). For each kernel, the least time is the longest of three: its bytes over the memory
bandwidth, its FLOP over the rate of matrix products, and the time of a launch. The bound on the images per second
assumes that all kernels reach these rates, and that only the copy of the batch runs beside them.
Times are not measured. Images are 375 x 500 pixels. If the method draws new crop
sizes for each step, the largest crops are counted.

The last line is one JSON object: ms, kernels, gb, tflop, host_reads, saved_gb (activations that the forward pass keeps)
and images_per_second_bound.
"""

import json
import os
import sys
from typing import Any, Literal
from unittest import mock

import torch
from fake_device import GPUS, Count, Counter, backward, fake_run
from pydantic import Field
from torch import nn
from training import loader_batch, make_config

from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.pretrain import step
from tessera.pretrain.methods import METHODS
from tessera.pretrain.optim.adamw import clip_gradients
from tessera.pretrain.resolve import gpu_defaults
from tessera.runtime.processes import make_accelerator
from tessera.runtime.settings import Settings, SettingsError, parse


class RooflineBenchmark(Settings):
    """Count the kernels, bytes and FLOP of a training step, and compute a bound of its images/s. No GPU is needed."""

    method: str = "dino"
    """pretraining method"""
    settings: dict[str, Any] | None = None
    """settings of the method, a mapping from names to values; settings that are not given have their defaults"""
    encoder: str = "vit_small"
    """encoder variant"""
    encoder_settings: dict[str, Any] | None = None
    """settings of the encoder, a mapping from names to values; settings that are not given are those of the variant"""
    batch_size: int = Field(default=512, ge=1)
    """number of images of a step on one GPU"""
    gpu: Literal["h200", "h100", "a100"] = "h200"
    """GPU whose rates determine the bound"""
    top: int = Field(default=0, ge=0)
    """number of operations and number of kinds of activations to list, most expensive first"""


def main(settings: RooflineBenchmark) -> None:
    try:
        counter = count_step(settings)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    show(counter, settings)


def count_step(settings: RooflineBenchmark) -> Counter:
    """Return the counts of one training step on a fake device.

    Raises:
        ValueError: the method or the encoder is unknown, or they do not fit together.
    """
    if settings.method not in METHODS or METHODS[settings.method].supervised:
        raise ValueError(f"Unknown pretraining method {settings.method!r}. Choose a method of `tessera pretrain`.")
    chosen = gpu_defaults(settings.encoder, "bf16") | (settings.encoder_settings or {})
    config = make_config(
        settings.method, settings.encoder, settings.batch_size, own=settings.settings, encoder=chosen, precision="bf16"
    )
    options = config.encoder_settings
    with torch.device("meta"):
        encoder = encoders.build(options.pop("variant"), **options)
        method = METHODS[config.method](encoder, config.method_config, config.steps)
    batch = loader_batch(method.transform(), settings.batch_size)
    accelerator = make_accelerator(mixed_precision="bf16", cpu=True)
    with (
        # both are restored at the end, after the assignments below
        mock.patch.object(step, "clip_gradients"),
        mock.patch.object(step, "to_model_input"),
        fake_run(config, accelerator, method, GPUS[settings.gpu]) as (counter, run),
    ):
        name_parts(counter, method)
        engine = run.engine
        engine.accelerator.backward = _in_part(counter, "backward", backward)
        step.clip_gradients = _in_part(counter, "clip", clip_gradients)
        engine.step = _in_part(counter, "AdamW", engine.step)
        method.after_step = _in_part(counter, "EMA and centre", method.after_step)
        step.to_model_input = _in_part(counter, "colours", to_model_input)  # colour changes and normalisation
        with counter.named("copy to the device"):
            batch = step.to_device(run, batch)
        with counter.named("other"):
            step.start_step(run, 0, [batch])
    return counter


def name_parts(counter: Counter, module: nn.Module, name: str = "") -> None:
    """Count each encoder of a method and crop size, and each module outside the encoders, as a part of its own."""
    for own, child in module.named_children():
        path = f"{name}.{own}" if name else own
        encoder = isinstance(child, encoders.Encoder)
        if not encoder and any(isinstance(one, (encoders.Encoder, nn.ModuleDict)) for one in child.modules()):
            name_parts(counter, child, path)
        else:
            _count_as(counter, child, path)


def _in_part(counter: Counter, part: str, function: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        with counter.named(part):
            return function(*args, **kwargs)

    return counted


def _count_as(counter: Counter, module: nn.Module, name: str) -> None:
    forward = module.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        images = args[0] if args else None
        size = f" {images.shape[-1]}" if isinstance(images, torch.Tensor) and images.ndim == 4 else ""
        with counter.named(f"{name}{size}"):
            return forward(*args, **kwargs)

    module.forward = counted


def show(counter: Counter, settings: RooflineBenchmark) -> None:
    """Print the table of parts, and the totals as JSON."""
    gpu, total = counter.gpu, counter.total()
    heads = ("part", "kernels", "GB", "TFLOP", "ms memory", "ms arithmetic", "ms at least", "host reads")
    print(
        f"{settings.method} {settings.encoder}, {settings.batch_size} images, {gpu.name}: {gpu.memory / 1e12:.2f} TB/s,"
    )
    print(f"{gpu.low / 1e12:.0f} TFLOP/s in bf16, {gpu.full / 1e12:.0f} in float32, {gpu.launch * 1e6} us a kernel\n")
    print(f"| {' | '.join(heads)} |\n|---|{'--:|' * (len(heads) - 1)}")
    for name, count in {**counter.parts(), "all": total}.items():
        print(f"| {name} | {_cells(count)} |")
    if settings.top:
        print("\n| part | operation | kernels | GB | TFLOP | ms memory | ms arithmetic | ms at least | host reads |")
        print(f"|---|---|{'--:|' * 7}")
        longest = sorted(counter.rows.items(), key=lambda item: -item[1].seconds)
        for (part, operation), count in longest[: settings.top]:
            print(f"| {part} | {operation} | {_cells(count)} |")
        print("\n| part | activations kept for the backward pass | number | GB |\n|---|---|--:|--:|")
        for kind, (count, size) in saved_kinds(counter)[: settings.top]:
            print(f"| {kind} | {count} | {size / 1e9:.1f} |")
    saved = sum(size for _, size in counter.saved.values()) / 1e9
    print(f"\nActivations kept for the backward pass: {saved:.1f} GB")
    result = {
        "ms": 1e3 * counter.seconds(),
        "kernels": total.kernels,
        "gb": total.bytes / 1e9,
        "tflop": total.flop / 1e12,
        "host_reads": total.host_reads,
        "saved_gb": saved,
        "images_per_second_bound": settings.batch_size / counter.seconds(),
    }
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


def saved_kinds(counter: Counter) -> list[tuple[str, tuple[int, int]]]:
    """Return each kind of saved activations, with their number and their bytes, largest first."""
    kinds: dict[str, tuple[int, int]] = {}
    for kind, size in counter.saved.values():
        count, total = kinds.get(kind, (0, 0))
        kinds[kind] = (count + 1, total + size)
    return sorted(kinds.items(), key=lambda item: -item[1][1])


def _cells(count: Count) -> str:
    times = (count.memory_seconds, count.arithmetic_seconds, count.seconds)
    cells = (f"{count.kernels:,}", f"{count.bytes / 1e9:.1f}", f"{count.flop / 1e12:.2f}")
    return " | ".join([*cells, *(f"{1e3 * t:.1f}" for t in times), str(count.host_reads)])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        main(parse(RooflineBenchmark, sys.argv[1:]))
    except SettingsError as error:
        raise SystemExit(str(error)) from None
