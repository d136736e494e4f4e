"""Low-rank updates (LoRA): their formula, and that merged weights compute what the layers computed."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tessera import encoders
from tessera.encoders.errors import EncoderError
from tessera.encoders.saving import as_saved
from tessera.extras.exports.export import export as export_encoder
from tessera.extras.finetune.finetune import Finetune, FinetuneConfig
from tessera.extras.finetune.lora import ATTENTION, add_lora
from tests.encoders.helpers import MICRO


def adapted(variant: str, **settings: int) -> encoders.Encoder:
    """An encoder with updates that are not 0."""
    torch.manual_seed(0)
    encoder = encoders.build(variant, **settings).eval()
    add_lora(encoder, 2, 3.0)
    for name, parameter in encoder.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.2)
    return encoder


def test_a_layer_computes_the_formula() -> None:
    layer = adapted("vit_micro").blocks[0].attn.qkv
    x = torch.randn(5, layer.in_features)
    w, b, down, up = (p.double() for p in (layer.weight, layer.bias, layer.lora_down, layer.lora_up))
    expected = x.double() @ w.T + b + 3.0 / 2 * (x.double() @ down.T) @ up.T
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert (down.shape, up.shape) == ((2, layer.in_features), (layer.out_features, 2))


@pytest.mark.parametrize("variant", MICRO)
def test_updates_start_at_zero_and_merged_weights_compute_the_same(variant: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 16, 16)
    encoder = encoders.build(variant).eval()
    before = encoder(images)
    add_lora(encoder, 2, 3.0)
    torch.testing.assert_close(encoder(images).tokens, before.tokens, rtol=1e-6, atol=1e-6)

    encoder = adapted(variant)
    trained = {name for name, p in encoder.named_parameters() if p.requires_grad}
    inside = [module for block in encoder.blocks for module in block.modules() if isinstance(module, nn.Linear)]
    layers = {name for name, module in encoder.named_modules() if module in inside}
    layers = {name for name in layers if name.rpartition(".")[2] in ATTENTION}
    assert trained == {f"{name}.lora_{part}" for name in layers for part in ("down", "up")} != set()
    own = encoder(images)
    assert (own.tokens - before.tokens).abs().max() > 0.01
    encoders.save(encoder, tmp_path / "e.safetensors")
    loaded = encoders.load(tmp_path / "e.safetensors")
    assert not any("lora" in name for name in loaded.state_dict())
    torch.testing.assert_close(loaded(images).tokens, own.tokens, rtol=1e-4, atol=1e-4)
    assert any("lora" in name for name in encoder.state_dict())  # the encoder itself keeps its updates
    encoder = as_saved(encoder)
    assert encoder.state_dict().keys() == loaded.state_dict().keys()
    torch.testing.assert_close(encoder(images).tokens, own.tokens, rtol=1e-4, atol=1e-4)


def test_chosen_layers_and_models_of_timm() -> None:
    encoder = encoders.build("timm:vit_tiny_patch16_224", image_size=32)
    add_lora(encoder, 1, 1.0, ["fc1"])
    changed = {name.split(".")[-2] for name, p in encoder.named_parameters() if p.requires_grad}
    assert changed == {"fc1"}
    with pytest.raises(EncoderError, match=r"layer named 'fc9'\. The names are: fc1, fc2, proj, qkv\."):
        add_lora(encoders.build("vit_micro"), 1, 1.0, ["fc9"])
    with pytest.raises(EncoderError, match=r"No block has a linear layer of attention\. The names are: none"):
        add_lora(encoders.build("timm:resnet18", image_size=32), 1, 1.0)


def test_low_rank_updates_are_exported_in_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    method = Finetune(encoders.build("vit_micro", depth=2), FinetuneConfig(classes=10, size=16, lora_rank=2), 10)
    for name, parameter in method.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    encoder, images = method.trained_encoder().eval(), torch.randn(2, 3, 16, 16)
    expected = encoder(images).pooled
    encoder = as_saved(encoder)
    torch.testing.assert_close(encoder(images).pooled, expected, rtol=1e-4, atol=1e-4)
    for form in ("ours", "timm"):
        export_encoder(encoder, tmp_path / f"{form}.safetensors", form)
    torch.testing.assert_close(
        encoders.load(tmp_path / "ours.safetensors")(images).pooled, expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("layers", [("proj",), ("fc2",)])
def test_a_layer_scale_also_scales_the_update(layers: tuple[str, ...]) -> None:
    """In training as in eval mode, although the encoder otherwise applies the layer scale to the weights."""
    torch.manual_seed(0)
    encoder = encoders.build("vit_micro", layer_scale=0.5, drop_path=0.0)
    add_lora(encoder, 2, 4.0, layers)
    for name, parameter in encoder.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(encoder.train()(images).pooled, encoder.eval()(images).pooled)
