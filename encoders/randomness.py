"""Random numbers of encoders as a function of seed, step and sample, equal on all devices and numbers of processes.

A training step sets the context before the forward pass:

    with random_keys(seed, step, samples):  # samples (B,) int64 on the CPU: index of each sample in the global batch
        loss = method(batch, step)

In this context, drop path and token dropping draw from a counter-based hash of (seed, step, sample, call, crop, block,
branch). `call` counts the draws in the context. An encoder call with n * B images has n crops per sample, crop-major:
image j belongs to sample j % B. Every process must make the same calls. Outside the context, encoders draw from torch's
generator.

Encoders draw once per forward pass, before the first block, and pass the result to their blocks as an argument. So
activation checkpointing recomputes the same values, and a compiled block gets a tensor. The functions here read nothing
from the device. Each `random_keys` context belongs to one thread.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch import Tensor

from encoders.errors import EncoderError
from encoders.segments import copy_to_device

BITS = 32
MASK = 2**BITS - 1
TOKEN = 2**20
"""First hash word of token dropping. Smaller words belong to the branches of blocks."""


class _Keys:
    """Keys of the samples of one forward pass, and the number of draws so far."""

    def __init__(self, samples: Tensor):
        self.samples = samples
        self.calls = 0


_current: ContextVar[_Keys | None] = ContextVar("random_keys", default=None)


@contextmanager
def random_keys(seed: int, step: int, samples: Tensor) -> Iterator[None]:
    """Let encoders draw random numbers as a function of `seed`, `step` and `samples`.

    Args:
        seed: seed of the run.
        step: optimizer step. Micro-batches of one step differ in their samples.
        samples: index of each sample of this batch in the global batch of the step: (B,) int64 on the CPU.
    """
    key = torch.zeros((), dtype=torch.int64)
    for word in (seed, seed >> BITS, step):
        key = hashed(key, torch.tensor(word & MASK))
    token = _current.set(_Keys(hashed(key, samples & MASK)))
    try:
        yield
    finally:
        _current.reset(token)


def next_keys(images: int) -> Tensor | None:
    """Return a key for each image of an encoder call: (n * B,) int64 on the CPU. None outside of `random_keys`.

    Raises:
        EncoderError: the number of images is not a multiple of the number of samples.
    """
    keys = _current.get()
    if keys is None:
        return None
    crops, rest = divmod(images, len(keys.samples))
    if rest:
        raise EncoderError(f"{images} images are not a multiple of the {len(keys.samples)} samples of random_keys.")
    drawn = hashed(hashed(keys.samples, torch.tensor(keys.calls)), torch.arange(crops)[:, None])  # (n, B)
    keys.calls += 1
    return drawn.flatten()


def hashed(keys: Tensor, words: Tensor) -> Tensor:
    """Combine keys with words, both from 0 to 2**32 - 1 in int64, into uniform numbers of the same range."""
    return _mixed(keys ^ _mixed((words + 0x9E3779B9) & MASK))


def _mixed(x: Tensor) -> Tensor:
    """Permute 32-bit numbers. Factors below 2**31 keep all products within int64."""
    x = x ^ (x >> 15)
    x = (x * 0x2C1B3C6D) & MASK
    x = x ^ (x >> 12)
    x = (x * 0x297A2D39) & MASK
    return x ^ (x >> 15)


def drop_path_scales(keys: Tensor, rates: Sequence[float], device: torch.device) -> Tensor:
    """Return the factor of each residual branch for each image, 0 or 1 / (1 - rate): (blocks, 2, images) float32.

    Args:
        keys: key of each image, (images,) int64 on the CPU.
        rates: drop path rate of each block.
        device: device of the result.
    """
    words, thresholds, factors = _constants(tuple(rates), device)
    return factors * (_mixed(copy_to_device(keys, device) ^ words) >= thresholds)


@lru_cache(maxsize=32)
def _constants(rates: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return mixed words (blocks, 2, 1), thresholds (blocks, 1, 1) and factors (blocks, 1, 1) on the device."""
    with torch.inference_mode(False):  # training cannot use cached inference tensors
        words = _mixed((torch.arange(2 * len(rates)) + 0x9E3779B9) & MASK).view(-1, 2, 1)
        exact = torch.tensor(rates, dtype=torch.float64).view(-1, 1, 1)
        constants = (words, (exact * 2**BITS).long(), (1 / (1 - exact)).float())
        first, second, third = (copy_to_device(tensor, device) for tensor in constants)
    return first, second, third


def token_noise(keys: Tensor, image_ids: Tensor, ranks: Tensor) -> Tensor:
    """Return a uniform number from 0 to 1 for each token: (T,) float64.

    Args:
        keys: key of each image.
        image_ids: index of the image of each token: (T,).
        ranks: index of each token in its image: (T,).
    """
    return hashed(keys[image_ids], TOKEN + ranks).double() / 2**BITS
