"""Weights of other architectures of timm and transformers are refused by name; SigLIP is read without its head."""

import pytest
import timm
import torch
import transformers

import tessera
from tessera.encoders.errors import WeightsError
from tessera.encoders.weight_files import recognise
from tessera.extras.backbones import timm_models
from tessera.extras.backbones.timm_models import PREFIX

SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("hiera_tiny_224", {}, "a Hiera"),
        ("vit_base_patch16_rope_reg1_gap_256", SMALL, "ViTs of timm with rotary positions"),
        ("vit_small_patch16_rope_mixed_224", {"depth": 1}, "a ViT of timm with rotary positions"),
        ("vit_base_patch16_clip_224", SMALL, "a CLIP"),
        ("beit_base_patch16_224", SMALL, "a BEiT"),
        ("swinv2_tiny_window8_256", {"depths": (1, 1, 1, 1)}, "a Swin Transformer V2"),
    ],
)
def test_models_of_timm_are_refused_by_name(name: str, options: dict, said: str, tmp_path) -> None:
    with torch.device("meta"):
        state = timm.create_model(name, pretrained=False, **options).state_dict()
    with pytest.raises(WeightsError, match=said) as error:
        recognise(state)
    assert f"--encoder {PREFIX}NAME" in str(error.value)


def test_models_of_transformers_are_refused_by_name() -> None:
    settings = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    for model, config in (
        (transformers.ViTModel, transformers.ViTConfig),
        (transformers.SiglipVisionModel, transformers.SiglipVisionConfig),
    ):
        with pytest.raises(WeightsError, match="a model of transformers that is neither DINOv2 nor DINOv3"):
            recognise(model(config(**settings, image_size=32, patch_size=16)).state_dict())


@pytest.mark.parametrize("side", [224, 160])
@torch.no_grad()
def test_siglip_is_read_without_its_pooling_head(side: int, tmp_path) -> None:
    model = timm.create_model("vit_base_patch16_siglip_224", pretrained=False, depth=1, dynamic_img_size=True).eval()
    torch.save(model.state_dict(), tmp_path / "siglip.pth")
    encoder = tessera.load(tmp_path / "siglip.pth")
    images = torch.randn(2, 3, side, side)
    torch.testing.assert_close(encoder(images).tokens, model.forward_features(images).flatten(0, 1))


def test_pretrained_models_of_timm_take_its_rule_for_positions() -> None:
    """Without a class head, only the name tells."""
    with torch.device("meta"):
        state = timm.create_model("vit_small_patch16_224", pretrained=False, num_classes=0).state_dict()
    for tag, rule in (("augreg_in21k", "antialias"), ("dino", "dino")):
        described = timm_models.settings(f"{PREFIX}vit_small_patch16_224.{tag}", state)
        assert described["interpolation"] == rule
