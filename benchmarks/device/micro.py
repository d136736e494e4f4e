"""Times of single parts: attention kernels, crops, colours, decoding, the copy of a batch, the update of weights."""

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torchvision.io
from loader import timed
from PIL import Image
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from device.settings import DeviceCheck, device
from device.training import IMAGE, attempt, loader_batch, make_run, milliseconds
from tessera.data.augment import to_model_input
from tessera.data.crops import MultiCrop, MultiCropConfig
from tessera.data.decode import decode
from tessera.pretrain.methods import METHODS
from tessera.pretrain.optim import ema
from tessera.pretrain.optim.adamw import clip_gradients

BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
SHAPES = ((4096, 37), (2048, 50), (1024, 197))
"""Numbers of crops and of tokens of a crop: 96 pixels, the visible tokens of MAE at 224 pixels, and 224 pixels."""
HEADS, WIDTH = 6, 64
Row = dict[str, Any]


def micro(check: DeviceCheck) -> Iterator[Row]:
    """Yield the time of each part in milliseconds."""
    times = 1 if check.small else 10
    for images, tokens in SHAPES:
        for backend in BACKENDS:
            row = {"attention of tokens": tokens, "crops": 4 if check.small else images, "kernel": backend.name}
            yield row | attention(row["crops"], tokens, backend, times)
    images = 1 if check.small else 512
    yield from pixel_work(images, times)
    yield from decoding(8 if check.small else 256)
    yield from updates(check, times)


def attention(images: int, tokens: int, backend: SDPBackend, times: int) -> Row:
    """Return the time of the forward and of the backward pass of attention. A kernel may lack for the device."""
    shape = (images, HEADS, tokens, WIDTH)
    q, k, v = (torch.randn(shape, device=device(), dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=device(), dtype=torch.bfloat16)
    try:
        with sdpa_kernel(backend):
            forward = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v), times)
            out = F.scaled_dot_product_attention(q, k, v)
    except RuntimeError:
        return {"forward, ms": None, "backward, ms": None}
    backward = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), times)
    return {"forward, ms": forward, "backward, ms": backward}


def pixel_work(images: int, times: int) -> Iterator[Row]:
    """Yield the times of the copy of a batch and of its colours."""
    batch = loader_batch(MultiCrop(MultiCropConfig()), images)
    assert batch.memory is not None
    row = {"part": "copy of crops", "images": images, "MB": batch.memory.numel() / 1e6}
    yield row | {"ms": milliseconds(lambda: batch.to(device(), non_blocking=True), times)}
    moved = batch.to(device())
    row = {"part": "colours and normalisation", "images": images, "MB": None}
    yield attempt(row, lambda: {"ms": milliseconds(lambda: to_model_input(moved), times)})


def decoding(images: int) -> Iterator[Row]:
    """Yield the rates of decoding JPEGs: on one core, and on the GPU."""
    files = [jpeg(seed) for seed in range(8)] * (images // 8)
    size = sum(map(len, files)) / len(files) / 1000
    row = {"decoder": "one core", "kB": size}
    yield row | {"images/s": 1 / timed(lambda: len([decode(file) for file in files[:8]]), 0.5).wall}
    if torch.cuda.is_available():
        encoded = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
        row = {"decoder": f"nvJPEG, {images} at once", "kB": size}
        yield attempt(row, lambda: {"images/s": 1000 * images / milliseconds(lambda: decoded(encoded), 5)})


def decoded(encoded: list[Tensor]) -> object:
    return torchvision.io.decode_jpeg(encoded, device="cuda")


def jpeg(seed: int, size: tuple[int, int] = IMAGE) -> bytes:
    """Return a JPEG of smooth noise and fine grain, about as large and as slow to decode as a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (size[0] // 25, size[1] // 25, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((size[1], size[0]), Image.Resampling.BICUBIC), dtype=np.float32)
    grain = rng.normal(0, 12, (*size, 1))
    with BytesIO() as file:
        Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        return file.getvalue()


def updates(check: DeviceCheck, times: int) -> Iterator[Row]:
    """Yield the times of clipping, of AdamW, and of the teacher's update, for DINO with 65,536 prototypes."""
    own = METHODS["dino"].small_settings if check.small else {}
    run = make_run("dino", "vit_micro" if check.small else "vit_small", 64, own=own, steps=100, precision="bf16")
    method: Any = run.method
    for p in method.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    gradients = run.engine.local_gradients(method.trained_parts())
    parts = {
        "clip, by tensor": lambda: clip_gradients(gradients, 3.0, "tensor"),
        "clip, global": lambda: clip_gradients(gradients, 3.0, "global"),
        "AdamW": run.engine.optimizer.step,
        "teacher": lambda: ema.update(method.teacher, method.student, 0.99),
    }
    count = sum(p.numel() for p in method.parameters() if p.requires_grad)
    for name, work in parts.items():
        yield attempt({"update": name, "parameters": count}, lambda work=work: {"ms": milliseconds(work, times)})
