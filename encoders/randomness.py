"""Random numbers of encoders that are functions of the seed, the step and the sample.

The numbers do not depend on the device or on the number of processes.

A training step sets the context before the forward pass:

    with random_keys(seed, step, samples):  # samples (B,) int64 on the CPU: index of each sample in the global batch
        loss = method(batch, step)

Inside the context, each random number of drop path is a hash of (seed, step, sample, call, crop, block, branch), and
each random number of token dropping is a hash of (seed, step, sample, call, crop, token). Random numbers that all
samples of a step share, on all processes, are hashes of (seed, step, call, word); see `shared_noise`. `call` is the
number of earlier draws in the context. An encoder call with n * B images has n crops per sample, crop-major: image j
belongs to sample j % B. All processes must make the same encoder calls in the same order. Outside the context, encoders
draw from torch's generator.

An encoder draws the random numbers of a forward pass before its first block, and passes them to the blocks as tensors.
Therefore, activation checkpointing repeats a block with the same random numbers, and compiled blocks do not draw random
numbers. The functions of this module never wait for the device. A `random_keys` context affects only the thread that
opened it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch import Tensor

from tessera.encoders.errors import EncoderError
from tessera.encoders.segments import copy_to_device

BITS = 32
MASK = 2**BITS - 1
TOKEN = 2**20
"""Smallest integer that is hashed for token dropping. Drop path hashes smaller integers, one for each residual branch
of each block, so that drop path and token dropping never share random numbers."""


class _Keys:
    """State of a `random_keys` context: a key for each sample, a shared key, and the number of draws so far."""

    def __init__(self, samples: Tensor, shared: Tensor):
        self.samples = samples
        self.shared = shared
        self.calls = 0
        self.repeated: tuple[Tensor, int] | None = None  # arguments of `repeated_keys`


_current: ContextVar[_Keys | None] = ContextVar("random_keys", default=None)


@contextmanager
def random_keys(seed: int, step: int, samples: Tensor) -> Iterator[None]:
    """Make encoders draw random numbers as a function of `seed`, `step` and `samples` within the context.

    Args:
        seed: seed of the run.
        step: index of the optimizer step. Micro-batches of the same step must have different samples.
        samples: index of each sample of this batch in the global batch of the step: (B,) int64 on the CPU.
    """
    key = torch.zeros((), dtype=torch.int64)
    for word in (seed, seed >> BITS, step):
        key = hashed(key, torch.tensor(word & MASK))
    shared = hashed(hashed(key, torch.tensor(MASK)), torch.tensor(MASK))
    token = _current.set(_Keys(hashed(key, samples & MASK), shared))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def restarted_draws() -> Iterator[None]:
    """Count the draws of the surrounding `random_keys` context from 0 again, until this context ends.

    If several encoders are trained side by side, each in its own `restarted_draws` context, each encoder draws the same
    numbers as if it were trained alone. Outside of a `random_keys` context, this context changes nothing.
    """
    keys = _current.get()
    token = _current.set(None if keys is None else _Keys(keys.samples, keys.shared))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def repeated_keys(owners: Tensor, images: int) -> Iterator[None]:
    """Give all inputs that belong to one image the keys of this image, until this context ends.

    For an encoder that splits an image into several inputs of another encoder, such as its channels. Outside of a
    `random_keys` context, this context changes nothing.

    Args:
        owners: index of the image of each input, (M,) int64 on the CPU.
        images: number of images (n * B).
    """
    keys = _current.get()
    if keys is not None:
        keys.repeated = owners, images
    try:
        yield
    finally:
        if keys is not None:
            keys.repeated = None


def next_keys(images: int) -> Tensor | None:
    """Return a random key for each image of an encoder call with n crops of B samples: (n * B,) int64 on the CPU.

    Outside of a `random_keys` context, return None.

    Raises:
        EncoderError: the number of images is not a multiple of the number of samples in the context.
    """
    keys = _current.get()
    if keys is None:
        return None
    owners = None
    if keys.repeated is not None:
        owners, images = keys.repeated
    crops, rest = divmod(images, len(keys.samples))
    if rest:
        raise EncoderError(
            f"The encoder got {images} images. The number of images must be a multiple of {len(keys.samples)}, the "
            "number of samples that were passed to random_keys."
        )
    drawn = hashed(hashed(keys.samples, torch.tensor(keys.calls)), torch.arange(crops)[:, None])  # (n, B)
    keys.calls += 1
    return drawn.flatten() if owners is None else drawn.flatten()[owners]


def shared_noise(words: Tensor) -> Tensor:
    """Return a uniform random number from 0 to 1 for each integer word: float64 on the CPU, with the shape of `words`.

    Inside a `random_keys` context, all samples of the step share the numbers. The numbers are therefore equal on all
    processes. Outside of such a context, the numbers come from torch's generator.
    """
    keys = _current.get()
    if keys is None:
        return torch.rand(words.shape, dtype=torch.float64)
    drawn = hashed(hashed(keys.shared, torch.tensor(keys.calls)), words)
    keys.calls += 1
    return drawn.double() / 2**BITS


def hashed(keys: Tensor, words: Tensor) -> Tensor:
    """Return the hash of each pair of a key and an integer word. `keys` and `words` broadcast against each other.

    Keys and hashes are integers from 0 to 2**32 - 1.
    """
    return _mixed(keys ^ _mixed((words + 0x9E3779B9) & MASK))


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of 32-bit integers with a one-to-one map. The factors are below 2**31, so the products fit int64."""
    x = x ^ (x >> 15)
    x = (x * 0x2C1B3C6D) & MASK
    x = x ^ (x >> 12)
    x = (x * 0x297A2D39) & MASK
    return x ^ (x >> 15)


def drop_path_scales(keys: Tensor, rates: Sequence[float], device: torch.device) -> Tensor:
    """Return drop path factors, 0 or 1 / (1 - rate), for each block, branch and image: (blocks, 2, images) float32.

    Args:
        keys: random key of each image, as returned by `next_keys`: (images,) int64 on the CPU.
        rates: drop path rate of each block.
        device: device of the result.
    """
    words, thresholds, factors = _constants(tuple(rates), device)
    return factors * (_mixed(copy_to_device(keys, device) ^ words) >= thresholds)


@lru_cache(maxsize=32)
def _constants(rates: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the constants of `drop_path_scales` on the device.

    Returns:
        Three tensors: words (blocks, 2, 1) that are hashed with the keys of the images; thresholds (blocks, 1, 1),
        where a hash below the threshold drops the branch; and the factors (blocks, 1, 1) of the branches that are not
        dropped.
    """
    with torch.inference_mode(False):  # autograd would reject cached inference tensors in later training steps
        words = _mixed((torch.arange(2 * len(rates)) + 0x9E3779B9) & MASK).view(-1, 2, 1)
        exact = torch.tensor(rates, dtype=torch.float64).view(-1, 1, 1)
        constants = (words, (exact * 2**BITS).long(), (1 / (1 - exact)).float())
        first, second, third = (copy_to_device(tensor, device) for tensor in constants)
    return first, second, third


def token_noise(keys: Tensor, image_ids: Tensor, ranks: Tensor) -> Tensor:
    """Return a uniform random number from 0 to 1 for each token: (T,) float64.

    Args:
        keys: random key of each image, as returned by `next_keys`.
        image_ids: index of the image that each token belongs to: (T,).
        ranks: index of each token within its image: (T,).
    """
    return hashed(keys[image_ids], TOKEN + ranks).double() / 2**BITS
