"""Weights of Swin Transformers, made from timm models, under Microsoft's names and timm's, in and out."""

import re
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F

from tessera.encoders import build, load_weights
from tessera.extras.formats import swin
from tests.encoders import helpers
from tests.encoders.helpers import CLOSE, scramble

SMALL = helpers.SMALL["swin_tiny"]
small = partial(helpers.small, "swin_tiny")
TIMM: dict[str, Any] = {"embed_dim": 24, "depths": (2, 2, 3), "num_heads": (1, 2, 4), "window_size": 4, "img_size": 64}
TABLE = "attn.relative_position_bias_table"


def timm_swin(**options) -> Any:
    return scramble(timm.create_model("swin_tiny_patch4_window7_224", **TIMM | {"num_classes": 0} | options))


def official(model) -> dict[str, torch.Tensor]:
    """timm's weights as Microsoft writes them: merging at the end of a stage, masks and indices, another head."""
    state = {}
    for name, tensor in model.state_dict().items():
        name = re.sub(r"layers\.(\d)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", name)
        state[name.replace("head.fc", "head")] = tensor
        if name.endswith(TABLE):
            state[name.replace("bias_table", "index")] = torch.zeros(16, 16, dtype=torch.int64)
    state["layers.0.blocks.1.attn_mask"] = torch.full((16, 16, 16), -100.0)
    return state


@torch.no_grad()
def assert_equals_timm(encoder, model, size=(64, 64)):
    images = torch.randn(2, encoder.channels, *size, generator=torch.Generator().manual_seed(1))
    expected = model.forward_features(images)
    torch.testing.assert_close(encoder.eval()(images).tokens, expected.flatten(0, 2), **CLOSE)


def test_files_of_microsoft(tmp_path):
    model = timm_swin(num_classes=5)
    state = official(model)
    assert {"layers.1.downsample.norm.weight", "head.weight"} <= set(state)
    torch.save({"model": state, "optimizer": {}, "epoch": 3}, tmp_path / "swin.pth")
    encoder = small()
    report = load_weights(encoder, tmp_path / "swin.pth")
    assert_equals_timm(encoder, model)
    assert set(report.used) == set(encoder.state_dict())
    assert (report.fresh, report.resized) == ([], [])
    rebuilt = {name for name in state if name.endswith(("index", "attn_mask"))}
    assert set(load_weights(small(), model.state_dict()).left_out) == {"head.fc.weight", "head.fc.bias"}
    assert set(report.left_out) == rebuilt | {"optimizer", "epoch", "head.weight", "head.bias"}


@pytest.mark.parametrize("mask_token", [True, False])
def test_checkpoints_of_simmim(tmp_path, mask_token):
    model, token = timm_swin(), torch.randn(1, 1, 24)
    state = {f"encoder.{name}": tensor for name, tensor in official(model).items()} | {"encoder.mask_token": token}
    torch.save({"model": state | {"decoder.0.weight": torch.ones(2)}, "epoch": 3}, tmp_path / "simmim.pth")
    encoder = small(mask_token=mask_token)
    report = load_weights(encoder, tmp_path / "simmim.pth")
    assert_equals_timm(encoder, model)
    assert {"epoch", "decoder.0.weight"} <= set(report.left_out)
    assert ("mask_token" in report.left_out) != mask_token
    assert not mask_token or torch.equal(encoder.mask_token, token[0])


