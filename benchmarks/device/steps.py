"""Speed of the real training step, through the training loop and the engine, and where its time goes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from device.settings import ROOT, DeviceCheck, wait
from device.training import attempt, loader_batch, make_run, on_device, train
from tessera.pretrain import loop
from tessera.pretrain.methods import METHODS

CASES = (("dino", "vit_small", 256), ("dino", "vit_small", 512), ("mae", "vit_base", 512))
"""Methods, encoders and numbers of images whose step is measured."""
WINDOW = 15
"""Number of steps before the measurement, and of measured steps."""
STEPS = 3
"""Number of steps of the profile."""
TOP = 40
"""Number of kernels that the profile lists."""
Row = dict[str, Any]
Case = tuple[str, str, int]


def cases(check: DeviceCheck) -> tuple[Case, ...]:
    """Return the cases, or small ones for a rehearsal."""
    return (("dino", "vit_micro", 8), ("mae", "vit_micro", 8)) if check.small else CASES


def step(check: DeviceCheck) -> Iterator[Row]:
    """Yield the speed of the step in eager mode."""
    yield from speeds(check, compiled=False)


def step_compiled(check: DeviceCheck) -> Iterator[Row]:
    """Yield the speed of the step with `--compile true`, the time of the compilation, and the number of graphs."""
    yield from speeds(check, compiled=True)


def speeds(check: DeviceCheck, *, compiled: bool) -> Iterator[Row]:
    """Yield the speed of each case, and then its share of the bound, which benchmarks/roofline.py counts meanwhile."""
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    gpu = next((known for known in ("h200", "h100", "a100") if known in name), None)
    counts = {case: start_roofline(case, gpu, compiled) for case in cases(check)} if gpu else {}
    reached: dict[Case, float] = {}
    for case in cases(check)[: 1 if check.small and compiled else None]:
        row = {"method": case[0], "encoder": case[1], "images": case[2], "compiled": compiled}
        found = attempt(row, lambda case=case: speed(check, case, compiled))
        reached[case] = found.get("images/s", 0.0)
        yield found
    for case, process in counts.items():
        yield attempt(
            {"share of the roofline": " ".join(map(str, case))}, lambda c=case, p=process: share(p, reached[c])
        )


def speed(check: DeviceCheck, case: Case, compiled: bool) -> Row:
    """Train through the training loop, and return the speed of its second half."""
    method, variant, images = case
    window = 2 if check.small else WINDOW
    own = METHODS[method].small_settings if check.small else {}
    settings: dict[str, Any] = {"steps": 2 * window, "record_every": window, "precision": "bf16", "compile": compiled}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with counted_graphs(check) if compiled else nullcontext([]) as graphs:
        run = make_run(method, variant, images, own=own, **settings)
        first, second = train(run, loader_batch(run.method.transform(), images))
    rate = second["images_per_second"]
    found = {"images/s": rate, "ms a step": 1000 * images / rate, "GiB": second.get("peak_memory_gb", 0) * 1e9 / 2**30}
    found |= {"warm-up, s more": window * images * (1 / first["images_per_second"] - 1 / rate), "loss": second["loss"]}
    return found | ({"graphs": graphs[0]} if compiled else {})


@contextmanager
def counted_graphs(check: DeviceCheck) -> Iterator[list[int]]:
    """Yield a list that holds, after the block, the number of graphs that torch.compile has made in the block.

    A rehearsal generates no code, because that takes long on a CPU.
    """
    from torch._dynamo.utils import counters  # imported here, because the import takes seconds

    torch.compiler.reset()
    counters.clear()
    found: list[int] = []
    with mock.patch("torch.compile", partial(_without_code, torch.compile)) if check.small else nullcontext():
        yield found
    found.append(counters["stats"]["unique_graphs"])


def _without_code(compile: Callable[..., Any], function: Any, *, options: object = None, **how: Any) -> Any:
    """Compile a function by a backend that generates no code. Options are those of the usual backend."""
    return compile(function, **{**how, "backend": "eager"})


def start_roofline(case: Case, gpu: str, compiled: bool) -> subprocess.Popen[str]:
    """Start to count a step in a process that sees no GPU."""
    command = [sys.executable, str(ROOT / "benchmarks" / "roofline.py"), "--gpu", gpu]
    command += ["--method", case[0], "--encoder", case[1], "--batch_size", str(case[2])]
    command += ["--compile", str(compiled)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


def share(process: subprocess.Popen[str], reached: float) -> Row:
    """Return the bound on the images per second, and the share of it that was reached."""
    lines = process.communicate()[0].splitlines()
    bound = json.loads(lines[-1])
    rate = bound["images_per_second_bound"]
    teraflop = bound["tflop"] / (bound["ms"] / 1000) * reached / rate
    return {"bound, images/s": rate, "reached": reached, "share": reached / rate, "TFLOP/s": teraflop}


def profiled(check: DeviceCheck) -> Iterator[Row]:
    """Yield the share of the time in which the device is idle, and the kernels that take most of the time of a step."""
    method, variant, images = cases(check)[-2]
    own = METHODS[method].small_settings if check.small else {}
    run = make_run(method, variant, images, own=own, steps=10, precision="bf16")
    batch = loader_batch(run.method.transform(), images)
    for _ in range(3):
        loop.training_step(run, [on_device(batch)])
    wait()
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            loop.training_step(run, [on_device(batch)])
        wait()
    kind = "CUDA" if cuda else "CPU"
    events = [event for event in profiler.events() or [] if event.device_type.name == kind and not _is_span(event)]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy = covered(spans)
    whole = max(end for _, end in spans) - spans[0][0]
    yield {
        "profile of": f"{method} {variant} {images}",
        "kernels a step": len(events) / STEPS,
        "ms a step": whole / 1000 / STEPS,
        "idle": 1 - busy / whole,
    }
    times: dict[str, list[float]] = {}
    for event in events:
        taken = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        times.setdefault(event.name, []).append(taken)
    everything = sum(map(sum, times.values()))
    for name, taken in sorted(times.items(), key=lambda item: -sum(item[1]))[: 5 if check.small else TOP]:
        row = {"kernel": name[:120], "calls a step": len(taken) / STEPS, "ms a step": sum(taken) / 1000 / STEPS}
        yield row | {"share": sum(taken) / everything}


def _is_span(event: Any) -> bool:
    """Return True for an event that marks a span of code, such as the optimizer's step, and no kernel."""
    return bool(getattr(event, "is_user_annotation", False))


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the total length of the union of intervals, which are sorted by their starts."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
