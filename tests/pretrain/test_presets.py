"""Presets for ImageNet: each difference from the official recipe is a row of a table in docs/methods.md."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tessera.pretrain.command_line import PRESETS, load
from tessera.pretrain.resolve import resolve
from tessera.runtime.settings import SettingsError
from tests.pretrain.small import presets

OFFICIAL = yaml.safe_load((Path(__file__).parent / "official_settings.yaml").read_text())
IMAGES = 1_281_167
"""Number of training images of ImageNet-1k."""
PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def settings_of(preset: str, tmp_path: Path) -> dict[str, Any]:
    config = resolve(load(["--config", preset, "--data", "x.tar"]), IMAGES)
    found: dict[str, Any] = {}
    for name in OFFICIAL[preset]["settings"]:
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        found[name] = list(value) if isinstance(value, tuple) else value
    return found


@pytest.mark.parametrize("preset", [file.stem for file in presets("imagenet_*")])
def test_a_published_recipe_stays_the_same_on_other_data(preset: str) -> None:
    given = load(["--config", preset, "--data", "x.tar", "--data.mean", "0,0,0", "--data.std", "1,1,1"])
    recipe, *others = (resolve(given, images, classes=10).model_dump() for images in (IMAGES, 300, 14_000_000))
    assert {name for name in recipe if any(other[name] != recipe[name] for other in others)} == set()


def test_a_preset_takes_an_encoder_of_another_family(caplog: pytest.LogCaptureFixture) -> None:
    assert load(["--config", "imagenet_dinov2_vit_large", "--data", "x.tar"]).encoder_settings["layer_scale"] == 1e-5
    config = load(["--config", "imagenet_dinov2_vit_large", "--data", "x.tar", "--encoder", "swin_tiny"])
    assert config.encoder_settings == {"variant": "swin_tiny", "drop_path": 0.3}
    assert (config.method, config.optim.lr) == ("dinov2", 4e-3)
    (left_out,) = caplog.messages
    assert left_out.startswith("swin_tiny has no settings ")
    assert left_out.endswith(". Those of imagenet_dinov2_vit_large are left out.")


def test_a_warmup_that_is_too_long_names_its_origin() -> None:
    config = load(["--config", "imagenet_mae_vit_base", "--data", "x.tar", "--steps", "30"])
    with pytest.raises(SettingsError, match=r"is 12480 \(preset imagenet_mae_vit_base\).*warmup_steps 3\."):
        resolve(config, IMAGES)


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {share}" for name, share in value.items())
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("preset", OFFICIAL)
def test_every_difference_from_the_official_recipe_is_documented(preset: str, tmp_path: Path) -> None:
    found = settings_of(preset, tmp_path)
    expected = [
        [f"`{name}`", shown(official), shown(found[name])]
        for name, official in OFFICIAL[preset]["settings"].items()
        if found[name] != official
    ]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    assert [row[1:] for row in rows if row[:1] == [f"`{preset}`"]] == expected


def test_every_preset_for_pretraining_on_imagenet_is_compared() -> None:
    found = {file.stem for file in PRESETS.glob("imagenet_*.yaml")}
    assert found - OFFICIAL.keys() == {"imagenet_finetune_vit_base"}
    assert all(re.search(r" at [0-9a-f]{7}, ", one["source"]) for one in OFFICIAL.values())
