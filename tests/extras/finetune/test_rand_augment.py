"""RandAugment against timm's operations on Pillow images, and its draws against timm's policy."""

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import kstest, norm
from timm.data import auto_augment

from tessera.extras.finetune.mixing import generators
from tessera.extras.finetune.rand_augment import OPERATIONS, Operations, draw_operations, rand_augment

NAMES = list(OPERATIONS)
FILL = (124, 116, 104)
LEVELS = (0.05, 0.3, 0.62, 0.9, 1.0)


def pictures() -> np.ndarray:
    """Images of 22 x 30 pixels: noise, a smooth picture, one of few values, and one of a single value."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:22, :30]
    smooth = np.stack([8 * rows, 6 * columns, 4 * (rows + columns)], 2) + rng.integers(0, 20, (22, 30, 3))
    return np.stack(
        [rng.integers(0, 256, (22, 30, 3)), smooth, rng.choice([40, 90, 200], (22, 30, 3)), np.full((22, 30, 3), 77)]
    ).astype(np.uint8)


def ours(images: np.ndarray, name: str, level: float) -> np.ndarray:
    kinds = torch.full((len(images), 2), -1)
    kinds[:, 1] = NAMES.index(name)
    levels = torch.full((len(images), 2), level, dtype=torch.float64)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    return rand_augment(pixels, Operations(kinds, levels), FILL).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("name", NAMES)
def test_operations_are_those_of_timm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = pictures()
    for sign in (1, -1):
        monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value, sign=sign: sign * value)
        for level in LEVELS[:-1] if name == "PosterizeIncreasing" else LEVELS:  # Pillow refuses to keep no bit
            argument = auto_augment.LEVEL_TO_ARG[name]
            arguments = argument(10 * level, {}) if argument else ()
            found = ours(images, name, sign * level)
            for image, mine in zip(images, found, strict=True):
                options = {"fillcolor": FILL, "resample": Image.Resampling.BILINEAR}
                theirs = np.asarray(auto_augment.NAME_TO_OP[name](Image.fromarray(image), *arguments, **options))
                difference = np.abs(mine - theirs.astype(np.float64))
                # edges of a moved image may round to another pixel, everything else is equal or one level away
                moved = name in ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
                assert np.mean(difference > 1) <= (0.01 if moved else 0), (level, sign)
                if not moved and name not in ("ColorIncreasing", "ContrastIncreasing", "SharpnessIncreasing"):
                    assert np.mean(difference > 0) <= 0.002, (level, sign)


def test_the_operations_are_those_of_maes_policy() -> None:
    assert sorted(NAMES) == sorted(auto_augment._RAND_INCREASING_TRANSFORMS)
    policy = auto_augment.rand_augment_transform("rand-m9-mstd0.5-inc1", {})
    assert policy.num_layers == 2
    assert {(op.prob, op.magnitude, op.magnitude_std, op.magnitude_max) for op in policy.ops} == {(0.5, 9, 0.5, None)}


def test_draws_follow_the_policy() -> None:
    keys = torch.randint(2**32, (6000,), generator=torch.Generator().manual_seed(0))
    drawn = draw_operations(generators(keys), 9)
    kinds, levels = drawn.kinds.flatten(), drawn.levels.flatten()
    assert float((kinds >= 0).double().mean()) == pytest.approx(0.5, abs=0.02)
    counts = Counter(kinds[kinds >= 0].tolist())
    assert len(counts) == 15
    assert max(counts.values()) / min(counts.values()) < 1.4
    applied = levels[kinds >= 0]
    assert float((applied > 0).double().mean()) == pytest.approx(0.5, abs=0.03)
    below = applied.abs()[applied.abs() < 1] * 10  # the normal distribution around 9, cut at 10
    cut = norm(9, 0.5)
    assert kstest(below, lambda x: cut.cdf(x) / cut.cdf(10)).pvalue > 1e-3  # pyright: ignore
    assert int(draw_operations(generators(keys[:100]), 0).kinds.max()) == -1


def test_images_of_other_channel_counts_and_without_operations() -> None:
    images = torch.randint(256, (15, 5, 32, 32), generator=torch.Generator().manual_seed(0)).float()
    kinds = torch.stack([torch.arange(15), torch.full((15,), -1)], 1)
    changed = rand_augment(images, Operations(kinds, torch.full((15, 2), 0.9, dtype=torch.float64)), [100] * 5)
    assert changed.shape == images.shape
    assert torch.equal(changed, changed.round())
    assert (float(changed.min()), float(changed.max())) == (0, 255)
    assert all(not torch.equal(a, b) for a, b in zip(changed[1:], images[1:], strict=True))
    nothing = Operations(torch.full((15, 2), -1), torch.ones(15, 2))
    assert torch.equal(rand_augment(images, nothing, [0] * 5), images)
