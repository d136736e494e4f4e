"""DINOv2's ViT (2304.07193) against timm, transformers and the published code written out."""

import math
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.encoders import build, load_weights
from tessera.encoders.images import Mask
from tests.encoders.helpers import images_of, scramble

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
SMALL: dict[str, Any] = {"dim": 48, "depth": 3, "heads": 3, "image_size": 56, "layer_scale": 0.5, "mask_token": False}
TIMM: dict[str, Any] = {"img_size": 56, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 0}


def small(registers: bool, **settings) -> Any:
    encoder = build(f"vit_small_14_dinov2{'_registers' if registers else ''}", **SMALL | settings)
    return scramble(encoder)


def published_positions(table: Tensor, grid: tuple[int, int], registers: bool) -> Tensor:
    """Resize a square table (1, N, D) as the published models do, with their arguments of `interpolate`."""
    side = math.isqrt(table.shape[1])
    maps = table.transpose(1, 2).unflatten(2, (side, side))
    if registers:
        maps = F.interpolate(maps, size=grid, mode="bicubic", antialias=True)
    else:
        maps = F.interpolate(maps, scale_factor=tuple((n + 0.1) / side for n in grid), mode="bicubic")
    return maps.flatten(2).transpose(1, 2)


@pytest.mark.parametrize("size", [(56, 56), (28, 28), (70, 42), (14, 224)])
@pytest.mark.parametrize("registers", [False, True])
@torch.no_grad()
def test_it_equals_timm_with_published_positions(registers, size):
    model = "vit_small_patch14_reg4_dinov2" if registers else "vit_small_patch14_dinov2"
    oracle = scramble(timm.create_model(model, **TIMM))
    encoder, images = small(registers), images_of(2, 3, *size)
    load_weights(encoder, oracle.state_dict())
    prefix, table = oracle.pos_embed.tensor_split([0 if registers else 1], dim=1)
    grid = (size[0] // 14, size[1] // 14)
    if size != (56, 56):
        table = published_positions(table, grid, registers)
        resized = timm.create_model(model, **TIMM | {"img_size": size}).eval()
        resized.load_state_dict(oracle.state_dict() | {"pos_embed": torch.cat([prefix, table], 1)})
        oracle = resized
    tokens, features = oracle.forward_features(images), encoder(images)
    torch.testing.assert_close(features.pooled, tokens[:, 0], **CLOSE)
    torch.testing.assert_close(features.tokens, tokens[:, oracle.num_prefix_tokens :].flatten(0, 1), **CLOSE)


def of_transformers(registers: bool, **options) -> Any:
    name, kind = ("dinov2_with_registers", "WithRegisters") if registers else ("dinov2", "")
    models = pytest.importorskip(f"transformers.models.{name}", reason="transformers is not installed")
    size = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 56, "patch_size": 14}
    size |= {} if registers else {"use_mask_token": True}
    config = getattr(models, f"Dinov2{kind}Config")(**size | options)
    return scramble(getattr(models, f"Dinov2{kind}Model")(config))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("registers", [False, True])
@torch.no_grad()
def test_it_equals_transformers_with_and_without_masks(registers, gated):
    oracle = of_transformers(registers, use_swiglu_ffn=gated)
    # transformers resizes positions without the published offset, as MAE does
    rule = {} if registers else {"interpolation": "mae"}
    encoder = small(registers, mask_token=True, mlp="swiglu" if gated else "gelu", **rule)
    report = load_weights(encoder, oracle.state_dict())
    assert (report.fresh, report.left_out, report.resized) == ([], [], [])
    for size in ((56, 56), (42, 28)):
        images = images_of(2, 3, *size)
        hidden = torch.rand(2 * size[0] * size[1] // 196, generator=torch.Generator().manual_seed(0)) < 0.3
        for mask in (None, Mask.from_hidden(hidden, encoder.grids(images))):
            masked = None if mask is None else hidden.view(2, -1)
            expected, features = oracle(images, bool_masked_pos=masked), encoder(images, mask)
            prefix = 5 if registers else 1
            torch.testing.assert_close(features.pooled, expected.pooler_output, **CLOSE)
            torch.testing.assert_close(features.tokens, expected.last_hidden_state[:, prefix:].flatten(0, 1), **CLOSE)
            if registers and mask is None:
                (found,) = encoder.register_tokens(images)
                torch.testing.assert_close(found, expected.last_hidden_state[:, 1:5], **CLOSE)
