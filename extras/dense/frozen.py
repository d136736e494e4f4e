"""Functions and settings shared by the evaluations of tokens: `segmentation`, `depth`, `patch_knn`, `attentive_probe`.

They read images for a frozen encoder, and train heads. Every step encodes new images,
and no features are kept, so the memory does not depend on the number of images. The result does not depend on the
number of processes, up to rounding.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor, nn

from tessera.data.augment import to_model_input
from tessera.data.batch import Batch
from tessera.data.batch_sampler import BatchSampler
from tessera.data.batches import Batches
from tessera.data.collate import Transform
from tessera.data.colors import Share
from tessera.data.crops import Areas, RandomCrop, RandomCropConfig
from tessera.data.loader import Reading, evaluation_batches, training_batches
from tessera.data.shards import ShardError, Source
from tessera.data.workers import free_cores
from tessera.encoders.base import Encoder
from tessera.evaluation.features import (
    EncoderSettings,
    EvaluationError,
    check_total,
    input_size,
)
from tessera.evaluation.tokens import patch_tokens
from tessera.runtime.collectives import all_reduce_sum, rank, sharing
from tessera.runtime.progress import track

WARMUP = 1500 / 40_000
"""Fraction of the training steps in which the learning rate rises, as in DINOv2."""
STEP = 2 / 3
"""Largest distance between neighbouring windows, as a fraction of their side, as in DINOv2."""


class TokenSettings(EncoderSettings):
    """Settings of every command that evaluates the tokens of a frozen encoder."""

    train: str | list[str]
    """SHARDS with the labels or maps to train on"""
    val: str | list[str]
    """test SHARDS; never used to choose hyperparameters"""
    batch_size: int = Field(16, ge=1)
    """number of images in a step, over all processes; each process encodes its share in one forward pass"""
    output: str | None = None
    """JSON result file, which must not exist; default: a new file in OUTPUT/evaluation, or next to the encoder"""


class HeadSettings(TokenSettings):
    """Settings of every command that trains heads on the tokens of a frozen encoder."""

    epochs: int = Field(32, ge=1)
    """number of passes over the training images"""
    weight_decay: float = Field(1e-4, ge=0)
    """weight decay of AdamW"""
    scale: Areas = (0.25, 1.0)
    """smallest and largest area of a training crop before the resize, as a share of the image's area"""
    flip: Share = 0.5
    """probability that a training crop is mirrored left to right"""
    seed: int = Field(0, ge=0, lt=2**31)
    """seed of the initial weights, the order of the images, and the crops"""


class DenseSettings(HeadSettings):
    """Settings of every command that trains a head for each token of a frozen encoder."""

    lr: float = Field(1e-3, gt=0)
    """peak learning rate of AdamW"""
    window: int | None = Field(None, ge=1)
    """side in pixels of overlapping windows in which an image of --image_size pixels is encoded; training crops have
    this size, and --scale is a share of the area of a window; default: the whole image"""


class Frozen(NamedTuple):
    """A frozen encoder, and how its images are read."""

    encoder: Encoder
    size: int
    """Side of the images in pixels."""
    reading: Reading


def freeze(
    settings: EncoderSettings, encoder: Encoder, accelerator: Accelerator, *, places: bool = True, **options: Any
) -> Frozen:
    """Freeze the encoder. `options` are further settings of `Reading`, such as the kind of the maps.

    Raises:
        EvaluationError: the places of the tokens count (`places`), and the tokens do not cover the images exactly.
    """
    encoder.requires_grad_(False)
    workers = free_cores(accelerator.num_processes) if settings.workers is None else settings.workers
    options |= {"workers_given": settings.workers is not None}
    reading = Reading(workers, source=settings.access, preprocessing=encoder.preprocessing, **options)
    size = input_size(encoder, settings.image_size)
    if places and size != (whole := whole_tokens(encoder, size)):
        sizes = " or ".join(str(one) for one in (whole, whole + encoder.stride) if one)
        raise EvaluationError(
            f"Images of {size} pixels are no whole number of tokens, whose side is {encoder.stride} pixels. So tokens "
            f"and pixels would not match. Give --image_size {sizes}."
        )
    return Frozen(encoder, size, reading)


def whole_tokens(encoder: Encoder, size: int) -> int:
    """Return the side in pixels of the largest whole number of tokens in an image of `size` pixels."""
    return size if encoder.settings.get("fixed_size") else size - size % encoder.stride


