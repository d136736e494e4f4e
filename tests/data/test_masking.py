"""Masks: how many, where, and from which numbers."""

import numpy as np
import pytest
import torch
from scipy import stats

from tessera.data.collate import Collator, Packing, Sample, collate
from tessera.data.crops import MultiCrop, MultiCropConfig, NativeCrop, RandomCrop, RandomCropConfig, native_grid
from tessera.data.masking import (
    MASKS,
    MaskedCrop,
    MaskedMultiCrop,
    block_mask,
    block_search_mask,
    hidden_count,
    random_mask,
)
from tests.data.batches import noise, rng


def crop(transform, image: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """(3, h, w): the one crop of an image."""
    images = collate(transform, [image], [rng(seed)]).views[0].images
    return images[0] if isinstance(images, torch.Tensor) else images.unpack()[0]


@pytest.mark.parametrize(
    ("tokens", "ratio", "hidden"),
    [(49, 0.75, 37), (196, 0.75, 147), (16, 0.5, 8), (4, 0.9, 3), (4, 0.01, 1), (2, 0.99, 1)],
)
def test_numbers_of_hidden_tokens(tokens, ratio, hidden):
    assert hidden_count(tokens, ratio) == hidden  # tokens - int(tokens * (1 - ratio)) within 1 and tokens - 1


def test_a_single_token_is_refused():
    with pytest.raises(ValueError, match="only one token, and hiding this token would leave no visible token"):
        hidden_count(1, 0.75)


@pytest.mark.parametrize("kind", list(MASKS))
@pytest.mark.parametrize("grid", [(14, 14), (3, 9), (1, 5), (2, 1)])
def test_masks_hide_equal_numbers_and_are_reproducible(kind, grid):
    for ratio in (0.3, 0.75):
        masks = [MASKS[kind](grid, ratio, rng(seed)) for seed in range(50)]
        assert {mask.shape for mask in masks} == {grid}
        assert {int(mask.sum()) for mask in masks} == {hidden_count(grid[0] * grid[1], ratio)}
        assert np.array_equal(masks[7], MASKS[kind](grid, ratio, rng(7)))
        assert len({mask.tobytes() for mask in masks}) > 1


def test_random_masks_hide_every_token_and_every_pair_alike():
    """Chi-squared at one in a thousand, seed fixed."""
    generator, draws = rng(), 6000
    masks = np.stack([random_mask((3, 4), 0.5, generator).ravel() for _ in range(draws)])
    assert stats.chisquare(masks.sum(0)).pvalue > 1e-3
    pairs = [(masks[:, i] & masks[:, j]).sum() for i in range(12) for j in range(i)]
    np.testing.assert_allclose(np.array(pairs) / draws, 6 * 5 / (12 * 11), atol=4 * 0.5 / np.sqrt(draws))


def test_block_masks_are_blocks():
    """Hidden tokens have far more hidden neighbours than by chance, which would be the ratio."""
    shares = []
    for seed in range(100):
        hidden = block_mask((14, 14), 0.4, rng(seed))
        shares.append((hidden[:, 1:] & hidden[:, :-1]).sum() / hidden[:, :-1].sum())
    assert np.mean(shares) > 0.75


def test_masked_crop_is_crop_and_mask():
    config = RandomCropConfig(size=32)
    masked = MaskedCrop(RandomCrop(config), 8, "random", 0.75)
    assert torch.equal(crop(masked, noise(50, 70)), crop(RandomCrop(config), noise(50, 70)))
    (drawn,) = masked.draw((50, 70), rng())
    (hidden,) = drawn.masks
    assert hidden.shape == (1, 4, 4)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (68, 56), (100, 1000), (224, 224)])
