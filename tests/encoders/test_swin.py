"""Swin Transformer against formulas written out pixel by pixel."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tessera.encoders.swin import VARIANTS, Swin, make_windows
from tests.encoders.helpers import CLOSE, first_input, images_of, scramble

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}  # in float64
SMALL: dict[str, Any] = {
    "dim": 24,
    "depths": (2, 3),
    "heads": (2, 4),
    "window_size": 4,
    "patch_size": 2,
    "image_size": 16,
}


def small(**settings) -> Any:
    return scramble(Swin(**SMALL | settings))


def naive_attention(block, x, window: int):
    """Shifted window attention of one image (h, w, D) in float64: each pair of tokens on its own, and no padding."""
    (height, width, dim), heads, table = x.shape, block.attn.heads, block.attn.relative_position_bias_table
    places = list(product(range(height), range(width)))
    bias = torch.full((heads, len(places), len(places)), -torch.inf, dtype=x.dtype)
    for (i, query), (j, key) in product(enumerate(places), repeat=2):
        together, crossing, offset = True, False, []
        for q, k, side in zip(query, key, (height, width), strict=True):
            shift = window // 2 if block.attn.shifted and side > window else 0
            padded = math.ceil(side / window) * window
            crossing |= (q < shift) != (k < shift)  # one of them is rolled round to the other end
            q, k = (q - shift) % padded, (k - shift) % padded
            together &= q // window == k // window
            offset.append(q - k + window - 1)
        if together:
            bias[:, i, j] = table[offset[0] * (2 * window - 1) + offset[1]] - 100 * crossing
    q, k, v = (x.view(-1, dim) @ block.attn.qkv.weight.T + block.attn.qkv.bias).split(dim, 1)
    out = []
    for head in range(heads):
        own = slice(head * dim // heads, (head + 1) * dim // heads)
        logits = q[:, own] @ k[:, own].T / math.sqrt(dim // heads) + bias[head]
        out.append(logits.softmax(1) @ v[:, own])
    return (torch.cat(out, 1) @ block.attn.proj.weight.T + block.attn.proj.bias).view(x.shape)


def naive_maps(encoder: Swin, image):
    """Output of each stage for one image (C, H, W): tokens one by one."""
    patch, weight = encoder.patch_size, encoder.patch_embed.proj.weight
    _, height, width = image.shape
    grid = math.ceil(height / patch), math.ceil(width / patch)
    x = image.new_zeros(*grid, weight.shape[0])
    for i, j in product(*map(range, grid)):
        pixels = image[:, i * patch : (i + 1) * patch, j * patch : (j + 1) * patch]
        pixels = weight[:, :, : pixels.shape[1], : pixels.shape[2]] * pixels
        x[i, j] = encoder.patch_embed.norm(pixels.sum((1, 2, 3)) + encoder.patch_embed.proj.bias)
    maps = []
    for stage in encoder.stages:
        for block in stage.blocks:
            x = x + naive_attention(block, block.norm1(x), encoder.window_size)
            hidden = F.gelu(block.norm2(x) @ block.mlp.fc1.weight.T + block.mlp.fc1.bias)
            x = x + hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
        maps.append(x)
        if stage.downsample is not None:
            rows, columns, dim = x.shape
            merged = x.new_zeros(math.ceil(rows / 2), math.ceil(columns / 2), 4 * dim)
            for i, j in product(range(rows), range(columns)):
                place = (i % 2 + 2 * (j % 2)) * dim  # (0, 0), (1, 0), (0, 1), (1, 1)
                merged[i // 2, j // 2, place : place + dim] = x[i, j]
            x = stage.downsample.norm(merged) @ stage.downsample.reduction.weight.T
    return maps


@pytest.mark.parametrize(
    ("size", "window"),
    [
        ((16, 16), 4),  # grids of 8 x 8, then 4 x 4: equal to the window, so not shifted
        ((17, 21), 4),  # 9 x 11, then 5 x 6: padding in each block
        ((6, 29), 4),  # 3 x 15, then 2 x 8: one side is shorter than a window, the other is shifted
        ((20, 18), 3),  # 10 x 9: rows with padding, columns without
        ((3, 2), 4),  # 2 x 1, then 1 x 1
    ],
)
@pytest.mark.parametrize("strength", [1, 100])  # with strong biases the -100 between regions can be overcome
@torch.no_grad()
def test_stages_equal_the_formula_pixel_by_pixel(size, window, strength):
    encoder = small(window_size=window).double()
    for block in encoder.blocks:
        block.attn.relative_position_bias_table *= strength
    images = images_of(2, 3, *size).double()
    features, maps = encoder(images), encoder.pyramid(images)
    for image in range(2):
        expected = naive_maps(encoder, images[image])
        for found, stage in zip(maps, [expected[0], encoder.norm(expected[1])], strict=True):
            torch.testing.assert_close(found[image].permute(1, 2, 0), stage, **EXACT)
        tokens = encoder.norm(expected[1]).flatten(0, 1)
        torch.testing.assert_close(features.tokens.unflatten(0, (2, -1))[image], tokens, **EXACT)
        torch.testing.assert_close(features.pooled[image], tokens.mean(0), **EXACT)
        assert features.grids[image].tolist() == list(expected[1].shape[:2])


def test_windows_that_are_alike_need_no_mask():
    for grid, shifted, masked in [((8, 12), False, 0), ((8, 10), False, 1), ((4, 3), True, 0), ((4, 8), True, 1)]:
        windows = make_windows(grid, 4, shifted, torch.device("cpu"))
        assert (windows.mask is not None) == masked
        assert make_windows(grid, 4, shifted, torch.device("cpu")) is windows  # made once


@torch.no_grad()
def test_positions_are_resized_for_other_grids():
    encoder = small(absolute_positions=True)
    for size, grid in [((16, 16), (8, 8)), ((15, 16), (8, 8)), ((12, 20), (6, 10)), ((32, 8), (16, 4))]:
        table = F.interpolate(encoder.absolute_pos_embed.view(1, 8, 8, 24).permute(0, 3, 1, 2), grid, mode="bicubic")
        images = images_of(1, 3, *size)
        expected = encoder.patch_embed(images) + table.permute(0, 2, 3, 1)
        torch.testing.assert_close(first_input(encoder, images), expected, **CLOSE)


@torch.no_grad()
def test_scale_and_norms_that_can_be_left_out():
    images, encoder = images_of(2, 3, 16, 16), small(qk_scale=0.5)
    plain = small()
    plain.load_state_dict(encoder.state_dict())
    for block in plain.blocks:  # a factor on the logits may as well be in the queries; heads are 12 wide
        width = block.norm1.normalized_shape[0]
        block.attn.qkv.weight[:width] *= 0.5 * math.sqrt(12)
        block.attn.qkv.bias[:width] *= 0.5 * math.sqrt(12)
    torch.testing.assert_close(encoder(images).tokens, plain(images).tokens, **CLOSE)
    bare = small(patch_norm=False)
    torch.testing.assert_close(first_input(bare, images).permute(0, 3, 1, 2), bare.patch_embed.proj(images))


def test_windows_that_inference_made_serve_in_training():
    encoder, images = small().train(), images_of(1, 3, 50, 42)
    make_windows.cache_clear()
    with torch.inference_mode():
        expected = encoder(images).pooled
    pooled = encoder(images).pooled
    pooled.square().sum().backward()
    torch.testing.assert_close(pooled, expected, **CLOSE)  # another kernel where the bias needs a gradient
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())


def test_initial_values():
    torch.manual_seed(0)
    encoder = Swin(**VARIANTS["swin_tiny"], absolute_positions=True, mask_token=True)
    block = encoder.blocks[-1]
    for weight in (block.attn.qkv.weight, block.attn.relative_position_bias_table, encoder.absolute_pos_embed):
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert encoder.mask_token.std().item() == pytest.approx(0.02, rel=0.3)
    assert not any(layer.bias.any() for layer in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2))
