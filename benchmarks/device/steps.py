"""Measure the speed of a training step in the training loop, and profile its kernels."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from device.equality import colours
from device.runner import Row, attempt
from torch.profiler import ProfilerActivity, profile
from training import loader_batch, make_config, make_run, train, training_step, wait

from tessera.pretrain.methods import METHODS, pretraining_methods
from tessera.pretrain.training_run import TrainingRun

Case = tuple[str, str, int]
"""Method, encoder and number of images per step."""
CASES: tuple[Case, ...] = (("dino", "vit_small", 512), ("mae", "vit_base", 512), ("dino", "vit_small", 256))
SMALL: tuple[Case, ...] = (("dino", "vit_micro", 8), ("mae", "vit_micro", 8))
FAMILIES = ("rope_vit_small", "swin_tiny", "twins_svt_small", "navit_small", "sam_vit_b")
"""Encoders that are measured under DINO and MAE. ViT-S/16 is measured under every method."""
WINDOW, SHORT = 15, 4
"""Number of warm-up steps, which is also the number of measured steps. `SHORT` is for the stage `pairs`."""
STEPS = 3
"""Number of profiled steps."""
TOP = 40
"""Number of kernels that the profile lists."""


def step(small: bool) -> Iterator[Row]:
    """Yield the speed of each case, and then its share of the bound that benchmarks/roofline.py counts in parallel."""
    cases = SMALL if small else CASES
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    gpu = next((known for known in ("h200", "h100", "a100") if known in name), None)
    counts = {case: start_roofline(case, gpu) for case in cases} if gpu else {}
    reached = dict[Case, float]()
    for found in speeds(cases, 2 if small else WINDOW):
        reached[found["method"], found["encoder"], found["images"]] = found.get("images/s", 0.0)
        yield found
    for case, process in counts.items():
        row = {"share of the roofline": " ".join(map(str, case))}
        yield attempt(row, lambda c=case, p=process: share(p, reached[c]))


def step_compiled(small: bool) -> Iterator[Row]:
    """Yield the speed of the step with `--compile true`, the time of the compilation, and the number of graphs.

    If `small` is true, torch builds the graphs but generates no code, because code for a CPU takes long to compile.
    """
    compiled = torch.compile

    def without_code(function: Any, *, options: object = None, **how: Any) -> Any:
        return compiled(function, **{**how, "backend": "eager"})

    with mock.patch("torch.compile", without_code) if small else nullcontext():
        yield attempt({"colours": "compiled"}, lambda: colours(4 if small else 64, compile=True))
        yield from speeds(SMALL[:1] if small else CASES[:2], 2 if small else WINDOW, compile=True)


def pairs(small: bool) -> Iterator[Row]:
    """Yield speed and memory of every method with ViT-S/16, and of DINO and MAE with an encoder of each family."""
    cases = [(method, "vit_small", 64) for method in pretraining_methods()]
    cases += [(method, variant, 64) for method in ("dino", "mae") for variant in FAMILIES]
    yield from speeds([("distill", "vit_micro", 8)] if small else cases, 1 if small else SHORT)


def speeds(cases: Sequence[Case], window: int, *, compile: bool = False) -> Iterator[Row]:
    """Yield the speed of each case."""
    for method, variant, images in cases:
        row = {"method": method, "encoder": variant, "images": images, "compiled": compile}
        yield attempt(row, lambda case=(method, variant, images): speed(case, window, compile=compile))


def speed(case: Case, window: int, *, compile: bool) -> Row:
    """Run the training loop for twice `window` steps. Return the speed, memory and loss of the second half."""
    from torch._dynamo.utils import counters  # imported here, because the import takes seconds

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.compiler.reset()
    counters.clear()
    run = case_run(case, steps=2 * window, record_every=window, compile=compile)
    images = case[2]
    first, second = train(run, loader_batch(run.method.transform(), images))
    rate = second["images_per_second"]
    found = {"images/s": rate, "ms a step": 1000 * images / rate, "GiB": second.get("peak_memory_gb", 0) * 1e9 / 2**30}
    found |= {"warm-up, s more": window * images * (1 / first["images_per_second"] - 1 / rate), "loss": second["loss"]}
    return found | ({"graphs": counters["stats"]["unique_graphs"]} if compile else {})


def case_run(case: Case, **settings: Any) -> TrainingRun:
    """Return a run in bf16. With a `_micro` encoder, the method has its small settings."""
    method, variant, images = case
    own = METHODS[method].small_settings if variant.endswith("_micro") else {}
    return make_run(make_config(method, variant, images, own=own, precision="bf16", **settings))


def start_roofline(case: Case, gpu: str) -> subprocess.Popen[str]:
    """Start benchmarks/roofline.py for a case, in a process that cannot use the GPU."""
    command = [sys.executable, str(Path(__file__).parents[1] / "roofline.py"), "--gpu", gpu]
    command += ["--method", case[0], "--encoder", case[1], "--batch_size", str(case[2])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


def share(process: subprocess.Popen[str], reached: float) -> Row:
    """Wait for benchmarks/roofline.py. Return its bound on the images/s, and the fraction `reached` / bound."""
    bound = json.loads(process.communicate()[0].splitlines()[-1])
    rate = bound["images_per_second_bound"]
    teraflop = bound["tflop"] / (bound["ms"] / 1000) * reached / rate
    return {"bound, images/s": rate, "reached": reached, "share": reached / rate, "TFLOP/s": teraflop}


def profiled(small: bool) -> Iterator[Row]:
    """Yield the share of a step in which the device is idle, and then the kernels that take most of the time."""
    case = (SMALL if small else CASES)[0]
    run = case_run(case, steps=10)
    batch = loader_batch(run.method.transform(), case[2])
    for _ in range(3):
        training_step(run, batch)
    wait()
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            training_step(run, batch)
        wait()
    kind = "CUDA" if cuda else "CPU"
    events = [event for event in profiler.events() or [] if event.device_type.name == kind and not _is_span(event)]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    whole = max(end for _, end in spans) - spans[0][0]
    yield {
        "profile of": " ".join(map(str, case)),
        "kernels a step": len(events) / STEPS,
        "ms a step": whole / 1000 / STEPS,
        "idle": 1 - covered(spans) / whole,
    }
    times: dict[str, list[float]] = {}
    for event in events:
        taken = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        times.setdefault(event.name, []).append(taken)
    everything = sum(map(sum, times.values()))
    for name, taken in sorted(times.items(), key=lambda item: -sum(item[1]))[: 5 if small else TOP]:
        row = {"kernel": name[:120], "calls a step": len(taken) / STEPS, "ms a step": sum(taken) / 1000 / STEPS}
        yield row | {"share": sum(taken) / everything}


def _is_span(event: Any) -> bool:
    """Return True if an event is not a kernel, but marks a span of code, such as the optimizer's step."""
    return bool(getattr(event, "is_user_annotation", False))


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the total length of the union of intervals, which are sorted by their starts."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
