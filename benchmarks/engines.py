"""Memory, time and traffic of a training step under every engine, measured here, and on paper for many GPUs.

    python benchmarks/engines.py [--output benchmarks/results/engines.md]

Every row is a launch of its own, as a user would launch it (configs/accelerate/), and trains on noise images that lie
ready. Measured are: what a process holds between steps and at the peak (on a GPU what torch allocated, on a CPU how far
the process rose above its size before the method was built), the time of a step, and on Linux without a GPU the bytes
that went over the loopback device, which nothing else should be using. The formulas are in docs/scaling.md; `state` and
`traffic` below are those formulas.
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
from device_check import build, random_batch
from loader import device, processor
from pydantic import Field

from data.augment import to_model_input
from pretrain import engines
from pretrain.optim.adamw import apply_schedules, clip_gradients
from runtime.processes import accelerator as make_accelerator
from runtime.settings import Settings, parse

ROOT = Path(__file__).parent.parent
ENGINES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
PASSES = {"dino": 2, "mae": 1}
"""how often a step runs the student: DINO's once for each size of crop"""
PAPER = {
    "ViT-B/16": (86e6, 31e6, 12),
    "ViT-L/16": (303e6, 31e6, 24),
    "ViT-g/14": (1.1e9, 60e6, 40),
    "ViT-7B/16": (6.7e9, 100e6, 40),
}
"""parameters of the encoder and of DINO's head, and blocks"""
KEPT = 1e9
"""numbers that DeepSpeed's ZeRO-3 keeps gathered at once, unless its file says another stage3_max_live_parameters"""
GPUS = (8, 64, 256)


class EnginesBenchmark(Settings):
    """Memory, time and traffic of a step under every engine."""

    encoders: tuple[str, ...] = ("vit_tiny", "vit_small", "vit_base")
    """variants"""
    methods: tuple[Literal["dino", "mae"], ...] = ("dino", "mae")
    """methods"""
    engines: tuple[Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"], ...] = ENGINES
    """names of files in configs/accelerate"""
    processes: int = Field(default=2, ge=1)
    """processes of each launch"""
    images: int = Field(default=2, ge=1)
    """images a process and step; few, so that what is shared out is seen"""
    steps: int = Field(default=3, ge=1)
    """timed steps, after two to warm up"""
    output: Path | None = None
    """file for the tables, in Markdown"""
    measure: str | None = None
    """used by the benchmark itself: the file for what one launch measures"""


@dataclass(frozen=True)
class Costs:
    """Bytes a process, of float32 weights, gradients and moments; and what a step sends."""

    held: float
    """between steps: weights, teacher, moments, and copies that the engine keeps"""
    step: float
    """on top of that during a step, without activations: gradients, and weights gathered"""
    sent: float
    """bytes that a process sends in a step, where sums and gatherings go around a ring"""


def costs(engine: str, trained: float, teacher: float, block: float, processes: int, passes: int) -> Costs:
    """The formulas of docs/scaling.md.

    Args:
        trained: parameters with gradients; `teacher`: those without.
        block: parameters of the largest part that is gathered at once.
        passes: how often a step runs the student.
    """
    n, ring = processes, 4 * (processes - 1) / processes
    if engine == "ddp":  # its buckets of gradients stay
        return Costs(16 * trained + 4 * teacher, 0, 2 * ring * trained)
    if engine in ("zero1", "zero2"):  # gradients summed for all, though each needs its range; then weights gathered
        step = 4 * trained / n + (4 * trained if engine == "zero1" else 0)
        return Costs(4 * trained + 12 * trained / n + 4 * teacher, step, 3 * ring * trained)
    if engine == "zero3":  # its ranges of gradients stay; what is used again soon stays gathered, so passes share it
        gathered = min(4 * (trained + teacher), 4 * KEPT)
        return Costs((16 * trained + 4 * teacher) / n, gathered, ring * (2 * trained + teacher + trained))
    # forward, backward, the teacher, gradients
    sent = ring * (2 * passes * trained + teacher + trained)
    return Costs((12 * trained + 4 * teacher) / n, 4 * trained / n + 2 * 4 * block, sent)


def measure(settings: EnginesBenchmark) -> None:
    """What one process of a launch does: some steps; the first process writes what was measured."""
    assert settings.measure is not None
    cuda = torch.cuda.is_available()
    accelerator = make_accelerator(mixed_precision="no")
    engine_class = engines.check(accelerator, "bf16" if cuda else "fp32", 1)
    name, variant = settings.methods[0], settings.encoders[0]
    steps = settings.steps + 2
    before = resident()
    method, optim, transform = build(name, variant, settings.images * accelerator.num_processes, steps)
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad)
    total = sum(p.numel() for p in method.parameters())
    block = max(sum(p.numel() for p in unit.parameters()) for unit in method.units())
    assert optim.betas is not None
    engine = engine_class(accelerator, method, optim.betas)
    batch = random_batch(transform, settings.images, seed=accelerator.process_index)
    seconds, sent = [], []
    for number in range(steps):
        dist.barrier()
        start, traffic = time.perf_counter(), loopback()
        if number == 2:
            forget_peak()
        apply_schedules(engine.optimizer, optim, number, steps, 256)
        engine.losses(to_model_input(batch.to(accelerator.device)), number, last=True)
        clip_gradients(engine.gradients(method.trained_parts()), 3.0, "global", sharded=engine.sharded)
        engine.step()
        method.after_step(number)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        sent.append((loopback() - traffic) / accelerator.num_processes)
    found = {
        "trained": trained,
        "teacher": total - trained,
        "block": block,
        "seconds": statistics.median(seconds[2:]),
        "sent": statistics.median(sent[2:]),
        "peak": peak() - before,
        "held": resident() - before,
    }
    if accelerator.is_main_process:
        Path(settings.measure).write_text(json.dumps(found))
    accelerator.end_training()


