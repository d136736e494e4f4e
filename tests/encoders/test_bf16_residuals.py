"""Tokens between blocks in bf16: without autocast nothing changes, and under it the error grows less than 2.5 times."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tessera import encoders
from tessera.encoders.base import Features
from tessera.encoders.blocks import Block
from tessera.encoders.images import Images, pack

VARIANTS = ("vit_micro", "rope_vit_micro")


def build(variant: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    small = {"dim": 96, "depth": 6, "heads": 2, "layer_scale": 0.5}
    return encoders.build(variant, **small, **settings).train()


def crops() -> Images:
    generator = torch.Generator().manual_seed(0)
    return pack([torch.randn(8, 3, side, side, generator=generator) for side in (32, 16)], 4)


def outputs(encoder: Any, dtype: torch.dtype = torch.float32) -> tuple[Features, Tensor]:
    """The features of packed crops, and the gradient of all parameters in one vector."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        features: Features = encoder(crops())
    (features.pooled.float().sin().sum() + features.tokens.float().cos().sum()).backward()
    return features, torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_autocast_nothing_changes(variant: str) -> None:
    (plain, gradient), (other, others) = (outputs(build(variant, bf16_residuals=given)) for given in (False, True))
    assert torch.equal(plain.pooled, other.pooled)
    assert torch.equal(plain.tokens, other.tokens)
    assert torch.equal(gradient, others)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_under_autocast_blocks_work_in_bf16_and_features_are_near_float32(variant: str, recompute: bool) -> None:
    encoder, dtypes = build(variant, bf16_residuals=True, checkpoint_activations=recompute), set()
    for block in encoder.blocks:
        for module in (block, block.norm1, block.attn, block.ls1, block.norm2, block.mlp, block.ls2):
            module.register_forward_hook(lambda _, inputs, output: dtypes.update({inputs[0].dtype, output.dtype}))
    exact, exact_gradient = outputs(build(variant))
    usual, usual_gradient = outputs(build(variant), torch.bfloat16)
    found, gradient = outputs(encoder, torch.bfloat16)
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
