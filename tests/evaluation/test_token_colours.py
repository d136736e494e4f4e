"""Colours of tokens against scikit-learn and SciPy."""

import numpy as np
import torch
from scipy.linalg import orthogonal_procrustes
from sklearn.decomposition import PCA

from tessera.evaluation.token_colours import common_colours, principal_components
from tests.evaluation.conftest import Known


def test_components_are_those_of_scikit_learn() -> None:
    tokens = torch.randn(3, 4, 6) * torch.tensor([9.0, 5.0, 3.0, 0.1, 0.1, 0.1]) + 4.0
    found = principal_components(Known(tokens), torch.zeros(3, 3, 8, 8))  # (3, 3, 2, 2)
    flat = found.permute(0, 2, 3, 1).flatten(0, 2).numpy()
    expected = PCA(3).fit_transform(tokens.flatten(0, 1).double().numpy())
    expected /= expected.std(0)
    signs = np.sign((flat * expected).sum(0))
    np.testing.assert_allclose(flat, expected * signs, atol=1e-6)
    alike = principal_components(Known(torch.ones(2, 4, 2)), torch.zeros(2, 3, 8, 8))
    assert alike.shape == (2, 3, 2, 2)
    assert not alike.any()


def test_the_rotation_is_that_of_scipy() -> None:
    first, second = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    flat = [one.permute(0, 2, 3, 1).reshape(-1, 3).numpy() for one in (first, second)]
    rotation, _ = orthogonal_procrustes(flat[1], flat[0])
    low, high = np.quantile(flat[0], 0.02, axis=0), np.quantile(flat[0], 0.98, axis=0)
    expected = np.clip((flat[1] @ rotation - low) / (high - low), 0, 1)
    one, two = common_colours([first, second])
    np.testing.assert_allclose(two.reshape(-1, 3), expected, atol=1e-9)
    assert one.shape == (2, 16, 16, 3)
    assert (one.min(), one.max()) == (0, 1)


def test_encoders_with_other_grids_share_the_colours() -> None:
    first = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    one, two = common_colours([first, first.repeat_interleave(2, 2).repeat_interleave(2, 3)])
    assert two.shape == (2, 8, 8, 3)
    np.testing.assert_allclose(two, one.repeat(2, 1).repeat(2, 2), atol=1e-2)
