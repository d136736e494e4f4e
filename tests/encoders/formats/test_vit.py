"""Weights of vit-pytorch in a ViT, and names of a ViT in timm."""

from functools import partial
from typing import Any

import pytest
import timm
import torch

from tessera.encoders import build, load_weights
from tessera.encoders.formats import vit
from tests.encoders import helpers
from tests.encoders.helpers import CLOSE, images_of, scramble

SMALL = helpers.SMALL["vit_small"]
small = partial(helpers.small, "vit_small")


def lucidrains(**settings) -> Any:
    """vit-pytorch's ViT as installed, 5 classes."""
    module = pytest.importorskip("vit_pytorch.vit", reason="vit-pytorch is not installed")
    size = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 48, "depth": 2, "heads": 3, "mlp_dim": 100}
    model = scramble(module.ViT(**size | {"dim_head": 20} | settings))
    for weight in model.to_patch_embedding[2].parameters():
        weight.data *= 1e-2  # so that the epsilon of the norm behind it counts
    return model


def like_lucidrains(**settings) -> Any:
    style = {"patch_norm": True, "qkv_bias": False, "norm_eps": 1e-5, "head_dim": 20, "mlp_ratio": 100 / 48}
    return small(**style | settings)


@torch.no_grad()
def assert_equals_lucidrains(encoder, model, images):
    """`model` pools before its class head."""
    special, seen = model.cls_token.shape[-2], []
    handle = model.transformer.register_forward_hook(lambda layer, args, output: seen.append(output))
    scores = model(images)
    handle.remove()
    features = encoder(images)
    torch.testing.assert_close(features.tokens, seen[0][:, special:].flatten(0, 1), **CLOSE)
    torch.testing.assert_close(model.mlp_head(features.pooled), scores, **CLOSE)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"pool": "mean"}, {"pool": "all", "class_token": False}),
        ({"dim_head": 16}, {"head_dim": None}),
        ({"heads": 1, "dim_head": 48}, {"heads": 1, "head_dim": None}),  # no map after attention
        ({"heads": 1, "dim_head": 32}, {"heads": 1, "head_dim": 32}),
        ({"channels": 2, "pool": "mean"}, {"channels": 2, "pool": "all", "class_token": False}),
    ],
)
@pytest.mark.parametrize("source", ["auto", "vit_pytorch"])
def test_weights_of_vit_pytorch_load(tmp_path, theirs, ours, source):
    model, encoder = lucidrains(**theirs), like_lucidrains(**ours)
    torch.save(model.state_dict(), tmp_path / "vit.pt")
    report = load_weights(encoder, tmp_path / "vit.pt", source)
    assert report.left_out == ["mlp_head.weight", "mlp_head.bias"]
    assert report.fresh == []
    assert set(report.used) == set(encoder.state_dict())
    identity = ours.get("heads") == 1 and ours["head_dim"] is None
    assert report.resized == [
        f"blocks.{i}.attn.proj.weight is the identity, because vit-pytorch has no projection there"
        for i in range(2)
        if identity
    ]
    assert_equals_lucidrains(encoder, model, images_of(2, theirs.get("channels", 3), 32, 32))


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_weights_of_vit_pytorch_before_its_tables_lost_a_dimension(pool):
    """Until 1.15.7 there was a class token for either pool, and the mean had it in."""
    model, encoder = lucidrains(), like_lucidrains(pool="all" if pool == "mean" else "class")
    model.pool = pool
    state = model.state_dict()
    state |= {name: state[name][None] for name in ("cls_token", "pos_embedding")}
    assert state["cls_token"].shape == (1, 1, 48)
    assert state["pos_embedding"].shape == (1, 17, 48)
    load_weights(encoder, state)
    assert_equals_lucidrains(encoder, model, images_of(2, 3, 32, 32))


