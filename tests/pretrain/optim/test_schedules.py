import numpy as np
import pytest

from tessera.pretrain.optim.schedules import cosine, linear


def dino_cosine(base: float, final: float, steps: int, warmup: int) -> np.ndarray:
    """The published schedule in its own terms: a linspace, then half a cosine."""
    rise = np.linspace(0, base, warmup) if warmup else np.array([])
    i = np.arange(steps - warmup)
    return np.concatenate([rise, final + 0.5 * (base - final) * (1 + np.cos(np.pi * i / len(i)))])


@pytest.mark.parametrize(
    ("base", "final", "steps", "warmup"), [(5e-4, 1e-6, 100, 10), (0.996, 1.0, 37, 0), (0.04, 0.4, 5, 1)]
)
def test_cosine_is_the_published_schedule(base: float, final: float, steps: int, warmup: int) -> None:
    ours = [cosine(step, steps, base, final, warmup) for step in range(steps)]
    expected = dino_cosine(base, final, steps, warmup)
    if warmup == 1:  # linspace of one value is 0 alone
        expected[0] = 0.0
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-15)
    assert cosine(10 * steps, steps, base, final, warmup) == pytest.approx(final)


def mae_cosine(lr: float, min_lr: float, steps: int, warmup: int) -> list[float]:
    """The published schedule of MAE in its own terms."""
    rise = [lr * t / warmup for t in range(warmup)]
    fall = [0.5 * (1 + np.cos(np.pi * (t - warmup) / (steps - warmup))) for t in range(warmup, steps)]
    return rise + [min_lr + (lr - min_lr) * share for share in fall]


@pytest.mark.parametrize("warmup", [0, 1, 2, 10])
def test_cosine_is_the_published_schedule_of_mae(warmup: int) -> None:
    ours = [cosine(step, 40, 1e-3, 1e-6, warmup, reach_in_warmup=False) for step in range(40)]
    np.testing.assert_allclose(ours, mae_cosine(1e-3, 1e-6, 40, warmup), rtol=1e-12, atol=1e-18)


def test_linear_is_a_linspace_then_constant() -> None:
    np.testing.assert_allclose(
        [linear(s, 7, 0.04, 0.07) for s in range(10)], [*np.linspace(0.04, 0.07, 7), 0.07, 0.07, 0.07]
    )
    ours = [linear(s, 7, 0.04, 0.07, reach_in_warmup=False) for s in range(10)]
    np.testing.assert_allclose(ours, [*np.linspace(0.04, 0.07, 7, endpoint=False), 0.07, 0.07, 0.07])
    assert linear(0, 0, 0.04, 0.07) == linear(0, 0, 0.04, 0.07, reach_in_warmup=False) == 0.07
    assert [linear(s, 1, 0.04, 0.07) for s in range(3)] == pytest.approx([*np.linspace(0.04, 0.07, 1), 0.07, 0.07])
