"""Attention in bf16 on the CPU against the formula in float64."""

import pytest
import torch
import torch.nn.functional as F

from tessera.encoders import attention
from tessera.encoders.attention import dot_product_attention


def inputs(queries: int = 17, tokens: int = 17) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, n, 8) for n in (queries, tokens, tokens))
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def formula(q, k, v, bias=None, scale=None):
    """Attention in float64."""
    logits = q.double() @ k.double().mT * (8**-0.5 if scale is None else scale)
    if bias is not None:
        logits = logits.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else logits + bias.double()
    return logits.softmax(-1) @ v.double()


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the root mean square of the difference, relative to that of the exact values."""
    return float(((result.double() - exact).norm() / exact.norm()).detach())


FLOAT_BIAS = torch.linspace(-2, 2, 17 * 17).reshape(17, 17)
CASES = {
    "plain": ({}, 17),
    "scale": ({"scale": 0.7}, 17),
    "float bias": ({"bias": FLOAT_BIAS}, 17),
    "bool bias": ({"bias": FLOAT_BIAS.T > -1}, 17),
    "few queries": ({}, 3),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_formula(case, autocast, monkeypatch):
    def unused(*_, **__):
        raise AssertionError("the slow kernel of torch was used")

    monkeypatch.setattr(F, "scaled_dot_product_attention", unused)
    options, queries = CASES[case]
    q, k, v = inputs(queries)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = dot_product_attention(q, k, v, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad((out.float() * weights).sum(), (q, k, v))
    exact = formula(q, k, v, **options)
    exact_gradients = torch.autograd.grad((exact * weights.double()).sum(), (q, k, v))
    # a logit of 2 to 4 in bf16 is off by at most 0.008, and so a weight by 0.8 %
    assert error(out, exact) < 0.008
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert error(gradient, exact_gradient.double()) < 0.016


def test_float32_inputs_are_computed_in_bf16_under_autocast():
    """Queries and keys that were rotated by their positions are in float32, and values in bf16."""
    q, k, v = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = dot_product_attention(q.float(), k.float(), v)
    torch.testing.assert_close(out, dot_product_attention(q, k, v), rtol=0, atol=0)


def test_a_query_without_keys_is_finite():
    q, k, v = inputs()
    bias = torch.ones(17, 17, dtype=torch.bool)
    bias[3] = False
    out = dot_product_attention(q, k, v, bias=bias)
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.float().sum(), (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp16_and_long_sequences_are_computed_in_float32(dtype, monkeypatch):
    """The weights of long sequences would not fit into memory, and products in fp16 are slow on CPUs."""
    monkeypatch.setattr(attention, "MOST_KEYS", 16)
    q, k, v = (x.to(dtype) for x in inputs())
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=FLOAT_BIAS).to(dtype)
    out = dot_product_attention(q, k, v, bias=FLOAT_BIAS)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
