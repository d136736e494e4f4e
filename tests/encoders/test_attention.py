"""Attention of batches and of packed images, and attention in bf16 on the CPU, against the formula in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from tessera.encoders import dot_product as module
from tessera.encoders import packed_attention
from tessera.encoders.attention import attention
from tessera.encoders.blocks import Block
from tessera.encoders.dot_product import dot_product_attention
from tessera.encoders.segments import Segments
from tests.encoders.helpers import error


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
    assert error(out.double(), exact) < 0.008
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert error(gradient.double(), exact_gradient.double()) < 0.016


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
    monkeypatch.setattr(module, "MOST_KEYS", 16)
    q, k, v = (x.to(dtype) for x in inputs())
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=FLOAT_BIAS).to(dtype)
    out = dot_product_attention(q, k, v, bias=FLOAT_BIAS)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


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


@pytest.mark.slow
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn runs on CUDA only")
@pytest.mark.parametrize("scale", [0.3, 1.0, None])
def test_packed_attention_by_the_varlen_kernel(scale):
    lengths, queries = torch.tensor([30, 7, 100, 4]), torch.tensor([2, 1, 50, 3])
    segments = Segments(lengths, torch.device("cuda"), queries=queries)
    q, k, v = (x.to("cuda", torch.bfloat16) for x in packed_inputs(segments, width=32))
    out = packed_attention.attention_varlen(q, k, v, scale, segments)
    expected = packed_attention.attention_by_run(*(x.float() for x in (q, k, v)), scale, segments)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