def resident() -> int:
    """Bytes that this process holds now."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, or it would count
    return status("VmRSS")


def peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else status("VmHWM")


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def status(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def loopback() -> int:
    """Bytes that this machine has sent to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def launch(settings: EnginesBenchmark, engine: str, method: str, variant: str) -> dict[str, float]:
    """One row."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
        command += ["--config_file", str(ROOT / "configs" / "accelerate" / f"{engine}.yaml")]
        command += ["--num_processes", str(settings.processes), __file__, "--measure", str(file)]
        command += ["--methods", json.dumps([method]), "--encoders", json.dumps([variant])]
        command += ["--images", str(settings.images), "--steps", str(settings.steps)]
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if ran.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{ran.stderr[-3000:]}")
        return json.loads(file.read_text())


def measured_rows(settings: EnginesBenchmark) -> list[list[str]]:
    """Headings and a row for each launch."""
    headings = ["method", "encoder", "engine", "held, MB", "by formula", "peak, MB", "sent a step, MB", "by formula"]
    rows = [[*headings, "ms a step", "time / ddp"]]
    for method in settings.methods:
        for variant in settings.encoders:
            base = 0.0
            for engine in settings.engines:
                found = launch(settings, engine, method, variant)
                numbers = found["trained"], found["teacher"], found["block"]
                wanted = costs(engine, *numbers, settings.processes, PASSES[method])
                base = base or found["seconds"]
                megabytes = [found["held"], wanted.held, found["peak"], found["sent"], wanted.sent]
                cells = [method, variant, engine, *(f"{number / 1e6:,.0f}" for number in megabytes)]
                rows.append([*cells, f"{1000 * found['seconds']:,.0f}", f"{found['seconds'] / base:.2f}"])
                print("  ".join(rows[-1]), flush=True)
    return rows


def paper_rows() -> list[list[str]]:
    """What the formulas say of DINO on many GPUs."""
    rows = [["encoder", "engine", *(f"{count} GPUs: held + step, GB" for count in GPUS), "sent a step, GB"]]
    for name, (encoder, head, blocks) in PAPER.items():
        both = encoder + head
        for engine in ENGINES:
            found = [costs(engine, both, both, encoder / blocks, count, PASSES["dino"]) for count in GPUS]
            sizes = [f"{each.held / 1e9:,.1f} + {each.step / 1e9:,.1f}" for each in found]
            rows.append([name, engine, *sizes, f"{found[-1].sent / 1e9:,.1f}"])
    return rows


def show(tables: dict[str, list[list[str]]], settings: EnginesBenchmark, seconds: float) -> None:
    """Print the tables, and write them as Markdown when asked."""
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{processor()}, {os.cpu_count()} cores"
    command = " ".join(["python benchmarks/engines.py", *sys.argv[1:]])
    what = f"{settings.processes} processes, {settings.images} images each, {device().type}, float32 weights"
    lines = ["# Engines", "", f"`{command}`: {machine}, torch {torch.__version__}; {what}; {seconds / 60:.0f} minutes."]
    lines.append("")
    for title, (headings, *rows) in tables.items():
        lines += [f"## {title}", ""]
        rules = ["---"] * 3 + ["--:"] * (len(headings) - 3)
        lines += ["| " + " | ".join(cells) + " |" for cells in (headings, rules, *rows)]
        lines.append("")
    print("\n" + "\n".join(lines))
    if settings.output:
        settings.output.write_text("\n".join(lines))


def main(settings: EnginesBenchmark) -> None:
    if settings.measure is not None:
        measure(settings)
        return
    started = time.perf_counter()
    rows = measured_rows(settings)
    tables = {"Measured": rows, "DINO on paper": paper_rows()}
    show(tables, settings, time.perf_counter() - started)


if __name__ == "__main__":
    main(cast(EnginesBenchmark, parse(EnginesBenchmark)))
