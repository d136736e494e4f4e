"""Colour changes of batches against torchvision and SciPy, one image at a time."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from scipy import ndimage, stats
from torchvision.transforms.v2 import functional as tv

from tessera.data import augment
from tessera.data.augment import augment_colors, to_model_input
from tessera.data.batch import Batch, Colors, View
from tessera.data.colors import BandDrop, ColorConfig
from tessera.data.pixels import BAND, normal_noise
from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.encoders.images import PackedImages, pack
from tests.data.batches import STRONG, by_name, draw, drawn, from_names, rng

MEAN, STD = (torch.tensor(values)[:, None, None] for values in (IMAGENET.mean, IMAGENET.std))


def pictures(n: int, height: int = 20, width: int = 24) -> torch.Tensor:
    """Noise, smooth colours, and the flat extremes where HSV has no hue."""
    noise = rng(1).integers(0, 256, (n, 3, height, width), dtype=np.uint8)
    noise[1::3] = ndimage.zoom(noise[1::3, :, :4, :4], (1, 1, height / 4, width / 4), order=1)
    noise[2::3, :, :5] = [[[0]], [[128]], [[128]]]
    noise[2::3, :, 5:10] = 255
    noise[2::3, :, 10:] = 0
    return torch.from_numpy(noise)


def row(colors: Colors, i: int) -> Colors:
    return [(operation, numbers[i : i + 1]) for operation, numbers in colors]


def one_by_one(image: torch.Tensor, colors: Colors, i: int) -> torch.Tensor:
    """Oracle: torchvision's operations one after the other, the blur by SciPy; colours of crop i."""
    x, p = image.double() / 255, {name: numbers[i] for name, numbers in by_name(colors).items()}
    steps = [
        lambda x: tv.adjust_brightness(x, float(p["brightness"])),
        lambda x: tv.adjust_contrast(x, float(p["contrast"])),
        lambda x: tv.adjust_saturation(x, float(p["saturation"])),
        lambda x: tv.adjust_hue(x, float(p["hue"])),
    ]
    for step in p["order"].astype(int):
        x = steps[step](x)
    if p["grayscale"]:
        x = tv.rgb_to_grayscale(x, num_output_channels=3)
    return blurred_and_solarized(x, float(p["blur"]), p["solarize"])


def blurred_and_solarized(x: torch.Tensor, sigma: float, solarize: bool) -> torch.Tensor:
    if sigma > 0:
        blurred = [ndimage.gaussian_filter(c.numpy(), sigma, mode="nearest", truncate=6) for c in x]
        x = torch.from_numpy(np.stack(blurred))
    return torch.where(x >= 0.5, 1 - x, x) if solarize else x


FUSED = ["fused", pytest.param("compiled", marks=pytest.mark.medium)]


@pytest.fixture(params=["separate", *FUSED])
def colors_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """`augment_colors` on one tensor, and on channels that are apart, not compiled and compiled."""
    if request.param == "fused":
        monkeypatch.setattr(augment, "compiled", lambda function: function)
    return partial(augment_colors, compile=request.param != "separate")


def test_batches_equal_single_images_of_torchvision(colors_of):
    view, p = pictures(96), drawn(96)
    found = colors_of(view, p) * STD + MEAN
    for i in range(len(view)):
        torch.testing.assert_close(found[i].double(), one_by_one(view[i], p, i), rtol=0, atol=1 / 255)


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "hue", "grayscale", "blur", "solarize"])
def test_each_change_alone(name, colors_of):
    view, p = pictures(24), by_name(drawn(24))
    off = by_name(drawn(24, ColorConfig(jitter=0, grayscale=0)))
    off |= {"blur": np.zeros(24, np.float32), "solarize": np.zeros(24, bool)}
    colors = from_names(off | {name: p[name]})
    found = colors_of(view, colors) * STD + MEAN
    assert (found - view / 255).abs().max() > 0.1
    for i in range(len(view)):
        torch.testing.assert_close(found[i].double(), one_by_one(view[i], colors, i), rtol=0, atol=5e-4)


@pytest.mark.parametrize("colors_of", FUSED, indirect=True)
def test_fused_operations_equal_separate_ones_to_rounding(colors_of):
    view, p = pictures(96), drawn(96)
    torch.testing.assert_close(colors_of(view, p), augment_colors(view, p), rtol=0, atol=2e-5)


