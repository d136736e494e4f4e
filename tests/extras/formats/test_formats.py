"""What the weight format of every family promises: into timm, from its own weights, and described by them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch

from tessera import encoders
from tessera.encoders import WeightsError, build, load_weights
from tessera.encoders.weight_files import format_of
from tests.encoders.helpers import CLOSE, MICRO, SMALL, images_of, small

State = dict[str, Any]
FIVE = {"depths": (2,) * 5, "dims": (32,) * 5, "heads": 1, "reductions": 1, "window_size": 2, "image_size": 128}
TWO = {name: value if name == "image_size" or value in (1, 2) else value[:2] for name, value in FIVE.items()}
IN_TIMM: list[tuple[str, dict[str, Any]]] = [
    *((variant, {}) for variant in ("vit_small", "rope_vit_small", "sam_vit_b", "swin_tiny", "twins_svt_small")),
    ("vit_small", {"layer_scale": 0.1, "qk_norm": True, "registers": 3}),
    ("vit_small", {"pool": "mean", "mlp_ratio": 2.0, "channels": 2}),
    ("vit_small", {"pool": "mean", "class_token": False, "registers": 2, "qkv_bias": False}),
    ("vit_small", {"pool": "all", "registers": 1}),
    ("vit_small", {"classes": 5, "image_size": (24, 45), "mask_token": True}),
    ("vit_small", {"classes": 5, "distillation_token": True}),
    ("vit_small", {"positions": "sincos", "patch_size": 4, "image_size": 16}),
    ("vit_small", {"mlp": "swiglu", "layer_scale": 0.5, "norm_eps": 1e-6}),
    ("vit_small", {"qk_scale": 0.25}),  # heads are 16 wide: this is the usual factor
    ("rope_vit_small", {"mlp": "swiglu", "registers": 2}),
    ("rope_vit_small", {"qkv_bias": False, "pool": "mean", "channels": 2}),
    ("rope_vit_small", {"rope_base": 50.0, "registers": 0}),
    ("sam_vit_b", {"norm_eps": 1e-5, "qkv_bias": False, "mlp_ratio": 2.0, "channels": 2}),
    ("sam_vit_b", {"image_size": (33, 20), "mask_token": True}),
    ("sam_vit_b", {"window_size": 0}),
    ("sam_vit_b", {"window_size": 3}),  # of 6 tokens a side, which windows of 4 do not divide
    ("sam_vit_b", {"relative_positions": False, "out_dim": 7}),
    ("sam_vit_b", {"absolute_positions": False, "global_blocks": (0, 2)}),
    ("swin_tiny", {"window_size": 8, "image_size": (32, 64)}),
    ("swin_tiny", {"mask_token": True, "channels": 5, "drop_path": 0.3}),
    ("swin_tiny", {"mlp_ratio": 2.7, "qkv_bias": False}),
    ("swin_tiny", {"window_size": 7, "image_size": 56}),
    ("twins_svt_small", {"channels": 1, "image_size": (64, 96), "window_size": (8, 2), "mask_token": True}),
    (
        "twins_svt_small",
        {"window_size": (6, 2), "reductions": (3, 1), "mlp_ratios": (2.0, 3.0), "channels": 5, "image_size": (96, 48)},
    ),
    ("twins_svt_small", TWO),
    ("twins_svt_small", FIVE),
]


def tokens_of(model: Any, images: torch.Tensor) -> torch.Tensor:
    """The features of the patches in a model of timm, (T, D)."""
    x = model.forward_features(images)
    if hasattr(model, "num_prefix_tokens") and x.ndim == 3:
        x = model.fc_norm(x[:, model.num_prefix_tokens :])
    if hasattr(model, "neck"):
        x = x.permute(0, 2, 3, 1)
    return x.flatten(0, -2)


BEFORE_NORMS = ("patch_embed", "pos_embed", "cls_token", "attn.proj", "attn.sr", "pos_block", "fc2", "lin2", "neck.0")
"""Weights whose outputs go into a norm."""


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["", "epsilon counts"])
@pytest.mark.parametrize(("variant", "settings"), IN_TIMM)
@torch.no_grad()
def test_timm_gives_the_same_features(variant, settings, scale, tmp_path):
    """Also with variances of about 1e-6 before each norm."""
    encoder = small(variant, **settings)
    for weight_name, weight in encoder.named_parameters():
        if any(part in weight_name for part in BEFORE_NORMS) and "norm" not in weight_name:
            weight *= scale
    name, options, state = format_of(encoder).to_timm(encoder)
    torch.save(state, tmp_path / "weights.pth")
    model = timm.create_model(name, checkpoint_path=str(tmp_path / "weights.pth"), **options).eval()
    patch, size = encoder.settings["patch_size"], encoder.settings["image_size"]
    sides = [side // patch * patch for side in ([size, size] if isinstance(size, int) else size)]
    images = images_of(2, encoder.channels, *sides)
    features = encoder(images)
    torch.testing.assert_close(features.tokens, tokens_of(model, images), **CLOSE)
    torch.testing.assert_close(
        encoder.logits(images) if "classes" in settings else features.pooled, model(images), **CLOSE
    )
    if hasattr(encoder, "pyramid"):
        maps = model.forward_intermediates(images, norm=True, intermediates_only=True)
        for ours, theirs in zip(encoder.pyramid(images), maps, strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)
    again = small(variant, **settings)
    load_weights(again, model.state_dict(), "ours")
    torch.testing.assert_close(again(images).tokens, features.tokens, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(again(images).pooled, features.pooled, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("variant", "name", "options"),
    [
        *((f"vit_{size}", f"vit_{size}_patch16_224", {}) for size in ("tiny", "small", "base", "large")),
        ("vit_huge", "vit_huge_patch14_224", {}),
        *(
            (f"rope_vit_{size}", f"vit_{size}_patch16_dinov3", {})
            for size in ("small", "small_plus", "base", "large", "huge_plus", "7b")
        ),
        *(
            (f"sam_vit_{size[0]}", f"samvit_{size}_patch16", {"img_size": 1024, "norm_layer": ""})
            for size in ("base", "large", "huge")
        ),
        *(
            (f"swin_{size}", f"swin_{size}_patch4_window7_224", {"img_size": 224, "drop_path_rate": 0.0})
            for size in ("tiny", "small", "base", "large")
        ),
        *((f"twins_svt_{size}", f"twins_svt_{size}", {}) for size in ("small", "base", "large")),
    ],
)
def test_published_variants_are_timms_own(variant, name, options):
    with torch.device("meta"):
        encoder = build(variant)
        found, given, state = format_of(encoder).to_timm(encoder)
        assert found == name
        assert not options or given == {"num_classes": 0, **options}
        assert not {"embed_dim", "embed_dims", "depth", "depths", "num_heads"} & set(given)
        timm.create_model(name, **given).load_state_dict(state, strict=True)


@pytest.mark.parametrize(
    ("variant", "settings", "message"),
    [
        ("vit_small", {"norm_eps": 1e-5}, r"norm_eps is 1e-05, not 1e-6"),
        ("rope_vit_small", {"mask_key_bias": False}, "mask_key_bias is not set"),
        ("rope_vit_small", {"layer_scale": None}, "it has no layer scale"),
        (
            "swin_tiny",
            {"image_size": 66},
            "66 x 66 pixels .* need padding to fill patches of 4. Choose a multiple of 64",
        ),
        ("swin_tiny", {"image_size": 72}, "72 x 72 pixels .* to fill windows of 4. .* such as --set image_size=64"),
        ("twins_svt_small", {"image_size": (64, 72)}, "64 x 72 pixels .* need padding .* multiple of 32 pixels"),
        ("twins_svt_vit_pytorch", {}, 'layout is "vit_pytorch"'),
        ("navit_small", {}, "timm has no NaViT.* or try --to onnx"),
    ],
)
def test_what_timm_has_not_is_refused(variant, settings, message):
    encoder = small(variant, **settings)
    with pytest.raises(WeightsError, match=message):
        format_of(encoder).to_timm(encoder)


@pytest.mark.parametrize("variant", SMALL)
def test_our_weights_come_back(variant):
    """With the mask token where the encoder has one."""
    encoder, masking = small(variant, mask_token=False), small(variant, mask_token=True)
    own = masking.mask_token.clone()
    for target, source, left_out, fresh in (
        (build(variant, **SMALL[variant] | {"mask_token": True}), masking, [], []),
        (encoder, masking, ["mask_token"], []),
        (masking, encoder, [], ["mask_token"]),
    ):
        report = load_weights(target, source.state_dict(), "ours")
        assert (report.left_out, report.fresh, report.resized) == (left_out, fresh, [])
        loaded = target.state_dict()
        assert all(torch.equal(t, loaded[name]) for name, t in source.state_dict().items() if name not in left_out)
    assert torch.equal(masking.mask_token, own)


ANTIALIAS = {"interpolation": "antialias"}  # what weights with registers or a class head are assumed to need
DESCRIBED: list[tuple[str, dict[str, Any]]] = [
    *((variant, {}) for variant in SMALL if variant not in ("vit_small", "twins_svt_vit_pytorch", "navit_small")),
    ("vit_small", {"dim": 192}),  # fewer channels do not tell the number of heads
    ("vit_small", {"dim": 192, "layer_scale": 0.1, "qk_norm": True, "registers": 3, **ANTIALIAS}),
    ("vit_small", {"dim": 192, "pool": "mean", "mlp_ratio": 2.0, "channels": 2}),
    (
        "vit_small",
        {"dim": 192, "pool": "mean", "class_token": False, "registers": 2, "qkv_bias": False, **ANTIALIAS},
    ),
    ("vit_small", {"dim": 192, "pool": "all", "class_token": False}),
    ("vit_small", {"dim": 192, "heads": 4, "head_dim": 64, "mask_token": True}),
    ("vit_small", {"dim": 192, "qk_norm": True, "heads": 6}),
    ("vit_small", {"dim": 192, "distillation_token": True, "classes": 4, **ANTIALIAS}),
    ("vit_small", {"dim": 192, "representation_size": 10, "classes": 4, **ANTIALIAS}),
    ("vit_small", {"dim": 192, "patch_norm": True, "head_dim": 64}),
    ("sam_vit_b", {"image_size": (32, 20), "mask_token": True}),
    ("sam_vit_b", {"window_size": 0, "global_blocks": (0, 1, 2)}),
    ("sam_vit_b", {"absolute_positions": False, "qkv_bias": False, "channels": 2}),
    ("sam_vit_b", {"mlp_ratio": 2.0, "out_dim": 7, "global_blocks": (0, 2), "heads": 6}),
    ("sam_vit_b", {"image_size": 12, "window_size": 5}),
    ("swin_tiny", {"window_size": 3, "channels": 1}),
    ("swin_tiny", {"mlp_ratio": 2.7, "patch_norm": False, "patch_size": 2}),
    ("twins_svt_small", {"channels": 5, "qkv_bias": False, "mlp_ratios": (2.0, 3.0)}),
]


@pytest.mark.parametrize(("variant", "settings"), DESCRIBED)
@torch.no_grad()
def test_described_weights_build_their_encoder(variant, settings):
    encoder = small(variant, **settings)
    again = build(**format_of(encoder).describe(encoder.state_dict())).eval()
    report = load_weights(again, encoder.state_dict())
    assert (report.fresh, report.resized) == ([], [])
    assert report.left_out == [n for n in encoder.state_dict() if n.startswith(("head", "pre_logits"))]  # not needed
    size = settings.get("image_size", (16, 24))
    images = images_of(2, encoder.channels, *((size, size) if isinstance(size, int) else size))
    assert torch.equal(again(images).tokens, encoder(images).tokens)
    assert torch.equal(again(images).pooled, encoder(images).pooled)


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        *((name, {}) for name in encoders.VARIANTS if not re.search("rope|dinov2|navit|vit_pytorch", name)),
        ("sam_vit_h", {"image_size": (512, 640), "absolute_positions": False}),
        ("sam_vit_b", {"relative_positions": False}),
        ("sam_vit_b", {"image_size": 224}),  # windows are as large as the grid
        ("sam_vit_b", {"image_size": 64}),  # and larger
        ("swin_micro", {"window_size": 3, "channels": 1}),
        ("swin_large", {"window_size": 12, "qkv_bias": False}),
        ("swin_tiny", {"absolute_positions": True, "image_size": 96, "mask_token": True}),
        ("swin_tiny", {"depths": (1, 2), "heads": (2, 4)}),
        ("twins_svt_micro", {"channels": 5, "reductions": (4, 2), "qkv_bias": False, "mlp_ratios": (2.0, 3.0)}),
        ("twins_svt_small", {"mask_token": True, "depths": (1, 2, 3, 1)}),
        ("twins_svt_base", {"dims": (64, 192, 384, 768), "heads": (2, 6, 12, 24), "patch_size": 8}),
    ],
)
def test_weights_are_described_by_their_variant(variant, settings):
    with torch.device("meta"):
        encoder = build(variant, **settings)
        described = format_of(encoder).describe(encoder.state_dict())
        again = build(**described)
    assert described["variant"] == variant
    assert again.settings == encoder.settings


def without(name: str) -> Callable[[State], State]:
    return lambda state: {key: tensor for key, tensor in state.items() if key != name}


def beside(**tensors: Any) -> Callable[[State], State]:
    return lambda state: state | {key.replace("__", "."): tensor for key, tensor in tensors.items()}


UNRECOGNISED = "format of the weights is not recognised. Known formats: .*, a ViT\\."
REFUSED: list[tuple[str, dict[str, Any], Callable[[State], State], str]] = [
    *((variant, {}, beside(extra__weight=torch.ones(2)), "Unknown to the encoder: extra.weight") for variant in SMALL),
    ("vit_small", {}, without("blocks.1.norm2.bias"), "Missing from the checkpoint: blocks.1.norm2.bias"),
    ("vit_small", {}, beside(backbone__extra=torch.ones(2)), "Unknown to the encoder: extra"),
    ("vit_small", {"classes": 9}, without("head.bias"), "Missing from the checkpoint: head.bias"),
    ("vit_small", {}, without("pos_embed"), "Missing from the checkpoint: pos_embed"),
    ("vit_small", {}, beside(norm__bias=torch.ones(2)), r"norm.bias \(2,\), not \(48,\)"),
    ("vit_small", {}, without("patch_embed.proj.weight"), UNRECOGNISED),
    ("vit_small", {}, beside(epoch=3), "has no state dict under teacher"),
    ("twins_svt_small", {}, without("blocks.1.0.norm2.bias"), "Missing from the checkpoint: blocks.1.0.norm2.bias"),
    ("twins_svt_small", {}, without("patch_embeds.0.proj.weight"), "Missing from the .*: patch_embeds.0.proj.weight"),
    ("twins_svt_small", {}, beside(norm__bias=torch.ones(2)), r"norm.bias \(2,\), not \(64,\)"),
    ("twins_svt_small", {}, without("blocks.0.0.attn.qkv.weight"), UNRECOGNISED),
    ("sam_vit_b", {}, without("neck.2.weight"), "Missing from the checkpoint: neck.2.weight"),
    ("sam_vit_b", {}, without("pos_embed"), "Missing from the checkpoint: pos_embed. .*absolute_positions"),
    ("sam_vit_b", {}, without("patch_embed.proj.weight"), UNRECOGNISED),
    ("sam_vit_b", {}, beside(norm__bias=torch.ones(2)), "Unknown to the encoder: norm.bias"),
]


@pytest.mark.parametrize(("variant", "settings", "change", "message"), REFUSED)
def test_weights_that_do_not_fit_change_nothing(variant, settings, change, message):
    encoder, state = small(variant, **settings), small(variant, **settings).state_dict()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    with pytest.raises(WeightsError, match=message):
        load_weights(encoder, change(state))
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 48}, r"patch_embed.proj.weight \(24, 3, 4, 4\), not \(48, 3, 4, 4\)"),
        ({"depths": (2, 2, 2)}, r"Unknown to the encoder: layers.2.blocks.2.attn.proj.bias"),
        ({"mlp_ratio": 2.0}, "encoder settings: mlp_ratio"),
        ({"qkv_bias": False}, "encoder settings: qkv_bias"),
        ({"patch_norm": False}, "encoder settings: patch_norm"),
    ],
)
def test_messages_say_which_swin_would_fit(settings, message):
    with pytest.raises(WeightsError, match=message):
        load_weights(small("swin_tiny", **settings), small("swin_tiny").state_dict())


@pytest.mark.parametrize("variant", MICRO)
@pytest.mark.parametrize("other", MICRO)
def test_weights_of_another_family_are_refused(variant, other):
    if variant == other or (variant, other) == ("sam_vit_micro", "vit_micro"):  # which grows from it
        return
    with pytest.raises(ValueError, match=r"file has weights of .* which do not fit"):
        load_weights(build(variant), build(other).state_dict())
