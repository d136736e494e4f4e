"""NaViT: dropping tokens, packing, refusing. The formula is in test_navit_formula.py."""

from typing import Any

import pytest
import torch

from tessera.encoders import navit
from tessera.encoders.images import Mask, PackedImages, pack
from tessera.encoders.navit import NaViT
from tests.encoders.helpers import mask_of, scramble

SMALL: dict[str, Any] = {
    "dim": 48,
    "depth": 3,
    "heads": 3,
    "head_dim": 20,
    "mlp_ratio": 2.0,
    "patch_size": 4,
    "image_size": (16, 24),
}
SIZES = ((16, 24), (4, 4), (12, 8), (8, 24), (16, 4))  # 24, 1, 6, 12 and 4 tokens


def small(**settings) -> Any:
    return scramble(NaViT(**SMALL | settings))


def images_of(sizes=SIZES, channels: int = 3, seed: int = 1) -> list[torch.Tensor]:
    """(1, C, H, W) each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, channels, *size, generator=generator) for size in sizes]


def kept(encoder: NaViT, images: PackedImages) -> tuple[list[int], torch.Tensor]:
    """Tokens of each image that reach the first block in training, and which of all tokens they are."""
    seen = []
    handle = encoder.blocks[0].register_forward_pre_hook(lambda block, args: seen.append(args))
    tokens = encoder.train()(images).tokens
    encoder.eval()(images)
    handle.remove()
    (some, segments, _), (full, _, _) = seen
    assert len(tokens) == len(some) == int(segments.lengths.sum())
    distances = (some[:, None] - full).abs().amax(2)  # a linear map of fewer rows may differ in the last bit
    places = distances.argmin(1).tolist()
    assert ((distances < 1e-3).sum(1) == 1).all()
    assert places == sorted(set(places))
    owner = torch.repeat_interleave(images.lengths)
    assert torch.equal(segments.image_ids, owner[places])
    return segments.lengths.tolist(), torch.tensor(places)


@torch.no_grad()
def test_token_drop_leaves_out_its_share_of_each_image_in_training_only():
    packed = pack(images_of(), 4)  # of 24, 1, 6, 12 and 4 tokens
    torch.manual_seed(0)
    counts, places = kept(small(token_drop=0.3), packed)
    assert counts == [17, 1, 4, 8, 3]  # 16.8, 0.7, 4.2, 8.4 and 2.8
    torch.manual_seed(0)
    assert torch.equal(kept(small(token_drop=0.3), packed)[1], places)
    torch.manual_seed(1)
    assert not torch.equal(kept(small(token_drop=0.3), packed)[1], places)
    assert kept(small(token_drop=0.99), packed)[0] == [1] * 5
    # 0.1 at none, 0.7 at 24: 0.7, 0.125, 0.25, 0.4 and 0.2 of 24, 1, 6, 12 and 4
    assert kept(small(token_drop=0.1, token_drop_full=0.7), packed)[0] == [7, 1, 4, 7, 3]
    assert kept(small(token_drop_full=0.5), packed)[0] == [12, 1, 5, 9, 4]
    large = pack(images_of([(32, 24)]), 4)  # more than fills the tables
    assert kept(small(token_drop_full=0.5, positions="fractional"), large)[0] == [24]
    assert kept(small(), packed)[0] == [24, 1, 6, 12, 4]
    encoder = small(token_drop=0.3)
    assert len(encoder(packed).tokens) == 47  # not in evaluation


def test_token_drop_keeps_every_token_equally_often():
    torch.manual_seed(0)
    lengths, times = torch.tensor([6, 3, 9]), torch.zeros(18)
    for _ in range(2000):
        visible, counts = navit._random_tokens(lengths, torch.tensor([0.5, 0.5, 0.6]).double())
        assert counts.tolist() == [3, 2, 4]
        times[visible] += 1
    expected = torch.tensor([1 / 2] * 6 + [2 / 3] * 3 + [4 / 9] * 9) * 2000
    assert (times - expected).abs().max() < 100  # 4.5 standard deviations


@torch.no_grad()
def test_token_drop_computes_what_dropping_computes():
    packed, encoder = pack(images_of(), 4), small(token_drop=0.4)
    torch.manual_seed(0)
    _, places = kept(encoder, packed)
    torch.manual_seed(0)
    features = encoder.train()(packed)
    hidden = torch.ones(47, dtype=torch.bool).index_fill(0, places, False)
    expected = encoder.eval()(packed, Mask.from_hidden(hidden, packed.grids), drop=True)
    assert torch.equal(features.tokens, expected.tokens)
    assert torch.equal(features.pooled, expected.pooled)
    assert torch.equal(features.grids, packed.grids)


@pytest.mark.parametrize("positions", ["absolute", "fractional"])
@pytest.mark.parametrize("pool", ["attention", "mean"])
def test_nothing_is_read_from_the_device(positions, pool):
    """Tensors on the meta device have no values, so what waits for a device fails there."""
    encoder = small(mask_token=True, positions=positions, pool=pool, drop_path=0.1).to("meta")
    packed = pack(images_of(), 4)
    mask = mask_of(packed.grids, [17, 0, 0, 7, 2]).to("meta")
    packed = packed.to("meta")
    for training in (True, False):
        encoder.train(training)
        assert encoder(packed, mask).tokens.shape == (47, 48)
        assert encoder(packed, mask, drop=True).tokens.shape == (21, 48)
    encoder.token_drop = encoder.token_drop_full = 0.3
    features = encoder.train()(packed)
    assert features.tokens.shape == (33, 48)
    assert features.pooled.shape == (5, 48)
    assert features.pooled.is_meta


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            torch.zeros(1, 3, 14, 24),
            "14 x 24 pixels do not divide into patches of 4 x 4 pixels. Make the images 12 or 16 pixels high and 24",
        ),
        (
            torch.zeros(1, 3, 20, 24),
            r"5 x 6 patches .* tables of 4 rows and 6 columns.* image_size=\(20, 24\).*fraction",
        ),
        (pack(images_of([(16, 8), (8, 36)]), 4), r"up to 4 x 9 patches .* image_size=\(16, 36\)"),
    ],
)
def test_images_that_do_not_fit_are_refused(images, message):
    with pytest.raises(ValueError, match=message):
        small()(images)


def test_masks_and_token_drop_are_not_combined():
    packed = pack(images_of(), 4)
    mask = mask_of(packed.grids, [17, 0, 0, 7, 2])
    encoder = small(token_drop_full=0.1, mask_token=True)
    for drop in (False, True):
        with pytest.raises(ValueError, match=r"mask cannot be combined with token_drop. Set token_drop .* to 0"):
            encoder.train()(packed, mask_of(packed.grids, [17, 0, 0, 7, 2]), drop=drop)
    assert len(encoder.eval()(packed, mask).tokens) == 47
