"""Settings of a fine-tuning: those of the encoder from which it starts, of the method, and of the user."""

from pathlib import Path

import pytest

from tessera import encoders
from tessera.encoders.base import Preprocessing
from tessera.pretrain.command_line import load
from tessera.pretrain.config import to_yaml
from tessera.pretrain.resolve import resolve
from tessera.runtime.settings import SettingsError

SHARDS = ["--data", "x.tar"]


def test_a_run_that_starts_from_an_encoder_of_this_project_has_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "encoder.safetensors"
    encoder = encoders.build("vit_micro", channels=1, image_size=24, positions="sincos", drop_path=0.3, qk_norm=True)
    encoder.preprocessing = Preprocessing((0.4,), (0.2,))
    encoders.save(encoder, file)
    for start in (str(file), str(tmp_path)):
        arguments = [*SHARDS, "--method", "finetune", "--init_from", start]
        config = resolve(load(arguments), 1000, classes=7)
        built = encoders.build(**config.encoder_settings).settings
        # the method's defaults override those of the encoder
        changed = {"positions": "learned", "drop_path": 0.1, "pool": "mean"}
        assert built == encoder.settings | changed
        assert config.data.preprocessing == Preprocessing((0.4,), (0.2,))
        assert config.method_config.classes == 7
        assert config.evaluate_every == 1000 // 64  # one epoch
        flags = ["--encoder.drop_path", "0.2", "--data.mean", "0.5", "--finetune.size", "32", "--evaluate_every", "9"]
        given = resolve(load([*arguments, *flags]), 1000, classes=7)
        assert encoders.build(**given.encoder_settings).settings == built | {"drop_path": 0.2, "image_size": 32}
        assert given.data.preprocessing == Preprocessing((0.5,), (0.2,))
        assert given.evaluate_every == 9
        (tmp_path / "config.yaml").write_text(to_yaml(given))
        skipped = {"config": True, "source": {"commands"}}
        again = resolve(load(["--config", str(tmp_path / "config.yaml")]), 1000)
        assert again.model_dump(exclude=skipped) == given.model_dump(exclude=skipped)
    other = load([*SHARDS, "--init_from", str(file), "--encoder", "vit_tiny"])
    assert other.encoder_settings == {"variant": "vit_tiny"}
    assert resolve(other, 1000).encoder_settings["channels"] == 1


def test_the_encoder_learns_as_fast_as_the_classifier(tmp_path: Path) -> None:
    encoders.save(encoders.build("vit_micro"), tmp_path / "encoder.safetensors")
    words = ["--data", "a.tar", "--method", "finetune", "--init_from", str(tmp_path / "encoder.safetensors")]
    assert resolve(load(words), 1_000_000, classes=2).optim.encoder_lr_factor == 1.0


def test_settings_of_another_method_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"finetune.mixup is a setting of the method finetune, but this run trains"):
        load([*SHARDS, "--method", "dino", "--finetune.mixup", "0"])
