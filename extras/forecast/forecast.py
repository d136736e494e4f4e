"""The forecast of `--dry_run`: how fast a run trains, how long it takes, and what it needs of its loader.

On the device that is there, a few steps of the run are measured. For a GPU that is named, the work of a step is counted
on fake tensors (`fake_device`), which gives a bound: no step can be faster than its memory traffic and its products.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from rich.filesize import decimal

from tessera.data.batch import Batch
from tessera.data.batches import Batches
from tessera.extras.forecast.fake_device import DEVICE, GPU, Counter, backward, counting, fake_copy
from tessera.pretrain.config import RunConfig
from tessera.pretrain.engines import Engine
from tessera.pretrain.engines.ddp import DDP
from tessera.pretrain.methods.method import Method
from tessera.pretrain.preflight import Plan
from tessera.pretrain.step import finish_step, start_step, to_device
from tessera.pretrain.training_run import TrainingRun
from tessera.runtime.collectives import all_reduce_max
from tessera.runtime.settings import SettingsError

GPUS = {
    "h200": GPU("H200", memory=0.9 * 4.3e12, low=700e12, full=40e12, size=141 * 10**9),
    "h100": GPU("H100", memory=0.9 * 3.0e12, low=650e12, full=40e12),
    "a100": GPU("A100", memory=0.9 * 1.9e12, low=250e12, full=18e12),
}
LOADER_IMAGES = 32
"""Largest number of images in a batch of the loader that is measured."""
LOADER_SECONDS = 2.0
"""Time for which the loader is measured."""
STEP_SECONDS = 20.0
"""Longest step that is measured with all of its images. The time of a longer step is extrapolated from few images."""
MOST_SECONDS = 30.0
"""Time after which no further step is measured. A slow machine measures one step."""
FEW = 4
"""Number of images of the first measured steps."""
REACHED = (0.4, 0.8)
"""Share of the counted bound that training reaches on a GPU: a guess, because this project did not run on a GPU yet."""
LAUNCH = 8e-6
"""Seconds in which a process launches one kernel in PyTorch: a guess, too."""


def loader_speed(batches: Batches) -> float:
    """Return the images/s that one process reads, decodes and crops, measured for `LOADER_SECONDS`.

    `batches` must have no workers.
    """
    started, speed, images = time.perf_counter(), 0.0, 0
    for number, batch in enumerate(batches):
        images += len(batch)
        seconds = time.perf_counter() - started
        speed = images / max(seconds, 1e-9)
        if number == 0:  # the first batch also opens files, so it counts only if it is the only one
            started, images = time.perf_counter(), 0
        elif seconds > LOADER_SECONDS:
            break
    return speed


def step_seconds(run: TrainingRun, batch: Batch) -> float:
    """Return the seconds of a step whose forward passes all have `batch`, from the loader. Collective.

    The second and third of three steps are measured, and the shorter one counts, on the slowest process. After
    `MOST_SECONDS`, no further step is done. The weights of the run change.
    """
    seconds = list[float]()
    while len(seconds) < 3 and sum(seconds) < MOST_SECONDS:
        started = time.perf_counter()
        batches = (to_device(run, batch) for _ in range(run.config.accumulate))
        finish_step(run, start_step(run, 0, batches))
        seconds.append(float(all_reduce_max(torch.tensor(time.perf_counter() - started))))
    return min(seconds[1:] or seconds)


def gpu_memory(config: RunConfig, processes: int) -> tuple[str, int]:
    """Implement `Forecast.gpu_memory`."""
    gpu = GPUS[config.gpu or ""]
    if processes > 1:
        raise SettingsError("--gpu counts a step in one process. Start the forecast without a launcher, with --gpus N.")
    if config.compile:
        raise SettingsError("--gpu counts steps that are not compiled. Remove --compile; a compiled step is faster.")
    if config.batch_size % (config.gpus * config.accumulate):
        raise SettingsError(
            f"--batch_size {config.batch_size} is not divisible by --gpus {config.gpus} times --accumulate "
            f"{config.accumulate}."
        )
    return f"an {gpu.name} of {gpu.size / 1e9:.0f} GB", gpu.size


@contextmanager
def fake_run(
    config: RunConfig, accelerator: Accelerator, method: Method, gpu: GPU
) -> Iterator[tuple[Counter, TrainingRun]]:
    """Return a context with a run on a fake GPU, and the counter of its work. The weights of `method` are lost."""
    with (
        mock.patch.dict(PartialState._shared_state, device=DEVICE),
        mock.patch.dict(AcceleratorState._shared_state, device=DEVICE),
        counting(gpu) as counter,
    ):
        fake_copy(method)
        method.to = lambda *_, **__: method  # torch cannot move fake parameters, which are on the device already
        accelerator.backward = backward
        run = bare_run(config, accelerator, method, DDP(accelerator, method, config.optim))
        counter.clear()
        yield counter, run


def bare_run(config: RunConfig, accelerator: Accelerator, method: Method, engine: Engine) -> TrainingRun:
    """Return a run without evaluation, records and checkpoints."""
    nothing: Any = None
    return TrainingRun(config, Path(), accelerator, method, engine, None, None, nothing, images=1)


def forecast(
    config: RunConfig,
    accelerator: Accelerator,
    engine: Engine | None,
    method: Method,
    loader: Callable[[int], Batches],
    plan: Plan,
    *,
    fits: bool,
) -> dict[str, str]:
    """Implement `Forecast.forecast`."""
    processes, workers, steps = accelerator.num_processes, plan.workers, config.steps - plan.step
    each, passes = config.batch_size // processes // config.accumulate, processes * config.accumulate
    reading = loader_speed(loader(min(each, LOADER_IMAGES) * passes))
    if config.gpu is not None:
        batch = next(iter(loader(config.batch_size // config.gpus)))
        return counted(config, accelerator, method, batch, reading, steps)
    assert engine is not None
    run = bare_run(config, accelerator, method, engine)
    few = min(FEW, each)
    seconds = step_seconds(run, next(iter(loader(few * passes))))
    if fits and seconds * each / few < STEP_SECONDS:
        seconds = step_seconds(run, next(iter(loader(config.batch_size))))
    elif each > few and seconds > MOST_SECONDS:
        seconds *= each / few
    elif each > few:
        more = min(2 * few, each)
        rise = step_seconds(run, next(iter(loader(more * passes)))) - seconds
        seconds += rise * (each - few) / (more - few)
    training = config.batch_size / seconds
    made = reading * max(workers, 1) * processes
    # without workers, a process reads and trains in turns
    whole = min(training, made) if workers else 1 / (1 / training + 1 / made)
    duration = steps * config.batch_size / whole
    return {
        "training, images/s": f"{_speed(training)} ({1e3 * seconds:,.0f} ms per step, measured)",
        "loader, images/s": f"{_speed(made)} ({_speed(reading)} per worker, measured)",
        "time": f"{_time(duration)} at {_speed(whole)} images/s, without evaluations",
    }


def counted(
    config: RunConfig, accelerator: Accelerator, method: Method, batch: Batch, reading: float, steps: int
) -> dict[str, str]:
    """Return the rows of the forecast for the GPUs that `config.gpu` names. The weights of `method` are lost.

    Args:
        batch: Batch of the loader for one forward pass of one GPU.
        reading: Images/s of one loader worker of this machine.
        steps: Number of steps that the run still has to do.
    """
    gpus, gpu = config.gpus, GPUS[config.gpu or ""]
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad)
    with fake_run(config, accelerator, method, gpu) as (counter, run):
        start_step(run, 0, [to_device(run, batch) for _ in range(config.accumulate)])
    most = config.batch_size / counter.seconds()
    # with small encoders, a process launches kernels more slowly than the GPU runs them
    launched = config.batch_size / (LAUNCH * counter.total().kernels)
    low, high = (min(share * most, launched) for share in REACHED)
    shortest, longest = (_time(steps * config.batch_size / speed) for speed in (high, low))
    likely, hours = f"{low:,.0f} to {high:,.0f}", f"{shortest} to {longest}"
    if low == high:
        likely, hours = f"{low:,.0f}, limited by the launch of kernels", longest
    workers = math.ceil(high / gpus / reading)
    rows = {
        f"images/s of {gpus} {gpu.name}": f"at most {most:,.0f} (counted), likely {likely} (a guess)",
        "time": f"{hours}, without evaluations",
        "loader workers that feed a GPU": f"--workers {workers}, if each reads {reading:,.0f} images/s as here",
    }
    if gpus > 1:
        sent = round(2 * (gpus - 1) / gpus * 4 * trained)
        rows["sent by a GPU in each step"] = f"{decimal(sent)} of gradients, during the backward pass (DDP)"
    return rows


def _speed(images: float) -> str:
    """Return a number of images per second that keeps a digit."""
    return f"{images:,.0f}" if images >= 10 else f"{images:.2g}"


def _time(seconds: float) -> str:
    """Return a length of time as a text."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 0.1 else "less than 0.1 s"
    return f"{seconds / 3600:.1f} hours" if seconds >= 90 * 60 else f"{seconds / 60:.1f} minutes"
