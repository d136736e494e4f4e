"""Weights of a NaViT: vit-pytorch's, and ours."""

from functools import partial
from typing import Any

import pytest
import torch
from vit_pytorch.na_vit import NaViT as Oracle
from vit_pytorch.na_vit_nested_tensor import NaViT as NestedOracle
from vit_pytorch.na_vit_nested_tensor_3d import NaViT as NestedOracle3d

from tessera.encoders import build, load_weights
from tessera.encoders.formats import navit as formats
from tests.encoders import helpers
from tests.encoders.helpers import CLOSE, scramble

THEIRS: dict[str, Any] = {"dim": 48, "depth": 2, "heads": 3, "patch_size": 4, "image_size": (16, 24)}
small = partial(helpers.small, "navit_small")


def oracle(**settings) -> Any:
    return scramble(Oracle(**THEIRS | settings, dim_head=20, mlp_dim=120, num_classes=5))


def image(channels: int = 3, size: tuple[int, int] = (16, 24)) -> torch.Tensor:
    return torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def assert_equals(encoder, model, images):
    model.mlp_head = torch.nn.Identity()
    torch.testing.assert_close(encoder(images).pooled, model([list(images)]), **CLOSE)


@pytest.mark.parametrize("source", ["auto", "vit_pytorch"])
def test_weights_of_vit_pytorch(tmp_path, source):
    model, encoder = oracle(), small()
    torch.save(model.state_dict(), tmp_path / "navit.pth")
    report = load_weights(encoder, tmp_path / "navit.pth", source)
    assert set(report.used) == set(encoder.state_dict())
    assert (report.fresh, report.resized) == ([], [])
    heads = {"mlp_head.0.gamma", "mlp_head.0.beta", "mlp_head.1.weight"}
    assert set(report.left_out) == heads | {name for name in model.state_dict() if name.endswith(".beta")}
    assert_equals(encoder, model, image())
    settings = {"patch_size": 2, "channels": 12}  # as many values as a patch of 4 pixels of three channels has
    model, encoder = oracle(**settings), small(**settings)
    load_weights(encoder, model.state_dict(), source)
    assert_equals(encoder, model, image(channels=12))


@pytest.mark.parametrize(
    "settings", [{}, {"channels": 1, "patch_size": 8, "image_size": (32, 8)}, {"channels": 5}, {"depth": 1}]
)
def test_described_settings_build_an_encoder_for_the_weights(settings):
    model = oracle(**settings)
    encoder = build(**formats.describe(model.state_dict())).eval()
    assert load_weights(encoder, model.state_dict()).resized == []
    channels, size = settings.get("channels", 3), settings.get("image_size", (16, 24))
    assert_equals(encoder, model, image(channels, size))
    ours = small(**settings)
    with pytest.raises(ValueError, match=r"Missing from the checkpoint: blocks.0.attn.q_norm.gamma"):
        formats.describe({name: tensor for name, tensor in ours.state_dict().items() if "q_norm" not in name})


def test_position_tables_are_resized_along_their_length():
    model, encoder = oracle(), small(image_size=(32, 24))
    report = load_weights(encoder, model.state_dict())
    assert report.resized == ["pos_embed_rows resized from 4 to 8 by linear interpolation"]
    table = model.pos_embed_height.detach()
    # entry i of 8 lies at (i + 0.5) / 2 - 0.5 of 4, and at the ends at the first and the last
    places = [max(0.0, min(3.0, (i + 0.5) / 2 - 0.5)) for i in range(8)]
    expected = [table[int(p)] * (1 - p % 1) + table[min(int(p) + 1, 3)] * (p % 1) for p in places]
    torch.testing.assert_close(encoder.pos_embed_rows, torch.stack(expected))
    assert torch.equal(encoder.pos_embed_columns, model.pos_embed_width)
    assert load_weights(small(image_size=8), model.state_dict()).resized == [
        "pos_embed_rows resized from 4 to 2 by linear interpolation",
        "pos_embed_columns resized from 6 to 2 by linear interpolation",
    ]


def test_weights_without_a_pool_are_refused():
    model = oracle()
    report = load_weights(small(pool="mean"), model.state_dict())
    assert {"attn_pool.query", "attn_pool.attn.q.weight", "attn_pool.norm.weight"} <= set(report.left_out)
    with pytest.raises(ValueError, match=r"Missing from the checkpoint: attn_pool.* encoder settings: .*pool"):
        load_weights(small(), small(pool="mean").state_dict())


def test_betas_must_be_zero():
    encoder, state = small(), oracle().state_dict()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    state["transformer.layers.1.1.0.beta"][3] = 1e-3
    with pytest.raises(ValueError, match=r"transformer.layers.1.1.0.beta is not zero.* layer norms .* no bias"):
        load_weights(encoder, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())


@pytest.mark.parametrize("frames", [False, True])
def test_weights_of_nested_tensors_are_refused(frames):
    options = THEIRS | {"mlp_dim": 120, "num_classes": 5, "dim_head": 20}
    model = NestedOracle3d(**options, max_frames=4, frame_patch_size=2) if frames else NestedOracle(**options)
    with pytest.raises(
        ValueError, match=r"on nested tensors .*another architecture.*Only weights of na_vit.py can be loaded"
    ):
        load_weights(small(), model.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 96}, "width 48, 2 blocks and patches of 4 pixels. This encoder has width 96.* dim=48, depth=2"),
        ({"depth": 3}, "This encoder has width 48, 3 blocks"),
        ({"patch_size": 8}, "with patch_size=4"),
        ({"heads": 2, "head_dim": 30}, r"q_norm.gamma \(3, 1, 20\), not \(2, 1, 30\).*settings: heads, head_dim"),
        ({"mlp_ratio": 3.0}, r"mlp.fc1.weight \(120, 48\), not \(144, 48\).*settings: mlp_ratio"),
    ],
)
@pytest.mark.parametrize("theirs", [True, False])
def test_messages_say_what_would_fit(settings, message, theirs):
    state = oracle().state_dict() if theirs else small().state_dict()
    with pytest.raises(ValueError, match=message):
        load_weights(small(**settings), state)


def test_missing_and_unknown_weights_are_named():
    state = oracle().state_dict() | {"extra": torch.zeros(1)}
    del state["transformer.layers.1.1.4.weight"]
    with pytest.raises(ValueError, match=r"Missing .*blocks.1.mlp.fc2.weight. Unknown to the encoder: extra"):
        load_weights(small(), state)
