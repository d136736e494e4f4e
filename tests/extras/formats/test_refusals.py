"""Weight files of unexpected content, and the recognition of formats."""

from functools import partial
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F

from tessera.encoders import build, load_weights, weight_files
from tessera.encoders.errors import WeightsError
from tessera.encoders.layers import sincos_table
from tessera.encoders.vit import ViT
from tessera.encoders.weight_files import Format
from tessera.extras.formats import sam_vit, swin, twins, vit
from tests.encoders.helpers import MICRO
from tests.encoders.helpers import timm_vit as small_vit

SMALL: dict[str, Any] = {"dim": 64, "depth": 4, "heads": 1, "patch_size": 8, "image_size": 32}
timm_vit = partial(small_vit, embed_dim=64, depth=4, num_heads=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "is of type list. It must be a dict"),
        (torch.ones(2), "is of type Tensor"),
        ("weights", "is of type str"),
        (None, "is of type NoneType"),
        (3, "is of type int"),
        ({0: torch.ones(2)}, "keys of type int"),
        ({"model": {0: torch.ones(2), "a": torch.ones(2)}}, "keys of type int"),
        (
            {"state": {0: {"step": 3}}, "param_groups": []},
            "no state dict under teacher, student, model, state_dict. The checkpoint holds state, param",
        ),
        ({}, "The checkpoint holds nothing"),
    ],
)
def test_files_without_weights_are_refused_by_name(tmp_path, content, message):
    encoder = build("vit_small", **SMALL)
    torch.save(content, tmp_path / "file.pth")
    with pytest.raises(WeightsError, match=message):
        load_weights(encoder, tmp_path / "file.pth")
    if not isinstance(content, str):
        with pytest.raises(WeightsError, match=message):
            load_weights(encoder, content)


def test_values_that_are_no_weights_are_refused_with_their_number():
    encoder = build("vit_small", **SMALL)
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    state = timm_vit().state_dict()
    broken = state["norm.weight"].clone()
    broken[:3], broken[3] = torch.nan, torch.inf
    with pytest.raises(WeightsError, match=r"NaN or infinite values: norm.weight \(4 of 64\)"):
        load_weights(encoder, state | {"norm.weight": broken})
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(WeightsError, match=rf"These tensors are not: norm.bias \({dtype}\)"):
            load_weights(encoder, state | {"norm.bias": state["norm.bias"].to(dtype)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())
    load_weights(encoder, state | {"head.weight": torch.full((2, 64), torch.nan)})  # excluded tensors do not matter


@pytest.mark.parametrize("kind", ["decoder", "fixed positions"])
@torch.no_grad()
def test_weights_of_mae_keep_their_interpolation_at_another_size(kind):
    """Against the formula of the official interpolate_pos_embed: bicubic to the size, corners not aligned."""
    model = timm_vit()
    if kind == "fixed positions":
        model.pos_embed.copy_(torch.cat([torch.zeros(1, 64), sincos_table(4, 4, 64)])[None])
    state = model.state_dict()
    if kind == "decoder":
        state |= {"mask_token": torch.zeros(1, 1, 16), "decoder_pos_embed": torch.zeros(1, 17, 16)}
    described = vit.describe(state)
    assert described["interpolation"] == "mae"
    encoder = build(**described).eval()
    load_weights(encoder, state)
    maps = model.pos_embed[:, 1:].reshape(1, 4, 4, 64).permute(0, 3, 1, 2)
    table = F.interpolate(maps, size=(6, 6), mode="bicubic", align_corners=False).flatten(2).mT
    larger = timm_vit(img_size=48)
    larger.load_state_dict(model.state_dict() | {"pos_embed": torch.cat([model.pos_embed[:, :1], table], 1)})
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    expected = larger.forward_head(larger.forward_features(images), pre_logits=True)
    torch.testing.assert_close(encoder(images).pooled, expected, rtol=1e-4, atol=5e-5)


def test_weights_of_dino_keep_the_interpolation_of_dino():
    assert vit.describe(timm_vit().state_dict())["interpolation"] == "dino"


def known_files() -> dict[str, tuple[Format, dict[str, torch.Tensor]]]:
    """Name of a file -> its format, and its tensors."""
    with torch.device("meta"):
        files = {name: (weight_files.format_of(build(name)), build(name).state_dict()) for name in MICRO}
        files["twins vit-pytorch"] = (twins, build("twins_svt_vit_pytorch").state_dict())
        sam = build("sam_vit_micro").state_dict()
        files["full SAM"] = (
            sam_vit,
            {f"image_encoder.{n}": t for n, t in sam.items()} | {"mask_decoder.a": sam["pos_embed"]},
        )
        files["SAM without tables"] = (sam_vit, build("sam_vit_micro", relative_positions=False).state_dict())
        files["normed patches"] = (vit, build("vit_micro", patch_norm=True).state_dict())
        for form, name in (
            (vit, "vit_tiny_patch16_224"),
            (swin, "swin_tiny_patch4_window7_224"),
            (twins, "twins_svt_small"),
            (sam_vit, "samvit_base_patch16"),
        ):
            files[name] = (form, timm.create_model(name, num_classes=3).state_dict())
    return files


def test_exactly_one_format_recognises_each_file():
    for file, (family, state) in known_files().items():
        claims = [name for name in weight_files.FORMATS.names() if weight_files.FORMATS[name].recognises(state)]
        assert [weight_files.FORMATS[name] for name in claims] == [family], file


def test_two_formats_for_one_file_are_refused():
    both = build("sam_vit_micro").state_dict() | build("twins_svt_micro").state_dict()
    with pytest.raises(WeightsError, match=r"ambiguous. The file may hold weights of"):
        weight_files.recognise(both)


def test_an_encoder_without_a_format_takes_its_own_weights():
    class Other(ViT):
        """A family of another package."""

    encoder, source = Other(**SMALL), build("vit_small", **SMALL)
    report = load_weights(encoder, source.state_dict())
    assert len(report.used) == len(source.state_dict())
    assert torch.equal(encoder.cls_token, source.cls_token)
    with pytest.raises(WeightsError, match=r"Missing from the checkpoint: cls_token"):
        load_weights(encoder, {name: t for name, t in source.state_dict().items() if name != "cls_token"})
    with pytest.raises(WeightsError, match="Other has no weight format"):
        weight_files.format_of(encoder)
