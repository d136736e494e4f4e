"""SAM-ViT against timm at sizes that its tables were not made for, and its own promises."""

from functools import partial

import pytest
import timm
import torch

from tessera.encoders.sam_vit import SAMViT
from tests.encoders import helpers
from tests.encoders.helpers import CLOSE, images_of, scramble

SMALL = helpers.SMALL["sam_vit_b"]
small = partial(helpers.small, "sam_vit_b")


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


@torch.no_grad()
def test_the_neck_follows_the_last_block():
    encoder, images = small(), images_of(2, 3, 24, 36)
    maps = encoder.block_maps(images, 2)
    assert [each.shape for each in maps] == [(2, 48, 6, 9)] * 2
    assert torch.equal(encoder.neck(maps[-1]), encoder.feature_map(images))


def test_maps_that_cannot_be_are_refused():
    encoder, images = small(), images_of(2, 3, 24, 24)
    for ask in (encoder.feature_map, encoder.block_maps):
        with pytest.raises(ValueError, match="smaller than one patch"):
            ask(images[..., :3])
    with pytest.raises(ValueError, match=r"4 blocks .* must be from 1 to 3"):
        encoder.block_maps(images, 4)
    with pytest.raises(NotImplementedError, match="block_maps"):
        encoder.intermediate(images)
