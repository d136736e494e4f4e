"""Weights that do not fit a ViT, and names and positions of a ViT in timm."""

from functools import partial

import pytest
import timm
import torch

from tessera.encoders import build, load_weights
from tessera.extras.formats import vit
from tests.encoders import helpers
from tests.encoders.helpers import CLOSE, images_of, scramble

SMALL = helpers.SMALL["vit_small"]
small = partial(helpers.small, "vit_small")


def test_what_does_not_fit_is_refused():
    style = {"patch_norm": True, "qkv_bias": False, "norm_eps": 1e-5, "head_dim": 20}
    state = small(**style).state_dict()
    for settings, message in [
        ({"patch_norm": False}, r"Unknown to the encoder: patch_embed.norm1.bias.*settings: patch_norm"),
        ({"head_dim": 24}, r"qkv.weight \(180, 48\), not \(216, 48\).*settings: head_dim"),
        ({"qkv_bias": True}, r"Missing from the checkpoint: blocks.0.attn.qkv.bias.*qkv_bias"),
        ({"pool": "all", "class_token": False}, r"Unknown to the encoder: cls_token.*settings: class_token"),
        ({"patch_size": 4}, r"patches of 8 pixels. This encoder .* patches of 4 pixels"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_weights(small(**style | settings), state)
    with pytest.raises(
        ValueError, match=r"Missing from the checkpoint: patch_embed.norm1.bias.*settings: .*patch_norm"
    ):
        load_weights(small(patch_norm=True), small().state_dict())
    sam = build("sam_vit_b", **SMALL, window_size=0, qkv_bias=False)
    with pytest.raises(ValueError, match=r"which has no norms of patches \(patch_embed.norm1"):
        load_weights(sam, state)


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
