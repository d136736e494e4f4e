"""Hues and blurs against colorsys and plain sums in float64."""

import colorsys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.data import pixels
from tessera.data.pixels import blur_weights, gaussian_blur, shift_hue
from tessera.encoders.base import IMAGENET


def test_autocast_leaves_the_blur_exact():
    lines, weights = torch.rand(4, 20, 3, 24), blur_weights(torch.tensor([0.5, 1, 2, 3]), radius=12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        blurred = gaussian_blur(lines, weights)
    assert torch.equal(blurred, gaussian_blur(lines, weights))


@pytest.mark.parametrize("apart", [False, True])
def test_hue_against_colorsys(apart):
    steps = torch.linspace(0, 1, 6, dtype=torch.float64)
    colors = torch.cartesian_prod(steps, steps, steps).T[None, :, :, None]  # every tie of channels is among them
    for turns in (-0.5, -0.13, 0.0, 0.21, 0.5):
        sixths = torch.tensor([6 * turns], dtype=torch.float64)
        shifted = torch.stack(shift_hue(colors.unbind(1), sixths), 1) if apart else shift_hue(colors, sixths)
        for color, got in zip(colors[0, :, :, 0].T.tolist(), shifted[0, :, :, 0].T.tolist(), strict=True):
            hue, saturation, value = colorsys.rgb_to_hsv(*color)
            assert got == pytest.approx(colorsys.hsv_to_rgb((hue + turns) % 1, saturation, value), abs=1e-9)


def test_blur_against_a_plain_sum_in_float64():
    line = torch.rand(1, 1, 3, 9, dtype=torch.float64)
    for sigma in (0.1, 0.7, 2.5):
        radius = int(np.ceil(4 * sigma))
        weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
        padded = np.pad(line[0, 0].numpy(), ((0, 0), (radius, radius)), mode="edge")
        expected = [(padded[:, i : i + len(weights)] * weights).sum(1) / weights.sum() for i in range(9)]
        blurred = gaussian_blur(line, blur_weights(torch.tensor([sigma], dtype=torch.float64), radius=11))[0, 0]
        np.testing.assert_allclose(blurred.numpy(), np.stack(expected, axis=1), atol=1e-12)


def test_normalising_in_one_pass_gives_the_same_up_to_rounding():
    x = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    expected = (x.double() - torch.tensor(IMAGENET.mean).view(3, 1, 1)) / torch.tensor(IMAGENET.std).view(3, 1, 1)
    for found in (pixels._normalized_at_once(x, IMAGENET, torch.empty_like(x)), pixels.normalize(x, IMAGENET)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


class Operations(TorchDispatchMode):
    """Names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.split("::")[-1])
        return func(*args, **(kwargs or {}))


def test_on_a_gpu_normalising_is_one_kernel():
    x = torch.empty(2, 3, 5, 7, device="meta")
    with Operations() as operations:
        pixels.normalize(x, IMAGENET)
    assert [name for name in operations.names if name in ("sub", "div_", "addcmul")] == ["addcmul"]