def test_native_crops_keep_the_aspect_ratio(height, width):
    transform = NativeCrop(RandomCropConfig(size=224), 16, 128, 1024)
    wanted = min(max(height / width, 1 / 4), 4)
    for seed in range(20):
        rows, columns = (side // 16 for side in transform.draw((height, width), rng(seed))[0].size)
        assert 30 <= rows * columns <= 196
        assert (rows - 1) / (columns + 1) < wanted < (rows + 1) / max(columns - 1, 0.5)


def test_native_crop_shows_the_box_it_says(monkeypatch):
    """With the whole image as its box, it is the image resized."""
    image = noise(60, 90)
    plain = crop(NativeCrop(RandomCropConfig(size=48, scale=(1.0, 1.0), flip=0.0), 8, 48, 64), image)
    assert plain.shape == (3, 40, 56)  # 5 x 7 = 35 of at most 36 tokens
    resized = torch.nn.functional.interpolate(image[None], size=(40, 56), mode="bicubic", antialias=True)
    assert (plain.int() - resized[0].int()).abs().max() <= 1
    mirrored = crop(NativeCrop(RandomCropConfig(size=48, scale=(1.0, 1.0), flip=1.0), 8, 48, 64), image)
    assert torch.equal(mirrored, plain.flip(2))


def test_native_grid_uses_the_budget():
    for height, width in ((3, 4), (1, 1), (9, 16), (1, 4), (4, 1)):
        for tokens in (16, 49, 196, 256):
            rows, columns = native_grid(height, width, tokens)
            assert 0.7 * tokens < rows * columns <= tokens
    assert native_grid(1, 1, 196) == (14, 14)
    assert native_grid(1, 1, 1) == (1, 1)


def test_packed_batches_keep_names_labels_and_masks():
    transform = MaskedCrop(NativeCrop(RandomCropConfig(size=32), 4, 16, 100), 4, "random", 0.75)
    assert transform.packing == Packing(4, 100)
    images = [noise(40 + 9 * i, 90 - 7 * i, i) for i in range(9)]
    samples = [
        Sample("abcdefghi"[i], image, transform.draw((image.shape[1], image.shape[2]), rng(i)), i)
        for i, image in enumerate(images)
    ]
    batch = Collator(transform, 9)(samples)
    (view,) = batch.views
    packed, (mask,) = view.images, view.masks
    assert not isinstance(packed, torch.Tensor)
    assert packed.sequences is not None
    assert len(batch) == 9
    assert batch.labels is not None
    assert [list("abcdefghi")[i] for i in batch.labels.tolist()] == batch.keys
    masks = mask.hidden.split(packed.lengths.tolist())
    for image, h, label in zip(packed.unpack(), masks, batch.labels.tolist(), strict=True):
        assert torch.equal(image, crop(transform, images[label], label))
        ((hidden,),) = (
            one.masks for one in transform.draw((images[label].shape[1], images[label].shape[2]), rng(label))
        )
        assert np.array_equal(h.numpy(), hidden.ravel())
    sums = [int(part.sum()) for part in packed.lengths.split(packed.sequences.tolist())]
    assert max(sums) <= 100
    assert sum(sums) == len(packed.patches)


def test_searched_blocks_are_those_of_dinov2():
    """Facts measured on the official code: shares of masks and of places at 77 of 256 tokens."""
    masks = np.stack([block_search_mask((16, 16), 77, rng(seed), fill=False) for seed in range(2000)])
    counts = masks.sum((1, 2))
    assert counts.max() == 77
    assert counts.min() >= 74  # the search gives up at most a few tokens early
    assert 0.9 <= (counts == 77).mean() <= 0.98
    places = masks.mean(0)
    assert np.mean(places[[0, 0, -1, -1], [0, -1, 0, -1]]) == pytest.approx(0.03, abs=0.015)
    assert np.mean([places[0, 7:9], places[-1, 7:9], places[7:9, 0], places[7:9, -1]]) == pytest.approx(0.14, abs=0.02)
    assert places[7:9, 7:9].mean() == pytest.approx(0.55, abs=0.03)
    filled = np.stack([block_search_mask((16, 16), 77, rng(seed), fill=True) for seed in range(200)])
    assert set(filled.sum((1, 2)).tolist()) == {77}
    assert (filled >= masks[:200]).all()  # single tokens are only added


@pytest.mark.parametrize("grid", [(2, 2), (1, 7), (4, 4)])
def test_searched_blocks_hide_a_token_of_the_smallest_grids(grid):
    for wanted in (1, grid[0] * grid[1] // 2):
        for seed in range(20):
            assert 1 <= block_search_mask(grid, wanted, rng(seed), fill=False).sum() <= wanted
            assert block_search_mask(grid, wanted, rng(seed), fill=True).sum() == wanted


def test_half_of_the_global_crops_are_masked():
    config = MultiCropConfig(global_size=32, local_size=16, local_crops=3)
    plain = MultiCrop(config)
    transform = MaskedMultiCrop(plain, (8, 8), 0.5, (0.1, 0.5), fill=True)
    batch = collate(transform, [noise(40, 60, seed) for seed in range(40)], [rng(seed) for seed in range(40)])
    (mask,) = batch.views[0].masks
    hidden = mask.hidden.view(2, 40, 64).sum(2)  # crop-major
    assert ((hidden > 0).sum(0) == 1).all()
    assert 12 <= (hidden[0] > 0).sum() <= 28  # either crop
    assert 6 <= hidden[hidden > 0].min() <= 8
    assert 28 <= hidden[hidden > 0].max() <= 31  # int(64 * share) with shares below 0.5
    assert batch.views[1].masks == ()
    without = collate(plain, [noise(40, 60, 5)], [rng(5)])  # masks do not change what is drawn for the crops
    assert isinstance(batch.views[0].images, torch.Tensor)
    assert isinstance(without.views[0].images, torch.Tensor)
    assert torch.equal(batch.views[0].images[5::40], without.views[0].images)
    for probability, crops in ((0.0, {0}), (1.0, {2}), (0.25, {0, 1}), (0.75, {1, 2})):
        drawn = [MaskedMultiCrop(plain, (8, 8), probability, (0.1, 0.5), fill=False).draw((40, 60), rng(seed))[0]
                 for seed in range(60)]  # fmt: skip
        counts = [int(view.masks[0].any((1, 2)).sum()) for view in drawn]
        assert set(counts) == crops
        assert np.mean(counts) / 2 == pytest.approx(probability, abs=0.1)
