import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from tessera.evaluation import logistic


@pytest.fixture(scope="module")
def inputs(digits):
    """Return normalised features of all digits, and their labels."""
    return logistic.normalised(torch.cat([one.features for one in digits])), torch.cat([one.labels for one in digits])


@pytest.mark.parametrize(("images", "strength"), [(30, 0.0025), (300, 0.1), (1200, 0.0025), (1200, 10.0)])
def test_weights_and_accuracy_are_those_of_scikit_learn(inputs, images, strength, monkeypatch):
    monkeypatch.setattr(logistic, "CHUNK", 128)
    x, y = inputs
    found = logistic.fit(x[:images], y[:images], 10, strength, 1000)
    with threadpool_limits(1):  # its threads wait for each other on busy cores
        oracle = LogisticRegression(C=1 / strength, fit_intercept=False, tol=1e-8, max_iter=5000)
        oracle.fit(x[:images].double().numpy(), y[:images].numpy())
    expected = torch.from_numpy(oracle.coef_.T).float()
    assert (found.weight - expected).norm() < 0.01 * expected.norm()
    top1, top5 = logistic.accuracy(found, x[1200:], y[1200:])
    scores = oracle.decision_function(x[1200:].double().numpy())
    ahead = (scores > scores[np.arange(len(scores)), y[1200:]][:, None]).sum(1)
    assert top1 == pytest.approx(np.mean(ahead < 1), abs=2.1 / 597)
    assert top5 == pytest.approx(np.mean(ahead < 5), abs=2.1 / 597)
    assert top1 > 0.6
    assert 0 < found.iterations < 1000


def test_the_gradient_of_the_objective_is_zero(inputs):
    x, y = inputs
    weight = logistic.fit(x, y, 10, 1.0, 1000).weight.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x.double() @ weight, y, reduction="sum") + weight.square().sum() / 2
    (gradient,) = torch.autograd.grad(loss / len(y), weight)
    assert gradient.abs().max() < 2e-6


def test_iterations_are_limited(inputs):
    assert logistic.fit(*inputs, 10, 1e-6, 3).iterations == 3


def test_a_row_loses_its_mean_and_its_length():
    found = logistic.normalised(torch.tensor([[1.0, 3.0], [7.0, 5.0], [2.0, 2.0]]))
    expected = torch.tensor([[-1.0, 1.0], [1.0, -1.0], [0.0, 0.0]]) / 2**0.5
    torch.testing.assert_close(found, expected)
