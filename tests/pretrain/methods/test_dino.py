"""DINO against its formulas written out in float64."""

import math

import numpy as np
import pytest
import torch

from tessera import encoders
from tessera.data.batch import Batch
from tessera.evaluation import references
from tessera.pretrain.methods.dino import DINO, DINOConfig, resolve
from tessera.pretrain.methods.heads import Head
from tessera.pretrain.methods.method import RunSize
from tessera.pretrain.optim.adamw import OptimConfig
from tests.views import batch_of, crops_of


def make(steps: int = 10, images: int = 4, **settings) -> tuple[DINO, Batch]:
    torch.manual_seed(0)
    given = {
        "prototypes": 32,
        "hidden_dim": 24,
        "bottleneck_dim": 12,
        "global_size": 16,
        "local_size": 8,
        "local_crops": 3,
        "batch_norm": False,
        "centering": "mean",
        "momentum": 0.9,
    }
    config, _ = resolve(DINOConfig(**(given | settings)), OptimConfig(), RunSize(1000, images, steps))
    method = DINO(encoders.build("vit_micro", depth=2, dim=24, heads=2), config, steps)
    generator = torch.Generator().manual_seed(1)
    views = [torch.randn(n * images, 3, s, s, generator=generator) for n, s in ((2, 16), (config.local_crops, 8))]
    return method, batch_of(views, (2, config.local_crops))


def naive_head(head: Head, x: np.ndarray) -> np.ndarray:
    weights = {name: p.detach().double().numpy() for name, p in head.named_parameters()}
    erf = np.vectorize(math.erf)
    for layer in (0, 2, 4):
        x = x @ weights[f"mlp.{layer}.weight"].T + weights[f"mlp.{layer}.bias"]
        if layer < 4:
            x = x * 0.5 * (1 + erf(x / math.sqrt(2)))
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    v = weights["last_layer.weight_v"]
    return x @ (weights["last_layer.weight_g"] * v / np.linalg.norm(v, axis=1, keepdims=True)).T


def test_head_equals_formula() -> None:
    method, _ = make()
    assert not method.student["head"].last_layer.weight_g.requires_grad
    x = torch.randn(5, 24)
    torch.testing.assert_close(
        method.student["head"](x).detach().double().numpy(), naive_head(method.student["head"], x.double().numpy()),
        rtol=1e-5, atol=1e-6,
    )  # fmt: skip


def test_method_loss_and_gradients_equal_naive_float64() -> None:
    """The whole forward pass, crops in their order, with a centre that is not zero."""
    method, batch = make()
    method.center.normal_()
    loss, metrics = method(batch, 3)
    loss.backward()
    twin, _ = make()
    twin.load_state_dict(method.state_dict())
    twin.double()
    views = [view.images.double() for view in batch.views]
    logits = [torch.cat([twin.student["head"](twin.student["encoder"](c).pooled) for c in v.chunk(n)])
              for v, n in zip(views, crops_of(batch), strict=True)]  # fmt: skip
    student = torch.cat([v.unflatten(0, (n, -1)) for v, n in zip(logits, crops_of(batch), strict=True)])
    with torch.no_grad():
        teacher = twin.teacher["head"](twin.teacher["encoder"](views[0]).pooled).unflatten(0, (2, -1))
    naive = references.dino_loss(student, teacher, twin.center, 0.1, method.temperature(3))
    naive.backward()
    torch.testing.assert_close(loss.double(), naive, rtol=1e-5, atol=0)
    for (name, p), q in zip(method.student.named_parameters(), twin.student.parameters(), strict=True):
        if p.requires_grad:
            assert p.grad is not None, name
            torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    entropy = metrics["teacher_entropy"].item()
    assert 0 < entropy < math.log(32)
    assert metrics["teacher_student_kl"].item() == pytest.approx(loss.item() - entropy, rel=1e-5)


def test_settings_scale_with_the_data() -> None:
    imagenet, optim = resolve(DINOConfig(), OptimConfig(), RunSize(1_281_167, 512, 250_200))
    assert (imagenet.prototypes, imagenet.momentum, imagenet.teacher_temperature) == (65536, 0.996, 0.04)
    assert (optim.lr, optim.warmup_steps, optim.weight_decay_end) == (5e-4, 25_020, 0.4)
    assert (imagenet.centering, imagenet.batch_norm) == ("mean", False)
    small, _ = resolve(DINOConfig(), OptimConfig(), RunSize(1437, 64, 600))
    assert (small.prototypes, small.centering, small.momentum, small.batch_norm) == (64, "sinkhorn", 0.9, True)
    half, _ = resolve(DINOConfig(), OptimConfig(), RunSize(1437, 64, 600, accumulate=2))
    assert half.prototypes == 32
    continued, _ = resolve(DINOConfig(), OptimConfig(), RunSize(1437, 64, 600, pretrained=True))
    assert continued.momentum == 0.99
    given, _ = resolve(DINOConfig(prototypes=99), OptimConfig(), RunSize(1437, 64, 600))
    assert given.prototypes == 99
