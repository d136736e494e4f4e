"""Encoders by name: built, saved, loaded."""

import json
import os

import pytest
import torch

from tessera.encoders import build, family, load, save, saving


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("vit_micro", {}),
        ("vit_micro", {"image_size": (8, 32), "registers": 2, "layer_scale": 0.1, "positions": "sincos"}),
        ("vit_tiny", {"depth": 2, "pool": "mean", "class_token": False, "mask_token": True, "qk_norm": True}),
        ("vit_tiny", {"depth": 1, "distillation_token": True, "classes": 4, "channels": 1}),
    ],
)
def test_saved_encoders_come_back_bit_for_bit(tmp_path, variant, settings):
    encoder = build(variant, **settings)
    save(encoder, tmp_path / "encoder.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["encoder.json", "encoder.safetensors"]
    again = load(tmp_path / "encoder.safetensors")
    assert not again.training
    assert again.settings == encoder.settings
    assert json.loads((tmp_path / "encoder.json").read_text())["variant"] == variant
    state = again.state_dict()
    assert list(state) == list(encoder.state_dict())
    assert all(torch.equal(tensor, state[name]) for name, tensor in encoder.state_dict().items())
    images = torch.randn(2, settings.get("channels", 3), 32, 48)
    assert torch.equal(again(images).tokens, encoder.eval()(images).tokens)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    save(build("vit_micro"), tmp_path / "a.safetensors")
    save(build("vit_micro", depth=3), tmp_path / "b.safetensors")
    (tmp_path / "a.json").rename(tmp_path / "b.json")
    with pytest.raises(ValueError, match=r"b.safetensors do not fit the settings in .*b.json"):
        load(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"a.json is missing"):
        load(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"must end in .safetensors"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"Make the encoder with encoders.build"):
        save(family("vit_micro")(), tmp_path / "c.safetensors")


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "encoder.safetensors"
    save(build("vit_micro"), path)
    before = path.read_bytes()

    def broken(state, file):
        file.write_bytes(before[: len(before) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(saving, "save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        save(build("vit_micro"), path)
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["encoder.json", "encoder.safetensors"]


def test_an_encoder_is_found_in_the_folder_of_a_run(tmp_path):
    latest = tmp_path / "checkpoints" / "latest"
    latest.mkdir(parents=True)
    save(build("vit_micro", depth=1), latest / "encoder.safetensors")
    assert load(tmp_path).settings["depth"] == load(latest).settings["depth"] == 1
    save(build("vit_micro", depth=2), tmp_path / "encoder.safetensors")
    assert load(str(tmp_path)).settings["depth"] == 2
    with pytest.raises(ValueError, match=r"must end in \.safetensors\. The folder holds no encoder"):
        load(tmp_path / "checkpoints")
