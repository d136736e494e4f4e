"""Colour changes against torchvision, colorsys and SciPy, one image at a time; what is drawn against its law."""

import colorsys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from scipy import ndimage, stats
from torchvision.transforms.v2 import functional as tv

from tessera.data import augment, crops
from tessera.data.augment import (
    ColorConfig,
    Operation,
    augment_colors,
    blur_weights,
    color_operations,
    colors_for,
    draw_colors,
    gaussian_blur,
    shift_hue,
    to_model_input,
)
from tessera.data.batch import Batch, Colors, View
from tessera.data.crops import MultiCrop, MultiCropConfig
from tessera.data.masking import MaskedMultiCrop
from tessera.data.sampler import sample_rng
from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.encoders.images import PackedImages, pack
from tests.data.batches import by_name, from_names, rng, same_colors, training_batches

N = 20_000
STRONG = ColorConfig(brightness=0.8, contrast=0.8, saturation=1.5, hue=0.5, jitter=0.9, grayscale=0.3)
MEAN, STD = (torch.tensor(values)[:, None, None] for values in (IMAGENET.mean, IMAGENET.std))


def pictures(n: int, height: int = 20, width: int = 24) -> torch.Tensor:
    """Noise, smooth colours, and the flat extremes where HSV has no hue."""
    noise = rng(1).integers(0, 256, (n, 3, height, width), dtype=np.uint8)
    noise[1::3] = ndimage.zoom(noise[1::3, :, :4, :4], (1, 1, height / 4, width / 4), order=1)
    noise[2::3, :, :5] = [[[0]], [[128]], [[128]]]
    noise[2::3, :, 5:10] = 255
    noise[2::3, :, 10:] = 0
    return torch.from_numpy(noise)


def draw(config: ColorConfig, blur: list[float], solarize: list[float], seed: int = 0, **options) -> Colors:
    return draw_colors(rng(seed), color_operations(config, blur, solarize, **options), len(blur))


def drawn(n: int, config: ColorConfig = STRONG, seed: int = 0) -> Colors:
    return draw(config, [0.6] * n, [0.4] * n, seed, blur_sigma=(0.1, 3))


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
    parts, from_bytes = [], augment._from_bytes
    monkeypatch.setattr(augment, "_from_bytes", lambda images: parts.append(len(images)) or from_bytes(images))
    torch.testing.assert_close(augment_colors(view, p), whole, rtol=0, atol=1e-5)
    assert parts == [4] * 7 + [3]


def test_crops_of_several_bands_are_blurred():
    view, p = pictures(6, 150, 2 * augment.BAND), draw(ColorConfig(jitter=0, grayscale=0), [1] * 6, [0] * 6)
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


