"""Checkpoints of every known kind, made from timm models under the names and in the files of their projects."""

import argparse
from functools import partial

import pytest
import timm
import torch
from safetensors.torch import save_file

from tessera.encoders import build, load_weights
from tests.encoders import helpers
from tests.encoders.helpers import CLOSE, timm_vit

small = partial(helpers.small, "vit_small")
OPTIONS = argparse.Namespace(lr=1e-3, output_dir="somewhere")


def head_of_dino(prefix: str) -> dict:
    return {f"{prefix}head.mlp.0.weight": torch.zeros(8, 48), f"{prefix}head.last_layer.weight_g": torch.zeros(9, 1)}


def decoder_of_mae() -> dict:
    names = ("decoder_embed.weight", "decoder_pos_embed", "decoder_blocks.0.norm1.weight", "decoder_pred.bias")
    return {name: torch.zeros(3) for name in names} | {"mask_token": torch.zeros(1, 1, 16)}


@torch.no_grad()
def assert_equals_timm(encoder, model, size=32):
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    tokens = model.forward_features(images)
    torch.testing.assert_close(encoder(images).pooled, model.forward_head(tokens, pre_logits=True), **CLOSE)
    expected = model.fc_norm(tokens[:, model.num_prefix_tokens :]).flatten(0, 1)
    torch.testing.assert_close(encoder(images).tokens, expected, **CLOSE)


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_flat_files_of_dino_and_timm(tmp_path, ending):
    model, path = timm_vit(), tmp_path / f"vit.{ending}"
    (save_file if ending == "safetensors" else torch.save)(model.state_dict(), path)
    encoder = small()
    report = load_weights(encoder, path)
    assert set(report.used) == set(encoder.state_dict())
    assert (report.left_out, report.fresh, report.resized) == ([], [], [])
    assert str(report) == "30 tensors loaded"
    assert_equals_timm(encoder, model)


@pytest.mark.parametrize("teacher", [True, False])
def test_training_checkpoint_of_dino_gives_the_teacher_without_its_head(tmp_path, teacher):
    model, other = timm_vit(), {name: torch.zeros_like(t) for name, t in timm_vit().state_dict().items()}
    theirs = {f"backbone.{name}": tensor for name, tensor in (model.state_dict() if teacher else other).items()}
    student = {f"module.backbone.{n}": t for n, t in (other if teacher else model.state_dict()).items()}
    checkpoint = {
        "student": student | head_of_dino("module."),
        "optimizer": {"state": {0: {"step": 3}}},
        "epoch": 7,
        "args": OPTIONS,
        "dino_loss": {"center": torch.zeros(1, 9)},
    }
    if teacher:
        checkpoint["teacher"] = theirs | head_of_dino("")
    torch.save(checkpoint, tmp_path / "checkpoint.pth")
    encoder = small()
    report = load_weights(encoder, tmp_path / "checkpoint.pth")
    assert_equals_timm(encoder, model)
    assert {"optimizer", "epoch", "args", "dino_loss"} <= set(report.left_out)
    assert ("student" in report.left_out) == teacher
    assert "left out: " in str(report)
    assert "head.* (2)" in str(report)


def test_checkpoints_of_mae(tmp_path):
    model = timm_vit()
    checkpoint = {"model": model.state_dict() | decoder_of_mae(), "args": OPTIONS, "optimizer": {}}
    torch.save(checkpoint, tmp_path / "pretrained.pth")
    encoder = small(positions="sincos", mask_token=True)
    before = encoder.mask_token.clone()
    report = load_weights(encoder, tmp_path / "pretrained.pth")
    assert_equals_timm(encoder, model)
    assert not encoder.pos_embed.requires_grad
    assert torch.equal(encoder.mask_token, before)  # the checkpoint's mask token is the decoder's
    assert report.fresh == ["mask_token"]
    assert set(report.left_out) == {"args", "optimizer", *decoder_of_mae()}

    # as the official fine-tuning starts: the norm of the tokens goes, one for the mean comes
    averaged = build("vit_small", **helpers.SMALL["vit_small"], pool="mean")
    report = load_weights(averaged, tmp_path / "pretrained.pth")
    assert {"norm.weight", "norm.bias"} <= set(report.left_out)
    assert report.fresh == ["fc_norm.weight", "fc_norm.bias"]
    assert torch.equal(averaged.fc_norm.weight, torch.ones(48))

    tuned = timm_vit(global_pool="avg", num_classes=5)
    checkpoint = {"model": tuned.state_dict(), "args": OPTIONS}
    encoder = small(pool="mean")
    assert set(load_weights(encoder, checkpoint).left_out) == {"args", "head.weight", "head.bias"}
    assert_equals_timm(encoder, tuned)
    with pytest.raises(ValueError, match=r"Missing .* norm.bias, norm.weight. Unknown .* fc_norm.*settings: pool"):
        load_weights(small(), checkpoint)


