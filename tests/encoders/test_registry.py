"""Encoders by name: variants, settings, and settings without effect."""

import inspect

import pytest

from tessera.encoders import VARIANTS, EncoderError, build, family, supported
from tests.encoders.helpers import small


def test_names_that_are_not_known_come_with_the_nearest():
    with pytest.raises(ValueError, match=r"Unknown encoder 'vit_smal'. Did you mean 'vit_small'"):
        build("vit_smal")
    with pytest.raises(ValueError, match=r"Unknown setting 'drop_pat' of vit_tiny. Did you mean 'drop_path'"):
        build("vit_tiny", drop_pat=0.1)
    settings = build("vit_tiny", depth=1, image_size=(32, 64)).settings
    assert settings["image_size"] == [32, 64]
    assert (settings["variant"], settings["dim"], settings["depth"], settings["pool"]) == ("vit_tiny", 192, 1, "class")


@pytest.mark.parametrize("family", dict.fromkeys(family(variant) for variant in VARIANTS))
def test_every_setting_is_documented_in_one_line(family):
    described = inspect.getdoc(family).partition("Args:\n")[2].splitlines()
    lines = {line.split(":")[0].strip() for line in described if line.endswith(".")}
    assert len(lines) == len(described)
    assert lines == set(inspect.signature(family).parameters)


@pytest.mark.parametrize(("name", "value"), [("dim", 48.5), ("image_size", "x"), ("heads", None)])
def test_settings_of_a_wrong_kind_are_refused(name, value):
    for variant in ("vit_micro", "navit_micro", "sam_vit_micro"):
        with pytest.raises(ValueError, match=rf"{name} of {variant} must be int"):
            build(variant, **{name: value})


@pytest.mark.parametrize(
    ("variant", "settings", "message"),
    [
        (
            "rope_vit_micro",
            {"interpolation": "mae"},
            "interpolation .* has no effect with positions='rope'",
        ),
        ("rope_vit_micro", {"position_init": "sincos"}, "Remove position_init, or change positions"),
        ("vit_micro", {"rope_shift": 0.1}, "rope_shift of vit_micro has no effect with positions='learned'"),
        ("vit_micro", {"positions": "sincos", "cls_norm": True}, "cls_norm .* no effect with positions='sincos'"),
        ("vit_micro", {"pool": "max"}, "pool of vit_micro must be one of class, mean, all, not 'max'"),
        ("navit_micro", {"positions": "learned"}, "must be one of absolute, fractional, not 'learned'"),
        ("twins_svt_micro", {"layout": "timm"}, "layout of twins_svt_micro must be one of meituan, vit_pytorch"),
    ],
)
def test_settings_without_effect_and_unknown_choices_are_refused(variant, settings, message):
    with pytest.raises(EncoderError, match=message):
        build(variant, **settings)


@pytest.mark.parametrize(
    ("variant", "settings", "message"),
    [
        ("vit_small", {"heads": 5}, "dim. of 48 does not split into 5 heads"),
        ("vit_small", {"class_token": False}, "class_token=False needs pool"),
        ("vit_small", {"representation_size": 8}, "needs classes"),
        ("rope_vit_small", {"heads": 8}, "multiple of 4, not 6"),
        ("rope_vit_small", {"rope_rescale": 0.5}, "rope_rescale is the largest factor"),
        ("sam_vit_b", {"global_blocks": (1, 3)}, r"block indices from 0 to 2, not \(1, 3\)"),
        ("swin_tiny", {"heads": (2,)}, "depths has 3 entries, and heads has 1. Give one entry per stage"),
        ("twins_svt_small", {"depths": (1, 2, 1)}, "depths has 3 entries, but dims defines 2 stages"),
        ("navit_small", {"head_dim": None, "heads": 5}, "48 does not split into 5 heads. .* set head_dim"),
        ("navit_small", {"token_drop": 1.0}, "token_drop is a fraction .* less than 1, not 1.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(variant, settings, message):
    with pytest.raises(EncoderError, match=message):
        small(variant, **settings)


def test_supported_settings_are_those_that_the_variant_takes():
    wanted = {"positions": "sincos", "position_init": "sincos", "init": "xavier", "rope_rescale": 2.0, "drop_path": 0.1}
    wanted |= {"token_init": "dinov2"}
    assert supported("vit_small", wanted) == {n: v for n, v in wanted.items() if n != "rope_rescale"}
    assert supported("rope_vit_small", wanted) == {"init": "xavier", "rope_rescale": 2.0, "drop_path": 0.1}
    assert supported("vit_small_14_dinov2", wanted).keys() == {"positions", "position_init", "init", "drop_path"}
    assert supported("navit_small", wanted) == {"positions": "sincos", "drop_path": 0.1}
    assert supported("swin_tiny", wanted) == {"drop_path": 0.1}
