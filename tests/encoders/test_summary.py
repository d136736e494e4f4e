"""The summary against published counts, counts by hand, and a real forward pass."""

from typing import Any

import pytest
import torch

from tessera import encoders
from tessera.encoders import summary
from tessera.encoders.summary import summarize

# variant, settings, image size, parameters, giga multiply-accumulates of the official implementations
PUBLISHED = [
    ("vit_small", {}, 224, 21_665_664, 4.598),
    ("vit_small", {"patch_size": 8}, 224, 21_670_272, 22.405),
    ("vit_base", {}, 224, 85_798_656, 17.563),
    ("swin_tiny", {}, 224, 27_519_354, 4.490),
    ("swin_large", {}, 224, 194_995_476, 34.474),
    ("twins_svt_base", {}, 224, 55_301_952, 8.562),
    ("sam_vit_b", {}, 1024, 89_670_912, 486.04),
    ("vit_large", {}, 224, 303_301_632, None),
    ("sam_vit_h", {}, 1024, 637_026_048, None),
]


def on_meta(variant: str, **settings) -> Any:
    with torch.device("meta"):
        return encoders.build(variant, **settings)


@pytest.mark.parametrize(("variant", "settings", "size", "parameters", "giga"), PUBLISHED)
def test_published_counts(variant, settings, size, parameters, giga):
    counted = summarize(on_meta(variant, **settings), size, size)
    assert counted.parameters == parameters
    if giga is not None:
        assert round(counted.macs / 1e9, 2 if variant == "sam_vit_b" else 3) == giga


def test_macs_of_a_small_vit_by_hand():
    dim, depth, tokens = 96, 4, 16 + 1
    counted = summarize(on_meta("vit_micro"), 16, 16)
    attention = depth * 2 * tokens * tokens * dim
    linear = 16 * 3 * 4 * 4 * dim + depth * tokens * (3 + 1 + 4 + 4) * dim * dim
    assert counted.macs == linear + attention
    assert counted.tokens == (4, 4)


@pytest.mark.parametrize("variant", ["vit_micro", "navit_micro", "swin_micro", "twins_svt_micro", "sam_vit_micro"])
def test_activations_are_those_of_a_real_pass(variant):
    """With the fused kernel of the CPU, which keeps the same tensors.

    It takes no bias that needs a gradient: Swin's is frozen here, SAM's is made of the queries: it runs another.
    """

    def frozen(encoder):
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_("relative_position_bias_table" not in name)
        return encoder

    encoder = frozen(encoders.build(variant))
    kept: dict[int, torch.Tensor] = {}  # alive, so that no address comes twice

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    images = torch.randn(1, 3, 16, 16)
    weights = {t.untyped_storage().data_ptr() for t in [*encoder.parameters(), *encoder.buffers()]}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        encoder(images)
    real = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in weights)
    counted = summarize(frozen(on_meta(variant)), 16, 16).activation_bytes
    assert counted == pytest.approx(real, rel=0.05 if variant == "sam_vit_micro" else 0.01)


def test_the_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    summary.main(["vit_small", "--image_size", "96", "--set", "depth=6", "pool=mean"])
    printed = capsys.readouterr().out
    assert "vit_small" in printed
    assert "96 x 96" in printed
    assert "6 x 6" in printed
    for argv, message in [
        (["vit_smal"], "Did you mean 'vit_small'"),
        (["vit_small", "--set", "depht=3"], "Did you mean 'depth'"),
        (["vit_small", "--set", "depth"], "NAME=VALUE, not 'depth'"),
        (["vit_small", "--image_size", "9"], "smaller than one patch"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            summary.main(argv)
        assert message in capsys.readouterr().err


# parameters of the published implementations, without heads
PARAMETERS = {
    "vit_small_14_dinov2": 22_056_576,
    "vit_base_14_dinov2": 86_580_480,
    "vit_large_14_dinov2": 304_368_640,
    "vit_giant_14_dinov2": 1_136_480_768,
    "vit_small_14_dinov2_registers": 22_058_112,
    "vit_giant_14_dinov2_registers": 1_136_486_912,
    "rope_vit_small": 21_601_152,
    "rope_vit_small_plus": 28_697_472,
    "rope_vit_base": 85_669_632,
    "rope_vit_large": 303_154_176,
    "rope_vit_large_plus": 403_915_776,
    "rope_vit_huge_plus": 840_633_600,
    "rope_vit_7b": 6_716_043_264,
    "navit_tiny": 5_632_320,  # NaViT of vit-pytorch without its head
    "navit_small": 22_175_616,
    "navit_base": 87_997_440,
    "navit_large": 307_232_512,
    "twins_svt_vit_pytorch": 251_512_096,  # TwinsSVT() of vit-pytorch without its head
}


@pytest.mark.parametrize(("variant", "parameters"), PARAMETERS.items())
def test_parameters_are_those_of_the_published_code(variant, parameters):
    assert sum(p.numel() for p in on_meta(variant).parameters()) == parameters
