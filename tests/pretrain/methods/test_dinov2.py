"""DINOv2 against its formulas written out in float64."""

import math

import pytest
import torch
from torch import Tensor

from tessera import encoders
from tessera.data.batch import Batch, View
from tessera.encoders.images import Mask
from tessera.evaluation import references
from tessera.pretrain.methods.dinov2 import DINOv2, DINOv2Config, resolve
from tessera.pretrain.methods.method import RunSize
from tessera.pretrain.optim.adamw import OptimConfig, parameter_groups


def make(steps: int = 10, images: int = 4, variant: str = "vit_micro", **settings) -> tuple[DINOv2, Batch]:
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
    config, _ = resolve(DINOv2Config(**(given | settings)), OptimConfig(), RunSize(1000, images, steps))
    narrow = {"depth": 2, "dim": 24, "heads": 2} if variant == "vit_micro" else {}
    method = DINOv2(encoders.build(variant, mask_token=True, **narrow), config, steps)
    generator = torch.Generator().manual_seed(1)
    views = [torch.randn(n * images, 3, s, s, generator=generator) for n, s in ((2, 16), (config.local_crops, 8))]
    rows, columns = method.trained_encoder().grid(16, 16)
    tokens = rows * columns
    hidden = torch.rand(2 * images, tokens, generator=generator) < torch.linspace(0.1, 0.7, 2 * images)[:, None]
    hidden[::3] = False  # crops without hidden tokens
    return method, batch(views, hidden, method)


