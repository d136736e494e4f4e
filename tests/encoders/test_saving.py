"""Encoders by name: built, saved, loaded."""

import json
import os

import pytest
import torch

from tessera.encoders import Preprocessing, build, family, load, save, saving


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
    step = latest.parent / "step-00000040"
    step.mkdir()
    (latest.parent / "step-00000050-old").mkdir()
    assert load(tmp_path).settings["depth"] == 2  # a file without a step
    save(build("vit_micro", depth=2), tmp_path / "encoder.safetensors", step=40)
    assert load(tmp_path).settings["depth"] == 2
    save(build("vit_micro", depth=2), tmp_path / "encoder.safetensors", step=20)
    assert load(tmp_path).settings["depth"] == 1  # the run was continued after step 20
    with pytest.raises(ValueError, match=r"must end in \.safetensors\. The folder holds no encoder"):
        load(tmp_path / "checkpoints")


def test_modes_of_the_caller_do_not_reach_the_weights(tmp_path):
    saved = build("vit_micro")
    save(saved, tmp_path / "encoder.safetensors")
    with torch.device("meta"), torch.inference_mode():
        loaded = load(tmp_path / "encoder.safetensors")
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in saved.state_dict().items())
    assert not any(parameter.is_inference() for parameter in loaded.parameters())


@pytest.mark.parametrize(
    "preprocessing",
    [
        Preprocessing((0.1,) * 3, (0.2,) * 3),
        Preprocessing((0.1,) * 3, (0.2,) * 3, "uint8", (1.0,) * 3, (200.0,) * 3),
        Preprocessing((0.1,) * 3, (0.2,) * 3, "uint16", (112.0, 0.0, 3.0), (9840.0,) * 3, "auto"),
        Preprocessing((0.1,) * 3, (0.2,) * 3, "float32", (-1.5,) * 3, (1.5,) * 3, -3.4028234663852886e38),
    ],
)
def test_type_and_range_are_saved(preprocessing, tmp_path):
    encoder = build("vit_micro")
    encoder.preprocessing = preprocessing
    save(encoder, tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors").preprocessing == preprocessing
    stored = json.loads((tmp_path / "a.json").read_text())["preprocessing"]
    assert (stored.keys() == {"mean", "std"}) == (preprocessing.low is None)  # files of usual encoders stay the same
