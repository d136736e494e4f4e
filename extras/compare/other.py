"""Train the encoder of a cell with another library, through an adapter, in the environment of that library.

`tessera compare` starts `PYTHON -m tessera.extras.compare.other`. An adapter is a Python file with a class `Adapter`:

    class Adapter:
        def __init__(self, encoder, task): ...  # the encoder before training, and a `Task`
        batch_size                              # number of images of a step
        encoder                                 # the encoder that is scored: that of the teacher, if there is one
        def views(self, image): ...             # Pillow image -> list of tensors (3, side, side), one for each view
        def step(self, views, done): ...        # one step on tensors (B, 3, side, side); `done` rises from 0 to 1

The images, the encoder with its first weights, and the compute are those of the comparison. Views, loss, optimizer and
schedules are those of the adapter.
"""

import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tessera import encoders
from tessera.data.decode import decode
from tessera.data.shards import Source, open_shards
from tessera.encoders import WEIGHTS
from tessera.evaluation.features import input_size
from tessera.extras.compare.compute import FILE, processor_seconds
from tessera.pretrain.command_line import load
from tessera.pretrain.config import RunConfig
from tessera.pretrain.job import workers
from tessera.pretrain.monitoring.sinks import append_line
from tessera.pretrain.resolve import with_precision
from tessera.runtime import stdio
from tessera.runtime.lock import locked
from tessera.runtime.processes import exit_on_user_error, make_accelerator
from tessera.runtime.settings import Settings, flags, validate
from tessera.runtime.user_error import UserError

RECORDS = 20
"""Number of records of compute in a training."""


class AdapterError(UserError):
    """An adapter cannot be used."""


class OtherSettings(Settings):
    """Train with an adapter. The flags of a run follow after --."""

    adapter: Path
    """Python file with the class `Adapter`"""
    encoder: Path
    """encoder before training"""
    minutes: float | None = None
    """compute of the training"""
    steps: int | None = None
    """steps of the training, in place of minutes"""


class Task(NamedTuple):
    """Facts that an adapter needs."""

    size: int
    """Side of the global crops in pixels."""
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    """Context of the forward pass in the precision of the comparison."""


class Views(Dataset[list[Tensor]]):
    """Views of each image of a source."""

    def __init__(self, source: Source, views: Callable[[Image.Image], list[Tensor]]) -> None:
        self.source, self.views = source, views

    def __len__(self) -> int:
        return self.source.images

    def __getitem__(self, number: int) -> list[Tensor]:
        return self.views(Image.fromarray(decode(self.source.image(number)).permute(1, 2, 0).numpy()))


def run(settings: OtherSettings, config: RunConfig) -> None:
    """Train, and write the encoder and the compute to the folder of the run.

    Raises:
        AdapterError: the adapter has no class `Adapter`, or the comparison has settings that adapters do not support.
        ShardError: the shards cannot be read.
    """
    precision = with_precision(config).precision
    if precision == "fp16" or isinstance(config.data.shards, dict) or not config.data.shards or config.data.exclude:
        raise AdapterError(
            "Adapters support no --precision fp16, no mixture of data sets and no --data.exclude. Change it, or remove "
            "--others."
        )
    accelerator = make_accelerator(mixed_precision="bf16" if precision == "bf16" else "no")
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    kind = runpy.run_path(str(settings.adapter)).get("Adapter")
    if kind is None:
        raise AdapterError(f"{settings.adapter} has no class Adapter. See docs/compare.md.")
    torch.manual_seed(config.seed)
    encoder = encoders.load(settings.encoder).to(accelerator.device).train().requires_grad_(True)
    adapter = kind(encoder, Task(input_size(encoder, None), accelerator.device, accelerator.autocast))
    source = open_shards(config.data.shards, source=config.access)
    options = {"shuffle": True, "drop_last": True, "num_workers": workers(config, accelerator)}
    loader = DataLoader(Views(source, adapter.views), adapter.batch_size, **options)
    if not len(loader):
        raise AdapterError(f"A batch of the adapter has {adapter.batch_size} images, and the data {source.images}.")
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    with locked(output):
        train(settings, adapter, loader, output)
        encoders.save(adapter.encoder, output / WEIGHTS)


def train(settings: OtherSettings, adapter: Any, loader: DataLoader[list[Tensor]], output: Path) -> None:
    """Train until the compute or the steps are spent. Record the compute as the sink `compute` does."""
    device = next(adapter.encoder.parameters()).device
    gpu, start, recorded = device.type == "cuda", time.time(), -1

    def clock() -> float:
        if gpu:
            torch.cuda.synchronize()
        return time.monotonic() if gpu else processor_seconds()

    begin = clock()
    for step, views in enumerate(batches(loader)):
        spent = clock() - begin
        done = step / settings.steps if settings.steps else spent / (60 * (settings.minutes or 0))
        if int(RECORDS * done) > recorded or done >= 1:
            recorded = int(RECORDS * done)
            line = {"step": step, "start": start, "evaluated": False, "cpu": processor_seconds()}
            line |= {"wall": time.monotonic(), "gpu": gpu, "images": step * adapter.batch_size}
            append_line(output / FILE, line)
            print(f"{step} steps, {spent / 60:.1f} minutes of compute", flush=True)
        if done >= 1:
            return
        adapter.step([view.to(device, non_blocking=True) for view in views], done)


def batches(loader: DataLoader[list[Tensor]]) -> Iterator[list[Tensor]]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def main() -> None:
    stdio.protect()
    with exit_on_user_error():
        split = sys.argv.index("--")
        settings = validate(OtherSettings, flags(OtherSettings, sys.argv[1:split], "tessera compare"))
        run(settings, load(sys.argv[split + 1 :]))


if __name__ == "__main__":
    main()
