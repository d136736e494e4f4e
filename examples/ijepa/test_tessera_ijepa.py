"""I-JEPA: masks, loss and predictor against their definitions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tessera_ijepa import IJEPA, BlockCrop, IJEPAConfig, draw_block, ijepa_loss
from torch import Tensor

from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.data.batch import Batch
from tessera.data.collate import collate
from tessera.methods import METHODS
from tessera.pretrain.methods.method import RunSize
from tessera.pretrain.optim.adamw import OptimConfig

STEPS = 10


@pytest.fixture
def method() -> IJEPA:
    torch.manual_seed(0)
    given = IJEPAConfig(size=32, predictor_dim=16, predictor_depth=2, targets=3)
    config, _ = IJEPA.resolve(given, OptimConfig(), RunSize(1000, 4, STEPS))
    own = IJEPA.encoder_defaults(config, "vit_micro", RunSize(1000, 4, STEPS))
    return IJEPA(encoders.build("vit_micro", depth=2, dim=24, heads=2, patch_size=4, **own), config, STEPS)


def make_batch(method: IJEPA, images: int, first: int = 0) -> Batch:
    numbers = range(first, first + images)
    noise = [torch.from_numpy(np.random.default_rng(n).integers(0, 256, (3, 40, 40), dtype=np.uint8)) for n in numbers]
    return to_model_input(collate(method.transform(), noise, [np.random.default_rng(n) for n in numbers]))


def test_blocks_are_rectangles_of_the_drawn_area() -> None:
    rng = np.random.default_rng(0)
    ratios = set()
    for _ in range(200):
        block = draw_block(16, (0.15, 0.2), (0.75, 1.5), rng)
        rows, columns = block.any(1).sum(), block.any(0).sum()
        assert block.sum() == rows * columns
        assert 0.12 * 256 <= block.sum() <= 0.23 * 256  # sides are rounded to whole tokens
        ratios.add(rows / columns)
    assert 0.6 < min(ratios) < 0.8
    assert 1.4 < max(ratios) < 1.8


def test_masks_depend_on_the_generator_only_and_the_context_avoids_the_targets() -> None:
    crop = BlockCrop(IJEPAConfig(size=224), 16)
    drawn = [crop.draw((300, 200), np.random.default_rng(seed))[0].masks for seed in range(20)]
    for seed, masks in enumerate(drawn):
        (again,) = crop.draw((300, 200), np.random.default_rng(seed))
        assert all(np.array_equal(a, b) for a, b in zip(masks, again.masks, strict=True))
        hidden, *targets = (mask[0] for mask in masks)
        assert len(targets) == 4
        assert not (~hidden & np.any(targets, axis=0)).any()
        assert 0.2 < (~hidden).mean() < 0.85
    assert not np.array_equal(drawn[0][0], drawn[1][0])


def test_targets_that_leave_no_context_are_an_error() -> None:
    crop = BlockCrop(IJEPAConfig(size=32, target_scale=(1.0, 1.0), target_ratio=(1.0, 1.0)), 4)
    with pytest.raises(ValueError, match=r"Set a smaller ijepa\.target_scale"):
        crop.draw((32, 32), np.random.default_rng(0))


def test_the_loss_is_the_mean_over_blocks() -> None:
    torch.manual_seed(0)
    counts = [3, 1, 5]
    predicted, target = torch.randn(9, 4) * 2, torch.randn(9, 4)
    expected = 0.0
    for block in zip(predicted.double().split(counts), target.double().split(counts), strict=True):
        difference = (block[0] - block[1]).abs()
        expected += float(torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean()) / 3
    assert ijepa_loss(predicted, target, torch.tensor(counts)).item() == pytest.approx(expected, rel=1e-6)


def naive_predictions(method: IJEPA, batch: Batch) -> Tensor:
    """Return the predictions (M, D), computed for one block of one image at a time."""
    (view,), predictor, tokens = batch.views, method.predictor, 64
    context, *targets = view.masks
    features = method.encoder.visible(view.images, context).tokens.split(context.lengths.tolist())
    found = []
    for target in targets:
        for image, own in enumerate(features):
            visible = (~context.hidden[image * tokens :][:tokens]).nonzero().flatten()
            wanted = target.hidden[image * tokens :][:tokens].nonzero().flatten()
            x = predictor.embed(own) + predictor.positions[visible]
            x = torch.cat([x, predictor.mask_token + predictor.positions[wanted]])[None]
            for block in predictor.blocks:
                x = block(x)
            found.append(predictor.out(x[0, len(visible) :]))
    return torch.cat(found)


def test_the_method_equals_one_block_of_one_image_at_a_time(method: IJEPA) -> None:
    batch = make_batch(method, 3)
    (view,) = batch.views
    predicted = naive_predictions(method, batch)
    whole = method.teacher(view.images).tokens
    hidden = torch.cat([mask.hidden_indices for mask in view.masks[1:]])
    target = ((whole - whole.mean(1, keepdim=True)) / (whole.var(1, correction=0, keepdim=True) + 1e-5).sqrt())[hidden]
    counts = torch.cat([mask.hidden.view(3, 64).sum(1) for mask in view.masks[1:]]).tolist()
    blocks = zip(predicted.split(counts), target.split(counts), strict=True)
    expected = torch.stack([F.smooth_l1_loss(a, b) for a, b in blocks]).mean()
    loss, metrics = method(batch, 0)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert metrics["target_spread"] > 0.1
    loss.backward()
    for name, parameter in method.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert not (parameter.requires_grad and name.startswith("teacher.")), name


def test_the_loss_of_a_batch_is_the_mean_of_its_halves(method: IJEPA) -> None:
    loss, _ = method(make_batch(method, 4), 0)
    halves = [method(make_batch(method, 2, first), 0)[0] for first in (0, 2)]
    torch.testing.assert_close(loss, torch.stack(halves).mean(), rtol=1e-5, atol=1e-6)


def test_the_encoder_does_not_see_hidden_pixels(method: IJEPA) -> None:
    batch = make_batch(method, 2)
    (view,) = batch.views
    hidden = view.masks[0].hidden.view(2, 1, 8, 8).repeat_interleave(4, 2).repeat_interleave(4, 3)
    assert isinstance(view.images, Tensor)
    noisy = replace(view, images=torch.where(hidden, torch.randn_like(view.images), view.images))
    before, after = (method.encoder.visible(v.images, v.masks[0]).tokens for v in (view, noisy))
    assert torch.equal(before, after)


def test_the_teacher_is_the_moving_average(method: IJEPA) -> None:
    method.train()
    assert not method.teacher.training
    old = [p.clone() for p in method.teacher.parameters()]
    with torch.no_grad():
        for p in method.encoder.parameters():
            p += 1
    method.after_step(5)
    momentum = 0.9 + 0.1 * 5 / (STEPS - 1)
    for before, p, student in zip(old, method.teacher.parameters(), method.encoder.parameters(), strict=True):
        torch.testing.assert_close(p, momentum * before + (1 - momentum) * student)
    assert method.trained_encoder() is method.teacher


def test_it_can_be_registered_without_an_installation() -> None:
    METHODS.pop("ijepa", None)
    assert METHODS.register("ijepa", IJEPA) is METHODS["ijepa"] is IJEPA
    del METHODS["ijepa"]


def test_images_of_one_token_are_refused(method: IJEPA) -> None:
    with pytest.raises(ValueError, match="must be a multiple of 4, and at least 8"):
        IJEPA(method.encoder, method.config.model_copy(update={"size": 6}), STEPS)
