"""NaViT against the formula of one image, written out in float64."""

import math
from dataclasses import replace

import pytest
import torch

from tessera.encoders import navit, packed_attention
from tessera.encoders.images import Mask, best_fit, pack
from tessera.encoders.navit import NaViT
from tests.encoders.helpers import CLOSE, mask_of
from tests.encoders.test_navit import images_of, small


def formula(encoder: NaViT, image: torch.Tensor, hidden=None, drop=False) -> tuple[torch.Tensor, torch.Tensor]:
    """Pooled (D,) and tokens (N, D) of one image (1, C, H, W) by the formula in float64."""
    w = {name: value.detach().double() for name, value in encoder.state_dict().items()}
    patch, (rows, columns) = encoder.stride, (side // encoder.stride for side in image.shape[-2:])

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[name + ".weight"]

    def entry(table, place, side):
        if not encoder.fractional:
            return table[place]
        at = place / side * len(table)
        low, rest = int(at + 1e-9), at - int(at + 1e-9)
        return (1 - rest) * table[low] + rest * table[min(low + 1, len(table) - 1)]

    def attend(x, context, name):
        q, (k, v) = x @ w[f"{name}.q.weight"].T, (context @ w[f"{name}.kv.weight"].T).chunk(2, -1)
        heads, _, d = w[f"{name}.q_norm.gamma"].shape
        outs = []
        for head in range(heads):
            a, b, c = (y[:, head * d : (head + 1) * d] for y in (q, k, v))
            a = a / a.norm(dim=-1, keepdim=True) * math.sqrt(d) * w[f"{name}.q_norm.gamma"][head]
            b = b / b.norm(dim=-1, keepdim=True) * math.sqrt(d) * w[f"{name}.k_norm.gamma"][head]
            weights = (a @ b.T).exp()
            outs.append(weights / weights.sum(-1, keepdim=True) @ c)
        return torch.cat(outs, -1) @ w[f"{name}.proj.weight"].T

    tokens = []
    for place in range(rows * columns):
        row, column = divmod(place, columns)
        pixels = image[0, :, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        x = norm(pixels.permute(1, 2, 0).flatten().double(), "patch_embed.norm1")
        x = norm(w["patch_embed.proj.weight"] @ x + w["patch_embed.proj.bias"], "patch_embed.norm2")
        if hidden is not None and hidden[place]:
            if drop:
                continue
            x = w["mask_token"][0]
        tokens.append(x + entry(w["pos_embed_rows"], row, rows) + entry(w["pos_embed_columns"], column, columns))
    x = torch.stack(tokens)
    for i in range(len(encoder.blocks)):
        inside = norm(x, f"blocks.{i}.norm1")
        x = x + attend(inside, inside, f"blocks.{i}.attn")
        y = norm(x, f"blocks.{i}.norm2") @ w[f"blocks.{i}.mlp.fc1.weight"].T + w[f"blocks.{i}.mlp.fc1.bias"]
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
        x = x + y @ w[f"blocks.{i}.mlp.fc2.weight"].T + w[f"blocks.{i}.mlp.fc2.bias"]
    x = norm(x, "norm")
    if "attn_pool.query" not in w:
        return x.mean(0), x
    query = w["attn_pool.query"][None]
    return (query + attend(norm(query, "attn_pool.norm"), x, "attn_pool.attn"))[0], x


def assert_formula(encoder: NaViT, images: list[torch.Tensor], mask: Mask | None = None, drop: bool = False):
    packed = pack(images, encoder.stride)
    features = encoder(packed, mask, drop=drop)
    hidden = [None] * len(images) if mask is None else mask.hidden.split(packed.lengths.tolist())
    expected = [formula(encoder, *pair, drop) for pair in zip(images, hidden, strict=True)]
    torch.testing.assert_close(features.pooled.double(), torch.stack([pooled for pooled, _ in expected]), **CLOSE)
    torch.testing.assert_close(features.tokens.double(), torch.cat([tokens for _, tokens in expected]), **CLOSE)
    assert torch.equal(features.grids, packed.grids)


@pytest.mark.parametrize("settings", [{}, {"pool": "mean"}, {"positions": "fractional"}, {"head_dim": None}])
@torch.no_grad()
def test_is_the_formula_of_each_image(settings):
    images = images_of()
    if "positions" in settings:
        images += images_of([(32, 12), (20, 40)])  # no table of absolute positions goes as far
    encoder = small(**settings)
    assert_formula(encoder, images)
    assert (encoder.attn_pool is None) == ("pool" in settings)


@pytest.mark.parametrize("settings", [{}, {"pool": "mean"}, {"positions": "fractional"}])
@torch.no_grad()
def test_hidden_tokens_are_dropped_at_other_counts_in_each_image_or_replaced(settings):
    images = images_of()
    grids = pack(images, 4).grids
    mask = mask_of(grids, [17, 0, 0, 7, 2])
    assert mask.lengths.tolist() == [7, 1, 6, 5, 2]
    encoder = small(mask_token=True, **settings)
    assert_formula(encoder, images, mask, drop=True)
    assert_formula(encoder, images, mask)
    assert_formula(encoder, images, mask_of(grids, [21, 1, 6, 0, 3]))  # in place, an image may be hidden altogether


def test_the_encoder_gives_attention_the_sequences_of_its_images(monkeypatch):
    images, encoder = images_of(), small()
    order = best_fit(pack(images, 4).lengths.tolist(), 24)
    assert [len(sequence) for sequence in order] == [1, 4]
    images = [images[i] for sequence in order for i in sequence]
    expected = encoder(pack(images, 4))
    packed = replace(pack(images, 4), sequences=torch.tensor([len(sequence) for sequence in order]))

    made = []

    def in_sequences(q, k, v, *, scale, segments):
        made.append(segments)
        return packed_attention.attention_in_sequences(q, k, v, scale, segments)

    monkeypatch.setattr(navit, "attention", in_sequences)
    features = encoder(packed)
    assert len(made) == 4
    assert made[0] is made[1] is made[2]  # what follows from the batch is made once for all blocks
    torch.testing.assert_close(features.pooled, expected.pooled, rtol=0, atol=5e-6)
    torch.testing.assert_close(features.tokens, expected.tokens, rtol=0, atol=5e-6)
    features.pooled.square().sum().backward()
    assert all(weight.grad.isfinite().all() for weight in encoder.parameters())
    mask = mask_of(packed.grids, [17, 11, 3, 3, 0])
    hidden = mask.hidden.split(packed.lengths.tolist())
    dropped = [formula(encoder, *pair, drop=True)[1] for pair in zip(images, hidden, strict=True)]
    torch.testing.assert_close(encoder(packed, mask, drop=True).tokens.double(), torch.cat(dropped), **CLOSE)
