"""Blocks with weights in bf16, as FSDP2 gathers them, under autocast: as near to float32 as blocks with float32 weights
under autocast, up to the rounding of the weights of norms and tables."""

import pytest
import torch
from torch import Tensor, nn

from tessera import encoders
from tessera.encoders.layers import LayerNorm, LayerScale
from tessera.pretrain.optim.adamw import flat_blocks
from tests.encoders.helpers import MICRO

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def build(variant: str) -> encoders.Encoder:
    """An encoder whose parameters all differ from their start, so that all of them show."""
    torch.manual_seed(0)
    encoder = encoders.build(variant)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return encoder


def outputs(encoder: encoders.Encoder, *, autocast: bool) -> tuple[Tensor, Tensor]:
    """The features of all tokens, and the gradient of all parameters in one vector."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        features = encoder(IMAGES)
    (features.pooled.float().sin().sum() + features.tokens.float().cos().sum()).backward()
    gradients = [p.grad.float().flatten() for p in encoder.parameters() if p.grad is not None]
    return features.tokens, torch.cat(gradients)


def error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("variant", MICRO)
def test_features_and_gradients_are_as_near_to_float32_as_under_autocast(variant: str) -> None:
    gathered = build(variant)
    for block in flat_blocks(gathered):
        block.bfloat16()
    exact, exact_gradient = outputs(build(variant), autocast=False)
    usual, usual_gradient = outputs(build(variant), autocast=True)
    found, gradient = outputs(gathered, autocast=True)
    assert found.dtype == usual.dtype
    assert 0 < error(found, exact) < 1.5 * error(usual, exact) < 0.1
    assert 0 < error(gradient, exact_gradient) < 1.5 * error(usual_gradient, exact_gradient)


@pytest.mark.parametrize("bias", [False, True])
def test_norms_and_scales_of_float32_compute_in_float32(bias: bool) -> None:
    torch.manual_seed(0)
    norm, scale = LayerNorm(64, bias=bias), LayerScale(64, 0.3)
    for module in (norm, scale):
        for parameter in module.parameters():
            nn.init.uniform_(parameter)
        module.bfloat16()
    x = torch.randn(5, 64)
    weight, shift = norm.weight.double(), norm.bias.double() if bias else 0
    x64 = x.double()
    centred = x64 - x64.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight + shift
    branch = torch.randn(5, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(norm(x).double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(scale(branch), branch.float() * scale.gamma.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", MICRO)
@torch.no_grad()
def test_an_encoder_in_half_precision_stays_in_half_precision(variant: str, dtype: torch.dtype) -> None:
    scaled = {"layer_scale": 0.5} if variant in ("vit_micro", "rope_vit_micro") else {}
    encoder = encoders.build(variant, **scaled).eval()
    found = encoder.to(dtype)(IMAGES.to(dtype)).tokens
    assert found.dtype == dtype
    assert error(found, encoder.float()(IMAGES).tokens) < 0.05
