"""Weights of SAM-ViT: the whole model, the encoder alone, timm's, ours, and growth from a plain ViT."""

from functools import partial
from typing import Any

import pytest
import timm
import torch

from tessera.encoders import build, load_weights
from tessera.extras.formats import sam_vit
from tests.encoders import helpers
from tests.encoders.helpers import CLOSE, images_of, scramble

SMALL = helpers.SMALL["sam_vit_b"]
PLAIN: dict[str, Any] = {name: SMALL[name] for name in ("dim", "depth", "heads", "patch_size", "image_size")}


small = partial(helpers.small, "sam_vit_b")


def timm_sam(**options) -> Any:
    options = {"patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 0, **options}
    options = {"window_size": 4, "global_attn_indexes": (1,), "neck_chans": 20, "norm_layer": "", **options}
    return scramble(timm.create_model("samvit_base_patch16", **{"img_size": 24, **options}))


def whole_model(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {"image_encoder." + name.replace("mlp.fc", "mlp.lin"): tensor for name, tensor in state.items()}
    other = {
        "prompt_encoder.not_a_point_embed.weight": torch.zeros(1, 20),
        "mask_decoder.iou_token.weight": torch.ones(1),
    }
    return state | other | {"pixel_mean": torch.zeros(3, 1, 1), "pixel_std": torch.ones(3, 1, 1)}


@torch.no_grad()
def test_the_whole_model_gives_its_encoder(tmp_path):
    oracle, encoder, images = timm_sam(), small(), images_of(2, 3, 24, 24)
    torch.save(whole_model(oracle.state_dict()), tmp_path / "sam.pth")
    report = load_weights(encoder, tmp_path / "sam.pth")
    assert set(report.used) == set(encoder.state_dict())
    assert (report.fresh, report.resized) == ([], [])
    assert len(report.left_out) == 4
    assert "left out: prompt_encoder.* (1), mask_decoder.* (1), pixel_mean, pixel_std" in str(report)
    torch.testing.assert_close(encoder.feature_map(images), oracle.forward_features(images), **CLOSE)
    state = encoder.state_dict()
    assert sam_vit.describe(whole_model(state)) == sam_vit.describe(state)


@pytest.mark.parametrize("form", ["timm", "classifier", "alone", "ours"])
@torch.no_grad()
def test_the_encoder_alone_under_all_names(form):
    oracle = timm_sam(num_classes=7 if form == "classifier" else 0)
    state, encoder, images = oracle.state_dict(), small(), images_of(2, 3, 24, 24)
    if form in ("alone", "ours"):
        state = {name.replace("mlp.fc", "mlp.lin"): tensor for name, tensor in state.items()}
    report = load_weights(encoder, state)
    assert report.left_out == (["head.fc.weight", "head.fc.bias"] if form == "classifier" else [])
    assert report.fresh == []
    torch.testing.assert_close(encoder.feature_map(images), oracle.forward_features(images), **CLOSE)


@torch.no_grad()
def test_tables_are_resized_for_another_image_size():
    before = small()
    after = small(image_size=(32, 20))
    report = load_weights(after, before.state_dict())
    assert report.resized == [
        "pos_embed resized from 6 x 6 to 8 x 5 by the rule of MAE, because no rule is published for SAM",
        "blocks.1.attn.rel_pos_h resized from 11 to 15 rows, linearly as published",
        "blocks.1.attn.rel_pos_w resized from 11 to 9 rows, linearly as published",
    ]
    images = images_of(2, 3, 32, 20)  # what the larger encoder has in its tables, the other makes for each image
    torch.testing.assert_close(after.feature_map(images), before.feature_map(images), rtol=1e-5, atol=1e-5)

    wider = small(window_size=5)
    report = load_weights(wider, before.state_dict())
    assert len(report.resized) == 4
    assert report.resized[0] == "blocks.0.attn.rel_pos_h resized from 7 to 9 rows, linearly as published"
    table = before.blocks[0].attn.rel_pos_w
    expected = torch.nn.functional.interpolate(table.T[None], size=9, mode="linear")[0].T
    assert torch.equal(wider.blocks[0].attn.rel_pos_w, expected)
    assert torch.equal(wider.blocks[1].attn.rel_pos_w, before.blocks[1].attn.rel_pos_w)


@pytest.mark.parametrize("kind", ["mae", "dino", "registers", "timm avg"])
@torch.no_grad()
def test_a_plain_vit_grows_into_a_sam_vit(kind):
    settings = {"registers": {"registers": 2}, "timm avg": {"pool": "mean"}}.get(kind, {})
    plain = scramble(build("vit_small", **PLAIN, **settings))
    state = dict(plain.state_dict())
    extra = []
    if kind == "mae":
        extra = ["decoder_embed.weight", "decoder_blocks.0.norm1.weight", "mask_token"]
        state |= {name: torch.zeros(1, 48) for name in extra}
    encoder = build("sam_vit_b", **SMALL | {"window_size": 0}, mask_token=True).eval()
    token, neck = encoder.mask_token.clone(), encoder.neck[0].weight.clone()
    report = load_weights(encoder, state)
    norm = "fc_norm" if kind == "timm avg" else "norm"
    special = ["cls_token"] + ["reg_token"] * (kind == "registers")
    assert sorted(report.left_out) == sorted([*special, f"{norm}.weight", f"{norm}.bias", *extra])
    assert {"mask_token", "neck.0.weight", "neck.3.bias", "blocks.2.attn.rel_pos_w"} <= set(report.fresh)
    assert torch.equal(encoder.mask_token, token)
    assert torch.equal(encoder.neck[0].weight, neck)
    assert not any(block.attn.rel_pos_h.any() or block.attn.rel_pos_w.any() for block in encoder.blocks)

    # a ViT of the same weights without its special tokens gives the same tokens before its norm
    bare = build("vit_small", **PLAIN, class_token=False, pool="mean").eval()
    state = {name: tensor for name, tensor in plain.state_dict().items() if name in bare.state_dict()}
    bare.load_state_dict(state | {"pos_embed": plain.pos_embed[:, 1:]}, strict=False)
    bare.fc_norm = torch.nn.Identity()
    images = images_of(2, 3, 24, 24)
    found = encoder.block_maps(images)[0].flatten(2).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(found, bare(images).tokens, rtol=1e-5, atol=1e-5)
    with_windows = build("sam_vit_b", **SMALL).eval()
    load_weights(with_windows, plain.state_dict())
    assert not torch.allclose(with_windows.block_maps(images)[0], encoder.block_maps(images)[0], atol=1e-3)


@torch.no_grad()
def test_positions_of_a_plain_vit_are_resized_without_the_class_row():
    plain = scramble(build("vit_small", **PLAIN))
    encoder = build("sam_vit_b", **SMALL | {"image_size": (40, 32)})
    report = load_weights(encoder, plain.state_dict())
    assert report.resized == [
        "pos_embed resized from 6 x 6 to 10 x 8 by the rule of MAE, because no rule is published for SAM"
    ]
    maps = plain.pos_embed[:, 1:].transpose(1, 2).unflatten(2, (6, 6))
    expected = torch.nn.functional.interpolate(maps, size=(10, 8), mode="bicubic").permute(0, 2, 3, 1)
    torch.testing.assert_close(encoder.pos_embed.detach(), expected)


@pytest.mark.parametrize(
    ("plain", "settings", "message"),
    [
        ({"layer_scale": 0.1}, {}, "no layer scale .blocks.0.ls1.gamma"),
        ({"qk_norm": True}, {}, "no norms of queries"),
        ({"qkv_bias": False}, {}, "Missing from the checkpoint: .*qkv.bias.*encoder settings: qkv_bias"),
        ({"mlp_ratio": 2.0}, {}, r"mlp.lin1.weight \(96, 48\), not \(192, 48\).*settings: mlp_ratio"),
        ({"depth": 2}, {}, "width 48, 2 blocks .* This encoder has width 48, 3 blocks"),
        ({}, {"absolute_positions": False}, "Unknown to the encoder: pos_embed. .*settings: absolute_positions"),
    ],
)
def test_a_vit_with_other_parts_is_refused(plain, settings, message):
    state = build("vit_small", **PLAIN | plain).state_dict()
    with pytest.raises(ValueError, match=message):
        load_weights(build("sam_vit_b", **SMALL | settings), state)


def test_incomplete_weights_are_not_described():
    for missing in ("neck.0.weight", "blocks.2.attn.rel_pos_w"):
        state = small().state_dict()
        state.pop(missing)
        with pytest.raises(ValueError, match=f"Missing from the checkpoint: {missing}"):
            sam_vit.describe(state)
    with pytest.raises(ValueError, match="Heads, windows and global blocks are unknown"):
        sam_vit.describe(small(relative_positions=False).state_dict())
