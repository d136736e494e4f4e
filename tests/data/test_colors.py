"""What colour operations draw, against its law; operations that are added draw from streams of their own."""

from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from tessera.data import crops
from tessera.data.batch import Colors
from tessera.data.colors import (
    BandDrop,
    BandJitter,
    Blur,
    ColorConfig,
    Noise,
    Operation,
    color_operations,
    colors_for,
    draw_colors,
)
from tessera.data.crops import MultiCrop, MultiCropConfig
from tessera.data.masking import MaskedMultiCrop
from tessera.data.sampler import sample_rng
from tests.data.batches import STRONG, by_name, draw, drawn, rng, same_colors, training_batches

N = 20_000


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


def test_colour_settings_without_rgb():
    given = ColorConfig(brightness=0.3)
    assert colors_for(given, 3) == given.model_copy(update={"colors": "rgb"})
    rgb = given.model_copy(update={"colors": "rgb"})  # a run of an older version
    left = colors_for(rgb, 5)
    assert (left.saturation, left.hue, left.grayscale, left.brightness) == (0, 0, 0, 0.3)
    assert colors_for(left, 5) == left  # as read from the config.yaml of a run
    assert colors_for(ColorConfig(saturation=0, hue=0, grayscale=0), 1).grayscale == 0
    for kind in ("auto", "rgb"):
        with pytest.raises(ValueError, match=r"channels is 1.* RGB images: saturation, hue\. Set them to 0, or leave"):
            colors_for(ColorConfig(colors=kind, saturation=0.2, hue=0.1, grayscale=0), 1)


def test_colour_settings_of_bands():
    """Given values hold; the others have the defaults of bands. One band is never dropped."""
    found = colors_for(MultiCropConfig(contrast=0.7), 13)
    names = ("colors", "brightness", "contrast", "noise", "band_drop", "hue", "solarize_global2")
    assert [getattr(found, name) for name in names] == ["bands", 0.2, 0.7, 0.05, 0.1, 0, 0]
    assert colors_for(found, 13) == found  # as read from the config.yaml of a run
    assert colors_for(MultiCropConfig(colors="bands"), 3).hue == 0
    assert colors_for(MultiCropConfig(), 3, fewer=True).colors == "bands"
    assert colors_for(MultiCropConfig(colors="rgb"), 3, fewer=True).colors == "rgb"
    assert colors_for(ColorConfig(), 1).band_drop == 0
    with pytest.raises(ValueError, match=r"channels is 13 and colors is bands.*: solarize_global2\."):
        colors_for(MultiCropConfig(solarize_global2=0.1), 13)


BANDS = ColorConfig(colors="bands", brightness=0.5, contrast=0.9, jitter=0.8, noise=0.2, band_drop=0.3)


def test_operations_of_bands_draw_from_streams_of_their_own():
    """Seeds and standard deviations are uniform and differ by position. They shift no box and no other operation."""
    config = MultiCropConfig(global_size=32, local_size=16, local_crops=3, **BANDS.model_dump())
    plain = config.model_copy(update={"noise": 0.0, "band_drop": 0.0, "jitter": 0.0})
    found = {BandJitter: [], Noise: [], BandDrop: []}
    for position in range(200):
        given, without = (MultiCrop(one).draw((50, 60), sample_rng(1, position)) for one in (config, plain))
        for view, other in zip(given, without, strict=True):
            assert np.array_equal(view.boxes, other.boxes)
            assert same_colors(view.colors[1:2], other.colors[1:2])  # the blur
            for operation, numbers in view.colors:
                found.get(type(operation), []).append(numbers)
            assert [type(one) for one, _ in view.colors] == [BandJitter, Blur, Noise, BandDrop]
    jitter, noise, drop = (np.concatenate(one) for one in found.values())
    assert (jitter >= 0).mean() == pytest.approx(0.8, abs=0.05)
    uniform = [jitter[jitter >= 0] / 2**32, noise[:, 0] / 0.2, noise[:, 1] / 2**32, drop[:, 0] / 2**32]
    for values in uniform:
        assert stats.kstest(values, "uniform").pvalue > 1e-3
    assert len(np.unique(np.concatenate(uniform[2:]))) == 2 * len(drop)