def evaluation_set(
    opened: Source, transform: Transform, batch_size: int, reading: Reading, accelerator: Accelerator
) -> Batches:
    """Return this process's part of all images. `batch_size` counts the images of all processes. Collective."""
    part = (accelerator.process_index, accelerator.num_processes)
    size, labels = max(batch_size // accelerator.num_processes, 1), reading.maps is None
    batches = evaluation_batches(opened, transform, size, part=part, labels=labels, reading=reading)
    check_total(batches.total)
    return batches


def model_inputs(batches: Batches, title: str, device: torch.device) -> Iterator[Batch]:
    """Yield the batches of this process as model input on `device`, with a progress bar on the main process."""
    for batch in track(batches, title, total=len(batches), shown=rank() == 0):
        yield to_model_input(batch.to(device, non_blocking=True))


def training_set(
    opened: Source, settings: HeadSettings, size: int, reading: Reading, accelerator: Accelerator, share: float = 1.0
) -> Batches:
    """Return one batch of random crops for each training step of this process.

    `size` is the side of a crop in pixels. The areas of the crops are `settings.scale`, multiplied by `share`.

    Raises:
        ShardError: the shards cannot be read, or a label or a map is missing.
        EvaluationError: the batch size does not fit the number of images.
    """
    smallest, largest = (share * area for area in settings.scale)
    crop = RandomCrop(RandomCropConfig(size=size, scale=(smallest, largest), flip=settings.flip))
    steps = max(settings.epochs * opened.images // settings.batch_size, 1)
    try:
        order = BatchSampler(
            settings.batch_size, steps=steps, rank=accelerator.process_index, world_size=accelerator.num_processes
        )
        batches = training_batches(opened, crop, order, seed=settings.seed, reading=reading)
    except ShardError:
        raise
    except ValueError as error:
        raise EvaluationError(str(error)) from error
    check_total(batches.total)
    return batches


def train_heads(
    heads: Sequence[tuple[nn.Module, float]],
    batches: Batches,
    backward: Callable[[Batch], None],
    weight_decay: float,
    device: torch.device,
) -> None:
    """Train heads by AdamW. The learning rates rise linearly, then fall linearly to 0. Collective.

    Args:
        heads: each head with its peak learning rate.
        batches: one batch of this process for each step.
        backward: function that computes the gradients of this process's part of the loss.
        weight_decay: weight decay of AdamW.
        device: device of the heads.

    Raises:
        EvaluationError: the weights are not finite after the training.
    """
    steps, parameters = len(batches), [parameter for head, _ in heads for parameter in head.parameters()]
    groups = [{"params": [*head.parameters()], "lr": peak} for head, peak in heads]
    optimizer = torch.optim.AdamW(groups, weight_decay=weight_decay)
    for step, batch in enumerate(model_inputs(batches, f"{steps:,} training steps", device)):
        for group, (_, peak) in zip(optimizer.param_groups, heads, strict=True):
            group["lr"] = peak * rate(step, steps)
        with sharing(batch.share):
            backward(batch)
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad = all_reduce_sum(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    if not all(parameter.isfinite().all() for parameter in parameters):
        raise EvaluationError(
            "The classifier's weights are NaN or infinite. Check whether the encoder has diverged, try --precision "
            "fp32, or lower the learning rate."
        )


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate. It rises linearly in the first steps (`WARMUP`), then falls linearly."""
    warmup = math.ceil(WARMUP * steps)
    return min((step + 1) / warmup, 1.0) * (1 - step / steps)


def window_tokens(encoder: Encoder, images: Tensor, precision: str, window: int | None = None) -> Tensor:
    """Return the tokens of overlapping windows, averaged where windows overlap: (b, C, S, S) -> (b, D, h, w) float32.

    A linear head of these tokens gives the mean of the logits of the windows.

    Args:
        window: side of the windows in pixels. None selects S, for one window.

    Raises:
        EvaluationError: the windows do not fit the images or the encoder.
    """
    size, stride = images.shape[2], encoder.stride
    side = window or size
    if side > size or (size - side) % stride:
        raise EvaluationError(
            f"Windows of {side} pixels do not fit an image of {size} pixels. Give an --image_size that is the side of "
            f"a window plus a multiple of {stride} pixels, the stride of the encoder."
        )
    step = max(int(STEP * side) // stride, 1) * stride
    starts = [*range(0, size - side, step), size - side]
    total = count = torch.zeros((), device=images.device)
    for top, left in itertools.product(starts, starts):
        part = patch_tokens(encoder, images[:, :, top : top + side, left : left + side], precision)
        around = [cut // stride for cut in (left, size - side - left, top, size - side - top)]
        total = total + F.pad(part, around)
        count = count + F.pad(torch.ones_like(part[:1, :1]), around)
    return total / count
