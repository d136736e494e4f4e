"""The command that turns checkpoints into encoders of ours or of timm's."""

import argparse
import json

import pytest
import timm
import torch

import tessera
from tessera import encoders
from tessera.encoders.base import IMAGENET
from tessera.extras.exports import command as export
from tests.encoders.helpers import CLOSE, scramble


def images(size: int) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_an_official_checkpoint_becomes_an_encoder_without_saying_what_it_is(tmp_path, capsys):
    model = scramble(timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=7))
    checkpoint = {"model": model.state_dict(), "args": argparse.Namespace(lr=1e-3), "epoch": 3}
    torch.save(checkpoint, tmp_path / "mae.pth")
    export.main([str(tmp_path / "mae.pth"), str(tmp_path / "ours.safetensors")])
    encoder = encoders.load(tmp_path / "ours.safetensors")
    assert (encoder.settings["variant"], encoder.settings["image_size"]) == ("vit_tiny", 64)
    torch.testing.assert_close(encoder(images(64)).pooled, model.forward_features(images(64))[:, 0], **CLOSE)
    printed = capsys.readouterr().out
    loaded = tessera.load(tmp_path / "mae.pth")
    assert torch.equal(loaded(images(64)).pooled, encoder(images(64)).pooled)
    assert "left out: args, epoch, head.* (2)" in printed
    assert "of the variant vit_tiny" in printed


@torch.no_grad()
def test_ours_becomes_a_checkpoint_that_timm_creates_its_model_from(tmp_path, capsys):
    encoder = scramble(encoders.build("vit_tiny", image_size=64, depth=3))
    encoders.save(encoder, tmp_path / "ours.safetensors")
    export.main([str(tmp_path / "ours.safetensors"), str(tmp_path / "timm.safetensors"), "--to", "timm"])
    printed = capsys.readouterr().out
    call = printed[printed.index("timm.create_model") :].strip()
    model = eval(call, {"timm": timm}).eval()  # the very line that a user would paste
    torch.testing.assert_close(model(images(64)), encoder(images(64)).pooled, **CLOSE)
    config = timm.data.resolve_data_config(model=model)
    assert config["input_size"] == (3, 64, 64)
    assert config["interpolation"] == "bicubic"
    assert (config["mean"], config["std"]) == (IMAGENET.mean, IMAGENET.std)


def test_timm_gets_the_preprocessing_of_the_encoder(tmp_path, capsys):
    encoder = encoders.build("vit_tiny", image_size=(48, 64), depth=1, channels=2)
    encoder.preprocessing = encoders.Preprocessing(mean=(0.1, 0.2), std=(0.3, 0.4))
    encoders.save(encoder, tmp_path / "ours.safetensors")
    export.main([str(tmp_path / "ours.safetensors"), str(tmp_path / "again.safetensors")])
    assert encoders.load(tmp_path / "again.safetensors").preprocessing == encoder.preprocessing
    export.main([str(tmp_path / "again.safetensors"), str(tmp_path / "timm.safetensors"), "--to", "timm"])
    printed = capsys.readouterr().out
    model = eval(printed[printed.index("timm.create_model") :].strip(), {"timm": timm})
    config = timm.data.resolve_data_config(model=model)
    assert (config["input_size"], config["mean"], config["std"]) == ((2, 48, 64), (0.1, 0.2), (0.3, 0.4))
    encoders.save(encoders.build("vit_tiny", depth=1, channels=2), tmp_path / "rgb.safetensors")
    with pytest.raises(SystemExit, match="2"):
        export.main([str(tmp_path / "rgb.safetensors"), str(tmp_path / "x.safetensors"), "--to", "timm"])
    assert "preprocessing has 3 channels, but the encoder has 2" in capsys.readouterr().err


def test_settings_change_what_is_built_and_tables_are_resized(tmp_path, capsys):
    encoders.save(encoders.build("swin_micro"), tmp_path / "a.safetensors")
    export.main([str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "--set", "window_size=2"])
    assert json.loads((tmp_path / "b.json").read_text())["window_size"] == 2
    assert "resized from windows of 4 x 4 to 2 x 2" in capsys.readouterr().out


def test_what_cannot_be_is_refused(tmp_path, capsys):
    encoders.save(encoders.build("navit_micro"), tmp_path / "navit.safetensors")
    torch.save({"something": torch.ones(2)}, tmp_path / "else.pth")
    for source, output, options, message in [
        ("navit.safetensors", "x.safetensors", ["--to", "timm"], "timm"),
        ("navit.safetensors", "x.pth", [], "must end in .safetensors"),
        ("else.pth", "x.safetensors", [], "format of the weights is not recognised"),
        ("missing.pth", "x.safetensors", [], "missing.pth"),
        ("navit.safetensors", "x.safetensors", ["--encoder", "vit_micro"], "which do not fit a ViT"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            export.main([str(tmp_path / source), str(tmp_path / output), *options])
        assert message in capsys.readouterr().err
        assert not (tmp_path / output).exists()
