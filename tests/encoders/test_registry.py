"""Encoders by name: variants, settings, and settings without effect."""

import inspect
import subprocess
import sys

import pytest

from tessera.encoders import VARIANTS, EncoderError, build, family, supported
from tests.launched import ROOT


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
        ("vit_micro", {"positions": "rope", "interpolation": "mae"}, "no effect with positions='rope'"),
        ("vit_micro", {"pool": "max"}, "pool of vit_micro must be one of class, mean, all, not 'max'"),
        ("navit_micro", {"positions": "learned"}, "must be one of absolute, fractional, not 'learned'"),
        ("twins_svt_micro", {"layout": "timm"}, "layout of twins_svt_micro must be one of meituan, vit_pytorch"),
    ],
)
def test_settings_without_effect_and_unknown_choices_are_refused(variant, settings, message):
    with pytest.raises(EncoderError, match=message):
        build(variant, **settings)


def test_supported_settings_are_those_that_the_variant_takes():
    wanted = {"positions": "sincos", "position_init": "sincos", "init": "xavier", "rope_rescale": 2.0, "drop_path": 0.1}
    wanted |= {"token_init": "dinov2"}
    assert supported("vit_small", wanted) == {n: v for n, v in wanted.items() if n != "rope_rescale"}
    assert supported("rope_vit_small", wanted) == {"init": "xavier", "rope_rescale": 2.0, "drop_path": 0.1}
    assert supported("vit_small_14_dinov2", wanted).keys() == {"positions", "position_init", "init", "drop_path"}
    assert supported("navit_small", wanted) == {"positions": "sincos", "drop_path": 0.1}
    assert supported("swin_tiny", wanted) == {"drop_path": 0.1}


def test_a_clone_has_the_same_variants_under_both_names():
    """In the folder of the repository, `encoders` is importable besides `tessera.encoders`."""
    code = "import encoders, tessera.encoders as t; print(encoders.VARIANTS is t.VARIANTS, encoders.build is t.build)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "True True\n"