def test_views_are_compiled_where_asked(monkeypatch):
    used = []
    monkeypatch.setattr(augment, "compiled", lambda function: used.append(function.__name__) or function)
    batch = Batch([View(pictures(6), 1, colors=drawn(6))])
    separate = to_model_input(batch).views[0].images
    assert used == []
    torch.testing.assert_close(to_model_input(batch, compile=True).views[0].images, separate, rtol=0, atol=2e-5)
    assert used == ["fused", "fused"]  # before and after the blur


def test_nothing_drawn_changes_nothing():
    view, p = pictures(6), draw(ColorConfig(jitter=0, grayscale=0), [0] * 6, [0] * 6)
    assert torch.equal(augment_colors(view, p), (view / 255 - MEAN) / STD)


def test_a_crop_does_not_depend_on_its_batch():
    view, p = pictures(30), drawn(30)
    together = augment_colors(view, p)
    alone = torch.cat([augment_colors(view[i : i + 1], row(p, i)) for i in range(30)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_a_batch_that_is_changed_in_parts(monkeypatch):
    view, p = pictures(31), drawn(31)
    whole = augment_colors(view, p)
    monkeypatch.setattr(augment, "CACHED", 4 * view[0].numel())
    parts, to_unit = [], augment.to_unit
    monkeypatch.setattr(augment, "to_unit", lambda images, given: parts.append(len(images)) or to_unit(images, given))
    torch.testing.assert_close(augment_colors(view, p), whole, rtol=0, atol=1e-5)
    assert parts == [4] * 7 + [3]


def test_crops_of_several_bands_are_blurred():
    view, p = pictures(6, 150, 2 * BAND), draw(ColorConfig(jitter=0, grayscale=0), [1] * 6, [0] * 6)
    found = augment_colors(view, p) * STD + MEAN
    for i in range(6):
        torch.testing.assert_close(found[i].double(), one_by_one(view[i], p, i), rtol=0, atol=5e-4)


def test_memory_order_and_input_are_kept():
    view, p = pictures(9), drawn(9)
    before = view.clone()
    interleaved = augment_colors(view.contiguous(memory_format=torch.channels_last), p)
    assert torch.equal(view, before)
    assert interleaved.is_contiguous()
    assert torch.equal(interleaved, augment_colors(view, p))


@pytest.mark.parametrize("compile", [False, True])
def test_the_device_is_never_waited_for(compile, monkeypatch):
    """The meta device has no values: reading one raises."""
    monkeypatch.setattr(augment, "compiled", lambda function: function)
    out = augment_colors(pictures(30).to("meta"), drawn(30), compile=compile)
    assert out.shape == (30, 3, 20, 24)
    assert out.device.type == "meta"


def test_all_views_become_floats():
    first, second, p = pictures(6), pictures(12, 10, 10), drawn(6)
    batch = Batch([View(first, 2, colors=p), View(second, 4)], keys=["a", "b", "c"])
    done = to_model_input(batch, dtype=torch.bfloat16)
    assert done.keys == batch.keys
    assert batch.views[0].images.dtype == torch.uint8
    assert torch.equal(done.views[0].images, augment_colors(first, p).bfloat16())
    assert torch.equal(done.views[1].images, ((second / 255 - MEAN) / STD).bfloat16())
    halves = Preprocessing((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    plain = to_model_input(Batch([View(first, 2)], preprocessing=halves))
    torch.testing.assert_close(plain.views[0].images, first / 127.5 - 1, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="not normalised"):
        to_model_input(done)


def test_packed_images_are_normalised_but_not_recoloured():
    generator = torch.Generator().manual_seed(0)
    views = [torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8, generator=generator) for size in ((8, 12), (4, 4))]
    packed = to_model_input(Batch([View(pack(views, 4), 1)])).views[0].images
    assert isinstance(packed, PackedImages)
    single = [to_model_input(Batch([View(view, 1)])).views[0].images for view in views]
    expected = [image for images in single if isinstance(images, torch.Tensor) for image in images]
    for image, other in zip(packed.unpack(), expected, strict=True):
        torch.testing.assert_close(image, other, rtol=0, atol=0)
    with pytest.raises(ValueError, match="not normalised"):
        to_model_input(Batch([View(packed, 1)]))
    with pytest.raises(ValueError, match="cannot have colour changes"):
        to_model_input(Batch([View(pack(views, 4), 1, colors=drawn(4))]))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 4, 12])
def test_images_that_are_not_rgb(channels, compile, monkeypatch):
    """Oracle: each operation written out in float64."""
    monkeypatch.setattr(augment, "compiled", lambda function: function)
    images = torch.from_numpy(rng().integers(0, 256, (40, channels, 20, 24), dtype=np.uint8))
    config = STRONG.model_copy(update={"saturation": 0.0, "hue": 0.0, "grayscale": 0.0})
    colors, preprocessing = drawn(40, config), Preprocessing((0.3,) * channels, (0.2,) * channels)
    found = augment_colors(images, colors, preprocessing, compile=compile) * 0.2 + 0.3
    p = by_name(colors)
    for i, image in enumerate(images):
        x = image.double() / 255
        for step in p["order"][i]:
            if step == 0:
                x = (x * float(p["brightness"][i])).clamp(0, 1)
            if step == 1:
                factor = float(p["contrast"][i])
                x = (x * factor + (1 - factor) * x.mean()).clamp(0, 1)
        x = blurred_and_solarized(x, float(p["blur"][i]), p["solarize"][i])
        torch.testing.assert_close(found[i].double(), x, rtol=0, atol=1 / 255)


def hashed(seed: int, places: np.ndarray) -> np.ndarray:
    """The hash of `data.pixels` in 32 bits that wrap."""
    x = (seed + places).astype(np.uint32)
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return (x ^ (x >> np.uint32(15))).astype(np.float64)


def changed_bands(x: np.ndarray, p: dict[str, np.ndarray], config: ColorConfig) -> np.ndarray:
    """Oracle in float64: the changes of bands, one crop (C, H, W) and one band at a time."""
    x = x.copy()
    u = [np.floor(hashed(int(p["BandJitter"]), np.arange(2 * len(x))) / 256) / 2**24] if p["BandJitter"] >= 0 else []
    for factors in u:
        for band, (brightness, contrast) in enumerate(factors.reshape(-1, 2)):
            one = np.clip(x[band] * (1 - config.brightness + 2 * config.brightness * brightness), 0, 1)
            factor = 1 - config.contrast + 2 * config.contrast * contrast
            x[band] = np.clip(one.mean() + factor * (one - one.mean()), 0, 1)
    if p["Blur"] > 0:
        x = np.stack([ndimage.gaussian_filter(c, p["Blur"], mode="nearest", truncate=6) for c in x])
    sigma, seed = p["Noise"]
    quantiles = (np.floor(hashed(int(seed), np.arange(x.size)) / 512) + 0.5) / 2**23
    x = np.clip(x + sigma * stats.norm.ppf(quantiles).reshape(x.shape), 0, 1)
    seed, own = p["BandDrop"]
    u = np.floor(hashed(int(seed), np.arange(len(x))) / 256) / 2**24
    u[int(own) :] = -1  # bands that the image lacks
    x[(u < config.band_drop) & (u < u.max())] = 0
    return x


@pytest.mark.parametrize("channels", [1, 5])
def test_changes_of_bands(channels, colors_of):
    config = ColorConfig(colors="bands", brightness=0.6, contrast=0.9, jitter=0.7, noise=0.3, band_drop=0.6)
    images = torch.from_numpy(rng().integers(0, 256, (40, channels, 20, 24), dtype=np.uint8))
    colors, preprocessing = drawn(40, config), Preprocessing((0.0,) * channels, (1.0,) * channels)
    (drop,) = (numbers for operation, numbers in colors if isinstance(operation, BandDrop))
    drop[30:, 1] = rng().integers(1, channels + 1, 10)  # these images have only so many bands
    found = colors_of(images, colors, preprocessing)
    for i, image in enumerate(images):
        p = {type(operation).__name__: numbers[i] for operation, numbers in colors}
        expected = changed_bands(image.double().numpy() / 255, p, config)
        torch.testing.assert_close(found[i].double(), torch.from_numpy(expected), rtol=0, atol=5e-5)
    dropped = (found[:30] == 0).all((2, 3)).sum(1)
    assert dropped.max() == channels - 1
    assert dropped.float().mean() >= 0.4 * (channels - 1)


def test_noise_is_normal_and_differs_by_place_and_crop():
    """Kolmogorov-Smirnov at one in a thousand; correlations within 4.5 standard deviations of zero."""
    places = torch.arange(50_000, dtype=torch.int32)
    values = normal_noise(torch.tensor([5, -7], dtype=torch.int32)[:, None], places).double().numpy()
    assert stats.kstest(values.ravel(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(values[:, 1:], values[:, :-1]) - np.eye(4)).max() < 4.5 / 50_000**0.5
