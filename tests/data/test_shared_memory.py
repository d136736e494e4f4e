"""Memory that workers share with their parent: nothing is overwritten, nothing is lost, what does not fit arrives."""

import gc
import pickle
import time

import numpy as np
import pytest
import torch
from rich.filesize import decimal

import tessera.data.batches
import tessera.data.shared_memory
from tessera.data.batch import Batch, ViewParameters
from tessera.data.batches import fit_buffers, prepared_bytes
from tessera.data.collate import ViewShape
from tessera.data.crops import MultiCrop, MultiCropConfig, RandomCrop, RandomCropConfig
from tessera.data.masking import MaskedCrop
from tessera.data.shared_memory import BufferRing, SharedBatch
from tessera.data.workers import WorkersError
from tests.data.batches import collated, evaluation_batches, training_batches
from tests.data.made import picture

SMALL = MultiCrop(MultiCropConfig(global_size=8, local_size=4, local_crops=2))
MASKED = MaskedCrop(RandomCrop(RandomCropConfig(size=8)), 4, "random", 0.5)


def batch(memory=None, seed=0):
    image = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (3, 9, 9), dtype=np.uint8))
    made = collated(SMALL, [image] * 3, [np.random.default_rng(b) for b in range(3)], list("abc"))
    if memory is None:
        return made
    memory[: len(made.memory)] = made.memory
    return made.in_memory(memory[: len(made.memory)])


def equal(one, other):
    return one.keys == other.keys and all(
        torch.equal(a.images, b.images) for a, b in zip(one.views, other.views, strict=True)
    )


def test_a_buffer_is_taken_until_it_was_opened():
    ring = BufferRing(workers=2, buffers=2, size=5000)
    first, second = ring.take(1), ring.take(1)
    assert ring.take(1) is None
    assert ring.take(0) is not None
    assert len({buffer.memory.data_ptr() for buffer in (first, second)}) == 2
    shared_batch = SharedBatch.from_batch(batch(first.memory), first)
    assert {view.images.device.type for view in shared_batch.batch.views} == {"meta"}  # pixels stay behind
    assert shared_batch.batch.memory.device.type == "meta"
    sent = pickle.loads(pickle.dumps(shared_batch.buffer))
    assert sent == first
    assert ring.take(1) is None
    opened = SharedBatch(shared_batch.batch, sent).open()
    assert equal(opened, batch())
    assert ring.take(1).index == first.index
    first.memory.zero_()
    assert equal(opened, batch())


def test_a_batch_without_room_is_sent_unchanged():
    ring = BufferRing(1, 1, 64)
    buffer = ring.take(0)
    made = batch()
    assert SharedBatch.from_batch(made, buffer) is made
    assert ring.take(0) is not None


def test_memory_is_given_back():
    gc.collect()  # those of other tests
    before = len(tessera.data.shared_memory._rings)
    ring = BufferRing(1, 3, 2**40)  # nothing is committed
    assert len(tessera.data.shared_memory._rings) == before + 1
    del ring
    gc.collect()
    assert len(tessera.data.shared_memory._rings) == before


@pytest.fixture
def pictures(write_tar):
    """Shards of 60 noise images of many sizes, as PNG."""
    sizes = np.random.default_rng(0).integers(9, 40, (60, 2)).tolist()
    members = [(f"{number:03d}.png", picture(number, size, "PNG")) for number, size in enumerate(sizes)]
    return [write_tar("a.tar", members[:25]), write_tar("b.tar", members[25:])]


def batches(shards, workers, transform=SMALL, **settings):
    given = {"batch_size": 5, "seed": 3, "steps": 24, "streams": 4} | settings
    return training_batches(shards, transform, workers=workers, **given)


def contents(found):
    """All values of some batches, copied."""
    return [
        (
            one.keys,
            bytes(one.memory.numpy()),
            [view.images.tolist() for view in one.views],
            [mask.hidden.tolist() for view in one.views for mask in view.masks],
        )
        for one in found
    ]


@pytest.mark.medium
@pytest.mark.parametrize("transform", [SMALL, MASKED], ids=["crops", "masked"])
def test_what_was_received_is_never_overwritten(pictures, transform):
    """Kept to the end, or looked at slowly: what one process makes alone."""
    expected = contents(batches(pictures, 0, transform))
    for workers in (1, 3):
        kept = list(batches(pictures, workers, transform))
        assert contents(kept) == expected
        slow = []
        for one in batches(pictures, workers, transform):
            time.sleep(0.01)  # workers are as far ahead as they may
            slow += contents([one])
        assert slow == expected


