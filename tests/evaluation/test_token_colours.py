"""Colours of tokens against scikit-learn and NumPy."""

import numpy as np
import torch
from sklearn.decomposition import PCA

from tessera.evaluation.token_colours import principal_components, token_colours
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


def test_the_ends_of_each_component_are_cut() -> None:
    components = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    flat = components.permute(0, 2, 3, 1).reshape(-1, 3).numpy()
    low, high = np.quantile(flat, 0.02, axis=0), np.quantile(flat, 0.98, axis=0)
    found = token_colours(components)
    np.testing.assert_allclose(found.reshape(-1, 3), np.clip((flat - low) / (high - low), 0, 1), atol=1e-9)
    assert found.shape == (2, 16, 16, 3)
