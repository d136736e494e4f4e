"""RoPE-ViT against formulas written out in float64."""

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.encoders import build
from tessera.encoders.blocks import MaskedKeyBiasLinear, SwiGLU, rotate, swiglu_width
from tessera.encoders.images import Mask, pack
from tessera.encoders.randomness import random_keys
from tessera.encoders.rope import RotaryPositions
from tessera.encoders.vit import ViT
from tests.encoders import helpers
from tests.encoders.helpers import images_of, scramble

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
SMALL = helpers.SMALL["rope_vit_small"]
small = partial(helpers.small, "rope_vit_small")


def naive_angles(grid, periods: Tensor, coordinates: str = "separate", factor=(1, 1), shift=(0, 0)) -> Tensor:
    """The angles of each patch, (N, d / 2) float64, patch by patch. Coordinates are shifted, then scaled."""
    h, w = grid
    sides = {"separate": (h, w), "max": (max(h, w),) * 2, "min": (min(h, w),) * 2}[coordinates]
    rows = []
    for place in product(range(h), range(w)):
        places = [(2 * (place[k] + 0.5) / sides[k] - 1 + float(shift[k])) * float(factor[k]) for k in range(2)]
        rows.append([2 * math.pi * at / float(period) for at in places for period in periods])
    return torch.tensor(rows, dtype=torch.float64)


def naive_rotation(x: Tensor, angles: Tensor) -> Tensor:
    """Multiply each pair of channels (k, k + d / 2) by a rotation matrix: (..., N, d)."""
    x, half = x.double(), x.shape[-1] // 2
    out = torch.empty_like(x)
    for n in range(len(angles)):
        for k in range(half):
            c, s = math.cos(angles[n, k]), math.sin(angles[n, k])
            matrix = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
            out[..., n, [k, k + half]] = x[..., n, [k, k + half]] @ matrix.T
    return out


@pytest.mark.parametrize("coordinates", ["separate", "max", "min"])
@pytest.mark.parametrize("grid", [(3, 5), (4, 4), (6, 2)])
def test_rotations_are_the_formula(grid, coordinates):
    rope = RotaryPositions(16, 1, coordinates=coordinates)
    torch.testing.assert_close(rope.periods.double(), 100.0 ** (torch.arange(4).double() * 2 / 8), rtol=1e-6, atol=0)
    (table,) = rope.table(grid, torch.ones(1, 2), torch.zeros(1, 2))
    angles = naive_angles(grid, rope.periods, coordinates)
    torch.testing.assert_close(table.double(), torch.stack([angles.sin(), angles.cos()]), rtol=0, atol=2e-6)
    x = images_of(2, 3, grid[0] * grid[1], 16)
    torch.testing.assert_close(rotate(x, table).double(), naive_rotation(x, angles), rtol=0, atol=1e-5)


def test_random_coordinates_are_shifted_then_scaled():
    rope = RotaryPositions(16, 2)
    factors, shifts = torch.tensor([[0.5, 2.0], [1.5, 0.7]]), torch.tensor([[0.1, -0.2], [0.0, 0.3]])
    for table, factor, shift in zip(rope.table((3, 4), factors, shifts), factors, shifts, strict=True):
        angles = naive_angles((3, 4), rope.periods, factor=factor, shift=shift)
        torch.testing.assert_close(table.double(), torch.stack([angles.sin(), angles.cos()]), rtol=0, atol=4e-6)


def test_swiglu_and_masked_key_bias_are_the_formulas():
    torch.manual_seed(0)
    layer, x = scramble(SwiGLU(12, 16)), images_of(5, 12)
    gate, value = (layer.w12.weight.double() @ x.double().T + layer.w12.bias.double()[:, None]).chunk(2)
    hidden = gate / (1 + torch.exp(-gate)) * value
    expected = layer.w3.weight.double() @ hidden + layer.w3.bias.double()[:, None]
    torch.testing.assert_close(layer(x).double(), expected.T, **CLOSE)
    assert [swiglu_width(*a) for a in [(384, 4), (1536, 4), (384, 6), (1280, 6), (4096, 3, 64)]] == [
        1024,
        4096,
        1536,
        5120,
        8192,
    ]
    linear = scramble(MaskedKeyBiasLinear(12, 18))
    bias = linear.bias.double() * torch.tensor([1.0] * 6 + [0.0] * 6 + [1.0] * 6)
    torch.testing.assert_close(linear(x).double(), x.double() @ linear.weight.double().T + bias, **CLOSE)


@torch.no_grad()
def test_the_bias_of_keys_has_an_effect_only_if_it_is_not_masked():
    images = images_of(2, 3, 32, 32)
    for masked in (True, False):
        encoder = small(mask_key_bias=masked)
        before = encoder(images).pooled
        for block in encoder.blocks:
            block.attn.qkv.bias[48:96] += 1
        assert torch.equal(encoder(images).pooled, before) == masked


@torch.no_grad()
def test_norms_by_role():
    encoder, views = small(cls_norm=True, local_cls_norm=True, rope_rescale=None), [images_of(2, 3, 32, 32)]
    views.append(images_of(3, 3, 16, 16))
    packed, seen = pack(views, 8), []
    handle = encoder.blocks[-1].register_forward_hook(lambda layer, args, out: seen.append(out))
    pooled = encoder(packed).pooled
    encoder.train()
    trained, plain = encoder(packed).pooled, encoder(views[1]).pooled
    handle.remove()
    tokens = [part[0] for part in seen[0].split([16 + 5] * 2 + [4 + 5] * 3)]  # class tokens before the norms
    expected = encoder.cls_norm(torch.stack(tokens))
    torch.testing.assert_close(pooled, expected, **CLOSE)
    expected[2:] = encoder.local_cls_norm(torch.stack(tokens[2:]))
    torch.testing.assert_close(trained, expected, **CLOSE)
    torch.testing.assert_close(plain, encoder.cls_norm(torch.stack(tokens[2:])), **CLOSE)


