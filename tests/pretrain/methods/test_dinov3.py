"""DINOv3: the Gram teacher over a run, constant schedules, and a start from another run."""

import math

import numpy as np
import pytest
import torch

from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.data.batch import Batch, View
from tessera.data.collate import collate
from tessera.evaluation import references
from tessera.pretrain.methods.dinov3 import DINOv3, DINOv3Config, resized, resolve
from tessera.pretrain.methods.method import RunSize
from tessera.pretrain.optim.adamw import OptimConfig, apply_schedules, parameter_groups
from tests.pretrain.methods.test_dinov2 import batch

SMALL = {
    "prototypes": 32,
    "hidden_dim": 24,
    "bottleneck_dim": 12,
    "global_size": 16,
    "local_size": 8,
    "local_crops": 3,
    "batch_norm": False,
}
NARROW = {"depth": 2, "dim": 24, "heads": 2, "mask_token": True}


def make(steps: int = 60, variant: str = "vit_micro", **settings) -> tuple[DINOv3, Batch]:
    torch.manual_seed(0)
    config, _ = resolve(DINOv3Config(**(SMALL | settings)), OptimConfig(), RunSize(1000, 4, steps))
    narrow = NARROW if variant == "vit_micro" else {"mask_token": True}
    method = DINOv3(encoders.build(variant, **narrow), config, steps)
    generator = torch.Generator().manual_seed(1)
    views = [torch.randn(n * 4, 3, s, s, generator=generator) for n, s in ((2, 16), (3, 8))]
    given = batch(
        views, torch.rand(8, math.prod(method.trained_encoder().grid(16, 16)), generator=generator) < 0.3, method
    )
    if config.gram_size > 16:
        size = config.gram_size
        given.views.append(View(torch.randn(8, 3, size, size, generator=generator), 2))
    return method, given


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("variant", ["vit_micro", "swin_micro"])
def test_the_gram_term_compares_masked_tokens_with_the_gram_teachers(variant: str, size: int) -> None:
    method, given = make(variant=variant, gram_size=size, gram_start=0, gram_warmup_steps=0, local_weight=0.5)
    with torch.no_grad():
        for p in method.gram_teacher.parameters():
            p.add_(0.1 * torch.randn_like(p))
    loss, metrics = method(given, 0)
    loss.backward()
    first, seen = given.views[0], given.views[-1 if size > 16 else 0]
    with torch.no_grad():
        tokens = method.student["encoder"](first.images, first.masks[0]).tokens.unflatten(0, (8, -1))
        anchors = method.gram_teacher(seen.images).tokens.unflatten(0, (8, -1))
    side = round(anchors.shape[1] ** 0.5)
    maps = anchors.mT.unflatten(2, (side, side))
    small = (
        torch.nn.functional.interpolate(maps, size=method.trained_encoder().grid(16, 16), mode="bicubic").flatten(2).mT
    )
    expected = 2.0 * references.gram_loss(tokens.double(), small.double()).item()
    assert metrics["gram_loss"].item() == pytest.approx(expected, rel=1e-4)
    total = sum(metrics[name].item() for name in ("dino_loss", "ibot_loss", "koleo_loss", "gram_loss"))
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert [n for n, p in method.named_parameters() if p.requires_grad and p.grad is None] == []
    assert all(not p.requires_grad for p in method.gram_teacher.parameters())


def test_local_crops_count_less_once_the_gram_loss_is_warm() -> None:
    plain, given = make(gram_start=60)
    weighted, _ = make(gram_start=0, gram_warmup_steps=0, local_weight=0.25)
    full, quarter = (method(given, 0)[1]["dino_loss"].item() for method in (plain, weighted))
    nothing, _ = make(gram_start=0, gram_warmup_steps=0, local_weight=0.0)
    only_global = nothing(given, 0)[1]["dino_loss"].item()
    assert quarter == pytest.approx(only_global + 0.25 * (full - only_global), rel=1e-5)


def test_the_gram_teacher_is_replaced_when_it_is_due() -> None:
    method, given = make(steps=60, gram_refresh_steps=4, gram_refreshes=2)
    assert method.config.gram_start == 50
    assert [step for step in range(60) if method.replaces_gram_teacher(step)] == [50, 54, 58]
    method, given = make(gram_start=3, gram_refresh_steps=2, gram_refreshes=1, gram_warmup_steps=3, momentum=0.5)
    optimizer = torch.optim.AdamW(parameter_groups(method, {}), lr=1e-2)
    same, weights = [], []
    for step in range(7):
        method.before_step(step)
        pairs = zip(method.gram_teacher.parameters(), method.teacher["encoder"].parameters(), strict=True)
        same.append(all(torch.equal(a, b) for a, b in pairs))
        loss, metrics = method(given, step)
        weights.append(method.gram_weight(step))
        assert (metrics["gram_loss"] > 0) == (step > 3)  # the weight is 0 at gram_start
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step(step)
    assert same == [True, False, False, True, False, True, False]
    assert weights == pytest.approx([0, 0, 0, 0, 2 / 3, 4 / 3, 2])


