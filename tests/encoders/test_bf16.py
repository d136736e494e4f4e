"""Tokens between blocks in bf16 (`bf16_residuals`), and blocks with weights in bf16, as FSDP2 gathers them.

Without autocast, `bf16_residuals` changes nothing. Under autocast, the error grows less than 2.5 times. With gathered
weights, it is as near to float32 as with float32 weights under autocast, up to the rounding of norms and tables.
"""

from typing import Any

import pytest
import torch
from torch import nn

from tessera import encoders
from tessera.encoders.blocks import Block
from tessera.encoders.images import Images, pack
from tessera.encoders.layers import LayerNorm, LayerScale
from tessera.pretrain.optim.adamw import flat_blocks
from tests.encoders.helpers import MICRO, error, images_of, outputs

VARIANTS = ("vit_micro", "rope_vit_micro")
IMAGES = images_of(4, 3, 16, 16, seed=0)


def build(variant: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    small = {"dim": 96, "depth": 6, "heads": 2, "layer_scale": 0.5}
    return encoders.build(variant, **small, **settings).train()


def moved(variant: str) -> encoders.Encoder:
    """An encoder whose parameters all differ from their start, so that all of them show."""
    torch.manual_seed(0)
    encoder = encoders.build(variant)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return encoder


def crops() -> Images:
    generator = torch.Generator().manual_seed(0)
    return pack([torch.randn(8, 3, side, side, generator=generator) for side in (32, 16)], 4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_autocast_nothing_changes(variant: str) -> None:
    (plain, gradient), (other, others) = (
        outputs(build(variant, bf16_residuals=given), crops()) for given in (False, True)
    )
    assert torch.equal(plain.pooled, other.pooled)
    assert torch.equal(plain.tokens, other.tokens)
    assert torch.equal(gradient, others)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_under_autocast_blocks_work_in_bf16_and_features_are_near_float32(variant: str, recompute: bool) -> None:
    encoder, dtypes = build(variant, bf16_residuals=True, checkpoint_activations=recompute), set()
    for block in encoder.blocks:
        for module in (block, block.norm1, block.attn, block.norm2, block.mlp):  # attn and mlp apply the layer scale
            module.register_forward_hook(lambda _, inputs, output: dtypes.update({inputs[0].dtype, output.dtype}))
    exact, exact_gradient = outputs(build(variant), crops())
    usual, usual_gradient = outputs(build(variant), crops(), autocast=True)
    found, gradient = outputs(encoder, crops(), autocast=True)
    assert dtypes == {torch.bfloat16}
    assert found.pooled.dtype == found.tokens.dtype == gradient.dtype == torch.float32
    assert 0 < error(found.tokens, exact.tokens) < 2.5 * error(usual.tokens, exact.tokens) < 0.025
    assert error(gradient, exact_gradient) < 2.5 * error(usual_gradient, exact_gradient) < 0.025


def test_a_block_equals_a_float64_block_on_rounded_tokens() -> None:
    """Two sums are rounded to bf16, each by at most 2 ** -8 of its value. A branch is rounded as usual."""
    torch.manual_seed(0)
    block = Block(64, 2, mlp_ratio=4, qkv_bias=True, norm_eps=1e-6, layer_scale=0.3, drop_path=0, bf16_residuals=True)
    x = torch.randn(4, 9, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = block(x)
    expected = block.double()(x.double())
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("variant", MICRO)
def test_features_and_gradients_are_as_near_to_float32_as_under_autocast(variant: str) -> None:
    gathered = moved(variant)
    for block in flat_blocks(gathered):
        block.bfloat16()
    exact, exact_gradient = outputs(moved(variant), IMAGES)
    usual, usual_gradient = outputs(moved(variant), IMAGES, autocast=True)
    found, gradient = outputs(gathered, IMAGES, autocast=True)
    assert found.tokens.dtype == usual.tokens.dtype
    assert 0 < error(found.tokens, exact.tokens) < 1.5 * error(usual.tokens, exact.tokens) < 0.1
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
