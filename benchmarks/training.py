"""Build methods, batches and training runs for benchmarks, on a GPU or on the CPU."""

import atexit
import functools
import itertools
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator

from tessera import encoders
from tessera.data.batch import Batch
from tessera.data.collate import Collator, Sample, Transform
from tessera.extras.forecast.forecast import bare_run
from tessera.pretrain import loop
from tessera.pretrain.build import build_method
from tessera.pretrain.config import RunConfig, settings_model
from tessera.pretrain.engines import Engine
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.method import Method
from tessera.pretrain.resolve import make_accelerator, resolve
from tessera.pretrain.step import Step, finish_step, start_step, to_device
from tessera.pretrain.training_run import TrainingRun
from tessera.runtime.settings import validate

IMAGE = (375, 500)
"""Height and width of the images in pixels, which are typical of ImageNet."""
IMAGES = 1_281_167
"""Number of training images of ImageNet. Settings that depend on the number of images are derived from this number."""
DISTINCT = 16
"""Number of different images in a batch of noise."""


def device() -> torch.device:
    """Return the GPU, or the CPU if there is no GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    """Wait until the device has finished all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@functools.cache
def untrained_teacher() -> str:
    """Save an untrained ViT-S/16 to a temporary file for methods that learn from a frozen encoder. Return the path."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    path = Path(folder) / "teacher.safetensors"
    encoders.save(encoders.build("vit_small"), path)
    return str(path)


def make_config(
    method: str,
    variant: str,
    images: int,
    *,
    own: Mapping[str, Any] | None = None,
    encoder: Mapping[str, Any] | None = None,
    data_images: int = IMAGES,
    **settings: Any,
) -> RunConfig:
    """Return the resolved settings of a run.

    Args:
        method: pretraining method.
        variant: encoder variant.
        images: number of images per step, over all processes.
        own: settings of the method.
        encoder: settings of the encoder.
        data_images: number of training images, from which settings that are not given are derived.
        settings: further settings of the run.

    Raises:
        ValueError: the settings do not fit together.
    """
    needed = {"teacher": untrained_teacher()} if "teacher" in METHODS[method].Config.model_fields else {}
    given = {"method": method, "batch_size": images, "evaluation": {"pictures": 0}, **settings}
    given |= {method: needed | dict(own or {}), "encoder": {"variant": variant} | dict(encoder or {})}
    return resolve(validate(settings_model(variant), given), data_images)


def loader_batch(transform: Transform, images: int, *, size: tuple[int, int] = IMAGE, seed: int = 0) -> Batch:
    """Return a batch of noise images of `size` (H, W) in the form of the loader. If there is a GPU, pin its memory."""
    rng = np.random.default_rng(seed)
    pixels = np.random.default_rng(seed).integers(0, 256, (DISTINCT, *size, 3), dtype=np.uint8)
    noise = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    samples = (Sample(str(i), noise[i % DISTINCT], transform.draw(size, rng), position=i) for i in range(images))
    batch = Collator(transform, images)(samples)
    return batch.pin_memory() if torch.cuda.is_available() else batch


class Records:
    """Recorder and saver of a run. The recorder keeps the records in memory, and the saver saves nothing."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def scalars(self, record: dict[str, Any]) -> None:
        self.rows.append(record)

    def ignore(self, *_: Any, **__: Any) -> None:
        pass

    pictures = skipped = close = save = wait = ignore


def as_run(config: RunConfig, accelerator: Accelerator, method: Method, engine: Engine) -> TrainingRun:
    """Return a run without data, evaluation and checkpoints."""
    run, records = bare_run(config, accelerator, method, engine), cast(Any, Records())
    run.recorder = run.saver = records
    return run


def make_run(config: RunConfig) -> TrainingRun:
    """Build the method and its engine as a pretraining run does, and return the run."""
    accelerator, engine_class = make_accelerator(config)
    torch.manual_seed(0)
    method = build_method(config, fresh=False)
    return as_run(config, accelerator, method, engine_class(accelerator, method, config.optim))


def training_step(run: TrainingRun, *batches: Batch) -> Step:
    """Run one optimizer step on batches of the loader, one per forward pass, and wait for it."""
    return finish_step(run, start_step(run, run.state.step, (to_device(run, batch) for batch in batches)))


def train(run: TrainingRun, batch: Batch) -> list[dict[str, Any]]:
    """Run the training loop to its last step, with the same batch in every step. Return the records of its metrics."""
    loop.train(run, itertools.repeat(batch))
    records: Any = run.recorder
    return records.rows