def test_distilled_checkpoint_of_deit():
    model = timm.models.deit.VisionTransformerDistilled(
        img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5
    ).eval()
    encoder = small(distillation_token=True)
    report = load_weights(encoder, {"model": model.state_dict()})
    assert report.left_out == ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(encoder(images).pooled, model.forward_features(images)[:, 0], **CLOSE)
    with pytest.raises(
        ValueError, match=r"Unknown to the encoder: dist_token. Check these encoder settings: distillation_token"
    ):
        load_weights(small(), model.state_dict())


@pytest.mark.parametrize("no_embed_class", [True, False])
def test_registers_of_timm_and_of_dinov2(no_embed_class):
    model = timm_vit(reg_tokens=3, init_values=0.1, no_embed_class=no_embed_class)
    encoder = small(registers=3, layer_scale=1.0)
    load_weights(encoder, model.state_dict())
    assert_equals_timm(encoder, model)
    with pytest.raises(
        ValueError, match=r"Unknown to the encoder: .*reg_token. Check these encoder settings: .*registers"
    ):
        load_weights(small(), model.state_dict())

    dinov2 = timm_vit(init_values=0.1).state_dict() | {"mask_token": torch.ones(1, 48)}
    dinov2["register_tokens"] = torch.randn(1, 3, 48)
    model = timm_vit(reg_tokens=3, init_values=0.1, no_embed_class=True)
    model.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(dict(dinov2), model))
    encoder = small(registers=3, layer_scale=1.0)
    assert load_weights(encoder, dinov2).left_out == ["mask_token"]
    assert_equals_timm(encoder, model)
    encoder = small(registers=3, layer_scale=1.0, mask_token=True)
    assert load_weights(encoder, dinov2).left_out == []
    assert encoder.mask_token.eq(1).all()


@pytest.mark.parametrize("rule", ["dino", "mae"])
def test_position_table_is_resized_by_the_rule_of_the_encoder(rule):
    model = timm_vit()
    encoder = small(image_size=(24, 56), interpolation=rule, registers=2)
    state = model.state_dict() | {"reg_token": torch.zeros(1, 2, 48)}
    report = load_weights(encoder, state)
    assert report.resized == [f"pos_embed resized from 4 x 4 to 3 x 7 by the rule of {rule}"]
    assert report.resized[0] in str(report)
    maps = model.pos_embed[:, 1:].reshape(1, 4, 4, 48).permute(0, 3, 1, 2)
    how = {"scale_factor": (3.1 / 4, 7.1 / 4)} if rule == "dino" else {"size": (3, 7)}
    expected = torch.nn.functional.interpolate(maps, mode="bicubic", **how).flatten(2).transpose(1, 2)
    torch.testing.assert_close(encoder.pos_embed[:, 1:], expected, **CLOSE)
    assert torch.equal(encoder.pos_embed[:, :1], model.pos_embed[:, :1])


def test_a_table_that_may_be_square_or_not_is_not_guessed():
    wide = small(image_size=(16, 64))
    with pytest.raises(
        ValueError, match=r'fits both a grid of 4 x 4 and the encoder.s grid of 2 x 8. Pass source="ours"'
    ):
        load_weights(small(image_size=(16, 64)), wide.state_dict())
    encoder = small(image_size=(16, 64))
    load_weights(encoder, wide.state_dict(), "ours")
    assert torch.equal(encoder.pos_embed, wide.pos_embed)
    with pytest.raises(ValueError, match="position table of 22 rows"):
        load_weights(small(), small(image_size=(24, 56)).state_dict())


def test_heads_are_used_where_there_are_any():
    model = timm_vit(num_classes=5)
    encoder = small(classes=5)
    assert load_weights(encoder, model.state_dict()).left_out == []
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(encoder.logits(images), model(images), **CLOSE)
    report = load_weights(small(classes=5), timm_vit().state_dict())
    assert report.fresh == ["head.weight", "head.bias"]
    assert "initial values kept: head.* (2)" in str(report)
    with pytest.raises(ValueError, match=r"head.weight \(5, 48\), not \(9, 48\).*settings: classes"):
        load_weights(small(classes=9), model.state_dict())


def test_prefixes_of_distributed_and_of_compiled_modules_are_taken_off():
    model, encoder = timm_vit(), small()
    load_weights(encoder, {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()})
    assert_equals_timm(encoder, model)
