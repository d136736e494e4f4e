"""Measure memory, time and traffic of a training step under every engine.

    python benchmarks/engines.py [--precision bf16] [--output benchmarks/results/engines.md]
    python benchmarks/engines.py --processes 4 --engines '["fsdp2", "hsdp"]'

Every row of the table comes from a separate launch with an engine file of configs/accelerate/. Each launch trains on
noise images in memory. The benchmark measures the memory of a process between steps and at the peak, and the time of a
step. On a GPU, "memory" is the memory that torch has allocated. On a CPU, "memory" is the growth of the process's
resident memory since just before the method was built. On Linux without a GPU, the benchmark also counts the bytes sent
over the loopback device, so no other program should use this device. "Host at the start" is the largest growth of the
resident memory while the method is built and the engine shards it. The columns "by formula" use the formulas of
docs/scaling.md.
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
from pydantic import Field
from tables import machine, publish, table, typed_command
from torch import nn
from training import as_run, device, loader_batch, make_config, training_step

from tessera.encoders.base import Encoder
from tessera.pretrain import engines
from tessera.pretrain.build import build_method
from tessera.pretrain.methods import pretraining_methods
from tessera.runtime.collectives import gather_on_main
from tessera.runtime.processes import exit_on_user_error, make_accelerator
from tessera.runtime.settings import Settings, SettingsError, parse

ROOT = Path(__file__).parent.parent
ENGINES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
GROUPS = 2
"""Number of groups of processes under HSDP. HSDP is measured only on request, because it needs four processes."""
KEPT = 1e9
"""Default of DeepSpeed's stage3_max_live_parameters: largest number of parameters that ZeRO-3 keeps gathered."""
GATHERED = {"fp32": 4, "bf16": 2}
"""Bytes per value of gathered weights under FSDP2, by precision of the forward pass."""


class EnginesBenchmark(Settings):
    """Measure memory, time and traffic of a training step under every engine."""

    encoders: tuple[str, ...] = ("vit_tiny", "vit_small", "vit_base")
    """encoder variants"""
    methods: tuple[str, ...] = pretraining_methods()
    """pretraining methods"""
    engines: tuple[str, ...] = ENGINES
    """engines: names of files in configs/accelerate/, without .yaml"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """precision of the forward pass: fp32 or bf16"""
    processes: int = Field(default=2, ge=2)
    """number of processes per launch"""
    images: int = Field(default=2, ge=1)
    """images per process and step; with few images, the sharded state takes more memory than the activations"""
    steps: int = Field(default=3, ge=1)
    """number of timed steps, after two warm-up steps"""
    output: Path | None = None
    """Markdown file for the tables"""
    measure: str | None = None
    """for internal use: JSON file for the measurements of one launch"""


@dataclass(frozen=True)
class Costs:
    """Memory and network traffic of one process in bytes. Weights, gradients and moments are float32."""

    held: float
    """Memory that stays allocated between steps: weights, teacher, moments, and copies that the engine keeps."""
    step: float
    """Additional memory during a step, without activations: gradients and gathered weights."""
    sent: float
    """Bytes that a process sends in a step, if reduction and gathering use ring algorithms."""


def costs(
    engine: str, trained: float, teacher: float, block: float, processes: int, passes: int, precision: str
) -> Costs:
    """Return the costs of a training step according to the formulas of docs/scaling.md.

    Args:
        engine: name of the engine.
        trained: number of parameters with gradients.
        teacher: number of parameters without gradients.
        block: number of parameters in the largest unit that FSDP2 gathers as a whole.
        processes: number of processes.
        passes: number of forward passes of the trained encoder in a step.
        precision: precision of the forward pass.
    """
    n, ring = processes, 4 * (processes - 1) / processes
    if engine == "ddp":  # DDP keeps gradients allocated in its buckets
        return Costs(16 * trained + 4 * teacher, 0, 2 * ring * trained)
    if engine in ("zero1", "zero2"):  # ZeRO-1 and ZeRO-2 all-reduce gradients and all-gather weights
        step = 4 * trained / n + (4 * trained if engine == "zero1" else 0)
        return Costs(4 * trained + 12 * trained / n + 4 * teacher, step, 3 * ring * trained)
    if engine == "zero3":  # ZeRO-3 keeps gradients allocated, and keeps weights gathered
        gathered = min(4 * (trained + teacher), 4 * KEPT)
        return Costs((16 * trained + 4 * teacher) / n, gathered, ring * (2 * trained + teacher + trained))
    # In a step, FSDP2 gathers the student's weights for each forward and each backward pass, gathers the teacher's
    # weights once, and reduces the gradients. HSDP does the same within a group, and then sums the gradient shards over
    # the groups.
    size, groups = (n // GROUPS, GROUPS) if engine == "hsdp" else (n, 1)
    width = GATHERED[precision]
    within = (size - 1) / size * (width * (2 * passes * trained + teacher) + 4 * trained)
    between = 2 * (groups - 1) / groups * 4 * trained / size
    # Three blocks are gathered: one that runs, one in advance, and one that is not freed yet. With several forward
    # passes, the gradient of a block is complete only after the backward pass of the first one, and is reduced then.
    waiting = width * trained if passes > 1 else 0
    step = 4 * trained / size + 3 * width * block + waiting
    return Costs((12 * trained + 4 * teacher) / size, step, within + between)


def measure(settings: EnginesBenchmark, output: Path) -> None:
    """Run the steps of one launch. The main process writes the measurements to `output`."""
    accelerator = make_accelerator(mixed_precision="no" if settings.precision == "fp32" else settings.precision)
    engine_class = engines.select(accelerator, settings.precision, 1)
    steps = settings.steps + 2
    before, host = resident(), status("VmRSS")
    forget_peak()
    main = accelerator.is_main_process if engine_class.sends_weights else None  # as in a pretraining run
    config = make_config(
        settings.methods[0], settings.encoders[0], settings.images * accelerator.num_processes,
        data_images=50_000, steps=steps, precision=settings.precision, optim={"warmup_steps": 0},
        encoder={"drop_path": 0.0},
    )  # fmt: skip
    torch.manual_seed(0)
    method = build_method(config, fresh=False, main=main)
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad)
    total = sum(p.numel() for p in method.parameters())
    block = max(sum(p.numel() for p in unit.parameters()) for blocks in method.units() for unit in blocks)
    engine = engine_class(accelerator, method, config.optim)
    starts = gather_on_main(status("VmHWM") - host)
    passes = count_passes(method.trained_parts())
    run = as_run(config, accelerator, method, engine)
    batch = loader_batch(method.transform(), settings.images, size=(256, 256), seed=accelerator.process_index)
    seconds, sent = [], []
    for number in range(steps):
        dist.barrier()
        start, traffic = time.perf_counter(), loopback()
        if number == 2:
            forget_peak()
        training_step(run, batch)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        sent.append((loopback() - traffic) / accelerator.num_processes)
    found = {
        "trained": trained,
        "teacher": total - trained,
        "block": block,
        "passes": passes[0] / steps,
        "seconds": statistics.median(seconds[2:]),
        "sent": statistics.median(sent[2:]),
        "peak": peak() - before,
        "held": resident() - before,
    }
    if starts is not None:  # on the main process
        output.write_text(json.dumps(found | {"main start": starts[0], "other start": max(starts[1:])}))
    accelerator.end_training()


def count_passes(parts: list[nn.Module]) -> list[int]:
    """Count the forward passes of the encoder in `parts` from now on. Return a list whose only element is the count."""
    count = [0]

    def increment(*_: object) -> None:
        count[0] += 1

    encoder = next(module for part in parts for module in part.modules() if isinstance(module, Encoder))
    encoder.register_forward_pre_hook(increment)
    return count


def resident() -> int:
    """Return the memory in bytes that this process currently uses."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # return free memory to the system, because VmRSS includes it
    return status("VmRSS")


def peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else status("VmHWM")


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5")


def status(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def loopback() -> int:
    """Return the number of bytes sent over the loopback device since the machine was started."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def launch(settings: EnginesBenchmark, engine: str, method: str, variant: str) -> dict[str, float]:
    """Measure one engine, method and encoder variant in a launch of its own. Return the measurements."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
        command += ["--config_file", str(ROOT / "configs" / "accelerate" / f"{engine}.yaml")]
        command += ["--num_processes", str(settings.processes)]
        if engine == "hsdp":
            sizes = {"replicate": GROUPS, "shard": settings.processes // GROUPS}
            for kind, size in sizes.items():
                command += [f"--parallelism_config_dp_{kind}_size", str(size)]
        command += [__file__, "--measure", str(file)]
        command += ["--methods", json.dumps([method]), "--encoders", json.dumps([variant])]
        command += ["--images", str(settings.images), "--steps", str(settings.steps), "--precision", settings.precision]
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if ran.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{ran.stderr[-3000:]}")
        return json.loads(file.read_text())


def measured_rows(settings: EnginesBenchmark) -> list[list[str]]:
    """Return the table of measurements: the headings, then one row for each launch."""
    headings = ["method", "encoder", "engine", "held, MB", "by formula", "peak, MB", "sent a step, MB", "by formula"]
    headings += ["host at the start: main process, MB", "others, MB"]
    rows = [[*headings, "ms a step", "time / ddp"]]
    for method in settings.methods:
        for variant in settings.encoders:
            base = 0.0
            for engine in settings.engines:
                found = launch(settings, engine, method, variant)
                numbers = found["trained"], found["teacher"], found["block"]
                wanted = costs(engine, *numbers, settings.processes, round(found["passes"]), settings.precision)
                base = base or found["seconds"]
                megabytes = [found["held"], wanted.held, found["peak"], found["sent"], wanted.sent]
                megabytes += [found["main start"], found["other start"]]
                cells = [method, variant, engine, *(f"{number / 1e6:,.0f}" for number in megabytes)]
                rows.append([*cells, f"{1000 * found['seconds']:,.0f}", f"{found['seconds'] / base:.2f}"])
                print("  ".join(rows[-1]), flush=True)
    return rows


def main(settings: EnginesBenchmark) -> None:
    if settings.measure is not None:
        measure(settings, Path(settings.measure))
        return
    for given, known in ((settings.methods, pretraining_methods()), (settings.engines, (*ENGINES, "hsdp"))):
        if unknown := set(given) - set(known):
            raise SettingsError(f"Unknown name: {', '.join(sorted(unknown))}. Choose from: {', '.join(known)}.")
    if "hsdp" in settings.engines and settings.processes < 2 * GROUPS:
        raise SettingsError(f"hsdp needs {2 * GROUPS} processes or more. Set --processes {2 * GROUPS}.")
    started = time.perf_counter()
    headings, *rows = measured_rows(settings)
    what = f"{settings.processes} processes, {settings.images} images each, {device().type}, {settings.precision}"
    minutes = (time.perf_counter() - started) / 60
    intro = f"{typed_command()}: {machine()}; {what}; {minutes:.0f} minutes."
    publish(["# Engines", intro, table(headings, rows, text=3)], settings.output)


if __name__ == "__main__":
    with exit_on_user_error():
        main(cast(EnginesBenchmark, parse(EnginesBenchmark)))
