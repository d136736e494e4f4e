"""Each corruption against a closed form, SciPy, Pillow or Matplotlib."""

import io
import math

import numpy as np
import pytest
import torch
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from PIL import Image
from scipy import ndimage
from sklearn.datasets import load_sample_image
from torch import Tensor

from tessera.encoders.base import Preprocessing
from tessera.extras.corruptions import images as corruptions
from tessera.extras.corruptions.images import CORRUPTIONS, SEVERITIES, SIDE, corrupt

RANDOM = CORRUPTIONS.keys() - {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg"}
SEEDED = np.random.default_rng


@pytest.fixture(scope="module")
def photo() -> Tensor:
    """A photograph of 224 pixels (3, 224, 224) uint8, with its values from 0 to 255."""
    return torch.from_numpy(load_sample_image("flower.jpg")[100:324, 200:424].copy()).permute(2, 0, 1).contiguous()


def ramps(side: int) -> Tensor:
    """Two channels that hold the row and the column of each pixel."""
    return torch.stack(torch.meshgrid(torch.arange(side).float(), torch.arange(side).float(), indexing="ij"))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_error_grows_with_the_severity(photo, name):
    errors = [float((corrupt(photo, name, n, "a").float() - photo).square().mean()) for n in range(1, SEVERITIES + 1)]
    assert errors[0] > 10
    assert errors == sorted(errors)
    assert len(set(errors)) == SEVERITIES


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_key_determines_the_random_values(photo, name):
    before = photo.clone()
    first, again, other = (corrupt(photo, name, 3, key) for key in ("a.tar/1", "a.tar/1", "a.tar/2"))
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (name not in RANDOM)
    assert torch.equal(photo, before)


@pytest.mark.parametrize("shape", [(1, 16, 16), (5, 24, 40)])
def test_small_images_and_any_number_of_channels(shape):
    image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for name in CORRUPTIONS:
        found = corrupt(image, name, 5, "a")
        assert (found.shape, found.dtype) == (image.shape, torch.uint8)
        assert not torch.equal(found, image)


@pytest.mark.parametrize("severity", range(SEVERITIES))
def test_noise_has_the_variance_of_its_formula(severity):
    x, rng = torch.full((3, 256, 256), 0.4), SEEDED(0)
    sigma, photons, share = (
        CORRUPTIONS[name][1][severity] for name in ("gaussian_noise", "shot_noise", "impulse_noise")
    )
    expected = {
        corruptions.gaussian_noise(x, sigma, 1, rng): (0.4, sigma**2),
        corruptions.shot_noise(x, photons, 1, rng): (0.4, 0.4 / photons),  # a Poisson variable has its mean as variance
    }
    for noisy, (mean, variance) in expected.items():
        assert float(noisy.mean()) == pytest.approx(mean, abs=4 * math.sqrt(variance / x.numel()))
        assert float(noisy.var()) == pytest.approx(variance, rel=0.03)
    noisy = corruptions.impulse_noise(x, share, 1, rng)
    for value in (0, 1):
        assert float((noisy == value).float().mean()) == pytest.approx(share / 2, rel=0.05)
    assert float((noisy == x).float().mean()) == pytest.approx(1 - share, rel=0.02)


def test_blurs_equal_those_of_scipy(photo):
    x = photo[:, 40:90, 60:130] / 255
    for kernel in (corruptions.disk(3), corruptions.disk(6.4), corruptions.line(5, 30), corruptions.line(2.5, -45)):
        found = corruptions.convolved(x, kernel)
        expected = np.stack([ndimage.convolve(one, kernel.numpy(), mode="mirror") for one in x.double().numpy()])
        np.testing.assert_allclose(found, expected, atol=1e-5)
    for sigma in (0.3, 1.7, 5):
        radius = math.ceil(4 * sigma)
        expected = np.stack(
            [ndimage.gaussian_filter(one, sigma, mode="nearest", radius=radius) for one in x.double().numpy()]
        )
        np.testing.assert_allclose(corruptions.blurred(x, sigma), expected, atol=1e-5)


def moments(kernel: Tensor) -> np.ndarray:
    """The covariance (2, 2) of the rows and columns of a kernel around its centre."""
    places = ramps(len(kernel)).flatten(1).double() - len(kernel) // 2
    return (places * kernel.flatten() @ places.T).numpy()


def test_kernels_have_the_moments_of_a_disk_and_of_a_line():
    for radius in (2.5, 4, 10):
        kernel = corruptions.disk(radius)
        assert float(kernel.sum()) == pytest.approx(1)
        np.testing.assert_allclose(moments(kernel), np.eye(2) * radius**2 / 4, rtol=0.05, atol=0.05)
    for length, degrees in ((6, 0), (9.5, 30), (12, -45), (8, 90)):
        kernel, angle = corruptions.line(length, degrees), math.radians(degrees)
        down, right = math.sin(angle), math.cos(angle)
        expected = length**2 / 3 * np.outer([down, right], [down, right])
        assert float(kernel.sum()) == pytest.approx(1)
        np.testing.assert_allclose(moments(kernel), expected, rtol=0.05, atol=0.35)  # bilinear weights add up to 1 / 4


def test_displacements_equal_those_of_scipy(photo):
    x, rng = photo[:, 40:90, 60:130] / 255, SEEDED(1)
    shift = torch.from_numpy(rng.uniform(-9, 9, (2, 50, 70))).float()
    places = np.stack(np.mgrid[:50, :70]) + shift.double().numpy()
    expected = np.stack([ndimage.map_coordinates(one, places, order=1, mode="reflect") for one in x.double().numpy()])
    np.testing.assert_allclose(corruptions.displaced(x, shift), expected, atol=1e-4)


def test_zoom_blur_is_the_mean_of_enlarged_images(photo):
    x, centre = photo / 255, np.array(111.5).repeat(2)[:, None, None]
    places = np.stack(np.mgrid[:224, :224])
    expected = np.mean(
        [
            [ndimage.map_coordinates(one, centre + (places - centre) / f, order=1) for one in x.double().numpy()]
            for f in np.linspace(1, 1.26, 12)
        ],
        axis=0,
    )
    np.testing.assert_allclose(corruptions.zoom_blur(x, 1.26, 1, SEEDED(0)), expected, atol=1e-4)


def test_zoom_blur_ends_where_the_ranges_of_imagenet_c_end():
    ranges = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))
    expected = [np.arange(1, end, step)[-1] for end, step in ranges]
    np.testing.assert_allclose(corruptions.CORRUPTIONS["zoom_blur"][1], expected)


