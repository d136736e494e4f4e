"""Weights of Meituan, timm and vit-pytorch in a Twins-SVT, and ours in timm."""

import argparse
from functools import partial
from typing import Any

import pytest
import timm
import torch
from vit_pytorch.twins_svt import TwinsSVT

from tessera.encoders import build, load_weights
from tessera.encoders.formats import twins as formats
from tests.encoders import helpers
from tests.encoders.helpers import CLOSE, images_of, scramble

small = partial(helpers.small, "twins_svt_small")
other = partial(helpers.small, "twins_svt_vit_pytorch")
TIMM: dict[str, Any] = {
    "embed_dims": (32, 64),
    "depths": (2, 2),
    "num_heads": (1, 2),
    "sr_ratios": (2, 1),
    "wss": (4, 4),
}
TIMM |= {"mlp_ratios": (4, 4)}
THEIRS: dict[str, Any] = {
    "s1_emb_dim": 12, "s2_emb_dim": 20, "s3_emb_dim": 24, "s4_emb_dim": 36, "s1_patch_size": 2,
    "s1_local_patch_size": 4, "s2_local_patch_size": 4, "s3_local_patch_size": 2,
    "s1_global_k": 4, "s2_global_k": 2, "s3_global_k": 2, "s4_global_k": 1,
    "s2_depth": 2, "s3_depth": 1, "s4_depth": 2,
}  # fmt: skip


def timm_twins(**options) -> Any:
    return scramble(timm.create_model("twins_svt_small", **TIMM | options))


def vit_pytorch_twins() -> Any:
    return scramble(TwinsSVT(num_classes=5, **THEIRS))


@pytest.mark.parametrize("source", ["auto", "twins"])
@torch.no_grad()
def test_files_of_meituan(tmp_path, source):
    model = timm_twins(num_classes=5)  # with the names of the published code
    torch.save({"model": model.state_dict(), "args": argparse.Namespace(lr=1.0), "epoch": 3}, tmp_path / "svt.pth")
    encoder = small(mask_token=True)
    before = encoder.mask_token.clone()
    report = load_weights(encoder, tmp_path / "svt.pth", source)
    assert sorted(report.left_out) == ["args", "epoch", "head.bias", "head.weight"]
    assert report.fresh == ["mask_token"]
    assert torch.equal(encoder.mask_token, before)
    assert set(report.used) == set(encoder.state_dict()) - {"mask_token"}
    images = images_of(2, 3, 64, 96)
    torch.testing.assert_close(
        encoder(images).pooled, model.forward_head(model.forward_features(images), True), **CLOSE
    )
    assert load_weights(small(), model.state_dict(), source).left_out == ["head.weight", "head.bias"]  # flat


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("source", ["auto", "vit_pytorch"])
@torch.no_grad()
def test_weights_of_vit_pytorch(source, head):
    model, encoder = vit_pytorch_twins(), other()
    state = model.state_dict()
    model.layers[-1] = torch.nn.Identity()
    report = load_weights(encoder, state if head else model.state_dict(), source)
    assert report.left_out == ["layers.6.weight", "layers.6.bias"] * head
    assert (set(report.used), report.fresh, report.resized) == (set(encoder.state_dict()), [], [])
    images = images_of(2, 3, 64, 128)
    features, maps = encoder(images), model.layers[:4](images)
    torch.testing.assert_close(features.pooled, model(images), **CLOSE)
    torch.testing.assert_close(features.tokens, maps.flatten(2).transpose(1, 2).flatten(0, 1), **CLOSE)
    for stage, ours in enumerate(encoder.pyramid(images), start=1):
        torch.testing.assert_close(ours, model.layers[:stage](images), **CLOSE)


def test_description_of_vit_pytorch_and_of_unknown_heads():
    assert formats.describe(vit_pytorch_twins().state_dict()) == {
        "variant": "twins_svt_vit_pytorch",
        "dims": (12, 20, 24, 36),
        "depths": (1, 2, 1, 2),
        "reductions": (4, 2, 2, 1),
        "patch_size": 2,
    }
    with pytest.raises(ValueError, match="The number of heads is unknown"):
        formats.describe(small(dims=(24, 64)).state_dict())
    with pytest.raises(ValueError, match=r"Missing from the checkpoint: blocks.0.0.attn.proj.weight"):
        formats.describe({k: v for k, v in small().state_dict().items() if k != "blocks.0.0.attn.proj.weight"})


@pytest.mark.parametrize("missing", ["to_q", "to_kv", "to_out.0", "net.1", "norm"])
def test_missing_parts_of_vit_pytorch_are_named(missing):
    state = vit_pytorch_twins().state_dict()
    gone = next(name for name in state if name.startswith("layers.2.1.layers.0.") and missing in name)
    del state[gone]
    with pytest.raises(ValueError, match=r"Missing from the checkpoint: blocks\.2\.0\."):
        load_weights(other(), state)


def test_messages_say_what_would_fit():
    with torch.device("meta"):
        base = build("twins_svt_base").state_dict()
    with pytest.raises(ValueError, match=r"depths \(2, 2, 18, 2\). This encoder .* Build twins_svt_base.$"):
        load_weights(small(), base)
    wider = small(dims=(64, 96), heads=(2, 3)).state_dict()
    with pytest.raises(ValueError, match=r"dims \(64, 96\) and .* Build .*dims=\(64, 96\), heads=\(2, 3\)"):
        load_weights(small(), wider)
    with pytest.raises(
        ValueError, match=r'has layout="vit_pytorch".* encoder has layout="meituan".*twins_svt_vit_pytorch'
    ):
        load_weights(small(), vit_pytorch_twins().state_dict())
    with pytest.raises(
        ValueError, match=r'has layout="meituan".* encoder has layout="vit_pytorch".* Build twins_svt_small'
    ):
        load_weights(other(), build("twins_svt_small", depths=(1, 2, 1, 2)).state_dict())
    same_sizes = build("twins_svt_vit_pytorch", dims=(32, 64), depths=(2, 2)).state_dict()
    with pytest.raises(ValueError, match=r'has layout="vit_pytorch".* Build twins_svt_vit_pytorch, dims=\(32, 64\)'):
        load_weights(small(), same_sizes)
    for settings, message in [
        ({"qkv_bias": False}, "encoder settings: qkv_bias"),
        ({"reductions": (4, 1)}, "encoder settings: reductions"),
        ({"patch_size": 2}, "encoder settings: patch_size"),
        ({"mlp_ratios": 2.0}, "encoder settings: mlp_ratios"),
        ({"head_dim": 16}, "encoder settings: head_dim"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_weights(small(**settings), timm_twins().state_dict())


def test_what_vit_pytorch_fixes_is_asked_of_the_encoder():
    state = vit_pytorch_twins().state_dict()
    for settings in ({"heads": 16, "head_dim": 32}, {"norm_eps": 1e-6}, {"qk_scale": 1.0}):
        with pytest.raises(ValueError, match="heads=8, head_dim=64, norm_eps=1e-05 and no qk_scale"):
            load_weights(other(**settings), state)
    with pytest.raises(
        ValueError,
        match=r"patches of side 2, and this encoder has patches of side 4. Build the encoder with patch_size=2",
    ):
        load_weights(other(patch_size=4), state)


def test_a_twins_pcpvt_is_not_recognised():
    pcpvt = timm.create_model("twins_pcpvt_small", embed_dims=(32, 64), depths=(1, 1), num_heads=(1, 2), num_classes=0)
    assert not formats.recognises(pcpvt.state_dict())
