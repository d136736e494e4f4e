"""KoLeo and iBOT against naive float64 formulas."""

import math

import pytest
import torch

from tessera.encoders.images import Mask
from tessera.pretrain.methods.losses import NEAREST, ibot_loss, koleo_loss, token_weights
from tessera.runtime.errors import UserError


def naive_koleo(features: torch.Tensor) -> torch.Tensor:
    """The double loop over images."""
    x = features.double()
    x = x / x.norm(dim=1, keepdim=True)
    logs = []
    for i in range(len(x)):
        distances = [(x[i] - x[j]).norm() for j in range(len(x)) if j != i]
        logs.append(torch.stack(distances).min().log())
    return -torch.stack(logs).mean()


def features(seed: int = 0) -> torch.Tensor:
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(seed))


def test_koleo_and_its_gradient_equal_naive_float64() -> None:
    x = features().requires_grad_()
    x64 = x.detach().double().requires_grad_()
    loss, naive = koleo_loss(x), naive_koleo(x64)
    torch.testing.assert_close(loss.double(), naive, rtol=1e-6, atol=0)
    (gradient,), (gradient64,) = torch.autograd.grad(loss, x), torch.autograd.grad(naive, x64)
    torch.testing.assert_close(gradient.double(), gradient64, rtol=1e-4, atol=1e-7)


def test_koleo_of_equal_images_is_finite() -> None:
    x = torch.cat([features(), features()]).requires_grad_()
    loss = koleo_loss(x)
    (gradient,) = torch.autograd.grad(loss, x)
    assert loss.item() == pytest.approx(-math.log(NEAREST), rel=1e-6)
    assert torch.equal(gradient, torch.zeros_like(gradient))
    with pytest.raises(UserError, match="at least two images"):
        koleo_loss(features()[:1])


def test_ibot_averages_over_tokens_of_a_crop_and_then_over_all_crops() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)
    mask = Mask.from_hidden(hidden.flatten(), torch.tensor([[2, 2]] * 3))
    student = torch.randn(4, 7, generator=generator, requires_grad=True)
    teacher = torch.softmax(torch.randn(4, 7, generator=generator) * 3, dim=1)
    loss = ibot_loss(student.log_softmax(1), teacher, token_weights(mask))
    (gradient,) = torch.autograd.grad(loss, student)
    student64 = student.detach().double().requires_grad_()
    entropies = -(teacher.double() * student64.log_softmax(1)).sum(1)
    naive = (entropies[:3].mean() + 0 + entropies[3]) / 3
    (gradient64,) = torch.autograd.grad(naive, student64)
    torch.testing.assert_close(loss.double(), naive, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), gradient64, rtol=1e-5, atol=1e-8)


def test_nothing_hidden_costs_nothing() -> None:
    mask = Mask.from_hidden(torch.zeros(8, dtype=torch.bool), torch.tensor([[2, 2]] * 2))
    student = torch.zeros(0, 7, requires_grad=True)
    loss = ibot_loss(student, torch.zeros(0, 7), token_weights(mask))
    assert loss.item() == 0
    loss.backward()
