"""Parts of teacher-student methods against torch and against their formulas in float64."""

import math

import pytest
import torch

from tessera import encoders
from tessera.encoders.base import encode
from tessera.encoders.images import Mask
from tessera.evaluation import references
from tessera.pretrain.methods.heads import BatchNorm, Head
from tessera.pretrain.methods.losses import NEAREST, koleo_loss, sinkhorn
from tessera.pretrain.methods.teacher_student import PendingCenter
from tessera.runtime.user_error import UserError
from tests.pretrain.small import MICRO, on_processes


def test_sinkhorn_balances_rows_and_prototypes() -> None:
    logits = torch.randn(24, 8, generator=torch.Generator().manual_seed(0)) * 3
    many = sinkhorn(logits, 0.5, iterations=100)
    torch.testing.assert_close(many.sum(1), torch.ones(24), rtol=1e-5, atol=0)
    torch.testing.assert_close(many.sum(0), torch.full((8,), 3.0), rtol=1e-3, atol=0)
    three = references.sinkhorn(logits.double(), 0.5)
    torch.testing.assert_close(sinkhorn(logits, 0.5).double(), three, rtol=1e-4, atol=1e-6)
    assert sinkhorn(logits * 1000, 0.04).isfinite().all()


def test_koleo_of_equal_images_is_finite() -> None:
    features = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    x = torch.cat([features, features]).requires_grad_()
    loss = koleo_loss(x)
    (gradient,) = torch.autograd.grad(loss, x)
    assert loss.item() == pytest.approx(-math.log(NEAREST), rel=1e-6)
    assert torch.equal(gradient, torch.zeros_like(gradient))
    with pytest.raises(UserError, match="at least two images"):
        koleo_loss(features[:1])


def test_batch_norm_equals_torch() -> None:
    ours, theirs = BatchNorm(6), torch.nn.BatchNorm1d(6)
    with torch.no_grad():
        ours.weight.normal_()
        theirs.weight.copy_(ours.weight)
    x = torch.randn(10, 6)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(ours(x1), theirs(x2))
    (g1,), (g2,) = (
        torch.autograd.grad(m(v).square().sum() + m(v).exp().sum(), v) for m, v in ((ours, x1), (theirs, x2))
    )
    torch.testing.assert_close(g1, g2, rtol=1e-4, atol=1e-5)


def test_a_head_may_have_prototypes_without_weight_norm() -> None:
    torch.manual_seed(0)
    head, x = Head(6, 9, 8, 5, layers=2, linear=True), torch.randn(4, 6)
    weight = {name: p.detach().double() for name, p in head.named_parameters()}
    hidden = torch.nn.functional.gelu(x.double() @ weight["mlp.0.weight"].T + weight["mlp.0.bias"])
    hidden = hidden @ weight["mlp.2.weight"].T + weight["mlp.2.bias"]
    expected = hidden / hidden.norm(dim=1, keepdim=True) @ weight["last_layer.weight"].T
    torch.testing.assert_close(head(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_no_rows_leave_batch_norm_and_sinkhorn_finite() -> None:
    norm, x = BatchNorm(6), torch.zeros(0, 6, requires_grad=True)
    norm(x).sum().backward()
    assert norm.weight.grad is not None
    assert torch.equal(norm.weight.grad, torch.zeros(6))
    assert sinkhorn(torch.zeros(0, 8), 0.1).shape == (0, 8)


def test_the_centre_is_a_running_mean_over_the_rows_of_a_step() -> None:
    generator = torch.Generator().manual_seed(0)
    center, pending = torch.randn(8, generator=generator), PendingCenter()
    first, second, third = (torch.randn(rows, 8, generator=generator) for rows in (3, 5, 2))
    expected = 0.8 * center.double() + 0.2 * torch.cat([first, second]).double().mean(0)
    pending.add(0, third)  # of a skipped step
    pending.add(1, first)
    pending.add(1, second)
    pending.move(center, 0.8)
    torch.testing.assert_close(center.double(), expected, rtol=1e-6, atol=1e-7)
    pending.add(2, torch.zeros(0, 8))
    before = center.clone()
    pending.move(center, 0.8)
    assert torch.equal(center, before)


@pytest.mark.parametrize("variant", MICRO)
def test_views_are_encoded_as_one_by_one(variant: str) -> None:
    torch.manual_seed(0)
    encoder = encoders.build(variant, mask_token=True).eval()
    views = [torch.randn(4, 3, 16, 16), torch.randn(6, 3, 8, 8)]
    grids = encoder.grids(views[0])
    mask = Mask.from_hidden(torch.rand(int(grids.prod(1).sum())) < 0.4, grids)
    pooled, tokens = encode(encoder, views, mask)
    expected = encoder(views[0], mask)
    torch.testing.assert_close(pooled, torch.cat([expected.pooled, encoder(views[1]).pooled]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tokens[: len(expected.tokens)], expected.tokens, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(encode(encoder, views)[0][:4], encoder(views[0]).pooled, rtol=1e-4, atol=1e-5)


def _uneven(rank: int) -> None:
    torch.distributed.init_process_group("gloo")
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    expected_center = torch.full((8,), 2.0).lerp(logits.mean(0), 0.1)
    expected = references.sinkhorn(logits.double(), 0.1)
    for own in (slice(0, 4), slice(4, 5)) if rank == 0 else (slice(4, 5), slice(0, 4)):
        torch.testing.assert_close(sinkhorn(logits[own], 0.1).double(), expected[own], rtol=1e-4, atol=1e-6)
    own = slice(0, 5) if rank == 0 else slice(0, 0)  # no row on the second process
    torch.testing.assert_close(sinkhorn(logits[own], 0.1).double(), expected[own], rtol=1e-4, atol=1e-6)
    center, pending = torch.full((8,), 2.0), PendingCenter()
    pending.add(0, logits[own])
    pending.move(center, 0.9)
    torch.testing.assert_close(center, expected_center, rtol=1e-6, atol=0)
    torch.distributed.destroy_process_group()


def test_processes_may_have_different_numbers_of_rows(free_port: int) -> None:
    on_processes(_uneven, free_port)
