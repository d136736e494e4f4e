"""LeJEPA against its formulas written out in float64 and the levels of its statistic."""

import math

import pytest
import torch

from tessera import encoders
from tessera.data.batch import Batch
from tessera.evaluation import references
from tessera.pretrain.methods.lejepa import (
    LeJEPA,
    LeJEPAConfig,
    draw_directions,
    resolve,
    scaled_weight,
    sigreg,
)
from tessera.pretrain.methods.method import RunSize
from tessera.pretrain.optim.adamw import OptimConfig
from tests.views import batch_of, crops_of

CPU = torch.device("cpu")


def make(images: int = 4, **settings) -> tuple[LeJEPA, Batch]:
    torch.manual_seed(0)
    given = {"global_size": 16, "local_size": 8, "local_crops": 3, "hidden_dim": 24, "output_dim": 6, "directions": 20}
    config, _ = resolve(LeJEPAConfig(**(given | settings)), OptimConfig(), RunSize(1000, images, 10))
    method = LeJEPA(encoders.build("vit_micro", depth=2, dim=24, heads=2), config, 10)
    generator = torch.Generator().manual_seed(1)
    views = [torch.randn(n * images, 3, s, s, generator=generator) for n, s in ((2, 16), (config.local_crops, 8))]
    return method, batch_of(views, (2, config.local_crops))


def naive_invariance(embeddings: torch.Tensor) -> torch.Tensor:
    views, images, width = embeddings.shape
    total = torch.zeros((), dtype=torch.float64)
    for n in range(images):
        centre = sum(embeddings[w, n].double() for w in range(views)) / views
        for v in range(views):
            total = total + ((embeddings[v, n].double() - centre) ** 2).sum()
    return total / (views * images * width)


@pytest.mark.parametrize("images", [64, 1024])
def test_sigreg_of_normal_embeddings_does_not_depend_on_the_number_of_images(images: int) -> None:
    embeddings = torch.randn(200, images, 8, generator=torch.Generator().manual_seed(0))
    exact = math.sqrt(2 * math.pi) * math.erf(3 / math.sqrt(2)) - math.sqrt(2 * math.pi / 3)  # of (1 - phi^2) * phi
    assert exact == pytest.approx(1.05, abs=0.005)
    assert sigreg(embeddings, draw_directions(8, 8, 0, CPU)).item() == pytest.approx(exact, abs=0.08)


@pytest.mark.parametrize(("images", "level"), [(32, 12.9), (128, 51.5), (1024, 412)])
def test_sigreg_of_zeros_grows_with_the_number_of_images(images: int, level: float) -> None:
    value = sigreg(torch.zeros(2, images, 4), draw_directions(4, 8, 0, CPU)).item()
    assert value == pytest.approx(level, rel=3e-3)
    assert value == pytest.approx(0.4024 * images, rel=1e-3)


@pytest.mark.parametrize(("std", "level"), [(0.9, 2.3), (1.1, 2.3), (0.5, 39.0)])
def test_sigreg_sees_a_variance_that_is_not_one(std: float, level: float) -> None:
    embeddings = std * torch.randn(16, 256, 8, generator=torch.Generator().manual_seed(0))
    assert sigreg(embeddings, draw_directions(8, 64, 0, CPU)).item() == pytest.approx(level, rel=0.1)


def test_directions_are_unit_vectors_that_depend_on_the_step_alone() -> None:
    torch.manual_seed(7)
    first = draw_directions(6, 50, 3, CPU)
    torch.manual_seed(8)
    assert torch.equal(first, draw_directions(6, 50, 3, CPU))
    assert not torch.equal(first, draw_directions(6, 50, 4, CPU))
    torch.testing.assert_close(first.norm(dim=0), torch.ones(50))
    assert first.mean(1).abs().max() < 0.2  # in all directions alike


def test_weight_balances_the_terms_alike_for_every_number_of_images() -> None:
    """A deviation from the normal distribution weighs as much against the invariance with 64 images as with 1,024."""
    assert scaled_weight(0.05, 256) == pytest.approx(0.05)
    ratios = []
    for images in (64, 1024):
        weight = scaled_weight(0.05, images)
        zeros = sigreg(torch.zeros(2, images, 4), draw_directions(4, 8, 0, CPU)).item()
        ratios.append(weight * zeros / (1 - weight))
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-5)