def test_sizes_are_uniform_and_orders_are_equally_likely():
    """Kolmogorov-Smirnov and chi-square at one in a thousand, seed fixed; 24 orders of about N / 24."""
    config = ColorConfig(jitter=1, brightness=0.4, contrast=1.5, saturation=0.2, hue=0.1)
    p = by_name(draw(config, [1] * N, [0] * N))
    laws = {
        "brightness": (0.6, 1.4),
        "contrast": (0, 2.5),
        "saturation": (0.8, 1.2),
        "hue": (-0.1, 0.1),
        "blur": (0.1, 2),
    }
    for name, (low, high) in laws.items():
        assert stats.kstest(p[name], stats.uniform(low, high - low).cdf).pvalue > 1e-3, name
    _, counts = np.unique(p["order"], axis=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


def test_changes_are_drawn_independently_of_each_other():
    """Correlations within 4.5 standard deviations of zero, places in the order among themselves left out."""
    p = by_name(draw(ColorConfig(jitter=1, grayscale=0.5), [1] * N, [0.5] * N))
    places = p.pop("order").argsort(1).T
    correlations = np.corrcoef(np.stack([*(values.astype(float) for values in p.values()), *places]))
    correlations[7:, 7:] = 0
    assert np.abs(correlations - np.diag(np.diag(correlations))).max() < 4.5 / N**0.5


def test_a_setting_does_not_shift_what_others_draw():
    p, q = by_name(drawn(50)), by_name(drawn(50, STRONG.model_copy(update={"jitter": 0.0, "grayscale": 1.0})))
    for name in ("blur", "solarize", "order"):
        assert np.array_equal(p[name], q[name])
    assert (q["brightness"] == 1).all()
    rngs = [rng(3), rng(3)]
    for one, config in zip(rngs, (STRONG, ColorConfig(jitter=0)), strict=True):
        draw_colors(one, color_operations(config, [0.5] * 3, [0] * 3), 3)
    assert rngs[0].random() == rngs[1].random()


@dataclass(frozen=True)
class Invert(Operation):
    """Operation that DINO does not have. Its parameters of a crop are its two random values, scaled."""

    values = 2

    factor: float

    def draw(self, u: np.ndarray) -> np.ndarray:
        return self.factor * u


def added(monkeypatch: pytest.MonkeyPatch, *operations: Operation) -> MaskedMultiCrop:
    """A transform whose views have these operations around those of DINO."""
    first, *rest = [*operations, None]
    monkeypatch.setattr(
        crops,
        "color_operations",
        lambda *given, **options: [one for one in (first, *color_operations(*given, **options), *rest) if one],
    )
    config = MultiCropConfig(global_size=32, local_size=16, local_crops=3, rotation=20)
    return MaskedMultiCrop(MultiCrop(config), (4, 4), 0.5, (0.1, 0.5), fill=True)


def of_invert(colors: Colors) -> np.ndarray:
    return next(numbers for operation, numbers in colors if type(operation) is Invert)


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_an_added_operation_changes_no_other_random_number(factor, monkeypatch):
    """Neither boxes, mirroring, rotations, masks nor colours of any view, even if it comes first."""
    plain, more = added(monkeypatch), added(monkeypatch, Invert(factor))
    for position in range(20):
        drawn = zip(*(one.draw((50, 60), sample_rng(1, position)) for one in (plain, more)), strict=True)
        for before, after in drawn:
            assert np.array_equal(before.boxes, after.boxes)
            assert np.array_equal(before.flips, after.flips)
            assert np.array_equal(before.degrees, after.degrees)
            assert all(np.array_equal(a, b) for a, b in zip(before.masks, after.masks, strict=True))
            assert same_colors(before.colors, after.colors[1:])
            assert of_invert(after.colors).any() == bool(factor)


def test_an_added_operation_has_random_numbers_of_its_own(monkeypatch):
    """They depend on seed, position, view and name, are uniform, and are the same beside any other operation."""
    other = type("Other", (Invert,), {})(1.0)
    alone, second = added(monkeypatch, Invert(1.0)), added(monkeypatch, other, Invert(1.0))
    places = [(seed, position) for seed in range(2) for position in range(60)]
    values, again, others = [], [], []
    for place in places:
        values += [of_invert(view.colors) for view in alone.draw((50, 60), sample_rng(*place))]
        again += [of_invert(view.colors) for view in second.draw((50, 60), sample_rng(*place))]
        others += [view.colors[0][1] for view in second.draw((50, 60), sample_rng(*place))]
    values, again, others = (np.concatenate(one).ravel() for one in (values, again, others))
    assert np.array_equal(values, again)
    assert len(np.unique([values, others])) == 2 * len(values) == 2 * 120 * (2 + 3) * 2
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_added_operations_draw_the_same_with_workers_and_after_a_restart(write_shards, monkeypatch):
    shards, transform = write_shards([20]), added(monkeypatch, Invert(1.0))

    def numbers(**given) -> list[list[np.ndarray]]:
        given = {"batch_size": 4, "seed": 1, "steps": 6, "streams": 4} | given
        return [
            [of_invert(view.colors) for view in batch.views] for batch in training_batches(shards, transform, **given)
        ]

    whole, restarted = numbers(), [*numbers(workers=2)[:3], *numbers(first_step=3)]
    assert len(whole) == len(restarted) == 6
    for one, other in zip(whole, restarted, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    ranks = [numbers(rank=rank, world_size=2) for rank in range(2)]
    for step, batch in enumerate(whole):
        for view, numbers_of_all in enumerate(batch):
            parts = [ranks[rank][step][view].reshape(-1, 2, 2) for rank in range(2)]
            assert np.array_equal(np.concatenate(parts, 1).reshape(-1, 2), numbers_of_all)


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
    with pytest.raises(ValueError, match="floats already"):
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
    with pytest.raises(ValueError, match="floats already"):
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


def test_colour_settings_without_rgb(caplog):
    given = ColorConfig(brightness=0.3)
    assert colors_for(given, 3) == given
    assert not caplog.text
    left = colors_for(given, 5)
    assert (left.saturation, left.hue, left.grayscale, left.brightness) == (0, 0, 0, 0.3)
    assert caplog.text.count("5 channels are not RGB. These colour changes are turned off: saturation, hue, gray") == 1
    assert colors_for(left, 5) == left  # as read from the config.yaml of a run
    assert colors_for(ColorConfig(saturation=0, hue=0, grayscale=0), 1).grayscale == 0
    with pytest.raises(ValueError, match=r"channels is 1.* RGB images: saturation, hue\. Set them to 0, or leave"):
        colors_for(ColorConfig(saturation=0.2, hue=0.1, grayscale=0), 1)
