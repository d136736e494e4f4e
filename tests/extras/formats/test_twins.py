"""Weights of Meituan and timm in a Twins-SVT, and ours in timm."""

import argparse
from functools import partial
from typing import Any

import pytest
import timm
import torch

from tessera.encoders import load_weights
from tessera.extras.formats import twins as formats
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


def timm_twins(**options) -> Any:
    return scramble(timm.create_model("twins_svt_small", **TIMM | options))


@torch.no_grad()
def test_files_of_meituan(tmp_path):
    model = timm_twins(num_classes=5)  # with the names of the published code
    torch.save({"model": model.state_dict(), "args": argparse.Namespace(lr=1.0), "epoch": 3}, tmp_path / "svt.pth")
    encoder = small(mask_token=True)
    before = encoder.mask_token.clone()
    report = load_weights(encoder, tmp_path / "svt.pth")
    assert sorted(report.left_out) == ["args", "epoch", "head.bias", "head.weight"]
    assert report.fresh == ["mask_token"]
    assert torch.equal(encoder.mask_token, before)
    assert set(report.used) == set(encoder.state_dict()) - {"mask_token"}
    images = images_of(2, 3, 64, 96)
    torch.testing.assert_close(
        encoder(images).pooled, model.forward_head(model.forward_features(images), True), **CLOSE
    )
    assert load_weights(small(), model.state_dict()).left_out == ["head.weight", "head.bias"]  # flat


def test_description_of_another_layout_and_of_unknown_heads():
    with pytest.raises(ValueError, match="do not tell their settings"):
        formats.describe(other().state_dict())
    with pytest.raises(ValueError, match="The number of heads is unknown"):
        formats.describe(small(dims=(24, 64)).state_dict())
    with pytest.raises(ValueError, match=r"Missing from the checkpoint: blocks.0.0.attn.proj.weight"):
        formats.describe({k: v for k, v in small().state_dict().items() if k != "blocks.0.0.attn.proj.weight"})


def test_a_twins_pcpvt_is_not_recognised():
    pcpvt = timm.create_model("twins_pcpvt_small", embed_dims=(32, 64), depths=(1, 1), num_heads=(1, 2), num_classes=0)
    assert not formats.recognises(pcpvt.state_dict())
