"""Masks and patches against what they say of themselves."""

from dataclasses import replace

import pytest
import torch

from tessera.encoders.images import Mask, best_fit, pack, patchify
from tessera.encoders.segments import Segments, token_positions


def test_mask_lists_the_visible_places_and_counts_them_for_each_image():
    grids = torch.tensor([[2, 2], [1, 3], [1, 1]])
    hidden = torch.tensor([True, False, False, True, True, True, True, False])
    mask = Mask.from_hidden(hidden, grids)
    assert mask.visible.tolist() == [1, 2, 7]
    assert mask.hidden_indices.tolist() == [0, 3, 4, 5, 6]
    assert mask.hidden_indices.dtype == torch.int64
    assert mask.lengths.tolist() == [2, 0, 1]
    moved = mask.to("meta")
    assert moved.hidden.is_meta
    assert moved.visible.is_meta
    assert moved.hidden_indices.is_meta
    assert moved.lengths.tolist() == [2, 0, 1]  # they decide shapes: reading them must not wait for a device


def test_an_extended_mask_hides_nothing_in_further_images():
    grids, more = torch.tensor([[2, 2], [1, 3]]), torch.tensor([[2, 2], [1, 3], [1, 1], [3, 1]])
    hidden = torch.tensor([True, False, False, True, True, False, False])
    extended = Mask.from_hidden(hidden, grids).extended(more)
    expected = Mask.from_hidden(torch.cat([hidden, torch.zeros(4, dtype=torch.bool)]), more)
    extended.check(more)
    for name, tensor in vars(expected).items():
        assert torch.equal(getattr(extended, name), tensor), name


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
    with pytest.raises(ValueError, match="4 x 6 pixels do not divide into patches of 4"):
        patchify(images, 4)


def test_images_of_many_sizes_are_packed_in_their_order_and_unpacked():
    images = [torch.arange(b * 3 * h * w).reshape(b, 3, h, w) for b, h, w in ((2, 4, 6), (1, 2, 8))]
    packed = pack(images, 2)
    assert packed.grids.tolist() == [[2, 3], [2, 3], [1, 4]]
    assert packed.lengths.tolist() == [6, 6, 4]
    assert packed.patches[12].tolist() == patchify(images[1], 2)[0].tolist()
    again = pack([packed, images[1]], 2).unpack()
    for image, expected in zip(again, [*images[0], *images[1], *images[1]], strict=True):
        torch.testing.assert_close(image, expected, rtol=0, atol=0)


def test_packing_a_single_view_copies_its_pixels_once(monkeypatch):
    monkeypatch.setattr(torch, "cat", lambda *_: pytest.fail("a second copy"))
    images = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    packed = pack([images], 2)
    assert torch.equal(packed.patches, patchify(images, 2))
    assert packed.grids.tolist() == [[2, 3], [2, 3]]
    assert packed.sequences is None
    again = pack([replace(packed, sequences=torch.tensor([2]))], 2)
    assert again.patches is packed.patches
    assert again.sequences.tolist() == [2]


def test_segments_says_whose_each_token_is():
    lengths, queries = torch.tensor([3, 2, 1, 4]), torch.tensor([1, 2, 1, 1])
    segments = Segments(lengths, torch.device("cpu"), queries=queries, sequences=torch.tensor([2, 2]))
    assert segments.image_ids.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 3]
    assert [starts.tolist() for starts in segments.cumulative_lengths] == [[0, 1, 3, 4, 5], [0, 3, 5, 6, 10]]
    assert segments.longest == (2, 4)
    asking, tokens = segments.padded
    assert asking.positions.tolist() == [0, 1, 2, 3, 4]
    assert asking.image_ids.tolist() == [[0, 1, 1], [2, 3, -1]]
    assert tokens.positions.tolist() == list(range(10))
    assert tokens.image_ids.tolist() == [[0, 0, 0, 1, 1], [2, 3, 3, 3, 3]]
    assert segments.attention_mask[:, 0].int().tolist() == [
        [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1]],
        [[1, 0, 0, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]],  # the last pads, and takes all
    ]
    for name in ("image_ids", "cumulative_lengths", "padded", "attention_mask"):
        assert getattr(segments, name) is getattr(segments, name)  # made once
    assert not segments.uniform
    assert Segments(torch.tensor([3, 3]), torch.device("cpu")).uniform
    assert not Segments(torch.tensor([3, 3]), torch.device("cpu"), queries=torch.tensor([1, 2])).uniform


def test_places_are_the_rows_and_columns_of_all_tokens_or_of_visible_ones():
    grids = torch.tensor([[2, 3], [1, 4], [2, 1]])
    expected = [(row, column, h, w) for h, w in grids.tolist() for row in range(h) for column in range(w)]
    indices, sides = token_positions(grids, Segments(grids.prod(1), torch.device("cpu")))
    assert list(zip(*indices.tolist(), *sides.tolist(), strict=True)) == expected
    visible = torch.tensor([1, 3, 5, 8, 11])
    indices, sides = token_positions(grids, Segments(torch.tensor([3, 1, 1]), torch.device("cpu")), visible)
    assert list(zip(*indices.tolist(), *sides.tolist(), strict=True)) == [expected[place] for place in visible]


def test_sequences_hold_every_image_once_and_no_more_than_their_budget():
    lengths = torch.randint(1, 60, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    sequences = best_fit(lengths, 64)
    assert sorted(image for sequence in sequences for image in sequence) == list(range(200))
    assert max(sum(lengths[image] for image in sequence) for sequence in sequences) <= 64
    with pytest.raises(ValueError, match="65 tokens does not fit a sequence of 64"):
        best_fit([3, 65], 64)
