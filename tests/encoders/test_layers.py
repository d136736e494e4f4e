"""Parts of encoders against formulas written out in float64."""

import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from tessera.encoders import packed_attention
from tessera.encoders.attention import attention
from tessera.encoders.blocks import Block
from tessera.encoders.drop_path import DropPath
from tessera.encoders.layers import LayerScale, init_linear, resize_table, sincos_table
from tessera.encoders.segments import Segments


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


LENGTHS, QUERIES, SEQUENCES = torch.tensor([3, 7, 1, 4]), torch.tensor([2, 1, 5, 3]), torch.tensor([1, 2, 1])
CPU = torch.device("cpu")


def naive_packed(q, k, v, scale, segments):
    """Image by image, each query on its own, in float64: (heads, T, d)."""
    out, first, before = [], 0, 0
    for queries, tokens in zip(segments.query_lengths.tolist(), segments.lengths.tolist(), strict=True):
        keys, values = (x[:, before : before + tokens].double() for x in (k, v))
        for query in range(first, first + queries):
            weights = (scale * torch.einsum("hd,hkd->hk", q[:, query].double(), keys)).exp()
            out.append(torch.einsum("hk,hkd->hd", weights / weights.sum(1, keepdim=True), values))
        first, before = first + queries, before + tokens
    return torch.stack(out, 1)


def packed_inputs(segments, width=8):
    generator = torch.Generator().manual_seed(0)
    counts = (int(n.sum()) for n in (segments.query_lengths, segments.lengths, segments.lengths))
    return [torch.randn(2, n, width, generator=generator, dtype=torch.float64) for n in counts]


@pytest.mark.parametrize("queries", [QUERIES, None])
def test_packed_attention_is_the_formula_by_every_way(queries):
    segments = Segments(LENGTHS, CPU, queries=queries, sequences=SEQUENCES)
    q, k, v = packed_inputs(segments)
    for scale in (0.3, None):
        expected = naive_packed(q, k, v, 8**-0.5 if scale is None else scale, segments)
        ways = {
            "chosen": attention(q, k, v, scale=scale, segments=segments),
            "by run": packed_attention.attention_by_run(q, k, v, scale, segments),
            "in sequences": packed_attention.attention_in_sequences(q, k, v, scale, segments),
        }
        for way, out in ways.items():
            torch.testing.assert_close(out, expected, msg=lambda text, way=way: f"{way}: {text}")
    with pytest.raises(ValueError, match="no bias"):
        attention(q, k, v, bias=torch.zeros(1), segments=segments)


@pytest.mark.parametrize("queries", [torch.tensor([2, 2, 2]), torch.tensor([1, 4, 1]), None])
def test_images_of_one_size_are_a_batch_for_attention(queries, monkeypatch):
    shapes, original = [], torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, **options):
        shapes.append((q.shape, k.shape, v.shape))
        return original(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    segments = Segments(torch.tensor([5, 5, 5]), CPU, queries=queries)
    q, k, v = packed_inputs(segments)
    torch.testing.assert_close(attention(q, k, v, scale=0.3, segments=segments), naive_packed(q, k, v, 0.3, segments))
    each = 5 if queries is None else 2
    together = [((3, 2, each, 8), (3, 2, 5, 8), (3, 2, 5, 8))]
    assert (shapes == together) == (queries is None or queries.tolist() == [2, 2, 2])


def test_no_way_of_packed_attention_reads_from_the_device():
    """Tensors on the meta device have no values, so what waits for a device fails there."""
    segments = Segments(LENGTHS, torch.device("meta"), queries=QUERIES, sequences=SEQUENCES)
    inputs = [x.to("meta") for x in packed_inputs(segments)]
    for way in (packed_attention.attention_in_sequences, packed_attention.attention_by_run):
        assert way(*inputs, 0.3, segments).shape == (2, 11, 8)
    assert all(n.is_meta for n in (*segments.cumulative_lengths, segments.image_ids, segments.attention_mask))


@pytest.mark.parametrize("takes_scale", [True, False])
def test_the_varlen_kernel_is_given_what_it_takes(takes_scale, monkeypatch):
    """A stand-in with its signature, with and without a scale of its own: it runs on GPUs only."""
    segments = Segments(LENGTHS, CPU, queries=QUERIES)

    def kernel(q, k, v, q_starts, k_starts, most_queries, most_tokens, scale=None):
        assert takes_scale or scale is None
        assert q_starts.dtype == k_starts.dtype == torch.int32
        assert (q_starts.tolist(), k_starts.tolist()) == ([0, 2, 3, 8, 11], [0, 3, 10, 11, 15])
        assert (most_queries, most_tokens) == (5, 7)
        assert all(x.is_contiguous() for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return naive_packed(*(x.transpose(0, 1) for x in (q, k, v)), scale, segments).transpose(0, 1)

    monkeypatch.setattr(packed_attention, "varlen_attn", kernel)
    monkeypatch.setattr(packed_attention, "VARLEN_TAKES_SCALE", takes_scale)
    q, k, v = packed_inputs(segments)
    for scale in (0.3, None):
        expected = naive_packed(q, k, v, 8**-0.5 if scale is None else scale, segments)
        torch.testing.assert_close(packed_attention.attention_varlen(q, k, v, scale, segments), expected)


def test_packed_blocks_compile_and_those_of_one_size_whole():
    torch.compiler.reset()
    block = Block(16, 2, mlp_ratio=2, qkv_bias=True, norm_eps=1e-6, layer_scale=None, drop_path=0.0)
    counter, graphs = CompileCounter(), []
    compiled = torch.compile(block, backend=counter)
    for lengths in ([3, 7, 1, 4], [2, 9, 4], [5, 4, 3, 2, 1], [14, 1]):
        segments, x = Segments(torch.tensor(lengths), CPU), torch.randn(15, 16)
        torch.testing.assert_close(compiled(x, segments), block(x, segments))
        graphs.append(counter.frame_count)
    # The lengths of a batch compile nothing anew, except that torch 2.11 makes a size dynamic at the second batch.
    assert len(set(graphs[1:])) == 1
    torch.compiler.reset()
    segments, whole = Segments(torch.tensor([5, 5, 5]), CPU), torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(whole(x, segments), block(x, segments))
    torch.compiler.reset()


def test_drop_path_leaves_out_packed_images_as_a_whole():
    torch.manual_seed(0)
    layer, segments = DropPath(0.5), Segments(torch.tensor([2, 1, 3]), CPU)
    found = {tuple(layer(torch.ones(6, 2), segments)[:, 0].tolist()) for _ in range(100)}
    assert found == {(a, a, b, c, c, c) for a in (0.0, 2.0) for b in (0.0, 2.0) for c in (0.0, 2.0)}
    assert torch.equal(layer.eval()(torch.ones(6, 2), segments), torch.ones(6, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn runs on CUDA only")
@pytest.mark.parametrize("scale", [0.3, 1.0, None])
def test_packed_attention_by_the_varlen_kernel(scale):
    lengths, queries = torch.tensor([30, 7, 100, 4]), torch.tensor([2, 1, 50, 3])
    segments = Segments(lengths, torch.device("cuda"), queries=queries)
    q, k, v = (x.to("cuda", torch.bfloat16) for x in packed_inputs(segments, width=32))
    out = packed_attention.attention_varlen(q, k, v, scale, segments)
    expected = packed_attention.attention_by_run(*(x.float() for x in (q, k, v)), scale, segments)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
