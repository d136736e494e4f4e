from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from pretrain.config import PRESETS, load, resolve, settings_model, to_yaml
from runtime.settings import SettingsError, names

SHARDS = ["--data", "somewhere.tar"]


def test_defaults_then_file_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("encoder: {variant: vit_tiny, depth: 3}\nsteps: 7\ndino: {local_crops: 5, local_size: 64}\n")
    config = load([*SHARDS, "--dino.local_crops", "6", "--config", str(file), "--encoder.heads", "2"])
    assert (config.steps, config.method_config.local_crops, config.method_config.local_size) == (7, 6, 64)
    assert config.method_config.global_size == 224
    assert config.encoder_settings == {"variant": "vit_tiny", "depth": 3, "heads": 2}
    file.write_text("encoder: vit_base\n")
    assert load([*SHARDS, "--config", str(file)]).encoder_settings["variant"] == "vit_base"
    assert load([*SHARDS, "--config", str(file), "--encoder", "vit_large"]).encoder_settings == {"variant": "vit_large"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dino.loca_crops", "6"], "did you mean '--dino.local_crops'"),
        (["--encoder.depht", "6"], "did you mean '--encoder.depth'"),
        (["--encoder", "vit_smal"], "did you mean 'vit_small'"),
        (["--lr", "1"], "did you mean '--optim.lr'"),
        (["--method", "dinosaur"], "unknown method 'dinosaur'; did you mean 'dino'?"),
        (["--dino.momentum", "3"], "dino.momentum: Input should be less than or equal to 1"),
        (["--batch_size", "0"], "batch_size: Input should be greater than or equal to 1"),
        (["--dino.local_scale", "0.5,0.1"], "local_scale"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--steps"], "expected one argument"),
    ],
)
def test_bad_flags_are_refused_with_what_would_work(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        load([*SHARDS, *arguments])
    assert message in str(error.value)


def test_bad_names_in_a_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("dino: {local_crop: 5}\nsteps: -1\n")
    with pytest.raises(SettingsError) as error:
        load([*SHARDS, "--config", str(file)])
    assert "unknown setting 'dino.local_crop'; did you mean 'dino.local_crops'?" in str(error.value)
    assert "steps: Input should be greater than or equal to 1 (got -1)" in str(error.value)


def test_saved_settings_repeat_the_run(tmp_path: Path) -> None:
    config = resolve(load([*SHARDS, "--encoder", "vit_tiny", "--seed", "3", "--dino.momentum", "0.99"]), 100_000)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = resolve(
        load(["--config", str(tmp_path / "config.yaml")]), 5
    )  # the number of images changes nothing any more
    skipped = {"config"}
    assert again.model_dump(exclude=skipped) == config.model_dump(exclude=skipped)
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert values["encoder"]["drop_path"] == 0.1  # DINO's, where the user gives none
    assert values["steps"] == 100 * 100_000 // 512


def test_without_data_the_preset_of_the_embedded_data_lies_below(tmp_path: Path) -> None:
    config = load(["--steps", "9"])
    assert config.encoder_settings["variant"] == "vit_micro"
    assert (config.steps, config.method_config.global_size) == (9, 16)
    other = load(["--encoder", "vit_tiny"])
    assert other.encoder_settings == {"variant": "vit_tiny"}
    assert load(SHARDS).method_config.global_size == 224


@pytest.mark.parametrize("file", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_are_valid(file: Path) -> None:
    config = resolve(load([*SHARDS, "--config", str(file)]), 1_281_167)
    assert config.method == file.stem.split("_")[1]
    if file.stem.startswith("imagenet"):  # says in full what follows from the size of ImageNet anyway
        variant, size = config.encoder_settings["variant"], str(config.batch_size)
        flags = ["--method", config.method, "--encoder", variant, "--batch_size", size, "--precision", "bf16"]
        derived = resolve(load([*SHARDS, *flags, "--steps", str(config.steps)]), 1_281_167)
        ignored = {"config", "steps", "checkpoint", "checkpoint_every"}
        assert config.model_dump(exclude=ignored) == derived.model_dump(exclude=ignored)


def test_every_setting_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load([*SHARDS, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    model = settings_model("vit_small")
    assert [name for name in names(model) if f"--{name}" not in text] == []
    assert undescribed(model) == []


def undescribed(model: type[BaseModel]) -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += [f"{name}.{inner}" for inner in undescribed(field.annotation)]
        elif not field.description:
            found.append(name)
    return found


def test_a_file_without_data_does_not_train_the_embedded_digits() -> None:
    with pytest.raises(SettingsError, match="names no data: give --data SHARDS"):
        load(["--config", str(PRESETS / "imagenet_dino_vit_small.yaml")])