def test_two_iterations_at_once_do_not_meet(pictures):
    loader = batches(pictures, 2)
    expected = contents(batches(pictures, 0))
    pairs = list(zip(loader, loader, strict=True))
    assert contents(first for first, _ in pairs) == expected
    assert contents(second for _, second in pairs) == expected


def test_workers_leave_pixels_in_the_buffers(pictures, monkeypatch):
    opened = []
    monkeypatch.setattr(
        SharedBatch, "open", lambda self, whole=SharedBatch.open: opened.append(self.buffer.index) or whole(self)
    )
    assert len(list(batches(pictures, 2, steps=20))) == 20
    assert len(opened) == 20
    assert set(opened) <= set(range(6))


def test_the_buffers_take_at_most_a_quarter_of_the_memory(pictures, monkeypatch, caplog):
    monkeypatch.setattr("tessera.data.batches.rank", lambda: 0)
    four = batches(pictures, 4)
    size, expected = four.collator.size, contents(four)
    assert (four.workers, four.buffered_bytes, four.lowered) == (4, 4 * 3 * size, "")
    monkeypatch.setattr("tessera.data.batches.memory", lambda: 4 * 4 * 3 * size)
    assert batches(pictures, 4).buffered_bytes == 4 * 3 * size
    assert not caplog.text
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    three = batches(pictures, 4)
    assert (three.workers, three.buffered_bytes) == (3, 3 * 2 * size)
    assert (
        f"3 workers of each process prepare one batch each, which takes {decimal(12 * size)} of shared" in caplog.text
    )
    assert f"4 workers with 2 batches would take {decimal(24 * size)} of {decimal(48 * size)}" in caplog.text
    assert contents(three) == expected  # the order does not depend on it
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert batches(pictures, 4).workers == 1  # a process needs one


def test_a_given_number_of_workers_is_refused_but_never_lowered(monkeypatch):
    monkeypatch.setattr("tessera.data.batches.memory", lambda: 1000)
    found = fit_buffers(20, 10, given=True, pinned=False)
    assert (found.workers, found.ahead) == (20, 1)
    assert "--workers 12 would take at most a quarter" in found.note
    with pytest.raises(
        WorkersError, match=r"--workers 26 needs 520 bytes of shared memory .* Use --workers 25 or fewer"
    ):
        fit_buffers(26, 10, given=True, pinned=False)
    assert fit_buffers(26, 10, given=False, pinned=False).workers == 12
    assert fit_buffers(0, 10**9, given=True, pinned=True) == (0, 2, "")


def test_pinned_copies_count(monkeypatch):
    """Of 16 bytes, as CUDA rounds 10 up: two batches of each worker, and two more."""
    assert prepared_bytes(10, 3, 2, pinned=True) == 3 * 3 * 10 + (3 * 2 + 2) * 16
    assert prepared_bytes(16, 1, 1, pinned=True) == 2 * 16 + 3 * 16
    assert prepared_bytes(10, 0, 2, pinned=True) == 0
    monkeypatch.setattr("tessera.data.batches.memory", lambda: 1000)
    found = fit_buffers(20, 10, given=False, pinned=True)
    assert found.workers == 6  # 6 * 2 * 10 + 8 * 16 = 248
    assert "shared and pinned memory" in found.note


def test_batches_larger_than_their_buffers_arrive(pictures, monkeypatch):
    expected = contents(batches(pictures, 0))
    ring = tessera.data.batches.BufferRing
    monkeypatch.setattr("tessera.data.batches.BufferRing", lambda workers, buffers, size: ring(workers, buffers, 1))
    assert contents(list(batches(pictures, 2))) == expected
    monkeypatch.setattr(
        "tessera.data.batches.BufferRing", lambda workers, buffers, size: ring(workers, 1, size)
    )  # too few
    assert contents(list(batches(pictures, 2))) == expected


class Large:
    """A crop larger than the images' own size."""

    views, packing = (ViewShape(1, 64),), None

    def draw(self, size, rng):
        return [ViewParameters(np.array([[0, 0, *size]]), (64, 64), np.zeros(1, bool))]


def test_evaluation_with_corrupt_images_and_workers(pictures, write_tar, png):
    bad = write_tar("bad.tar", [("1.png", png(5)), ("2.png", b"text"), ("3.png", png(6))])
    shards = [*pictures, bad]
    alone = list(evaluation_batches(shards, Large(), batch_size=8, labels=False))
    shared = list(evaluation_batches(shards, Large(), batch_size=8, labels=False, workers=2))
    assert sum(len(one) for one in alone) == 62
    assert contents(shared) == contents(alone)
    assert [one.skipped for one in shared] == [one.skipped for one in alone]
    assert all(isinstance(one, Batch) for one in shared)
