"""Position tables, layer scale and initial values against formulas written out in float64."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tessera.encoders.blocks import Block
from tessera.encoders.layers import LayerScale, init_linear, interpolate, resize_table, sincos_table


def naive_bicubic(table, old, new, scale):
    """Cubic convolution (a = -0.75) of (old r * c, D), edge values repeated, at (place + 0.5) / scale - 0.5."""

    def taps(place, factor, size):
        source = (place + 0.5) / factor - 0.5
        for tap in range(math.floor(source) - 1, math.floor(source) + 3):
            x, a = abs(source - tap), -0.75
            weight = (a + 2) * x**3 - (a + 3) * x**2 + 1 if x <= 1 else a * (x**3 - 5 * x**2 + 8 * x - 4)
            yield min(max(tap, 0), size - 1), weight

    table = table.double().reshape(*old, -1)
    rows = []
    for row in range(new[0]):
        for column in range(new[1]):
            value = torch.zeros(table.shape[-1], dtype=torch.float64)
            for y, wy in taps(row, scale[0], old[0]):
                for x, wx in taps(column, scale[1], old[1]):
                    value += wy * wx * table[y, x]
            rows.append(value)
    return torch.stack(rows)


@pytest.mark.parametrize(("old", "new"), [((14, 14), (6, 6)), ((4, 4), (2, 8)), ((3, 5), (7, 4)), ((4, 4), (4, 4))])
def test_tables_are_resized_by_the_rules_of_dino_and_of_mae(old, new):
    table = torch.randn(old[0] * old[1], 5, generator=torch.Generator().manual_seed(0))
    dino = resize_table(table[None], old, new, "dino")[0]
    scale = [(n + 0.1) / o for n, o in zip(new, old, strict=True)]
    torch.testing.assert_close(dino.double(), naive_bicubic(table, old, new, scale), rtol=1e-4, atol=5e-5)
    mae = resize_table(table[None], old, new, "mae")[0]
    scale = [n / o for n, o in zip(new, old, strict=True)]
    torch.testing.assert_close(mae.double(), naive_bicubic(table, old, new, scale), rtol=1e-4, atol=5e-5)
    assert (dino - mae).abs().max() > 0.01


@pytest.mark.parametrize("options", [
    {"size": (6, 5)}, {"size": (6, 5), "antialias": True}, {"scales": (6.1 / 14, 5.1 / 12)}, {"size": (31, 20)},
    {"size": (27, 1), "mode": "bilinear"},
])  # fmt: skip
def test_maps_are_resized_alike_by_deterministic_algorithms(monkeypatch, options):
    maps = torch.randn(2, 8, 14, 12, generator=torch.Generator().manual_seed(0), requires_grad=True)
    expected = interpolate(maps, **options)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad(expected, maps, upstream)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with torch.autocast("cpu", torch.bfloat16):
        found = interpolate(maps, **options)
    assert "Upsample" not in type(found.grad_fn).__name__
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(found, maps, upstream)[0], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [
    {"size": (6, 5)}, {"size": (31, 20)}, {"scales": (6.1 / 14, 5.1 / 12)}, {"scales": (14.1 / 14, 13.1 / 12)},
    {"size": (27, 1), "mode": "bilinear"},
])  # fmt: skip
def test_maps_on_the_meta_device_get_the_same_shape_and_a_gradient(options):
    maps = torch.zeros(2, 8, 14, 12)
    found = interpolate(maps.to("meta").requires_grad_(), **options)
    assert found.shape == interpolate(maps, **options).shape
    assert found.dtype == maps.dtype
    assert found.requires_grad


def test_sincos_table_is_the_formula():
    rows, columns, dim = 3, 5, 16
    expected = []
    for row in range(rows):
        for column in range(columns):
            channels = []
            for place in (column, row):
                angles = [place / 10000 ** (k / (dim // 4)) for k in range(dim // 4)]
                channels += [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
            expected.append(channels)
    torch.testing.assert_close(sincos_table(rows, columns, dim), torch.tensor(expected), rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match="multiple of 4"):
        sincos_table(2, 2, 18)


@pytest.mark.parametrize(("init", "deviation"), [("xavier", math.sqrt(2 / 1000)), ("trunc_normal", 0.02)])
def test_linear_layers_start_as_named(init, deviation):
    torch.manual_seed(0)
    layer = nn.Linear(400, 600)
    init_linear(layer, init)
    assert layer.weight.std().item() == pytest.approx(deviation, rel=0.02)
    assert (layer.weight.abs().max() <= math.sqrt(6 / 1000)) == (init == "xavier")
    assert not layer.bias.any()


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("selective", [False, True])
def test_factors_of_a_layer_scale_in_the_weights_give_its_outputs_and_gradients(mlp: Any, selective: bool) -> None:
    """In training, layer scale and linear layer are one product; in eval mode, the layer scale comes after it."""
    torch.manual_seed(0)
    block = Block(
        12, 2, mlp_ratio=2, qkv_bias=True, norm_eps=1e-6, layer_scale=0.3, drop_path=0.0, mlp=mlp, selective=selective
    ).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    found = []
    for training in (True, False):
        block.train(training).zero_grad()
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.update({t.untyped_storage().data_ptr(): t.numel()}) or t, lambda t: t
        ):
            out = block(x)
        out.square().sum().backward()
        found.append((out, [p.grad for p in block.parameters()], sum(kept.values())))
    (out, gradients, kept), (expected, wanted, more) = found
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for gradient, one in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, one, rtol=1e-10, atol=1e-10)
    if not selective:
        assert more - kept >= 2 * x.numel() - 3 * 12 * 30  # the inputs of both layer scales, less the scaled weights


@pytest.mark.parametrize(
    ("dtype", "same_dtype", "early"),
    [(None, False, True), (torch.bfloat16, True, True), (torch.bfloat16, False, False), (torch.float16, True, False)],
)
def test_factors_of_a_layer_scale_are_in_the_weights_where_no_precision_is_lost(
    dtype: torch.dtype | None, same_dtype: bool, early: bool
) -> None:
    scale = LayerScale(4, 1e-5, same_dtype=same_dtype)
    x, last = torch.ones(2, 4), nn.Linear(4, 4)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        factors = scale.early_factors(x, last)
        assert scale.eval().early_factors(x, last) is None
    assert (factors is not None) == early
    if factors is not None:
        assert torch.equal(factors, scale.gamma)
        last.register_forward_hook(lambda *_: None)
        assert scale.train().early_factors(x, last) is None
