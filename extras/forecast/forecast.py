"""The forecast of `--dry_run`: how fast a run trains, how long it takes, and what it needs of its loader.

On the device that is there, a few steps of the run are measured. For a GPU that is named, the FLOP of a step are
counted.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from rich.filesize import decimal
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.data.batch import Batch
from tessera.data.batch_sampler import share_bounds
from tessera.data.batches import Batches
from tessera.pretrain.config import RunConfig
from tessera.pretrain.engines import Engine
from tessera.pretrain.engines.meta_copy import on_meta
from tessera.pretrain.flop import image_flop, meta_batch
from tessera.pretrain.methods.method import Method
from tessera.pretrain.preflight import Plan
from tessera.pretrain.step import finish_step, start_step, to_device
from tessera.pretrain.training_run import TrainingRun
from tessera.runtime.collectives import all_reduce_max
from tessera.runtime.settings import SettingsError


class GPU(NamedTuple):
    """Rates that matrix products reach on a GPU, in FLOP per second. They are lower than those of the data sheet."""

    name: str
    low: float
    """Rate in bfloat16."""
    full: float
    """Rate in float32."""
    size: int = 80 * 10**9
    """Size of the memory in bytes."""


GPUS = {
    "h200": GPU("H200", low=700e12, full=40e12, size=141 * 10**9),
    "h100": GPU("H100", low=650e12, full=40e12),
    "a100": GPU("A100", low=250e12, full=18e12),
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
REACHED = (0.2, 0.4)
"""Share of the rate of matrix products that training reaches on a GPU: a guess, because this project did not run on a
GPU yet. Memory traffic limits a step (benchmarks/roofline.py)."""
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
    return f"an {gpu.name} of {gpu.size / 1e9:.0f} GB", gpu.size


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
    _, each = share_bounds(config.batch_size, processes, config.accumulate, method.together)
    passes = processes * config.accumulate
    reading = loader_speed(loader(min(each, LOADER_IMAGES) * passes))
    if config.gpu is not None:
        return counted(config, method, reading, steps)
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
    rows = {
        "training, images/s": f"{_speed(training)} ({1e3 * seconds:,.0f} ms per step, measured)",
        "loader, images/s": f"{_speed(made)} ({_speed(reading)} per worker, measured)",
        "time": f"{_time(duration)} at {_speed(whole)} images/s, without evaluations",
    }
    return rows if accelerator.device.type == "cpu" else rows | feeding(training / processes, reading)


class _Kernels(TorchDispatchMode):
    """Counts the operations that launch a kernel, which are all except views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **kwargs or {})


def step_work(method: Method) -> tuple[float, int]:
    """Return the FLOP per image and the number of kernels of a forward and a backward pass, which compute no values.

    Raises:
        SettingsError: the method does not run on the meta device.
    """
    phantom, batch = on_meta(method), meta_batch(method, method.transform())
    try:
        with _Kernels() as kernels:
            flop = image_flop(phantom, batch)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise SettingsError(f"--gpu cannot count a step of {type(method).__name__}: {error}. Remove --gpu.") from error
    return flop, kernels.count


def counted(config: RunConfig, method: Method, reading: float, steps: int) -> dict[str, str]:
    """Return the rows of the forecast for the GPUs that `config.gpu` names.

    Args:
        config: Settings of the run.
        method: Method of the run.
        reading: Images/s of one loader worker of this machine.
        steps: Number of steps that the run still has to do.
    """
    gpus, gpu = config.gpus, GPUS[config.gpu or ""]
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad)
    flop, kernels = step_work(method)
    rate = {"fp32": gpu.full, "tf32": gpu.low / 2}.get(config.precision, gpu.low)
    # with small encoders, a process launches kernels more slowly than the GPU runs them
    launched = config.batch_size / (LAUNCH * kernels * config.accumulate)
    low, high = (min(share * gpus * rate / flop, launched) for share in REACHED)
    shortest, longest = (_time(steps * config.batch_size / speed) for speed in (high, low))
    likely, hours = f"{low:,.0f} to {high:,.0f}", f"{shortest} to {longest}"
    if low == high:
        likely, hours = f"{low:,.0f}, limited by the launch of kernels", longest
    rows = {
        f"images/s of {gpus} {gpu.name}": f"{likely} (a guess from {flop / 1e9:,.1f} GFLOP an image)",
        "time": f"{hours}, without evaluations",
    } | feeding(high / gpus, reading)
    if gpus > 1:
        sent = round(2 * (gpus - 1) / gpus * 4 * trained)
        rows["sent by a GPU in each step"] = f"{decimal(sent)} of gradients, during the backward pass (DDP)"
    return rows


def feeding(training: float, reading: float) -> dict[str, str]:
    """Return the row of the CPUs that a GPU needs.

    Args:
        training: Images/s that the GPU trains.
        reading: Images/s that a loader worker reads.
    """
    workers = math.ceil(training / reading)
    return {
        "CPUs that keep a GPU busy": f"{workers + 1} (--workers {workers} for {_speed(training)} images/s, if each "
        f"reads {_speed(reading)} as here; and one for the training process)"
    }


def _speed(images: float) -> str:
    """Return a number of images per second that keeps a digit."""
    return f"{images:,.0f}" if images >= 10 else f"{images:.2g}"


def _time(seconds: float) -> str:
    """Return a length of time as a text."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 0.1 else "less than 0.1 s"
    return f"{seconds / 3600:.1f} hours" if seconds >= 90 * 60 else f"{seconds / 60:.1f} minutes"