def test_method_loss_and_gradients_equal_naive_float64() -> None:
    """The whole forward pass with crops in their order, and batch norm over the rows of all views."""
    method, batch = make()
    loss, metrics = method(batch, 3)
    loss.backward()
    twin, _ = make()
    twin.double()
    pooled = [
        [twin.encoder(crop).pooled for crop in view.images.double().chunk(n)]
        for view, n in zip(batch.views, crops_of(batch), strict=True)
    ]
    x = torch.cat([rows for view in pooled for rows in view])
    for layer in (0, 3, 6):
        linear = twin.projector[layer]
        x = x @ linear.weight.T + (linear.bias if layer == 6 else 0)
        if layer < 6:
            x = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()  # weight 1 and bias 0, as initialised
            x = x.clamp(min=0)
    embeddings = x.unflatten(0, (5, -1))
    weight = 0.02 * 256 / 4 / (0.98 + 0.02 * 256 / 4)
    naive = weight * references.sigreg(embeddings, draw_directions(6, 20, 3, CPU).double())
    naive = naive + (1 - weight) * naive_invariance(embeddings)
    naive.backward()
    torch.testing.assert_close(loss.double(), naive, rtol=1e-5, atol=0)
    for name in ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "norm.weight"):
        ours, theirs = (dict(m.encoder.named_parameters())[name].grad for m in (method, twin))
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-5 * theirs.abs().max().item())
    rows = embeddings.detach().flatten(0, 1)
    assert metrics["embedding_std"].item() == pytest.approx(rows.var(0, correction=0).mean().sqrt().item(), rel=1e-5)
    unrelated = (1 - 1 / 5) * rows.var(0, correction=0).mean()
    assert metrics["view_difference"].item() == pytest.approx((metrics["invariance"] / unrelated).item(), rel=1e-5)


def test_signs_of_collapse_name_the_flag_of_their_term() -> None:
    method, _ = make()
    healthy = {"sigreg": 2.0, "invariance": 0.2, "embedding_std": 0.95, "view_difference": 0.3, "feature_rank": 9.0}
    assert method.collapse_signs(healthy) == {}
    constant = method.collapse_signs(healthy | {"sigreg": 25.0, "invariance": 0.0, "embedding_std": 0.01})
    assert list(constant) == ["constant"]
    assert "higher lejepa.sigreg_weight" in constant["constant"]
    unrelated = method.collapse_signs(healthy | {"invariance": 0.8, "view_difference": 0.99})
    assert list(unrelated) == ["unrelated views"]
    assert "lower lejepa.sigreg_weight" in unrelated["unrelated views"]
    assert not any("lejepa" in line for line in method.advice(healthy))
    assert any("higher lejepa.sigreg_weight" in line for line in method.advice(healthy | {"sigreg": 30.0}))
    assert any("lower lejepa.sigreg_weight" in line for line in method.advice(healthy | {"view_difference": 0.9}))


def test_metrics_of_collapsed_embeddings_ring_the_alarm() -> None:
    method, batch = make(projector_layers=1)
    with torch.no_grad():
        method.projector[0].weight.mul_(1e-3)
    _, metrics = method(batch, 0)
    assert "constant" in method.collapse_signs({name: value.item() for name, value in metrics.items()})
    with torch.no_grad():
        method.projector[0].weight.mul_(3e4)
    noise = batch_of([torch.randn_like(view.images) for view in batch.views], crops_of(batch))
    _, metrics = method(noise, 0)
    assert "constant" not in method.collapse_signs({name: value.item() for name, value in metrics.items()})


def test_settings_scale_with_the_data() -> None:
    imagenet, optim = resolve(LeJEPAConfig(), OptimConfig(), RunSize(1_281_167, 512, 250_200))
    assert (imagenet.hidden_dim, imagenet.output_dim, imagenet.sigreg_weight, imagenet.directions) == (
        2048,
        512,
        0.05,
        1024,
    )
    assert (imagenet.local_crops, imagenet.global_scale, imagenet.local_scale) == (6, (0.3, 1.0), (0.05, 0.3))
    assert imagenet.blur_sigma == (0.1, 2.0)
    assert (optim.lr, optim.min_lr, optim.weight_decay, optim.clip) == (5e-4, 1e-6, 0.05, 0.0)
    _, given = resolve(LeJEPAConfig(), OptimConfig(lr=1e-3), RunSize(1_281_167, 256, 250_200))
    assert given.min_lr == 1e-6  # a thousandth of the peak, at any learning rate
    _, given = resolve(LeJEPAConfig(), OptimConfig(min_lr=0.0), RunSize(1_281_167, 256, 250_200))
    assert given.min_lr == 0.0
    small, _ = resolve(LeJEPAConfig(global_size=64), OptimConfig(), RunSize(4809, 64, 600))
    assert (small.sigreg_weight, small.directions) == (0.02, 256)
    assert (small.hidden_dim, small.output_dim, small.local_crops) == (512, 16, 4)
    assert (small.local_scale, small.blur_sigma) == ((0.15, 0.5), (0.029, 0.571))
    assert LeJEPAConfig(global_size=112).blur_sigma == (0.05, 1.0)
    assert LeJEPAConfig(global_size=128) == LeJEPAConfig(global_size=128, local_crops=6, local_scale=(0.05, 0.3))