def test_glass_and_elastic_move_pixels_by_their_length():
    x, inner = ramps(SIDE), slice(20, -20)
    moved = (corruptions.displaced(x, torch.full((2, SIDE, SIDE), 3.0)) - x)[:, inner, inner]
    torch.testing.assert_close(moved, torch.full_like(moved, 3.0), rtol=0, atol=1e-3)
    glass = (corruptions.glass_blur(x, 6, 1, SEEDED(0)) - x)[:, inner, inner].abs().max()
    assert 1.5 < float(glass) <= 6
    for length, unit in ((2, 1), (4, 0.5)):
        change = (corruptions.elastic(x, length, unit, SEEDED(0)) - x)[:, inner, inner]
        size = float(change.square().mean().sqrt())
        assert size == pytest.approx(2, rel=0.15), "the field is larger at the edges"
        neighbours = (change[:, 1:] - change[:, :-1]).square().mean().sqrt()
        # the difference of two pixels in a Gaussian field of standard deviation s is 1 / (s * sqrt(2)) of its size
        assert float(neighbours) == pytest.approx(size / (5 * unit * math.sqrt(2)), rel=0.1)


def test_brightness_changes_the_value_in_hsv(photo):
    hsv = rgb_to_hsv(photo.permute(1, 2, 0).double().numpy() / 255)
    hsv[..., 2] = np.minimum(hsv[..., 2] + 0.3, 1)
    found = corrupt(photo, "brightness", 3, "a").permute(1, 2, 0).numpy()
    np.testing.assert_allclose(found, 255 * hsv_to_rgb(hsv), atol=0.51)


