"""Fine-tuning: its loss and its parameter groups against MAE's formulas, and its promises for every encoder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import SoftTargetCrossEntropy

from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.data.batch import Batch
from tessera.data.pixels import to_pixels
from tessera.encoders.base import IMAGENET
from tessera.encoders.randomness import random_keys
from tessera.extras.finetune.finetune import Finetune, FinetuneConfig, mixed_cross_entropy, resolve
from tessera.pretrain.build import build_method
from tessera.pretrain.command_line import load
from tessera.pretrain.methods.method import RunSize
from tessera.pretrain.optim.adamw import OptimConfig, adamw, apply_schedules, learning_rate_factors, parameter_groups
from tessera.pretrain.resolve import resolve as resolve_run
from tessera.runtime.settings import SettingsError
from tests.pretrain.small import MICRO
from tests.views import batch_of

IMAGENET_SIZE = RunSize(1_281_167, 1024, 125_100, classes=1000)


def make(variant: str = "vit_micro", encoder: dict[str, Any] | None = None, **settings: Any) -> Finetune:
    torch.manual_seed(0)
    given: dict[str, Any] = {"size": 16, "classes": 3} | settings
    config, _ = resolve(FinetuneConfig(**given), OptimConfig(), IMAGENET_SIZE)
    defaults = Finetune.encoder_defaults(config, variant, IMAGENET_SIZE)
    method = Finetune(encoders.build(variant, **defaults | (encoder or {})), config, 10)
    torch.nn.init.normal_(method.head.weight, std=0.5)  # at the published 2e-5, all images have equal scores
    return method


def batch(images: int = 8, seed: int = 0) -> Batch:
    draws = torch.Generator().manual_seed(seed)
    pixels = torch.randn(images, 3, 16, 16, generator=draws)
    labels = torch.randint(3, (images,), generator=draws)
    return batch_of([pixels], labels=labels, positions=np.arange(images))


def test_loss_is_the_formula_in_float64_and_timms() -> None:
    rng = np.random.default_rng(0)
    logits, labels, share = rng.normal(size=(8, 5)) * 3, rng.integers(5, size=8), rng.random(8)
    partner = np.array([1, 0, 3, 2, 5, 4, 7, 6])
    expected = 0.0
    for b in range(8):
        scores = np.exp(logits[b]) / np.exp(logits[b]).sum()
        for k in range(5):
            own, other = (0.9 * (k == labels[i]) + 0.1 / 5 for i in (b, partner[b]))
            expected -= (share[b] * own + (1 - share[b]) * other) * np.log(scores[k]) / 8
    tensors = [torch.from_numpy(array) for array in (logits, labels, partner, share)]
    found = mixed_cross_entropy(tensors[0].float(), tensors[1], tensors[2], tensors[3].float(), 0.1)
    assert float(found) == pytest.approx(expected, rel=1e-6)
    assert found.dtype == torch.float32
    # timm mixes image i with image 7 - i
    target = mixup_target(tensors[1], 5, lam=0.3, smoothing=0.1)
    theirs = SoftTargetCrossEntropy()(tensors[0], target)
    mirrored = torch.arange(7, -1, -1)
    ours = mixed_cross_entropy(tensors[0], tensors[1], mirrored, torch.full((8,), 0.3, dtype=torch.float64), 0.1)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)


def test_learning_rates_decay_by_layer_as_in_mae() -> None:
    method = make(encoder={"depth": 4})
    _, optim = resolve(FinetuneConfig(classes=3), OptimConfig(), IMAGENET_SIZE)
    factors = learning_rate_factors(method, optim)
    layers = 4 + 1
    for name, parameter in method.named_parameters():
        inside = name.removeprefix("encoder.")
        if inside in ("cls_token", "pos_embed") or inside.startswith("patch_embed"):  # MAE's get_layer_id_for_vit
            layer = 0
        elif inside.startswith("blocks."):
            layer = int(inside.split(".")[1]) + 1
        else:
            layer = layers
        assert factors.get(parameter, 1.0) == pytest.approx(0.65 ** (layers - layer)), name


def test_tokens_positions_vectors_and_biases_have_no_weight_decay() -> None:
    method = make(encoder={"registers": 2})
    names = {parameter: name for name, parameter in method.named_parameters()}
    groups = parameter_groups(method, {})
    decayed = {names[p] for group in groups if group["decays"] for p in group["params"]}
    plain = {names[p] for group in groups if not group["decays"] for p in group["params"]}
    assert {
        "encoder.cls_token",
        "encoder.pos_embed",
        "encoder.reg_token",
    } <= plain  # MAE's fine-tuning trains positions
    assert decayed == {name for p, name in names.items() if p.ndim > 1 and name not in plain}
    assert "head.weight" in decayed


def test_the_published_settings_are_the_defaults_for_imagenet() -> None:
    config, optim = resolve(FinetuneConfig(), OptimConfig(), IMAGENET_SIZE)
    assert config.classes == 1000
    assert (config.mixup, config.cutmix, config.label_smoothing, config.erasing) == (0.8, 1.0, 0.1, 0.25)
    assert config.randaugment == 9
    assert optim.scaled_lr(1024) == pytest.approx(2e-3)  # 5e-4 * 1024 / 256
    assert (optim.layer_decay, optim.weight_decay, optim.betas, optim.min_lr) == (0.65, 0.05, (0.9, 0.999), 1e-6)
    assert optim.warmup_steps == 5 * 1251
    defaults = Finetune.encoder_defaults(config, "vit_base", IMAGENET_SIZE)
    assert defaults == {"drop_path": 0.1, "mask_token": False, "pool": "mean", "positions": "learned"}
    given = resolve(FinetuneConfig(classes=3, mixup=0.2), OptimConfig(layer_decay=0.9), IMAGENET_SIZE)
    assert (given[0].classes, given[0].mixup, given[1].layer_decay) == (3, 0.2, 0.9)
    small = resolve(FinetuneConfig(), OptimConfig(), RunSize(3000, 64, 4600, classes=5))
    assert small[1].scaled_lr(64) == pytest.approx(2e-3)  # 8e-3 * sqrt(64 / 1024)
    assert small[1].warmup_steps == 5 * 46


def test_pairs_that_are_mixed_stay_on_one_process() -> None:
    assert make().together == make(mixup=0.0).together == make(cutmix=0.0).together == 2
    assert make(mixup=0.0, cutmix=0.0).together == 1


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match=r"number of classes is not set"):
        Finetune(encoders.build("vit_micro"), FinetuneConfig(), 10)
    with pytest.raises(ValueError, match=r"Set finetune.size to one number"):
        Finetune(encoders.build("vit_micro", image_size=(16, 32)), FinetuneConfig(classes=2), 10)
    assert make(size=None, encoder={"image_size": 24}).image_size == 24


def test_images_without_operations_are_not_changed() -> None:
    pixels = torch.randint(256, (4, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    images = to_model_input(batch_of([pixels])).views[0].images
    assert isinstance(images, torch.Tensor)
    assert torch.equal(to_pixels(images, IMAGENET), pixels.float())
    method = make(mixup=0.0, cutmix=0.0, erasing=0.0, randaugment=9.0)
    changed = 0
    for seed in range(12):
        with random_keys(seed, 0, torch.arange(4)):
            augmented, share = method._augmented(images, IMAGENET)
        assert torch.equal(share, torch.ones(4))
        changed += sum(not torch.equal(a, b) for a, b in zip(augmented, images, strict=True))
    assert 24 < changed < 44  # three of four images get an operation, which rarely changes nothing
    wide = replace(IMAGENET, pixel_type="uint16", low=(0.0,) * 3, high=(9.0,) * 3)
    with pytest.raises(SettingsError, match=r"256 levels, but the images are uint16. Set --finetune.randaugment 0"):
        method._augmented(images, wide)


@pytest.mark.parametrize("variant", MICRO)
def test_weights_without_a_description_start_every_encoder(variant: str, tmp_path: Path) -> None:
    """Such as published weights: a torch file, whose class head and final norm are left out where they do not fit."""
    torch.manual_seed(1)
    source = encoders.build(variant).state_dict()
    torch.save({"model": source}, tmp_path / "published.pth")
    flags = ["--data", "x.tar", "--method", "finetune", "--encoder", variant, "--precision", "fp32"]
    config = resolve_run(load([*flags, "--init_from", str(tmp_path / "published.pth")]), 1000, classes=3)
    method = build_method(config, fresh=True)
    assert isinstance(method, Finetune)
    fresh = {"fc_norm.weight", "fc_norm.bias"} if variant == "vit_micro" else set()
    ours = method.encoder.state_dict()
    assert {name for name in ours if name not in source} == fresh  # MAE's fine-tuning replaces norm by fc_norm
    assert all(torch.equal(tensor, source[name]) for name, tensor in ours.items() if name in source)
    assert method.encoder.settings["drop_path"] == 0.1
    assert method.image_size == encoders.build(variant).settings["image_size"]


def test_first_blocks_keep_their_weights() -> None:
    method = make(encoder={"depth": 3}, frozen_blocks=2)
    trained = {name for name, p in method.named_parameters() if p.requires_grad}
    assert {name.split(".")[1] for name in trained if name.startswith("encoder.blocks.2")} == {"blocks"}
    assert {name.rpartition(".")[0] for name in trained if ".blocks." not in name} == {"encoder.fc_norm", "head"}
    assert not any(name.startswith(("encoder.blocks.0", "encoder.blocks.1")) for name in trained)
    with pytest.raises(ValueError, match=r"frozen_blocks is 4, but the encoder has 3 blocks"):
        make(encoder={"depth": 3}, frozen_blocks=4)
    with pytest.raises(ValueError, match=r"Set either lora_rank or frozen_blocks"):
        make(frozen_blocks=1, lora_rank=1)
    with pytest.raises(ValueError, match=r"batch norm, whose statistics change"):
        make("timm:resnet18", {"image_size": 32}, frozen_blocks=1, size=32)


def test_low_rank_updates_are_trained_in_place_of_weights() -> None:
    method = make(lora_rank=2)
    frozen = {name: p.clone() for name, p in method.named_parameters() if not p.requires_grad}
    optimizer = adamw(method, OptimConfig(betas=(0.9, 0.999), encoder_lr_factor=1.0), method.frozen())
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 1e-2, 0.05
    for seed in range(3):
        method(batch(seed=seed), 0)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    now = dict(method.named_parameters())
    assert all(torch.equal(now[name], before) for name, before in frozen.items())
    assert any("blocks.0.attn.qkv.weight" in name for name in frozen)
    assert all(p.abs().max() > 0 for name, p in now.items() if "lora" in name)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for name, p in now.items() if "lora" in name or name.startswith("head")}


def test_the_classifier_can_be_trained_first() -> None:
    method = make(head_steps=2)
    before = {name: p.clone() for name, p in method.named_parameters()}
    config = OptimConfig(lr=0.1, betas=(0.9, 0.999), encoder_lr_factor=1.0, min_lr=0.0, warmup_steps=0)
    config = config.model_copy(update={"weight_decay": 0.0, "weight_decay_end": 0.0})
    optimizer = adamw(method, config, method.frozen())
    for step in range(3):
        apply_schedules(optimizer, config, step, 10, 8)
        method(batch(seed=step), step)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = {name for name, p in method.named_parameters() if not torch.equal(p, before[name])}
        encoder_moved = any(name.startswith("encoder.") for name in moved)
        assert "head.weight" in moved
        assert encoder_moved == (step == 2)
    with pytest.raises(ValueError, match=r"batch norm, whose statistics change"):
        make("timm:resnet18", {"image_size": 32}, head_steps=1, size=32)


def test_updates_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match=r"have no effect without lora_rank"):
        make(lora_alpha=2.0)
    with pytest.raises(ValueError, match=r"reads the weight of the layer .*qkv without calling the layer"):
        make("timm:beit_base_patch16_224", {"image_size": 32}, lora_rank=1, size=32)