def test_what_does_not_fit_of_vit_pytorch_is_refused():
    state = lucidrains().state_dict()
    for settings, message in [
        ({"patch_norm": False}, r"Unknown to the encoder: patch_embed.norm1.bias.*settings: patch_norm"),
        ({"head_dim": 24}, r"qkv.weight \(180, 48\), not \(216, 48\).*settings: head_dim"),
        ({"qkv_bias": True}, r"Missing from the checkpoint: blocks.0.attn.qkv.bias.*qkv_bias"),
        ({"pool": "all", "class_token": False}, r"Unknown to the encoder: cls_token.*settings: class_token"),
        ({"patch_size": 4}, r"patches of 8 pixels. This encoder .* patches of 4 pixels"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_weights(like_lucidrains(**settings), state)
    with pytest.raises(ValueError, match=r"Unknown to the encoder: transformer.layers.0.0.temperature"):
        load_weights(like_lucidrains(), state | {"transformer.layers.0.0.temperature": torch.ones(1)})
    with pytest.raises(
        ValueError, match=r"Missing from the checkpoint: patch_embed.norm1.bias.*settings: .*patch_norm"
    ):
        load_weights(small(patch_norm=True), small().state_dict())
    sam = build("sam_vit_b", **SMALL, window_size=0, mlp_ratio=100 / 48, qkv_bias=False)
    with pytest.raises(ValueError, match=r"which has no norms of patches \(patch_embed.norm1"):
        load_weights(sam, state)


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


def test_a_distilled_vit_has_its_own_name_in_timm():
    with torch.device("meta"):
        name, options, state = vit.to_timm(build("vit_tiny", distillation_token=True))
        assert name == "deit_tiny_distilled_patch16_224"
        timm.create_model(name, **options).load_state_dict(state, strict=True)


@pytest.mark.parametrize("registers", [0, 2])
@torch.no_grad()
def test_positions_of_a_vit_of_timm_are_resized_as_timm_does(registers):
    """timm's ViTs have a class head, those of DINO and MAE do not."""
    settings = {"embed_dim": 64, "depth": 2, "num_heads": 1, "patch_size": 8, "img_size": 64, "reg_tokens": registers}
    settings |= {"num_classes": 5, "dynamic_img_size": True}
    model = scramble(timm.create_model("vit_small_patch16_224", **settings))
    encoder = build(**vit.describe(model.state_dict())).eval()
    load_weights(encoder, model.state_dict())
    for size in ((64, 64), (32, 32), (40, 104)):
        images = images_of(2, 3, *size)
        torch.testing.assert_close(encoder(images).pooled, model.forward_features(images)[:, 0], **CLOSE)
    dino = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")}
    assert vit.describe(dino)["interpolation"] == ("antialias" if registers else "dino")


def test_sizes_that_weights_do_not_tell_are_refused():
    mae = small().state_dict() | {"decoder_embed.weight": torch.ones(4, 48), "mask_token": torch.ones(1, 1, 4)}
    with pytest.raises(ValueError, match="unknown for attention with 48 channels"):
        vit.describe(mae)
    tiny = small(dim=192).state_dict() | {"decoder_embed.weight": torch.ones(4, 48), "mask_token": torch.ones(1, 1, 4)}
    assert vit.describe(tiny)["mask_token"] is False
    tiny.pop("pos_embed")
    with pytest.raises(ValueError, match="Missing from the checkpoint: pos_embed"):
        vit.describe(tiny)
    with pytest.raises(ValueError, match="grid of a position table of 22 rows is unknown"):
        vit.describe(small(dim=192, image_size=(24, 56)).state_dict())


@pytest.mark.parametrize("settings", [{}, {"pool": "mean"}, {"heads": 1, "dim": 64}])
def test_described_weights_of_vit_pytorch_build_their_encoder(settings):
    model = lucidrains(**{"dim_head": 64, **settings})
    encoder = build(**vit.describe(model.state_dict())).eval()
    assert load_weights(encoder, model.state_dict()).fresh == []
    assert_equals_lucidrains(encoder, model, images_of(2, 3, 32, 32))
