"""Weights of timm by name. The models of timm have random weights here, so that nothing is downloaded."""

import builtins
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import tessera
from tessera import encoders
from tessera.encoders.errors import WeightsError
from tessera.evaluation.features import FeatureSettings, load_encoder
from tessera.extras.exports import command as export
from tessera.pretrain.command_line import PRESETS, load
from tessera.pretrain.resolve import resolve
from tessera.runtime.settings import SettingsError

NAME = "vit_tiny_patch16_224.augreg_in21k"  # normalised with 0.5, unlike the default of this project
HALF = (0.5, 0.5, 0.5)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Let timm create its model without a download, always with the same random weights."""
    create = timm.create_model
    calls = []

    def offline(name: str, *, pretrained: bool, **options: Any) -> torch.nn.Module:
        assert pretrained
        calls.append(name)
        torch.manual_seed(0)
        return create(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    return offline(NAME, pretrained=True).eval()


def same_features(encoder: encoders.Encoder, model: Any) -> None:
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.forward_features(images)
        torch.testing.assert_close(encoder.eval()(images).pooled, expected[:, 0], rtol=1e-4, atol=1e-4)
    assert encoder.preprocessing.mean == encoder.preprocessing.std == HALF


def test_features_and_normalisation_are_those_of_timm(model, tmp_path: Path) -> None:
    assert model.pretrained_cfg["mean"] == HALF
    for encoder in (encoders.load(f"timm:{NAME}"), tessera.load(f"timm:{NAME}")):
        same_features(encoder, model)
    encoder, file = load_encoder(FeatureSettings(checkpoint=f"timm:{NAME}"))
    assert file is None
    same_features(encoder, model)
    export.main([f"timm:{NAME}", str(tmp_path / "own.safetensors")])
    same_features(encoders.load(tmp_path / "own.safetensors"), model)


def test_a_run_takes_the_encoder_and_the_normalisation_of_the_weights(model) -> None:
    config = load(["--data", "train.tar", "--init_from", f"timm:{NAME}"])
    assert (config.encoder.variant, config.encoder.image_size) == ("vit_tiny", 224)  # pyright: ignore
    assert (config.data.mean, config.data.std) == (HALF, HALF)
    built = encoders.build("vit_tiny")
    assert len(encoders.load_weights(built, f"timm:{NAME}").used) == len(built.state_dict())


@pytest.mark.parametrize("method", ["dinov2", "dinov3"])
def test_presets_that_continue_published_weights(method: str, model) -> None:
    file = PRESETS / f"continued_{method}_vit_small.yaml"
    config = resolve(load(["--data", "train.tar", "--config", str(file)]), 1_281_167)
    assert (config.method, config.optim.encoder_lr_factor) == (method, 0.1)
    assert config.encoder_settings["depth"] == 12


def test_an_unknown_name_names_similar_ones() -> None:
    with pytest.raises(
        WeightsError, match=r"no pretrained model 'vit_small_patch16_224.dina'.*vit_small_patch16_224.dino"
    ):
        encoders.load("timm:vit_small_patch16_224.dina")
    with pytest.raises(SettingsError, match=r"init_from: timm .* has no pretrained model"):
        load(["--data", "train.tar", "--init_from", "timm:vit_small_patch16_224.dina"])


def test_a_failed_download_and_a_missing_timm_are_errors_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(WeightsError, match=r"could not load the weights of .*: no network"):
        encoders.load(f"timm:{NAME}")
    imported = builtins.__import__

    def lacking(name: str, *rest: Any) -> Any:
        if name == "timm":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(WeightsError, match=r"needs timm. Install it with `pip install timm`"):
        encoders.load(f"timm:{NAME}")


def test_a_model_without_a_counterpart_is_timms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **options: create(name, **options))
    encoder = encoders.load("timm:resnet18.a1_in1k")
    assert (encoder.settings["variant"], encoder.settings["image_size"]) == ("timm:resnet18", 224)
    assert type(encoder.model) is timm.models.ResNet
