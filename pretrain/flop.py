"""FLOP and tokens of a training step, and the share of the device's peak that a run reaches.

The FLOP of the matrix products, convolutions and attention of a forward and a backward pass are counted once, by torch,
on the meta device, where nothing is computed. Everything that a method computes counts, such as a teacher's forward
pass and the heads. The FLOP that a run computes twice to save memory (`encoder.checkpoint_activations`) count once, and
those that it leaves out (`encoder.skip_dropped`) count as well, so that the share is that of useful work (PaLM,
2204.02311, appendix B).
"""

import functools
import logging
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from tessera.data.batch import Batch
from tessera.data.collate import Transform
from tessera.data.crops import MixedCrops, NativeCrop
from tessera.pretrain.activations import blank_batch
from tessera.pretrain.engines.meta_copy import on_meta
from tessera.pretrain.methods.method import Method
from tessera.runtime.collectives import alone

log = logging.getLogger(__name__)
COUNTED = 2
"""Number of images of the passes whose FLOP are counted."""
PEAKS = {"NVIDIA A100": 312e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""Dense bf16 and fp16 FLOP per second by the data sheets, by the beginning of the GPU's name."""
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIDES = {"cuda": 8192, "cpu": 512}
"""Side of the matrices whose product is timed."""
SECONDS = 0.05
"""Time for which products are timed."""


@dataclass(frozen=True)
class Work:
    """Work of a run per image, and the peak of a device."""

    flop: float
    """FLOP of a forward and a backward pass per image."""
    tokens: float
    """Tokens per image: the patches of all crops, also those that a method hides from the encoder."""
    peak: float
    """Peak of a device in FLOP per second."""

    def metrics(self, images_per_second: float, processes: int) -> dict[str, float]:
        """Return the metrics `tokens_per_second` and `mfu` of a run at the given speed of all processes."""
        mfu = self.flop * images_per_second / (self.peak * processes)
        return {"tokens_per_second": self.tokens * images_per_second, "mfu": mfu}


def count_work(method: Method, device: torch.device, precision: str) -> Work | None:
    """Return the work of a run. If it cannot be counted, log the reason and return None.

    `method` and the random generators of the run do not change.
    """
    transform = method.transform()
    if isinstance(transform, NativeCrop):
        log.info("The run has no metrics mfu and tokens_per_second, because crops have the sizes of the images.")
        return None
    parts = [(transform, 1.0)]
    if isinstance(transform, MixedCrops):
        parts = list(zip(transform.transforms, transform.shares, strict=True))
    try:
        phantom = _useful_work(on_meta(method))
        with torch.random.fork_rng(devices=[]), alone():
            flop = sum(share * image_flop(phantom, meta_batch(phantom, one)) for one, share in parts)
            tokens = sum(share * _tokens(phantom, one) for one, share in parts)
    except Exception as error:  # methods and encoders of the user may need tensors with values
        name, first = type(method).__name__, (str(error).splitlines() or [""])[0]
        log.info("%s has no metrics mfu and tokens_per_second, because its FLOP cannot be counted: %s", name, first)
        return None
    work = Work(flop, tokens, peak(device, precision))
    log.info("mfu: %.3g GFLOP an image, at most %.3g TFLOP/s of a process", work.flop / 1e9, work.peak / 1e12)
    return work


def meta_batch(method: Method, transform: Transform) -> Batch:
    """Return a batch on the meta device, of crops of `COUNTED` images."""
    return blank_batch(method, transform, [(64, 64)] * COUNTED).to("meta")


def image_flop(method: Method, batch: Batch) -> float:
    """Return the FLOP per image of a forward and a backward pass of a method. `batch` is a `meta_batch`."""
    with FlopCounterMode(display=False) as counter:
        loss, _ = method(batch, 0)
        loss.backward()
    return counter.get_total_flops() / COUNTED


def peak(device: torch.device, precision: str) -> float:
    """Return the peak of a device in FLOP per second in the precision of a run.

    For GPUs in `PEAKS` in bf16 or fp16, it is that of the data sheet. Otherwise, the fastest matrix product of a few is
    measured, on a CPU with the threads of this process.
    """
    low = LOW.get(precision)
    if device.type == "cuda" and low is not None:
        name = torch.cuda.get_device_name(device)
        for known, value in PEAKS.items():
            if name.startswith(known):
                return value
    return _fastest_product(device, low or torch.float32)


@functools.cache
def _fastest_product(device: torch.device, kind: torch.dtype) -> float:
    """Return the FLOP per second of the fastest of the square matrix products of `SECONDS`."""
    side = SIDES[device.type]
    own = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=own).to(kind) for _ in range(2))

    def seconds() -> float:
        started = time.perf_counter()
        (a @ b)[0, 0].item()  # waits for the device
        return time.perf_counter() - started

    seconds()  # the first product also loads the library
    found = [seconds()]
    while sum(found) < SECONDS:
        found.append(seconds())
    return 2 * side**3 / min(found)


def _useful_work(method: Method) -> Method:
    """Change a method so that it computes nothing twice, and leaves out no branch of a block."""
    for part in method.modules():
        for name in ("checkpoint_activations", "skip_dropped"):
            if hasattr(part, name):
                setattr(part, name, False)
    return method


def _tokens(method: Method, transform: Transform) -> float:
    encoder = method.trained_encoder()
    return float(sum(view.crops * int(np.prod(encoder.grid(view.size, view.size))) for view in transform.views))