def test_teachers_of_esvit(tmp_path):
    model = timm_swin()
    teacher = {f"backbone.{name}": tensor for name, tensor in official(model).items()}
    heads = {"head.mlp.0.weight": torch.ones(2), "head_dense.mlp.0.weight": torch.ones(2)}
    torch.save({"student": {}, "teacher": teacher | heads}, tmp_path / "checkpoint.pth")
    encoder = small()
    assert set(heads) <= set(load_weights(encoder, tmp_path / "checkpoint.pth").left_out)
    assert_equals_timm(encoder, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_become_float32(dtype):
    state = {name: tensor.to(dtype) for name, tensor in timm_swin(window_size=8).state_dict().items()}
    rounded, encoder = timm_swin(window_size=8), small(window_size=8)
    rounded.load_state_dict(state)
    assert load_weights(encoder, state).resized  # tables as well
    assert {tensor.dtype for tensor in encoder.state_dict().values()} == {torch.float32}
    assert_equals_timm(encoder, rounded)


@pytest.mark.parametrize(
    ("window", "size", "own"),
    [
        (8, (64, 64), 64),
        (8, (32, 64), (32, 64)),
        (8, (64, 64), 224),  # its own windows are not cut short
        (20, (64, 64), 64),  # all of them are
    ],
)
def test_biases_of_windows_cut_short_keep_their_relative_positions(window, size, own):
    """At 64 pixels the grids are 16, 8 and 4, at 32 they are 8, 4 and 2: timm's tables shrink with them."""
    model, encoder = timm_swin(window_size=window, img_size=size), small(window_size=window, image_size=own)
    report = load_weights(encoder, model.state_dict())
    assert_equals_timm(encoder, model, size)
    name, rows, columns = f"layers.2.blocks.0.{TABLE}", size[0] // 16, size[1] // 16
    sentence = f"{name} copied from windows of {rows} x {columns} to the middle of {window} x {window}"
    assert sentence in report.resized
    table = encoder.state_dict()[name].view(2 * window - 1, 2 * window - 1, 4)
    assert torch.equal(table[0, 0], table[window - rows, window - columns])


@pytest.mark.parametrize(
    ("window", "size", "placed"),
    [
        (6, 64, 4),  # the grid of the last stage is shorter than both windows
        (12, 64, 4),
        (6, 128, 6),  # the grid is longer than the new window: as in the official code, the biases are stretched
        (3, 64, 3),
    ],
)
def test_biases_of_a_last_stage_cut_short_go_into_another_window(window, size, placed):
    """Of a model with windows of 7 for 64 pixels, whose last stage has a grid and windows of 4."""
    model, encoder = timm_swin(window_size=7, img_size=64), small(window_size=window, image_size=size)
    load_weights(encoder, model.state_dict())
    name = f"layers.2.blocks.0.{TABLE}"
    maps = model.state_dict()[name].T.reshape(1, -1, 7, 7)
    if placed != 4:
        maps = F.interpolate(maps, size=(2 * placed - 1,) * 2, mode="bicubic")
    table = encoder.state_dict()[name].T.reshape(1, -1, 2 * window - 1, 2 * window - 1)
    inner = slice(window - placed, window + placed - 1)
    torch.testing.assert_close(table[..., inner, inner], maps, **CLOSE)
    first = model.state_dict()[f"layers.0.blocks.0.{TABLE}"].T.reshape(1, -1, 13, 13)
    expected = F.interpolate(first, size=(2 * window - 1,) * 2, mode="bicubic").flatten(2)[0].T
    torch.testing.assert_close(encoder.state_dict()[f"layers.0.blocks.0.{TABLE}"], expected, **CLOSE)


def test_positions_are_resized():
    encoder = small(absolute_positions=True)
    table = encoder.absolute_pos_embed.detach()
    other = build("swin_tiny", **SMALL | {"image_size": (64, 96)}, absolute_positions=True)
    report = load_weights(other, encoder.state_dict())
    assert report.resized == ["absolute_pos_embed resized from 16 x 16 to 16 x 24"]
    maps = F.interpolate(table.view(1, 16, 16, 24).permute(0, 3, 1, 2), size=(16, 24), mode="bicubic")
    torch.testing.assert_close(other.absolute_pos_embed.view(16, 24, 24), maps[0].permute(1, 2, 0), **CLOSE)
    assert load_weights(small(absolute_positions=True), encoder.state_dict()).resized == []
    with pytest.raises(ValueError, match=r"Unknown to the encoder: absolute_pos_embed. .*settings: absolute_positions"):
        load_weights(small(), encoder.state_dict())
    with pytest.raises(ValueError, match="position table of 384 rows is unknown"):
        load_weights(encoder, other.state_dict())
    oblong = small(absolute_positions=True, image_size=(32, 128))
    with pytest.raises(ValueError, match=r"fits both a grid of 16 x 16 and the encoder's grid of 8 x 32. Pass source"):
        load_weights(oblong, encoder.state_dict())
    assert load_weights(oblong, oblong.state_dict(), "ours").resized == []


def test_a_swin_v2_is_not_recognised():
    second = timm.create_model("swinv2_tiny_window8_256", embed_dim=24, depths=(1, 1), num_heads=(1, 2), img_size=64)
    with pytest.raises(ValueError, match="are those of a Swin Transformer V2"):
        load_weights(small(), second.state_dict())


def test_checkpoints_of_timm_and_microsoft_are_described():
    model = timm_swin(num_classes=3, window_size=8)
    expected = {"variant": "swin_tiny", "dim": 24, "depths": (2, 2, 3), "heads": (1, 2, 4), "window_size": 8}
    assert swin.describe(model.state_dict()) == swin.describe(official(model)) == expected
    oblong = timm_swin(window_size=8, img_size=(32, 64)).state_dict()
    with pytest.raises(ValueError, match="No square window has"):
        swin.describe(oblong)
    broken = {name: tensor for name, tensor in model.state_dict().items() if "layers.2.blocks.0." not in name}
    with pytest.raises(ValueError, match="is incomplete"):
        swin.describe(broken)


def test_official_models_need_few_options():
    with torch.device("meta"):
        wide = swin.to_timm(build("swin_base", window_size=12, image_size=384))[:2]
    usual = {"num_classes": 0, "drop_path_rate": 0.0}
    assert wide == ("swin_base_patch4_window12_384", usual | {"img_size": 384})


def test_timm_gets_the_drop_path_of_each_block():
    encoder = small(drop_path=0.3)
    name, options, _ = swin.to_timm(encoder)
    rates = [
        getattr(block.drop_path1, "drop_prob", 0.0)
        for stage in timm.create_model(name, **options).get_submodule("layers").children()
        for block in stage.get_submodule("blocks").children()
    ]
    assert rates == pytest.approx([block.drop_path.rate for block in encoder.blocks])
