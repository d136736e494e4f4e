"""Twins-SVT against formulas written out."""

import math
from typing import Any

import pytest
import torch

from tessera.encoders import build
from tessera.encoders.layers import MLP, PreNormBlock
from tessera.encoders.twins import GlobalAttention, LocalAttention, Twins, cached_keys
from tests.encoders.helpers import images_of, scramble

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
SMALL: dict[str, Any] = {
    "dims": (24, 40, 48),
    "depths": (3, 1, 2),
    "heads": (2, 5, 3),
    "reductions": (4, 2, 1),
    "window_size": 3,
}
SMALL |= {"patch_size": 2, "image_size": 24, "mlp_ratios": (2.0, 3.0, 1.5)}
THEIRS: dict[str, Any] = {
    "layout": "vit_pytorch",
    "depths": (1, 2, 1),
    "head_dim": 6,
    "qkv_bias": False,
    "norm_eps": 1e-5,
}


def small(**settings) -> Any:
    return scramble(Twins(**SMALL | settings))


def layer_norm(x: torch.Tensor, layer: torch.nn.LayerNorm) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias


def attend(queries, keys, values, heads: int) -> torch.Tensor:
    """One query (D,) to keys and values (K, D), head by head."""
    width, parts = len(queries) // heads, []
    for head in range(heads):
        own = slice(head * width, head * width + width)
        weights = torch.stack([(queries[own] * key[own]).sum() / math.sqrt(width) for key in keys]).exp()
        parts.append((weights[:, None] / weights.sum() * values[:, own]).sum(0))
    return torch.cat(parts)


def after_attention(block: PreNormBlock, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    x = x + attended @ block.attn.proj.weight.T + block.attn.proj.bias
    hidden = layer_norm(x, block.norm2) @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    return x + hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias


@pytest.mark.parametrize(("grid", "window"), [((5, 6), 4), ((4, 7), 4), ((3, 2), 7), ((9, 3), 4)])
@torch.no_grad()
def test_a_padded_window_is_attention_among_its_tokens(grid, window):
    attn = LocalAttention(8, heads=2, head_dim=4, scale=0.5, qkv_bias=True, window_size=window)
    block = scramble(PreNormBlock(8, attn, MLP(8, 16), norm_eps=1e-6, drop_path=0.0)).double()
    x = images_of(2, *grid, 8).double()
    q, k, v = (layer_norm(x, block.norm1) @ attn.qkv.weight.T + attn.qkv.bias).split(8, dim=-1)
    attended = torch.empty_like(x)
    for image in range(2):
        for row in range(grid[0]):
            for column in range(grid[1]):
                top, left = row // window * window, column // window * window
                own = image, slice(top, min(top + window, grid[0])), slice(left, min(left + window, grid[1]))
                keys, values = k[own].reshape(-1, 8), v[own].reshape(-1, 8)
                attended[image, row, column] = attend(q[image, row, column], keys, values, heads=2)
    torch.testing.assert_close(block(x), after_attention(block, x, attended), **EXACT)


@pytest.mark.parametrize(("grid", "reduction"), [((3, 5), 2), ((2, 3), 4), ((4, 3), 1)])
@torch.no_grad()
def test_summaries_of_the_border_are_completed_with_zeros(grid, reduction):
    attn = GlobalAttention(8, heads=2, head_dim=4, scale=0.5, qkv_bias=True, reduction=reduction, strided=False)
    block = scramble(PreNormBlock(8, attn, MLP(8, 16), norm_eps=1e-6, drop_path=0.0)).double()
    x = images_of(2, *grid, 8).double()
    normed = layer_norm(x, block.norm1)
    q, attended = normed @ attn.q.weight.T + attn.q.bias, torch.empty_like(x)
    for image in range(2):
        summaries = []
        for top in range(0, grid[0], reduction):
            for left in range(0, grid[1], reduction):
                if reduction == 1:
                    summaries.append(normed[image, top, left])
                    continue
                summary = attn.sr.bias
                for row in range(top, min(top + reduction, grid[0])):
                    for column in range(left, min(left + reduction, grid[1])):
                        summary = summary + attn.sr.weight[:, :, row - top, column - left] @ normed[image, row, column]
                summaries.append(layer_norm(summary, attn.norm))
        k, v = (torch.stack(summaries) @ attn.kv.weight.T + attn.kv.bias).split(8, dim=-1)
        for row in range(grid[0]):
            for column in range(grid[1]):
                attended[image, row, column] = attend(q[image, row, column], k, v, heads=2)
    torch.testing.assert_close(block(x), after_attention(block, x, attended), **EXACT)


@pytest.mark.parametrize("layout", [{}, THEIRS])
@pytest.mark.parametrize("size", [(33, 33), (9, 20), (1, 1), (57, 7), (113, 225)])
@torch.no_grad()
def test_incomplete_patches_are_completed_with_zeros(size, layout):
    encoder, images = small(**layout).double(), images_of(2, 3, *size).double()
    sides = [[math.ceil(side / 2 ** (stage + 1)) for side in size] for stage in range(3)]
    shapes = [[width, *side] for width, side in zip((24, 40, 48), sides, strict=True)]
    assert [list(x.shape[1:]) for x in encoder.pyramid(images)] == shapes
    padded = torch.zeros(
        2, 3, *(side + side % 2 for side in size), dtype=torch.float64
    )  # to whole patches, with zeros, right and below
    padded[..., : size[0], : size[1]] = images
    found, expected = encoder(images), encoder(padded)  # by other kernels of the convolution, on some CPUs
    torch.testing.assert_close([found.pooled, found.tokens], [expected.pooled, expected.tokens], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", [{}, THEIRS])
@torch.no_grad()
def test_an_odd_grid_is_completed_with_zeros(layout):
    embed, x = small(**layout).patch_embeds[1], images_of(2, 5, 3, 24)
    full = torch.zeros(2, 6, 4, 24)
    full[:, :5, :3] = x
    assert embed(x).shape == (2, 3, 2, 40)
    assert torch.equal(embed(x), embed(full))


def test_windows_seen_in_evaluation_serve_a_training():
    cached_keys.cache_clear()
    encoder, images = small(), images_of(2, 3, 33, 32)
    with torch.inference_mode():
        encoder(images)
        assert not cached_keys((3, 3), (2, 2), 1, images.device).is_inference()
    made = cached_keys.cache_info().misses
    encoder.train()(images).pooled.sum().backward()
    assert cached_keys.cache_info().misses == made


def test_initial_values_are_those_of_the_published_code():
    torch.manual_seed(0)
    encoder = build("twins_svt_small", depths=(2, 1, 1, 1), mask_token=True)
    block = encoder.blocks[0][1]
    for weight in (block.attn.kv.weight, block.mlp.fc1.weight, encoder.blocks[3][0].attn.qkv.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert encoder.mask_token.std().item() == pytest.approx(0.02, rel=0.3)
    embed, positions = encoder.patch_embeds[1].proj, encoder.pos_block[3].proj[0]
    for layer, fan_out in [(embed, 4 * 128), (block.attn.sr, 64 * 64), (positions, 9)]:
        assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)
        assert not layer.bias.any()
    assert not block.attn.kv.bias.any()
