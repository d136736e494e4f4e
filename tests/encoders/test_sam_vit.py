"""SAM-ViT against transformers, timm, a plain ViT and formulas written out."""

from typing import Any

import pytest
import timm
import torch

from tessera.encoders.sam_vit import SAMViT, resize_relative
from tessera.encoders.vit import ViT
from tests.encoders.helpers import CLOSE, images_of, scramble

SMALL: dict[str, Any] = {
    "dim": 48,
    "depth": 3,
    "heads": 3,
    "out_dim": 20,
    "patch_size": 4,
    "image_size": 24,
    "window_size": 4,
}
SMALL |= {"global_blocks": (1,)}


def small(**settings) -> Any:
    return scramble(SAMViT(**SMALL | settings))


def state_of_transformers(oracle: torch.nn.Module) -> dict[str, torch.Tensor]:
    theirs = "patch_embed.projection layers. layer_norm1 layer_norm2 neck.conv1 neck.norm1 neck.conv2 neck.norm2"
    ours = "patch_embed.proj blocks. norm1 norm2 neck.0 neck.1 neck.2 neck.3"
    state = {}
    for name, tensor in oracle.state_dict().items():
        for old, new in zip(theirs.split(), ours.split(), strict=True):
            name = name.replace(old, new)
        state[name] = tensor
    return state


def transformers_sam(**settings) -> Any:
    sam = pytest.importorskip("transformers.models.sam.modeling_sam", reason="transformers is not installed")
    size = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "output_channels": 20}
    size |= {"patch_size": 4, "image_size": 24, "window_size": 4, "global_attn_indexes": [1]}
    config = sam.SamVisionConfig(**size | settings)
    config._attn_implementation = "eager"
    return scramble(sam.SamVisionModel(config)).vision_encoder


@pytest.mark.parametrize(
    ("settings", "ours", "size"),
    [
        ({}, {}, 24),  # 6 tokens a side in windows of 4: filled up to 8
        ({"window_size": 3}, {"window_size": 3}, 24),  # windows divide
        ({"window_size": 0}, {"window_size": 0}, 24),
        ({"qkv_bias": False, "mlp_dim": 96}, {"qkv_bias": False, "mlp_ratio": 2.0}, 24),
        ({"use_rel_pos": False}, {"relative_positions": False}, 24),
        ({"use_abs_pos": False}, {"absolute_positions": False}, 24),
    ],
)
@torch.no_grad()
def test_map_equals_transformers(settings, ours, size):
    oracle, encoder = transformers_sam(**settings), SAMViT(**SMALL | ours).eval()
    encoder.load_state_dict(state_of_transformers(oracle))
    images = images_of(2, 3, size, size)
    expected = oracle(images).last_hidden_state
    torch.testing.assert_close(encoder.feature_map(images), expected, **CLOSE)
    features = encoder(images)
    torch.testing.assert_close(features.tokens, expected.permute(0, 2, 3, 1).flatten(0, 2), **CLOSE)
    torch.testing.assert_close(features.pooled, expected.mean((2, 3)), **CLOSE)


