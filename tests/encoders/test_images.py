"""Masks and patches against what they say of themselves."""

import pytest
import torch

from encoders.images import Mask, patch_grids, patchify


def test_mask_lists_the_visible_places_and_counts_them_for_each_image():
    grids = torch.tensor([[2, 2], [1, 3], [1, 1]])
    hidden = torch.tensor([True, False, False, True, True, True, True, False])
    mask = Mask.from_hidden(hidden, grids)
    assert mask.visible.tolist() == [1, 2, 7]
    assert mask.lengths.tolist() == [2, 0, 1]
    moved = mask.to("meta")
    assert moved.hidden.is_meta
    assert moved.visible.is_meta
    assert moved.lengths.tolist() == [2, 0, 1]  # they decide shapes: reading them must not wait for a device


@pytest.mark.parametrize(
    "hidden", [torch.zeros(7, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.bool), torch.zeros(8)]
)
def test_mask_of_wrong_size_or_type_is_refused(hidden):
    with pytest.raises(ValueError, match="one entry for each of 8 tokens"):
        Mask.from_hidden(hidden, torch.tensor([[2, 2], [1, 4]]))


def test_patchify_keeps_rows_columns_channels_in_this_order():
    images = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    expected = [
        [images[b, c, 2 * row + y, 2 * column + x].item() for y in range(2) for x in range(2) for c in range(3)]
        for b in range(2)
        for row in range(2)
        for column in range(3)
    ]
    assert patchify(images, 2).tolist() == expected
    assert patch_grids(images, 2).tolist() == [[2, 3], [2, 3]]
    with pytest.raises(ValueError, match="4 x 6 pixels do not divide into patches of 4"):
        patchify(images, 4)