def test_larger_crops_for_the_gram_teacher_have_the_students_boxes_and_true_colours() -> None:
    method, _ = make(gram_size=32, brightness=0.9)
    image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    transform = method.transform()
    drawn = transform.draw((64, 64), np.random.default_rng(3))
    assert np.array_equal(drawn[0].boxes, drawn[-1].boxes)
    assert np.array_equal(drawn[0].flips, drawn[-1].flips)
    given = collate(transform, [image], [np.random.default_rng(3)])
    assert [tuple(view.images.shape) for view in given.views] == [(2, 3, 16, 16), (3, 3, 8, 8), (2, 3, 32, 32)]
    assert given.views[-1].colors == []
    assert given.views[-1].masks == ()
    plain, _ = make()
    assert len(plain.transform().views) == 2


MIXED = {"sizes": {"24/12/32": 0.5, "16/8": 1.5}, "gram_start": 0, "gram_warmup_steps": 0}
BLUR = {"blur_sigma": (0.1, 2.0)}  # its default depends on global_size


@pytest.mark.parametrize("variant", ["vit_micro", "rope_vit_micro"])
def test_a_step_of_mixed_sizes_is_the_step_of_a_method_of_these_sizes(variant: str) -> None:
    """The loss of every combination, with its masks and crops, is that of a method that knows no other one."""
    image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    sizes = {"global_size": 24, "local_size": 12, "gram_size": 32}
    config, _ = resolve(DINOv3Config(**SMALL | MIXED | BLUR | sizes), OptimConfig(), RunSize(1000, 4, 60))
    mixed = DINOv3(encoders.build(variant, mask_token=True, image_size=24), config, 60).eval()
    transforms = mixed.transform().transforms
    assert [[view.size for view in one.views] for one in transforms] == [[16, 8], [24, 12, 32]]
    assert mixed.transform().views == transforms[1].views
    for transform, (large, local, gram) in zip(transforms, ((16, 8, 16), (24, 12, 32)), strict=True):
        own = {"global_size": large, "local_size": local, "gram_size": gram}
        plain, _ = resolve(
            DINOv3Config(**SMALL | BLUR | {"gram_start": 0, "gram_warmup_steps": 0} | own),
            OptimConfig(),
            RunSize(1000, 4, 60),
        )
        method = DINOv3(encoders.build(variant, mask_token=True, image_size=24), plain, 60).eval()
        method.load_state_dict(mixed.state_dict())
        batches = [
            to_model_input(collate(one, [image] * 3, [np.random.default_rng(seed) for seed in range(3)]))
            for one in (transform, method.transform())
        ]
        found, expected = mixed(batches[0], 0), method(batches[1], 0)
        assert torch.equal(found[0], expected[0])
        assert found[1] == expected[1]
        assert found[1]["gram_loss"] > 0
        assert batches[0].views[0].masks[0].hidden.numel() == 6 * (large // 4) ** 2


def test_sizes_set_the_sizes_that_are_not_given_and_are_sorted() -> None:
    given = DINOv3Config(sizes={"64/16": 0.5, "128/48/256": "0.25", "128/32": 1})
    assert given.sizes == {"64/16": 0.5, "128/32": 1.0, "128/48/256": 0.25}
    config, _ = resolve(given, OptimConfig(), RunSize(1000, 4, 60))
    assert (config.global_size, config.local_size, config.gram_size, config.local_crops) == (128, 48, 256, 8)
    again, _ = resolve(DINOv3Config(**config.model_dump()), OptimConfig(), RunSize(1000, 4, 60))
    assert again == config


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"16/8/24": 1, "18/8/24": 1}, "sizes 18/8/24: A side is not a multiple of 4 pixels, the side of a token"),
        ({"16/8/24": 1, "20/6/24": 1}, "sizes 20/6/24: A side is not a multiple of 4 pixels, the side of a token"),
        ({"16/8": 1, "24/8/20": 1}, "sizes 24/8/20: gram_size 20 is less than global_size 24. Raise gram_size"),
        ({"4/4": 1, "16/8": 1}, "sizes 4/4: .* is only one token of ViT.* Set global_size to at least 8"),
        ({"16-8": 1}, "String should match pattern"),
        ({"16/8": 0}, "Input should be greater than 0"),
        ({}, "at least 1 item"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixed(sizes=sizes)


def test_sizes_that_contradict_other_settings_are_refused() -> None:
    sizes = {"16/8": 1, "24/8": 1}
    assert mixed(sizes=sizes, global_size=16, local_size=8, gram_size=16).image_size == 16
    with pytest.raises(
        ValueError, match=r"global_size 16, local_size 8 and gram_size 24 are not a combination .* Remove"
    ):
        mixed(sizes=sizes, global_size=16)


def mixed(**settings) -> DINOv3:
    config, _ = resolve(DINOv3Config(local_crops=2, prototypes=32, **settings), OptimConfig(), RunSize(1000, 4, 60))
    return DINOv3(encoders.build("vit_micro", **NARROW), config, 60)


def test_schedules_are_constant_after_the_warm_up() -> None:
    config, optim = resolve(DINOv3Config(), OptimConfig(), RunSize(20_000_000, 4096, 1_000_000))
    assert (config.momentum, config.teacher_temperature_steps, config.gram_start) == (0.994, 100_000, 833_333)
    assert config.linear_last_layer
    assert optim.scaled_lr(4096) == pytest.approx(4e-4)
    method, _ = make()
    optimizer = torch.optim.AdamW(parameter_groups(method, {}), lr=1.0)
    for step in (100_000, 500_000, 999_999):
        apply_schedules(optimizer, optim, step, 1_000_000, 4096)
        assert all(group["lr"] == pytest.approx(4e-4) for group in optimizer.param_groups)
        assert {group["weight_decay"] for group in optimizer.param_groups} <= {0.0, 0.04}
    assert method.momentum(0) == method.momentum(59)
    with pytest.raises(ValueError, match=r"gram_size 8 is less than global_size 16"):
        make(gram_size=8)


def test_warm_ups_reach_their_end_in_the_step_after_the_warm_up() -> None:
    """As a linspace without its end point, in the official schedules of the ViT-7B."""
    config, optim = resolve(DINOv3Config(gram_warmup_steps=4, gram_start=20), OptimConfig(), RunSize(10**6, 1024, 100))
    method, _ = make(**config.model_dump(include={"teacher_temperature", "teacher_temperature_steps"}),
                     gram_warmup_steps=4, gram_start=20)  # fmt: skip
    optimizer = torch.optim.AdamW(parameter_groups(method, {}), lr=1.0)
    temperatures, rates = [], []
    for step in range(12):
        temperatures.append(method.temperature(step))
        apply_schedules(optimizer, optim, step, 100, 1024)
        rates.append(optimizer.param_groups[0]["lr"])
    np.testing.assert_allclose(temperatures, [*np.linspace(0.04, 0.07, 10, endpoint=False), 0.07, 0.07], rtol=1e-12)
    np.testing.assert_allclose(rates, [*np.linspace(0, 2e-4, 10, endpoint=False), 2e-4, 2e-4], rtol=1e-12)
    weights = [method.gram_weight(step) for step in range(19, 26)]
    np.testing.assert_allclose(weights, [0, *np.linspace(0, 2, 4, endpoint=False), 2, 2], rtol=1e-12)
    assert make(teacher_temperature_steps=0, teacher_temperature=0.05)[0].temperature(0) == 0.05


def test_the_momentum_may_rise() -> None:
    method, _ = make(momentum=0.9, momentum_end=1.0)
    expected = [1 + 0.5 * (0.9 - 1) * (1 + math.cos(math.pi * step / 60)) for step in range(60)]
    assert [method.momentum(step) for step in range(60)] == pytest.approx(expected)


def test_the_number_of_prototypes_is_bounded_by_the_rows_of_a_forward_pass() -> None:
    def prototypes(*size: int) -> int:
        return resolve(DINOv3Config(), OptimConfig(), RunSize(*size))[0].prototypes

    assert prototypes(20_000_000, 4096, 1_000_000) == 65536
    assert prototypes(1_281_167, 512, 100_000) == 32 * 2 * 512
    assert prototypes(20_000, 64, 1000) == 64
    assert prototypes(20_000, 64, 1000, None, 4) == 16
    config = resolve(DINOv3Config(prototypes=99), OptimConfig(), RunSize(20_000, 64, 1000))[0]
    assert (config.prototypes, config.ibot_prototypes, config.ibot_hidden_dim) == (99, 99, config.hidden_dim)


def test_without_a_gram_loss_there_is_no_gram_teacher() -> None:
    method, given = make(gram_weight=0.0)
    assert not any("gram" in name for name, _ in method.named_parameters())
    _, metrics = method(given, 59)
    assert "gram_loss" not in metrics
    method.after_step(59)


def test_resized_maps_keep_rows_and_columns() -> None:
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(4.0), indexing="ij")
    tokens = torch.stack([rows, columns], -1).flatten(0, 1)[None]  # (1, 32, 2)
    small = resized(tokens, (8, 4), (4, 2)).unflatten(1, (4, 2))
    torch.testing.assert_close(small[0, 1:3, 0, 0], torch.tensor([2.5, 4.5]), rtol=0, atol=0.1)
    assert (small[0, :, 0, 1] < small[0, :, 1, 1]).all()
    assert resized(tokens, (8, 4), (8, 4)) is tokens
