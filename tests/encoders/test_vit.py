"""ViT against timm and formulas written out."""

import math
from functools import partial
from typing import Any

import pytest
import timm
import torch

from tessera import encoders
from tessera.encoders import build, load_weights
from tessera.encoders.base import pooled_features
from tessera.encoders.images import pack
from tessera.encoders.randomness import random_keys
from tessera.encoders.vit import VARIANTS, ViT
from tests.encoders import helpers
from tests.encoders.helpers import CLOSE, first_input, images_of, mask_of, scramble

small = partial(helpers.small, "vit_small")


def resized(table: torch.Tensor, grid: tuple[int, int], rule: str = "dino") -> torch.Tensor:
    """A square table (1, N, D) on another grid, by torch as the published code calls it."""
    side = math.isqrt(table.shape[1])
    how = {"scale_factor": tuple((n + 0.1) / side for n in grid)} if rule == "dino" else {"size": grid}
    maps = table.transpose(1, 2).unflatten(2, (side, side))
    return torch.nn.functional.interpolate(maps, mode="bicubic", **how).flatten(2).transpose(1, 2)


@torch.no_grad()
def test_training_scores_of_both_tokens_are_timms():
    oracle = scramble(timm.create_model("deit_tiny_distilled_patch16_224", num_classes=9, depth=3, img_size=64))
    encoder = build("vit_tiny", depth=3, image_size=64, distillation_token=True, classes=9)
    load_weights(encoder, oracle.state_dict())
    images = images_of(2, 3, 64, 64)
    oracle.set_distilled_training(True)
    for ours, theirs in zip(encoder.train().logits(images), oracle.train()(images), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@torch.no_grad()
def test_representation_layer_and_scale_are_the_formula():
    images, encoder = images_of(2, 3, 32, 32), small(representation_size=20, classes=5, qk_scale=0.5)
    (weight, bias), head = encoder.pre_logits.fc.parameters(), encoder.head
    expected = torch.tanh(encoder(images).pooled @ weight.T + bias) @ head.weight.T + head.bias
    torch.testing.assert_close(encoder.logits(images), expected)
    plain = small()
    plain.load_state_dict(encoder.state_dict(), strict=False)
    for block in plain.blocks:  # a factor on the logits may as well be in the queries; heads are 16 wide
        block.attn.qkv.weight[:48] *= 0.5 * math.sqrt(16)
        block.attn.qkv.bias[:48] *= 0.5 * math.sqrt(16)
    torch.testing.assert_close(encoder(images).tokens, plain(images).tokens, **CLOSE)


@pytest.mark.parametrize(
    ("rule", "size", "changed"),
    [
        ("dino", (32, 32), False),
        ("dino", (39, 39), False),
        ("dino", (39, 32), True),  # the grid of the table, but the image is not square
        ("dino", (16, 64), True),  # as many patches as the table
        ("mae", (39, 32), False),
        ("mae", (16, 64), True),
        ("mae", (50, 27), True),
    ],
)
@torch.no_grad()
def test_positions_are_resized_when_the_published_code_does(rule, size, changed):
    encoder, images = small(interpolation=rule, registers=2), images_of(2, 3, *size)
    grid = (size[0] // 8, size[1] // 8)
    table = encoder.pos_embed[:, 1:]
    if changed:
        table = resized(table, grid, rule)
    cropped = images[..., : grid[0] * 8, : grid[1] * 8]  # what the patch does not divide is left out
    patches = torch.nn.functional.unfold(cropped, 8, stride=8).transpose(1, 2)
    weight, bias = encoder.patch_embed.proj.weight.flatten(1), encoder.patch_embed.proj.bias
    x = first_input(encoder, images)
    torch.testing.assert_close(x[:, 3:], patches @ weight.T + bias + table, **CLOSE)
    assert torch.equal(x[:, :1], (encoder.cls_token + encoder.pos_embed[:, :1]).expand(2, 1, 48))
    assert torch.equal(x[:, 1:3], encoder.reg_token.expand(2, 2, 48))
    assert encoder(images).grids.tolist() == [list(grid)] * 2


@pytest.mark.parametrize("pool", ["class", "mean"])
@torch.no_grad()
def test_dropping_is_running_the_visible_tokens_alone(pool):
    encoder, images = small(pool=pool, registers=2), images_of(3, 3, 24, 40)
    mask = mask_of(encoder.grids(images), 10)
    everything = first_input(encoder, images)
    features = encoder(images, mask, drop=True)
    norm = encoder.norm if pool == "class" else encoder.fc_norm
    for image in range(3):
        kept = [place for place in range(15) if not mask.hidden[15 * image + place]]
        x = torch.stack([everything[image, place] for place in [0, 1, 2] + [3 + place for place in kept]])[None]
        for block in encoder.blocks:
            x = block(x)
        pooled = x[0, 0] if pool == "class" else x[0, 3:].mean(0)
        torch.testing.assert_close(features.pooled[image], norm(pooled), **CLOSE)
        torch.testing.assert_close(features.tokens[5 * image : 5 * image + 5], norm(x[0, 3:]), **CLOSE)


@torch.no_grad()
def test_last_attention_is_the_softmax_of_queries_and_keys():
    encoder, images = small(registers=2), images_of(2, 3, 24, 40)
    x = first_input(encoder, images)
    for block in encoder.blocks[:-1]:
        x = block(x)
    block = encoder.blocks[-1]
    qkv = block.norm1(x) @ block.attn.qkv.weight.T + block.attn.qkv.bias
    found = encoder.last_attention(images)
    assert found.shape == (2, 3, 18, 18)
    for head in range(3):
        q, k = (qkv[..., start + 16 * head : start + 16 * head + 16] for start in (0, 48))
        logits = q.double() @ k.double().transpose(1, 2) / 4
        expected = logits.exp() / logits.exp().sum(2, keepdim=True)
        torch.testing.assert_close(found[:, head].double(), expected, **CLOSE)


@torch.no_grad()
def test_norms_of_patches_are_the_formula():
    encoder, images = small(patch_norm=True, channels=2, norm_eps=1e-5), images_of(2, 2, 16, 24)
    norm = torch.nn.functional.layer_norm
    patches = torch.nn.functional.unfold(images, 8, stride=8).transpose(1, 2)  # (B, N, 2 * 64)
    patches = patches.unflatten(2, (2, 64)).transpose(2, 3).flatten(2)  # pixel after pixel
    embed = encoder.patch_embed
    x = norm(patches, (128,), embed.norm1.weight, embed.norm1.bias, 1e-5) @ embed.proj.weight.T + embed.proj.bias
    x = norm(x, (48,), embed.norm2.weight, embed.norm2.bias, 1e-5)
    torch.testing.assert_close(embed(images), x, **CLOSE)


@torch.no_grad()
def test_pool_of_all_tokens_and_heads_of_any_width():
    encoder, images = small(pool="all", registers=2, head_dim=10), images_of(2, 3, 39, 47)
    seen = []
    encoder.norm.register_forward_hook(lambda layer, args, output: seen.append(output))
    features = encoder(images)
    assert seen[0].shape == (2, 1 + 2 + 20, 48)
    torch.testing.assert_close(features.pooled, seen[0].mean(1))
    torch.testing.assert_close(features.tokens, seen[0][:, 3:].flatten(0, 1))
    assert encoder.last_attention(images).shape == (2, 3, 23, 23)
    normed = small(patch_norm=True)  # sides that the patch does not divide lose their last pixels
    assert torch.equal(normed(images).tokens, normed(images[..., :32, :40]).tokens)


def test_initial_values_are_those_of_dino_and_of_mae():
    torch.manual_seed(0)
    dino, mae = ViT(**VARIANTS["vit_tiny"]), ViT(**VARIANTS["vit_tiny"], init="xavier", position_init="sincos")
    for weight in (dino.pos_embed, dino.cls_token, dino.blocks[0].attn.qkv.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert mae.patch_embed.proj.weight.std().item() == pytest.approx(math.sqrt(2 / (192 + 768)), rel=0.02)
    assert mae.pos_embed.requires_grad
    assert not mae.pos_embed[:, 0].any()
    assert mae.pos_embed[:, 1:].square().mean().item() == pytest.approx(0.5, abs=1e-3)
    assert not dino.blocks[0].mlp.fc1.bias.any()


def test_class_scores_need_classes():
    with pytest.raises(ValueError, match="classes=N"):
        small().logits(images_of(2, 3, 32, 32))


def test_initial_values_are_those_of_dinov2():
    torch.manual_seed(0)
    encoder = build("vit_small_14_dinov2_registers", depth=1)
    assert isinstance(encoder, ViT)
    assert encoder.cls_token is not None
    assert encoder.reg_token is not None
    assert encoder.mask_token is not None
    assert encoder.cls_token.std().item() == pytest.approx(1e-6, rel=0.2)
    assert encoder.reg_token.std().item() == pytest.approx(1e-6, rel=0.1)
    assert not encoder.mask_token.any()
    assert encoder.pos_embed.std().item() == pytest.approx(0.02, rel=0.01)
    assert encoder.blocks[0].attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert encoder.blocks[0].ls2.gamma.unique().tolist() == pytest.approx([1e-5])
    assert encoder.patch_embed.proj.weight.abs().max().item() == pytest.approx(1 / math.sqrt(3 * 196), rel=0.01)


@pytest.mark.parametrize("recompute", [False, True, "selective"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", ["vit_micro", "rope_vit_micro"])
def test_class_tokens_alone_equal_those_of_all_tokens(variant: str, packed: bool, recompute: Any) -> None:
    """Features, gradients and random numbers of drop path, in float64."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"drop_path": 0.4, "layer_scale": 0.5, "registers": 2, "local_cls_norm": True}
    encoder = encoders.build(variant, checkpoint_activations=recompute, **encoders.supported(variant, settings))
    encoder.double().train()
    views = [torch.randn(3, 3, side, side, dtype=torch.float64) for side in (32, 16)]
    images = pack(views, encoder.stride) if packed else views[0]
    found = []
    for pooled_only in (False, True):
        encoder.zero_grad()
        with random_keys(0, 0, torch.arange(6 if packed else 3)):
            features = encoder(images, pooled_only=pooled_only)
        features.pooled.square().sum().backward()
        found.append((features.pooled, {n: p.grad for n, p in encoder.named_parameters() if p.grad is not None}))
        assert len(features.tokens) == 0 or not pooled_only
    (expected, gradients), (pooled, others) = found
    torch.testing.assert_close(pooled, expected, rtol=1e-12, atol=1e-12)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_the_last_block_computes_class_tokens_only() -> None:
    """And encoders that pool all tokens say that they cannot."""
    encoder = encoders.build("vit_micro")
    images = torch.randn(2, encoder.channels, 32, 32)
    rows: list[int] = []
    encoder.blocks[-1].mlp.register_forward_hook(lambda _, inputs, output: rows.append(output.numel() // encoder.dim))
    assert encoder.can_skip_tokens
    assert torch.allclose(pooled_features(encoder, images), encoder(images).pooled, atol=1e-6)
    assert rows[0] == 2 < rows[1]
    mean = encoders.build("vit_micro", pool="mean")
    assert not mean.can_skip_tokens
    assert torch.equal(pooled_features(mean, images), mean(images).pooled)
