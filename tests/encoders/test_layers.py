"""Parts of encoders against formulas written out in float64."""

import math

import pytest
import torch
from torch import nn

from encoders import layers
from encoders.layers import DropPath, LayerScale, attention, init_linear, resize_table, sincos_table


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


def test_attention_is_the_formula_with_scale_and_bias():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 6, 8, generator=generator)
    bias = torch.randn(4, 6, 6, generator=generator)
    shut = torch.rand(2, 1, 6, 6, generator=generator) < 0.7
    shut |= torch.eye(6, dtype=torch.bool)
    logits = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double())

    def weighted(logits):
        return torch.einsum("bhqk,bhkd->bhqd", logits.exp() / logits.exp().sum(-1, keepdim=True), v.double()).float()

    torch.testing.assert_close(attention(q, k, v), weighted(logits / math.sqrt(8)))
    torch.testing.assert_close(attention(q, k, v, scale=0.2, bias=bias), weighted(logits * 0.2 + bias))
    torch.testing.assert_close(attention(q, k, v, bias=shut), weighted((logits / math.sqrt(8)).where(shut, -torch.inf)))


def test_drop_path_leaves_out_whole_samples_at_its_rate_and_keeps_the_mean():
    torch.manual_seed(0)
    layer, x = DropPath(0.3), torch.ones(20000, 3, 2)
    y = layer(x)
    assert ((y == y[:, :1, :1]).all(2).all(1)).all()
    values = y[:, 0, 0]
    assert values.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert (values == 0).float().mean().item() == pytest.approx(0.3, abs=0.015)  # 4.6 standard deviations
    assert torch.equal(layer.eval()(x), x)
    with pytest.raises(ValueError, match="drop_path"):
        DropPath(1.0)


def test_layer_scale_multiplies_channels():
    layer = LayerScale(3, 0.5)
    assert torch.equal(layer.gamma, torch.full((3,), 0.5))
    layer.gamma.data = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(layer(torch.ones(2, 2, 3)), torch.tensor([1.0, 2.0, 3.0]).expand(2, 2, 3))


@pytest.mark.parametrize(("init", "deviation"), [("xavier", math.sqrt(2 / 1000)), ("trunc_normal", 0.02)])
def test_linear_layers_start_as_named(init, deviation):
    torch.manual_seed(0)
    layer = nn.Linear(400, 600)
    init_linear(layer, init)
    assert layer.weight.std().item() == pytest.approx(deviation, rel=0.02)
    assert (layer.weight.abs().max() <= math.sqrt(6 / 1000)) == (init == "xavier")
    assert not layer.bias.any()


def test_packed_attention_is_that_of_each_image_alone_by_every_way():
    generator = torch.Generator().manual_seed(0)
    lengths, query_lengths, sequences = torch.tensor([3, 7, 1, 4]), torch.tensor([2, 1, 5, 3]), torch.tensor([1, 2, 1])
    k, v = (torch.randn(2, 15, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    q = torch.randn(2, 11, 8, generator=generator, dtype=torch.float64)
    images = zip(q.split(query_lengths.tolist(), 1), *(x.split(lengths.tolist(), 1) for x in (k, v)), strict=True)
    expected = [(0.3 * a @ b.mT).softmax(-1) @ c for a, b, c in images]
    inputs = (q, k, v, 0.3, query_lengths, lengths)
    ways = {
        "chosen": attention(q, k, v, scale=0.3, lengths=lengths, query_lengths=query_lengths),
        "by image": layers._attention_by_image(*inputs),
        "in sequences": layers._attention_in_sequences(*inputs, sequences),
    }
    for way, out in ways.items():
        torch.testing.assert_close(out, torch.cat(expected, 1), msg=lambda text, way=way: f"{way}: {text}")
    equal = attention(k, k, v, lengths=torch.tensor([5, 5, 5]))
    torch.testing.assert_close(equal, layers._attention_by_image(k, k, v, None, *[torch.tensor([5, 5, 5])] * 2))
    with pytest.raises(ValueError, match="no bias"):
        attention(q, k, v, bias=torch.zeros(1), lengths=lengths)


@pytest.mark.skipif(not torch.cuda.is_available() or layers.varlen_attn is None, reason="varlen_attn runs on CUDA only")
def test_packed_attention_by_the_varlen_kernel():
    lengths, query_lengths = torch.tensor([30, 7, 100, 4]), torch.tensor([2, 1, 50, 3])
    q, k, v = (
        torch.randn(4, int(n.sum()), 32, device="cuda", dtype=torch.bfloat16) for n in (query_lengths, lengths, lengths)
    )
    out = layers._attention_varlen(q, k, v, 0.3, query_lengths, lengths)
    expected = layers._attention_by_image(*(x.float() for x in (q, k, v)), 0.3, query_lengths, lengths)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