@pytest.mark.parametrize("size", [(24, 24), (20, 36), (8, 60), (4, 4), (37, 29)])
@torch.no_grad()
def test_relative_tables_serve_other_sizes_as_published(size):
    options = {"img_size": 24, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 0}
    options |= {"window_size": 4, "global_attn_indexes": (1,), "neck_chans": 20, "norm_layer": None}
    oracle = timm.models.vision_transformer_sam.VisionTransformerSAM(**options, use_rel_pos=True, use_abs_pos=False)
    scramble(oracle)
    encoder = SAMViT(**SMALL, absolute_positions=False).eval()
    encoder.load_state_dict({name.replace("mlp.fc", "mlp.lin"): t for name, t in oracle.state_dict().items()})
    images = images_of(2, 3, *size)
    expected = oracle.forward_features(images[..., : size[0] // 4 * 4, : size[1] // 4 * 4])
    torch.testing.assert_close(encoder.feature_map(images), expected, **CLOSE)
    torch.testing.assert_close(encoder(images).pooled, expected.mean((2, 3)), **CLOSE)
    assert encoder(images).grids.tolist() == [[size[0] // 4, size[1] // 4]] * 2


@pytest.mark.parametrize("grid", [(2, 5), (4, 3)])  # the tables are for 4 x 3
@torch.no_grad()
def test_attention_is_the_formula(grid):
    attn = small(image_size=(16, 12)).double().blocks[1].attn
    x = images_of(2, *grid, 48).double()
    tables = []
    for table, n in zip((attn.rel_pos_h, attn.rel_pos_w), grid, strict=True):
        places = ((torch.arange(2 * n - 1) + 0.5) * len(table) / (2 * n - 1) - 0.5).clamp(0, len(table) - 1)
        low, part = places.floor().long(), (places % 1)[:, None]
        tables.append(table[low] * (1 - part) + table[(low + 1).clamp(max=len(table) - 1)] * part)
    qkv = x.flatten(1, 2) @ attn.qkv.weight.T + attn.qkv.bias
    count, expected = grid[0] * grid[1], torch.zeros(2, grid[0] * grid[1], 48).double()
    for image in range(2):
        for head in range(3):
            q, k, v = (qkv[image, :, start + 16 * head : start + 16 * head + 16] for start in (0, 48, 96))
            logits = torch.zeros(count, count).double()
            for i in range(count):
                for j in range(count):
                    (r, c), (r2, c2) = divmod(i, grid[1]), divmod(j, grid[1])
                    place = tables[0][r - r2 + grid[0] - 1] + tables[1][c - c2 + grid[1] - 1]
                    logits[i, j] = q[i] @ k[j] / 4 + q[i] @ place
            weights = logits.exp() / logits.exp().sum(1, keepdim=True)
            expected[image, :, 16 * head : 16 * head + 16] = weights @ v
    expected = expected @ attn.proj.weight.T + attn.proj.bias
    close = {"rtol": 1e-10, "atol": 1e-10} if grid == (4, 3) else {"rtol": 1e-5, "atol": 1e-5}  # resized in float32
    torch.testing.assert_close(attn(x).flatten(1, 2), expected, **close)


def test_tables_are_resized_linearly():
    table = images_of(7, 5)
    assert resize_relative(table, 4) is table
    expected = torch.nn.functional.interpolate(table.T[None], size=11, mode="linear")[0].T
    assert torch.equal(resize_relative(table, 6), expected)
    assert resize_relative(table, 1).shape == (1, 5)
    assert resize_relative(table.half(), 6).dtype == torch.float16


@torch.no_grad()
def test_absolute_positions_are_resized_by_the_rule_of_mae():
    encoder, images = small(), images_of(2, 3, 22, 40)
    seen = []
    encoder.blocks[0].register_forward_pre_hook(lambda block, args: seen.append(args[0]))
    encoder(images)
    table = torch.nn.functional.interpolate(encoder.pos_embed.permute(0, 3, 1, 2), size=(5, 10), mode="bicubic")
    expected = encoder.patch_embed.proj(images) + table
    torch.testing.assert_close(seen[0], expected.permute(0, 2, 3, 1), **CLOSE)
    encoder = small(image_size=(22, 40))
    assert encoder.pos_embed.shape == (1, 5, 10, 48)
    assert [block.attn.rel_pos_h.shape[0] for block in encoder.blocks] == [7, 9, 7]
    assert [block.attn.rel_pos_w.shape[0] for block in encoder.blocks] == [7, 19, 7]


@pytest.mark.parametrize("windows", [{"window_size": 0}, {"global_blocks": (0, 1, 2)}])
@torch.no_grad()
def test_global_blocks_without_relative_positions_are_those_of_a_plain_vit(windows):
    encoder = small(**windows)
    for block in encoder.blocks:
        block.attn.rel_pos_h.zero_()
        block.attn.rel_pos_w.zero_()
    size = {name: SMALL[name] for name in ("dim", "depth", "heads", "patch_size", "image_size")}
    plain = ViT(**size, class_token=False, pool="mean", interpolation="mae").eval()
    state = {name.replace("mlp.lin", "mlp.fc"): tensor for name, tensor in encoder.state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if "rel_pos" not in name and "neck" not in name}
    state["pos_embed"] = state["pos_embed"].flatten(1, 2)
    assert plain.load_state_dict(state, strict=False).missing_keys == ["fc_norm.weight", "fc_norm.bias"]
    outputs = []
    for block in plain.blocks:
        block.register_forward_hook(lambda block, args, output: outputs.append(output))
    images = images_of(2, 3, 24, 36)
    plain(images)
    for ours, theirs in zip(encoder.block_maps(images, 3), outputs, strict=True):
        torch.testing.assert_close(ours.flatten(2).transpose(1, 2), theirs, rtol=1e-5, atol=1e-5)
    neckless = encoder.block_maps(images)
    assert torch.equal(encoder.neck(neckless[0]), encoder.feature_map(images))
    assert neckless[0].shape == (2, 48, 6, 9)


@torch.no_grad()
def test_windows_keep_apart_and_global_blocks_do_not():
    for blocks, reach in [((), 4), ((0, 1, 2), 7)]:
        encoder, images = small(global_blocks=blocks), images_of(1, 3, 28, 28)
        changed = images.clone()
        changed[..., :4, :4] += 1
        moved = (encoder.block_maps(changed)[0] != encoder.block_maps(images)[0]).any(1)[0]
        assert moved[:reach, :reach].all()
        assert moved.sum() == reach * reach


def test_positions_take_one_tensor_of_all_pairs():
    """The sum of both terms is laid out as attention reads it, so it is never copied."""
    bias = small().blocks[1].attn._bias(torch.randn(2, 3, 5, 7, 16))
    assert bias.shape == (2, 3, 35, 35)
    assert bias.is_contiguous()
    assert bias._base.shape == (2, 3, 5, 7, 5, 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 5}, "dim. of 48 does not split into 5 heads"),
        ({"image_size": (24, 3)}, "24 x 3 pixels is smaller than a patch of 4"),
        ({"global_blocks": (1, 3)}, r"block indices from 0 to 2, not \(1, 3\)"),
        ({"window_size": -1}, "window_size must be at least 0"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"out_dim": 0}, "out_dim must be at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SAMViT(**SMALL | settings)


def test_maps_that_cannot_be_are_refused():
    encoder, images = small(), images_of(2, 3, 24, 24)
    for ask in (encoder.feature_map, encoder.block_maps):
        with pytest.raises(ValueError, match="smaller than one patch"):
            ask(images[..., :3])
    with pytest.raises(ValueError, match=r"4 blocks .* must be from 1 to 3"):
        encoder.block_maps(images, 4)
    with pytest.raises(NotImplementedError, match="block_maps"):
        encoder.intermediate(images)