def test_contrast_keeps_the_mean_and_scales_the_deviation(photo):
    x = photo.double().numpy() / 255
    found = corruptions.contrast(photo / 255, 0.3, 1, SEEDED(0)).double().numpy()
    np.testing.assert_allclose(found.mean((1, 2)), x.mean((1, 2)), atol=1e-5)
    np.testing.assert_allclose(found.std((1, 2)), 0.3 * x.std((1, 2)), rtol=1e-4)


@pytest.mark.parametrize("severity", [1, 5])
def test_jpeg_and_pixelation_equal_those_of_pillow(photo, severity):
    image, file = Image.fromarray(photo.permute(1, 2, 0).numpy()), io.BytesIO()
    image.save(file, "JPEG", quality={1: 25, 5: 7}[severity])
    expected = np.asarray(Image.open(file))
    assert np.array_equal(corrupt(photo, "jpeg", severity, "a").permute(1, 2, 0).numpy(), expected)
    one, file = photo[:1], io.BytesIO()
    Image.fromarray(one[0].numpy()).save(file, "JPEG", quality={1: 25, 5: 7}[severity])
    assert np.array_equal(corrupt(one, "jpeg", severity, "a")[0].numpy(), np.asarray(Image.open(file)))
    small = image.crop((0, 0, 200, 200)).resize({1: (100, 100), 5: (40, 40)}[severity], Image.Resampling.BOX)
    expected = np.asarray(small.resize((200, 200), Image.Resampling.NEAREST)).astype(float)
    found = corrupt(photo[:, :200, :200], "pixelate", severity, "a").permute(1, 2, 0).numpy()
    np.testing.assert_allclose(found, expected, atol=1)


def test_weather_adds_gray_textures(photo):
    x = photo / 255
    cloud = corruptions.plasma((100, 180), 2, SEEDED(0))
    assert (float(cloud.min()), float(cloud.max())) == (0, 1)
    power = np.abs(np.fft.fft2(cloud[0].numpy()))[0, 1:91] ** 2
    assert power[:4].mean() > 100 * power[45:].mean(), "large structures dominate"
    frost = corruptions.frost(x, (0.7, 0.6), 1, SEEDED(0)) - 0.7 * x
    torch.testing.assert_close(frost, frost[:1].expand(3, -1, -1))
    assert 0 <= float(frost.min()) < 0.1
    assert 0.5 < float(frost.max()) <= 0.6 + 1e-6
    fog = corruptions.fog(x, 2, 1, SEEDED(0))
    most = float(x.max())
    torch.testing.assert_close(fog, (x + 2 * corruptions.plasma((224, 224), 2, SEEDED(0))) * most / (most + 2))
    flakes = corruptions.snow(torch.zeros(1, 448, 448), 0.2, 2, SEEDED(0)) - 0.1
    assert float(flakes.min()) >= 0
    # a share of the cells has a height from 0 to 1, which is doubled, and the blur keeps the sum
    assert float(flakes.mean()) == pytest.approx(2 * 0.2 / 2, rel=0.1)


@pytest.mark.parametrize("name", ["brightness", "gaussian_noise", "contrast"])
def test_images_of_16_bits_are_corrupted_within_their_range(name, photo):
    """Values of a range of 0 to 255 * 16 are those of 8 bits, times 16, but for the rounding to 8 bits."""
    given = Preprocessing((0.5,) * 3, (0.25,) * 3, "uint16", (0,) * 3, (255 * 16,) * 3)
    found = corrupt((photo.int() * 16).to(torch.uint16), name, 2, "a", given)
    assert found.dtype == torch.uint16
    assert (found.int() - 16 * corrupt(photo, name, 2, "a").int()).abs().max() <= 8
