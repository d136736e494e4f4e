"""Methods, batches and runs for measurements, on a GPU or on the CPU."""

import atexit
import functools
import itertools
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from device.settings import device, wait
from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.data.batch import Batch
from tessera.data.collate import Collator, Sample, Transform, collate
from tessera.pretrain import loop
from tessera.pretrain.build import build_method
from tessera.pretrain.checkpoints.resume import TrainState
from tessera.pretrain.config import EvaluationConfig, settings_model
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.base import Method, RunSize
from tessera.pretrain.optim.adamw import OptimConfig, apply_schedules, clip_gradients
from tessera.pretrain.resolve import make_accelerator, resolve

IMAGE = (375, 500)
"""Height and width of a whole image in pixels, which are typical of ImageNet."""
IMAGES = 1_281_167
"""Number of training images for which settings are derived: ImageNet's."""
DISTINCT = 16
"""Number of different images in a batch of noise."""


def build(
    name: str, variant: str, batch_size: int, steps: int, **settings: Any
) -> tuple[Method, OptimConfig, Transform]:
    """Return a method with a new encoder, the resolved optimizer settings, and the transform of the method."""
    torch.manual_seed(0)
    kind = METHODS[name]
    settings = with_teacher(name) | settings
    size = RunSize(50_000, batch_size, steps)
    config, optim = kind.resolve(kind.Config(**settings), OptimConfig(warmup_steps=0), size)
    defaults = kind.encoder_defaults(config, variant, size) | encoders.supported(variant, {"drop_path": 0.0})
    method = kind(encoders.build(variant, **defaults), config, steps)
    return method, optim, method.transform()


def with_teacher(name: str) -> dict[str, Any]:
    """Return the settings that a method cannot be built without: the teacher of a method that learns from one."""
    return {"teacher": untrained_teacher()} if "teacher" in METHODS[name].Config.model_fields else {}


@functools.cache
def untrained_teacher() -> str:
    """Save a new ViT-S/16 to a temporary folder, for methods that learn from a frozen encoder, and return its path."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    path = Path(folder) / "teacher.safetensors"
    encoders.save(encoders.build("vit_small"), path)
    return str(path)


def random_batch(transform: Transform, images: int, seed: int) -> Batch:
    """Return a batch of noise images in the format of the loader: uint8 tensors on the CPU."""
    rng = np.random.default_rng(seed)
    pictures = [torch.from_numpy(rng.integers(0, 256, (3, 256, 256), dtype=np.uint8)) for _ in range(images)]
    return collate(transform, pictures, [rng] * images)


def loader_batch(transform: Transform, images: int, *, size: tuple[int, int] = IMAGE) -> Batch:
    """Return a batch of noise images as the loader yields it, in pinned memory if there is a GPU."""
    rng = np.random.default_rng(0)
    noise = [
        torch.from_numpy(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).permute(2, 0, 1) for _ in range(DISTINCT)
    ]
    samples = (
        Sample(str(i), noise[i % DISTINCT], transform.draw(size, rng), position=i, label=0) for i in range(images)
    )
    batch = Collator(transform, images)(samples)
    return batch.pin_memory() if torch.cuda.is_available() else batch


def on_device(batch: Batch) -> Batch:
    """Return a batch of the loader as input for a method."""
    return to_model_input(batch.to(device(), non_blocking=True))


def milliseconds(work: Callable[[], object], times: int) -> float:
    """Return the median time in milliseconds of a call that runs on the device, after two warm-up calls."""
    taken = []
    for _ in range(times + 2):
        wait()
        start = time.perf_counter()
        work()
        wait()
        taken.append(1000 * (time.perf_counter() - start))
    return float(np.median(taken[2:]))


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Compute float32 products within the block in full ("highest") or as TF32 ("high"), convolutions too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=precision != "highest"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def attempt(row: Mapping[str, Any], work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return `row` with what `work` returns. If `work` raises an exception, print it and return a failed row."""
    try:
        return {**row, **work()}
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        return {**row, "ok": False, "error": f"{type(error).__name__}: {first}"}


@dataclass(frozen=True)
class Trainer:
    """Method and optimizer that train in a single process, without a distributed engine."""

    method: Method
    optimizer: torch.optim.Optimizer
    optim: OptimConfig
    steps: int
    """Number of steps in the run."""
    bf16: bool
    """True if the forward pass runs in bfloat16 autocast."""

    def step(self, batch: Batch, number: int) -> Tensor:
        """Train on a batch that comes from the loader, and return the loss, a scalar."""
        device = next(self.method.parameters()).device
        return self.train(to_model_input(batch.to(device, non_blocking=True)), number)

    def train(self, batch: Batch, number: int) -> Tensor:
        """Train on a normalised batch that is already on the device, and return the loss, a scalar."""
        method = self.method
        apply_schedules(self.optimizer, self.optim, number, self.steps, 256)
        with torch.autocast(next(method.parameters()).device.type, torch.bfloat16, enabled=self.bf16):
            loss, _ = method(batch, number)
        loss.backward()
        parts = [[p.grad for p in part.parameters() if p.grad is not None] for part in method.trained_parts()]
        clip_gradients(parts, self.optim.clip, self.optim.clip_by)
        self.optimizer.step()
        self.optimizer.zero_grad()
        method.after_step(number)
        return loss.detach()


class Records:
    """Recorder of a run that keeps its records in memory, and saver that saves nothing."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def scalars(self, record: dict[str, Any]) -> None:
        self.rows.append(record)

    def ignore(self, *_: Any, **__: Any) -> None:
        pass

    pictures = skipped = close = save = wait = ignore


def make_run(
    method: str, variant: str, images: int, *, own: Mapping[str, Any] | None = None, **settings: Any
) -> loop.Run:
    """Return a run with its engine, built as a pretraining run builds it, without data, evaluation and checkpoints.

    Args:
        method: pretraining method.
        variant: encoder variant.
        images: number of images per step, over all processes.
        own: settings of the method.
        settings: further settings of the run.
    """
    own = {**with_teacher(method), **(own or {})}
    model = settings_model(variant)
    given = model(
        method=method, batch_size=images, evaluation=EvaluationConfig(pictures=0), **{method: own}, **settings
    )
    config = resolve(given, IMAGES)
    accelerator, engine_class = make_accelerator(config)
    torch.manual_seed(0)
    built = build_method(config, fresh=False)
    records: Any = Records()
    engine = engine_class(accelerator, built, config.optim)
    return loop.Run(config, Path(), accelerator, built, engine, records, None, records, IMAGES, TrainState())


def train(run: loop.Run, batch: Batch) -> list[dict[str, Any]]:
    """Run the training loop to its last step on one batch, again and again. Return the records of its metrics."""
    loop.train(run, itertools.repeat(batch))
    records: Any = run.recorder
    return records.rows
