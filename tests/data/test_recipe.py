"""DINO's augmentation (main_dino.py) as a distribution: what is drawn, beside independent samplers.

Two-sample Kolmogorov-Smirnov for what is continuous, against torchvision's samplers with the arguments of the recipe;
binomial and chi-squared for what is counted. Seeds are fixed.
"""

import functools
import random

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import ColorJitter, RandomResizedCrop

from tessera.data.crops import MultiCrop, MultiCropConfig
from tests.data.batches import NAMES, by_name

IMAGES = 3000
SIZE = (375, 500)
LIMIT = 1e-3
VIEWS = {"global": (0.4, 1.0), "local": (0.05, 0.4)}
"""share of the image's area"""


@functools.cache
def theirs() -> dict[str, np.ndarray]:
    """Samples of the recipe's own operations."""
    torch.manual_seed(1)
    random.seed(1)
    samples: dict[str, list] = {
        name: [] for view in VIEWS for name in (f"{view} area", f"{view} ratio", f"{view} left")
    }
    samples |= {name: [] for name in ("brightness", "contrast", "saturation", "hue", "sigma", "first")}
    image, jitter = torch.empty(3, *SIZE), ColorJitter(0.4, 0.4, 0.2, 0.1)
    for _ in range(2 * IMAGES):
        for view, scale in VIEWS.items():
            _, left, height, width = RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3])
            samples[f"{view} area"].append(height * width)
            samples[f"{view} ratio"].append(np.log(width / height))
            samples[f"{view} left"].append(left / max(SIZE[1] - width, 1))
        order, *factors = ColorJitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
        for name, factor in zip(("brightness", "contrast", "saturation", "hue"), factors, strict=True):
            samples[name].append(factor)
        samples["first"].append(int(order[0]))
        samples["sigma"].append(random.uniform(0.1, 2.0))
    return {name: np.array(values) for name, values in samples.items()}


def chances(config: MultiCropConfig) -> dict[str, float]:
    """How likely the draws of our transform are under the recipe, for each operation."""
    source = np.random.default_rng(0)
    drawn = [MultiCrop(config).draw(SIZE, source) for _ in range(IMAGES)]
    found = {}
    for number, view in enumerate(VIEWS):
        boxes = np.concatenate([one[number].boxes for one in drawn])
        measures = {
            "area": boxes[:, 2] * boxes[:, 3],
            "ratio": np.log(boxes[:, 3] / boxes[:, 2]),
            "left": boxes[:, 1] / np.maximum(SIZE[1] - boxes[:, 3], 1),
        }
        for name, values in measures.items():
            found[f"{view} {name}"] = stats.ks_2samp(values, theirs()[f"{view} {name}"]).pvalue
        found[f"{view} flip"] = share(np.concatenate([one[number].flips for one in drawn]), 0.5)
    colors = [[by_name(view.colors) for view in one] for one in drawn]
    every = {name: np.stack([np.concatenate([view[name] for view in one]) for one in colors]) for name in NAMES}
    jittered = every["brightness"] != 1
    found["jitter"] = share(jittered, 0.8)
    for name in ("brightness", "contrast", "saturation", "hue"):
        found[name] = stats.ks_2samp(every[name][jittered], theirs()[name]).pvalue
    first = every["order"][:, :, 0].astype(int).ravel()
    counts = np.stack([np.bincount(values, minlength=4) for values in (first, theirs()["first"])])
    found["order"] = stats.chi2_contingency(counts).pvalue
    found["grayscale"] = share(every["grayscale"], 0.2)
    blurred = every["blur"] > 0
    found["sigma"] = stats.ks_2samp(every["blur"][blurred], theirs()["sigma"]).pvalue
    for name, crops, p in (("blur 1", 0, 1.0), ("blur 2", 1, 0.1), ("blur local", slice(2, None), 0.5)):
        found[name] = share(blurred[:, crops], p)
    for name, crops, p in (("solarize 1", 0, 0), ("solarize 2", 1, 0.2), ("solarize local", slice(2, None), 0)):
        found[name] = share(every["solarize"][:, crops], p)
    return found


def share(happened: np.ndarray, p: float) -> float:
    return float(stats.binomtest(int(happened.sum()), happened.size, p).pvalue)


def test_what_is_drawn_is_the_recipe():
    found = chances(MultiCropConfig())
    assert len(found) == 22
    assert {name: p for name, p in found.items() if p < LIMIT} == {}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("change", "operation"),
    [
        ({"global_scale": (0.35, 1.0)}, "global area"),
        ({"jitter": 0.77}, "jitter"),
        ({"hue": 0.11}, "hue"),
        ({"solarize_global2": 0.15}, "solarize 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_recipe_would_be_seen(change, operation):
    assert chances(MultiCropConfig(**change))[operation] < LIMIT
