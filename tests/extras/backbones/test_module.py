"""Wrapped modules: models of timm against timm itself, and modules of a user. timm's weights are random here."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tessera import encoders
from tessera.encoders.errors import EncoderError, WeightsError
from tessera.encoders.images import Mask
from tessera.encoders.randomness import random_keys
from tessera.extras.backbones.module import ModuleEncoder
from tessera.extras.exports import command as export
from tessera.extras.exports.export import export as export_encoder
from tessera.pretrain.command_line import load
from tessera.runtime.settings import SettingsError

FAMILIES = {
    "test_resnet": "map",
    "test_convnext": "map",
    "test_efficientnet": "map",
    "test_byobnet": "map",
    "test_nfnet": "map",
    "test_maxvit": "map",
    "mobilenetv3_small_050": "map",
    "test_mambaout": "channels last",
    "test_vit": "tokens",
    "test_vit3": "tokens",
    "twins_svt_small": "tokens",
    "levit_128s": "tokens",
}
"""Models of timm, and the form of their output."""


def images_of(side: int = 64, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))


def make(name: str, **settings: Any) -> ModuleEncoder:
    torch.manual_seed(0)
    encoder = encoders.build(f"timm:{name}", **{"image_size": 64} | settings)
    assert isinstance(encoder, ModuleEncoder)
    return encoder.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_features_are_those_of_timm(name: str) -> None:
    encoder, images = make(name), images_of()
    with torch.no_grad():
        features, expected = encoder(images), encoder.model.forward_features(images)
        head = encoder.model.forward_head(expected, pre_logits=True)
    side = 64 // encoder.stride
    if FAMILIES[name] == "map":
        expected = expected.permute(0, 2, 3, 1)
    elif FAMILIES[name] == "tokens":
        expected = expected[:, expected.shape[1] - side**2 :].unflatten(1, (side, side))
    assert expected.shape == (2, side, side, encoder.dim)
    assert torch.equal(features.tokens, expected.flatten(0, 2))
    assert features.grids.tolist() == [[side, side]] * 2
    if head.shape[1] == encoder.dim:
        assert torch.equal(features.pooled, head)
    else:
        torch.testing.assert_close(features.pooled, expected.mean((1, 2)))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_an_export_is_timms_own_state_dict(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = make(name, channels=4, mask_token=True)
    encoder.preprocessing = encoders.Preprocessing((0.5,) * 4, (0.2,) * 4)
    encoders.save(encoder, tmp_path / "ours.safetensors", step=7)
    export.main([str(tmp_path / "ours.safetensors"), str(tmp_path / "timm.safetensors"), "--to", "timm"])
    call = capsys.readouterr().out.partition("timm.safetensors: ")[2]
    model = eval(call, {"timm": timm}).eval()
    assert load_file(tmp_path / "timm.safetensors").keys() == model.state_dict().keys()
    images = images_of(channels=4)
    again = encoders.load(tmp_path / "ours.safetensors")
    with torch.no_grad():
        assert torch.equal(model.forward_features(images), encoder.model.forward_features(images))
        assert torch.equal(again(images).pooled, encoder(images).pooled)
    assert model.pretrained_cfg["mean"] == (0.5,) * 4
    back = make(name, channels=4)
    report = encoders.load_weights(back, tmp_path / "timm.safetensors")
    assert not report.left_out
    assert not report.fresh
    assert torch.equal(back(images).pooled, encoder(images).pooled)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_mambaout"])
def test_hidden_pixels_have_no_effect(name: str) -> None:
    encoder, images = make(name, mask_token=True), images_of(2 * 32 + 10)
    grids = encoder.grids(images)
    rows, columns = grids[0].tolist()
    hidden = torch.zeros(2, rows, columns, dtype=torch.bool)
    hidden[0, 1, 0] = hidden[1, -1, -1] = True
    mask = Mask.from_hidden(hidden.flatten(), grids)
    painted, side = images.clone(), encoder.stride
    painted[0, :, side : 2 * side, :side] = 9
    painted[1, :, (rows - 1) * side :, (columns - 1) * side :] = -9
    with torch.no_grad():
        encoder.mask_token.copy_(torch.tensor([1.0, -2.0, 0.5]))
        assert torch.equal(encoder(images, mask).tokens, encoder(painted, mask).tokens)
        painted[0, :, side : 2 * side, :side] = encoder.mask_token.view(3, 1, 1)
        painted[1, :, (rows - 1) * side :, (columns - 1) * side :] = encoder.mask_token.view(3, 1, 1)
        assert torch.equal(encoder(images, mask).tokens, encoder(painted).tokens)
    encoder(images, mask).tokens.square().mean().backward()
    assert encoder.mask_token.grad.abs().min() > 0


@pytest.mark.parametrize("name", ["test_convnext", "test_vit"])
def test_sides_are_padded_with_zeros(name: str) -> None:
    encoder, images = make(name), images_of(70)
    side = -(-70 // encoder.stride)
    with torch.no_grad():
        features = encoder(images)
        padded = torch.zeros(2, 3, side * encoder.stride, side * encoder.stride)
        padded[:, :, :70, :70] = images
        assert torch.equal(features.tokens, encoder(padded).tokens)
    assert features.grids.tolist() == [[side, side]] * 2 == encoder.grids(images).tolist()
    assert encoder(images_of(8)).pooled.shape == (2, encoder.dim)


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "mobilenetv3_small_050"])
def test_a_model_that_rounds_up_is_not_padded(name: str) -> None:
    encoder = make(name, image_size=70)
    for side in (33, 70, 90, 7):
        images = images_of(side)
        expected = encoder.model.forward_features(images)
        assert torch.equal(encoder(images).tokens, expected.permute(0, 2, 3, 1).flatten(0, 2))


def test_a_stage_has_its_own_map_stride_and_width() -> None:
    encoder, images = make("test_resnet", stage=-2), images_of()
    expected = encoder.model.forward_intermediates(images, indices=4, intermediates_only=True)[-2]
    assert (encoder.stride, encoder.dim) == (16, expected.shape[1])
    assert torch.equal(encoder(images).tokens, expected.permute(0, 2, 3, 1).flatten(0, 2))
    torch.testing.assert_close(encoder(images).pooled, expected.mean((2, 3)))


def test_a_model_of_one_size_is_refused_or_resized() -> None:
    with pytest.raises(EncoderError, match=r"cannot encode images of .* pixels: .* encoder.fixed_size to true"):
        make("levit_128s")(images_of(96))
    encoder = make("levit_128s", fixed_size=True)
    features = encoder(images_of(96))
    side = 64 // encoder.stride
    assert features.grids.tolist() == [[side, side]] * 2
    assert len(features.tokens) == 2 * side**2


def test_cached_functions_of_weights_follow_the_weights() -> None:
    """LeViT keeps its biases in evaluation mode, in which a teacher stays while its weights change."""
    encoder, images = make("levit_128s"), images_of()
    with torch.no_grad():
        encoder(images)
        for name, parameter in encoder.named_parameters():
            if "attention_biases" in name:
                parameter.add_(1 + torch.arange(parameter.shape[1]))
        fresh = make("levit_128s")
        fresh.load_state_dict(encoder.state_dict())
        assert torch.equal(encoder(images).pooled, fresh(images).pooled)


class Net(nn.Module):
    """A user's module: maps (B, D, h, w) or (B, h, w, D), or tokens."""

    def __init__(self, channels: int = 3, form: str = "map", dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, 8, 4, 4), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Sequential(nn.Conv2d(8, 12, 2, 2), nn.GELU()), nn.Dropout(dropout))
        self.unused = nn.Linear(3, 4)
        self.form = form

    def forward(self, images: Tensor) -> Any:
        x = self.body(self.stem(images))
        if self.form == "channels last":
            return x.permute(0, 2, 3, 1)
        if self.form == "tokens":
            tokens = x.flatten(2).mT
            return torch.cat([tokens.sum(1, keepdim=True), tokens], 1)
        return {"map": x, "vectors": x.mean((2, 3)), "list": [x]}[self.form]


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The registered variants, which are the same again after the test."""
    for name in ("my_net", "other_net"):
        monkeypatch.setitem(encoders.VARIANTS, name, {})
        del encoders.VARIANTS[name]
    return encoders.VARIANTS


@pytest.mark.parametrize("form", ["map", "channels last", "tokens"])
def test_a_module_of_the_user_is_an_encoder(form: str, variants: dict[str, Any], tmp_path: Path) -> None:
    encoder = encoders.from_module(lambda channels: Net(channels, form), "my_net", image_size=32, channels=5)
    images = images_of(40, 5)
    features = encoder.eval()(images)
    x = encoder.model.body(encoder.model.stem(images))
    assert (encoder.stride, encoder.dim) == (8, 12)
    torch.testing.assert_close(features.tokens, x.permute(0, 2, 3, 1).flatten(0, 2))
    torch.testing.assert_close(features.pooled, x.sum((2, 3)) if form == "tokens" else x.mean((2, 3)))
    encoders.save(encoder, tmp_path / "net.safetensors")
    again = encoders.load(tmp_path / "net.safetensors")
    assert torch.equal(again(images).pooled, features.pooled)
    assert again.settings == encoder.settings
    assert encoders.build("my_net", channels=2)(images_of(16, 2)).tokens.shape == (8, 12)
    with pytest.raises(WeightsError, match="timm has no equivalent"):
        export_encoder(encoder, tmp_path / "timm.safetensors", "timm")


def test_encoders_of_a_module_start_with_its_weights(variants: dict[str, Any]) -> None:
    net = Net()
    one, two = encoders.from_module(net, "my_net", image_size=32), encoders.build("my_net")
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, one.model.state_dict()[name])
        assert tensor.data_ptr() != two.model.state_dict()[name].data_ptr()
    assert encoders.load_weights(two, net.state_dict()).fresh == []


def test_bad_modules_are_refused_by_name(variants: dict[str, Any]) -> None:
    for form, words in (("vectors", r"is \(2, 12\)"), ("list", "is list")):
        with pytest.raises(EncoderError, match=rf"The output of my_net {words}. It must be a map"):
            encoders.from_module(Net(form=form), "my_net", image_size=32)
        assert "my_net" not in variants
    with pytest.raises(EncoderError, match="belongs to another encoder"):
        encoders.from_module(Net, "vit_small")
    with pytest.raises(EncoderError, match="belongs to another encoder"):
        encoders.from_module(Net, "timm:resnet18")
    encoders.from_module(Net, "my_net", image_size=32)
    with pytest.raises(EncoderError, match="forward_intermediates"):
        encoders.build("my_net", stage=1)
    with pytest.raises(EncoderError, match="do not cover the image"):
        encoders.from_module(Net, "other_net", image_size=35)
    with pytest.raises(EncoderError, match=r"no model 'resnet1888'. Similar names: resnet18"):
        encoders.build("timm:resnet1888")
    with pytest.raises(EncoderError, match="no model 'hf_hub:someone/model'"):
        encoders.build("timm:hf_hub:someone/model")
    with pytest.raises(SettingsError, match=r"encoder: timm .* no model 'resnet1888'"):
        load(["--encoder", "timm:resnet1888"])


def test_random_numbers_of_a_module_are_functions_of_step_and_samples(variants: dict[str, Any]) -> None:
    encoder = encoders.from_module(lambda: Net(dropout=0.5), "my_net", image_size=32).train()
    images = images_of(32)

    def draw(step: int) -> Tensor:
        torch.rand(1)
        with random_keys(0, step, torch.arange(2)):
            return encoder(images).tokens

    before = torch.get_rng_state()
    with random_keys(0, 0, torch.arange(2)):
        encoder(images)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


def test_options_are_arguments_of_timm() -> None:
    encoder = make("test_vit", options={"drop_path_rate": 0.5, "class_token": False, "global_pool": "avg"})
    assert encoder.model.cls_token is None
    assert max(part.drop_prob or 0 for part in encoder.modules() if hasattr(part, "drop_prob")) == 0.5
    for options, words in (
        ({"checkpoint_path": "/etc/passwd"}, "cannot contain checkpoint_path"),
        ({"pretrained_cfg_overlay": {}}, "cannot contain pretrained_cfg_overlay"),
        ({"num_classes": 3}, "cannot contain num_classes"),
        ({"no_such": 3}, "no_such"),
    ):
        with pytest.raises(EncoderError, match=words):
            make("test_vit", options=options)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let timm create pretrained models without a download, always with the same random weights."""
    create = timm.create_model

    def local(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        if pretrained:
            torch.manual_seed(5)
        return create(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", local)


def test_pretrained_weights_of_any_model_load(offline: None) -> None:
    encoder = encoders.load("timm:test_resnet.r160_in1k")
    torch.manual_seed(5)
    model = timm.create_model("test_resnet.r160_in1k").eval()
    images = images_of(160)
    with torch.no_grad():
        assert torch.equal(encoder(images).pooled, model.forward_head(model.forward_features(images), pre_logits=True))
    assert encoder.settings["variant"] == "timm:test_resnet"
    assert encoder.settings["image_size"] == 160
    assert encoder.preprocessing.mean == model.pretrained_cfg["mean"]
    smaller = make("test_vit", channels=1)
    report = encoders.load_weights(smaller, "timm:test_vit.r160_in1k")  # timm resizes positions and channels
    assert not report.left_out
    full = encoders.load_weights(make("test_resnet"), timm.create_model("test_resnet").state_dict())
    assert full.left_out == ["fc.weight", "fc.bias"]


def test_a_run_starts_from_pretrained_weights(offline: None) -> None:
    for words in (
        ["--init_from", "timm:test_resnet.r160_in1k"],
        ["--encoder", "timm:test_resnet.r160_in1k", "--init_from", "timm:test_resnet.r160_in1k"],
    ):
        config = load(["--data", "train.tar", *words])
        assert config.encoder.variant.startswith("timm:test_resnet")
        assert config.init_from == "timm:test_resnet.r160_in1k"
        assert config.data.mean is not None