AUGMENTED: dict[str, Any] = {"rope_shift": 0.5, "rope_jitter": 1.5, "rope_rescale": 2.0}


def tables_of(encoder: ViT, images) -> list[Tensor]:
    """The rotations that each block gets."""
    seen = []
    handles = [b.register_forward_pre_hook(lambda block, args: seen.append(args[3])) for b in encoder.blocks]
    encoder(images)
    for handle in handles:
        handle.remove()
    return seen


@torch.no_grad()
def test_coordinates_change_for_each_block_and_size_anew_in_training_only():
    encoder, views = small(**AUGMENTED, registers=0), [images_of(2, 3, 32, 32), images_of(2, 3, 24, 24)]
    still = tables_of(encoder, views[0])
    assert all(torch.equal(table, still[0]) for table in still)
    encoder.train()
    packed, draws = pack(views, 8), []
    with random_keys(0, 5, torch.arange(2)):
        for table in tables_of(encoder, packed):
            globals_, locals_ = table[:, :34], table[:, 34:]  # two images of 1 + 16 tokens, two of 1 + 9
            assert torch.equal(globals_[:, :17], globals_[:, 17:])  # images of one size share the draw
            assert torch.equal(locals_[:, :10], locals_[:, 10:])
            angles = torch.atan2(table[0], table[1])[:, 6]  # angles of the longest period of the row stay below pi
            draws += [angles[1].item(), angles[35].item()]
    assert len(set(draws)) == 6
    for seed, step, samples, equal in ((0, 5, torch.tensor([7, 9]), True), (0, 6, torch.arange(2), False)):
        with random_keys(seed, step, samples):
            other = torch.cat(tables_of(encoder, packed))
        with random_keys(0, 5, torch.arange(2)):
            assert torch.equal(other, torch.cat(tables_of(encoder, packed))) == equal


@torch.no_grad()
def test_random_coordinates_are_uniform_and_log_uniform():
    rope = RotaryPositions(32, 1, shift=0.25, jitter=1.5, rescale=2.0)
    shifts, factors = [], []
    for step in range(4000):
        with random_keys(0, step, torch.arange(1)):
            drawn = rope.draw([(4, 4)])
        assert drawn is not None
        factors.append(drawn[0][0, 0].log())
        shifts.append(drawn[1][0, 0])
    shift, factor = torch.stack(shifts), torch.stack(factors)  # (4000, 2)
    assert shift.abs().max() <= 0.25
    assert shift.std(0).tolist() == pytest.approx([0.5 / math.sqrt(12)] * 2, rel=0.03)
    each, common = factor[:, 0] - factor[:, 1], factor.mean(1)
    assert each.std().item() == pytest.approx(math.log(1.5) * 2 / math.sqrt(12) * math.sqrt(2), rel=0.03)
    variance = math.log(2) ** 2 / 3 + math.log(1.5) ** 2 / 6
    assert common.std().item() == pytest.approx(math.sqrt(variance), rel=0.03)
    assert abs(common.mean().item()) < 0.03


@torch.no_grad()
def test_dropping_keeps_the_positions_of_visible_patches():
    encoder, images = small(), images_of(2, 3, 24, 40)
    hidden = torch.rand(30, generator=torch.Generator().manual_seed(0)) < 0.6
    mask = Mask.from_hidden(hidden, encoder.grids(images))
    assert len(set(mask.lengths.tolist())) == 2  # the images keep different numbers of tokens
    features = encoder(images, mask, drop=True)
    seen = []
    handle = encoder.blocks[0].register_forward_pre_hook(lambda block, args: seen.append((args[0], args[3])))
    encoder(images)
    handle.remove()
    x, rope = seen[0]
    start = 0
    for image in range(2):
        kept = [0, 1, 2, 3, 4] + [5 + i for i in range(15) if not hidden[15 * image + i]]
        y = x[image : image + 1, kept]
        for block in encoder.blocks:
            y = block(y, None, None, rope[:, kept])
        end = start + len(kept) - 5
        torch.testing.assert_close(features.tokens[start:end], encoder.norm(y[0, 5:]), **CLOSE)
        torch.testing.assert_close(features.pooled[image], encoder.norm(y[0, 0]), **CLOSE)
        start = end


@torch.no_grad()
def test_last_attention_and_initial_values():
    encoder, images = small(), images_of(2, 3, 24, 40)
    weights = encoder.last_attention(images)
    assert weights.shape == (2, 3, 20, 20)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 20))
    torch.manual_seed(0)
    fresh = build("rope_vit_small", depth=1)
    assert isinstance(fresh, ViT)
    assert fresh.cls_token.std().item() == pytest.approx(0.02, rel=0.2)
    assert fresh.reg_token is not None
    assert fresh.reg_token.std().item() == pytest.approx(0.02, rel=0.1)
    assert fresh.mask_token is not None
    assert not fresh.mask_token.any()
    assert fresh.patch_embed.proj.weight.abs().max().item() == pytest.approx(1 / math.sqrt(3 * 256), rel=0.01)
    assert fresh.blocks[0].attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert fresh.blocks[0].ls1.gamma.unique().tolist() == pytest.approx([1e-5])