def batch(views: list[Tensor], hidden: Tensor, method: DINOv2) -> Batch:
    """A batch of global and local crops, with `hidden` tokens of the global crops, (2 * B, tokens)."""
    grid = method.trained_encoder().grid(16, 16)
    mask = Mask.from_hidden(hidden.flatten(), torch.tensor([grid]).expand(len(hidden), 2))
    images = len(hidden) // 2
    return Batch([View(views[0], 2, (mask,)), View(views[1], len(views[1]) // images)])


def naive_terms(method: DINOv2, given: Batch, step: int) -> dict[str, Tensor]:
    """The terms of the loss as loops over pairs, crops, tokens and images, for a method in float64."""
    c, (first, local) = method.config, given.views
    assert isinstance(first.images, Tensor)
    assert isinstance(local.images, Tensor)
    (mask,) = first.masks
    heads = {name: half["ibot_head" if c.separate_head else "head"]
             for name, half in (("student", method.student), ("teacher", method.teacher))}  # fmt: skip
    tau, images = method.temperature(step), len(first.images) // 2

    def probabilities(logits: Tensor, center: Tensor) -> Tensor:
        if c.centering == "mean":
            return torch.softmax((logits - center) / tau, dim=-1)
        return references.sinkhorn(logits, tau)

    with torch.no_grad():
        seen = method.teacher["encoder"](first.images)
        teacher = probabilities(method.teacher["head"](seen.pooled), method.center).chunk(2)
        all_hidden = heads["teacher"](seen.tokens[mask.hidden])
        teacher_tokens = probabilities(all_hidden, method.ibot_center)
    student = method.student["encoder"](first.images, mask)
    pooled = [*student.pooled.chunk(2), *method.student["encoder"](local.images).pooled.chunk(local.crops)]
    logits = [method.student["head"](crop) / c.student_temperature for crop in pooled]
    pairs = [-(teacher[g] * logits[s].log_softmax(1)).sum(1).mean()
             for g in range(2) for s in range(len(logits)) if s != g]  # fmt: skip
    token_logits = heads["student"](student.tokens[mask.hidden]) / c.student_temperature
    per_token = -(teacher_tokens * token_logits.log_softmax(1)).sum(1)
    counts = mask.hidden.view(2 * images, -1).sum(1).tolist()
    per_crop = [part.mean() for part in per_token.split(counts) if len(part)]
    return {
        "dino_loss": torch.stack(pairs).mean(),
        "ibot_loss": torch.stack(per_crop).sum() / (2 * images),
        "koleo_loss": 0.1 * (references.koleo_loss(pooled[0]) + references.koleo_loss(pooled[1])),
    }


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("centering", ["mean", "sinkhorn"])
def test_loss_and_gradients_equal_naive_float64(separate: bool, centering: str) -> None:
    second = {"separate_head": True, "ibot_prototypes": 20, "ibot_bottleneck_dim": 10} if separate else {}
    method, given = make(centering=centering, **second)
    method.center.normal_()
    method.ibot_center.normal_()
    loss, metrics = method(given, 3)
    loss.backward()
    twin, _ = make(centering=centering, **second)
    twin.load_state_dict(method.state_dict())
    twin.double()
    views = [view.images.double() for view in given.views]
    terms = naive_terms(twin, Batch([View(v, w.crops, w.masks) for v, w in zip(views, given.views, strict=True)]), 3)
    torch.stack(list(terms.values())).sum().backward()
    for name, term in terms.items():
        torch.testing.assert_close(metrics[name].double(), term.detach(), rtol=1e-5, atol=0, msg=name)
    assert loss.item() == pytest.approx(sum(term.item() for term in terms.values()), rel=1e-5)
    assert metrics["masked_crops"].item() == pytest.approx(5 / 8)
    for (name, p), q in zip(method.student.named_parameters(), twin.student.named_parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad.double(), q[1].grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_uniform_output_shows_in_each_term() -> None:
    """A uniform teacher and student: ln K for DINO, and ln K times the share of masked crops for iBOT."""
    method, given = make(norm_last_layer=False)
    with torch.no_grad():
        for half in (method.student, method.teacher):
            half["head"].last_layer.weight_g.zero_()
    _, metrics = method(given, 0)
    record = {name: value.item() for name, value in metrics.items()}
    assert record["dino_loss"] == pytest.approx(math.log(32), rel=1e-5)
    assert record["ibot_loss"] == pytest.approx(math.log(32) * 5 / 8, rel=1e-5)
    signs = method.collapse_signs(record | {"loss": 0.0})
    assert {"dino uniform", "ibot uniform"} == signs.keys()
    assert "dinov2.batch_norm" in signs["ibot uniform"]
    healthy = record | {"teacher_entropy": 2.0, "dino_loss": 2.5, "ibot_teacher_entropy": 1.0, "ibot_loss": 1.2}
    assert method.collapse_signs(healthy) == {}
    single = healthy | {"ibot_teacher_entropy": 0.001, "ibot_loss": 0.001}
    assert list(method.collapse_signs(single)) == ["ibot one prototype"]
    assert list(method.collapse_signs(healthy | {"koleo_loss": 0.2 * 8.0})) == ["equal features"]
    advice = method.advice(healthy | {"teacher_spread": 0.1, "prototypes_used": 1, "feature_rank": 3.0})
    assert "dinov2.batch_norm" in advice[0]
    assert "dinov2.prototypes" in advice[1]
    assert "ibot_loss 1.200" in advice[2]


def test_teacher_and_centres_follow_the_formula_over_three_steps() -> None:
    method, given = make(momentum=0.9)
    optimizer = torch.optim.AdamW(parameter_groups(method, {}), lr=1e-2)
    teacher = [p.detach().double() for p in method.teacher.parameters()]
    centers = [method.center.double(), method.ibot_center.double()]
    for step in range(3):
        with torch.no_grad():
            seen = method.teacher["encoder"](given.views[0].images)
            rows = [seen.pooled, seen.tokens[given.views[0].masks[0].hidden]]
            means = [method.teacher["head"](one).double().mean(0) for one in rows]
        method(given, step)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step(step)
        momentum = 1.0 + 0.5 * (0.9 - 1.0) * (1 + math.cos(math.pi * step / 10))
        teacher = [momentum * t + (1 - momentum) * s.detach().double()
                   for t, s in zip(teacher, method.student.parameters(), strict=True)]  # fmt: skip
        centers = [0.9 * center + 0.1 * mean for center, mean in zip(centers, means, strict=True)]
    for naive, p in zip(teacher, method.teacher.parameters(), strict=True):
        torch.testing.assert_close(p.double(), naive, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(method.center.double(), centers[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(method.ibot_center.double(), centers[1], rtol=1e-5, atol=1e-7)


def test_with_sinkhorn_nothing_moves_the_centres() -> None:
    method, given = make(centering="sinkhorn", separate_head=True)
    method(given, 0)
    method.after_step(0)
    assert not method.center.any()
    assert not method.ibot_center.any()
    assert "center_norm" not in method.health()


def test_nothing_hidden_leaves_dino_and_koleo() -> None:
    method, given = make(batch_norm=True, separate_head=True)
    views = [view.images for view in given.views]
    loss, metrics = method(batch(views, torch.zeros(8, 16, dtype=torch.bool), method), 0)
    loss.backward()
    method.after_step(0)
    assert metrics["ibot_loss"] == 0
    assert loss.item() == pytest.approx((metrics["dino_loss"] + metrics["koleo_loss"]).item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in method.student.parameters())
    assert torch.equal(method.ibot_center, torch.zeros(32))


def test_settings_scale_with_the_data() -> None:
    imagenet, optim = resolve(DINOv2Config(), OptimConfig(), RunSize(1_281_167, 2048, 125_000))
    assert (imagenet.prototypes, imagenet.hidden_dim, imagenet.bottleneck_dim) == (65536, 2048, 256)
    assert (imagenet.momentum, imagenet.teacher_temperature, imagenet.teacher_temperature_steps) == (0.992, 0.07, 37500)
    assert (imagenet.freeze_steps, imagenet.global_scale, imagenet.local_scale) == (1250, (0.32, 1.0), (0.05, 0.32))
    assert optim.scaled_lr(2048) == pytest.approx(0.004 * math.sqrt(2))
    assert (optim.warmup_steps, optim.weight_decay, optim.weight_decay_end, optim.clip) == (12_500, 0.04, 0.4, 3.0)
    assert (optim.layer_decay, optim.patch_embed_lr_factor, optim.clip_by) == (0.9, 0.2, "module")
    small, optim = resolve(DINOv2Config(prototypes=99), OptimConfig(clip_by="tensor"), RunSize(1437, 64, 600))
    assert (small.prototypes, small.ibot_prototypes, small.batch_norm) == (99, 99, True)
    assert (small.centering, small.momentum) == ("sinkhorn", 0.9)
    assert optim.clip_by == "tensor"


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="Set separate_head to true"):
        make(ibot_prototypes=7)
    with pytest.raises(ValueError, match="Set linear_last_layer to false"):
        make(linear_last_layer=True, norm_last_layer=True)
    config, _ = resolve(DINOv2Config(global_size=16), OptimConfig(), RunSize(1000, 4, 10))
    with pytest.raises(ValueError, match=r"Set encoder\.mask_token to true"):
        DINOv2(encoders.build("vit_micro"), config, 10)
    with pytest.raises(ValueError, match=r"is only one token of ViT.*at least 32"):
        DINOv2(encoders.build("vit_micro", mask_token=True, patch_size=16), config, 10)
