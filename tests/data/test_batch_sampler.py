import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.data.batch_sampler import BatchSampler, batch_ranges, share_bounds
from tessera.runtime.collectives import Share
from tests.data.batches import step_positions


@pytest.mark.parametrize("batch_size", [128, 192, 48])
def test_any_split_of_a_step_is_the_same_step(batch_size):
    for step in (0, 7):
        whole = step_positions(step, batch_size)
        assert sorted(whole) == list(range(step * batch_size, (step + 1) * batch_size))
        for world_size, accumulation in [(2, 1), (1, 2), (4, 2), (2, 8), (16, 1), (3, 1), (5, 2), (50, 1), (7, 5)]:
            least, most = share_bounds(batch_size, world_size, accumulation)
            split = {"world_size": world_size, "accumulation": accumulation}
            parts = [
                step_positions(step, batch_size, rank=rank, micro=micro, **split)
                for micro in range(accumulation)
                for rank in range(world_size)
            ]
            np.testing.assert_array_equal(np.concatenate(parts), whole)
            sizes = [len(part) for part in parts]
            assert (min(sizes), max(sizes)) == (least, most)


@pytest.mark.parametrize(("batch_size", "world_size", "accumulation", "together"), [
    (64, 3, 1, 1), (64, 5, 1, 1), (4, 5, 1, 1), (24, 7, 5, 1), (24, 5, 1, 2), (6, 4, 1, 2), (64, 4, 2, 1)
])  # fmt: skip
def test_shares_weigh_every_image_of_a_step_equally(batch_size, world_size, accumulation, together):
    for micro in range(accumulation):
        ranks = [
            BatchSampler(batch_size, 0, 1, rank, world_size, accumulation, together=together)
            for rank in range(world_size)
        ]
        shares, drawn = [one.share(micro) for one in ranks], [[*one][micro] for one in ranks]
        sizes = [len(one.positions(0, micro)) for one in ranks]
        assert all(size % together == 0 for size in sizes)
        assert [share.images for share in shares] == sizes
        assert [share.first for share in shares] == np.concatenate([[0], np.cumsum(sizes)[:-1]]).tolist()
        assert {share.total for share in shares} == {sum(sizes)}
        assert {share.complete for share in shares} == {min(sizes) > 0}
        for share, positions in zip(shares, drawn, strict=True):
            # an image counts 1 / batch_size: its share of the mean of this process, of processes and of passes
            assert share.weight / (world_size * accumulation) == pytest.approx(share.images / batch_size)
            assert len(positions) == (share.images or together)  # images that stand in for none
    even = BatchSampler(64, 0, 1, 1, 4, 2).share(1)
    assert even == Share(8, 8, 32, 1.0, complete=True)  # exactly 1: nothing is multiplied


def test_a_batch_of_fewer_images_than_passes_is_refused():
    with pytest.raises(ValueError, match=r"3 images is too small for 4 accumulated passes\."):
        BatchSampler(3, accumulation=4)
    with pytest.raises(ValueError, match="5 images do not split into groups of 2 images"):
        BatchSampler(5, together=2)


def test_a_rank_reads_its_own_streams():
    streams = [
        {int(p) % 64 for step in range(5) for p in step_positions(step, 256, rank=rank, world_size=8)}
        for rank in range(8)
    ]
    assert all(len(one) == 8 for one in streams)
    assert set.union(*streams) == set(range(64))


def test_batches_of_equally_many_samples_of_each_stream_keep_their_order():
    for step in (0, 3):
        expected = [step * 192 + turn * 64 + stream for stream in range(64) for turn in range(3)]
        assert step_positions(step, 192).tolist() == expected


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=6))
def test_skipped_batches_are_never_taken(ranges):
    text = ",".join(f"{first}-{first + more}" if more else str(first) for first, more in ranges)
    named = {number - 1 for first, more in ranges for number in range(first, first + more + 1)}
    sampler = BatchSampler(8, 0, 30, skipped=batch_ranges(text))
    taken = [int(positions[0]) // 8 for positions in sampler]
    assert taken == [batch for batch in range(200) if batch not in named][:30]


@pytest.mark.parametrize("text", ["0", "5-3", "a", "1,,2", "-4", "1-2-3", "9" * 30])
def test_skipped_batches_that_are_no_numbers(text):
    with pytest.raises(ValueError, match="no batch"):
        batch_ranges(text)
