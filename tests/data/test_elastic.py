"""The global batches of a run, whatever the processes, the workers, the accumulation, and the stops on the way."""

import random
from collections import Counter

import pytest
import torch

from tessera.data.batch_sampler import batch_ranges
from tessera.data.crops import MultiCrop, MultiCropConfig
from tessera.data.shards import ShardError
from tests.data.batches import training_batches

BATCH = 24  # 5 and 7 processes get uneven parts of it
SHARDS = {2: [7, 113], 40: [1 + n % 5 for n in range(40)]}  # 120 images each
STEPS = 3 * 120 // BATCH  # three epochs
MANY = 1000  # steps of the whole run, of which a test sees a few


def transform():
    return MultiCrop(MultiCropConfig(global_size=8, local_size=4, local_crops=2, global_scale=(0.3, 1.0)))


def part(shards, first_step, steps, **split):
    """One process's batches of some steps of the run."""
    settings = {"batch_size": BATCH, "seed": 5, "steps": MANY, "streams": 8, "window": 7} | split
    batches = iter(training_batches(shards, transform(), first_step=first_step, **settings))
    return [next(batches) for _ in range(steps * split.get("accumulation", 1))]


def samples(batch):
    """(key, digest of all that was drawn and cut for it) of each image of a batch."""
    drawn = []
    for view in batch.views:
        parts = [view.images, *(torch.from_numpy(numbers) for _, numbers in view.colors)]
        drawn += [part.unflatten(0, (view.crops, len(batch))) for part in parts]
    return [
        (key, hash(b"".join(part[:, image].contiguous().numpy().tobytes() for part in drawn)))
        for image, key in enumerate(batch.keys)
    ]


def steps_of(shards, first_step, steps, world_size, workers, accumulation, **order):
    """The global batches of some steps: the parts of all processes and passes, joined."""
    split = {"world_size": world_size, "workers": workers, "accumulation": accumulation} | order
    parts = [part(shards, first_step, steps, rank=rank, **split) for rank in range(world_size)]
    return [
        [
            sample
            for number in range(step * accumulation, (step + 1) * accumulation)
            for batches in parts
            for sample in samples(batches[number])
        ]
        for step in range(steps)
    ]


def epochs_are_whole(run, images):
    for epoch in range(len(run) * BATCH // images):
        steps = run[epoch * images // BATCH : (epoch + 1) * images // BATCH]
        assert set(Counter(key for step in steps for key, _ in step).values()) == {1}
        assert sum(map(len, steps)) == images


@pytest.mark.medium
@pytest.mark.parametrize("number", SHARDS)
def test_any_split_and_any_stops_give_the_same_run(write_shards, number):
    shards = write_shards(SHARDS[number])
    whole = steps_of(shards, 0, STEPS, world_size=1, workers=0, accumulation=1)
    epochs_are_whole(whole, 120)
    assert len({digest for step in whole for _, digest in step}) > 300  # each time the crops are others
    chance = random.Random(number)
    worlds, step = [7, 5, 4, 3, 2, 1], 0
    while step < STEPS:  # one process count after the other, with other workers, between stops at random steps
        steps = min(chance.randint(1, 5), STEPS - step)
        world_size = worlds.pop() if worlds else chance.randint(1, 7)
        workers, accumulation = chance.randint(0, 4), chance.choice([1, 1, 2])
        assert steps_of(shards, step, steps, world_size, workers, accumulation) == whole[step : step + steps]
        step += steps


def test_corrupt_images_are_replaced_alike_everywhere(write_shards):
    shards = write_shards([1, 40, 3, 16, 17, 2, 41])
    for path in shards[1:3]:
        with open(path, "r+b") as file:
            file.seek(512)  # the first image of the shard, behind its header
            file.write(b"no image")
    whole = steps_of(shards, 0, STEPS, world_size=1, workers=0, accumulation=1)
    assert "s00001" not in {key.rpartition("/")[2] for step in whole for key, _ in step}
    assert len({key for step in whole for key, _ in step}) == 118
    for world_size, workers, first_step in [(3, 2, 4), (4, 1, 9)]:
        assert steps_of(shards, first_step, 4, world_size, workers, 1) == whole[first_step : first_step + 4]


SPLITS = [(2, 2, 1, 4), (3, 0, 2, 9), (4, 1, 1, 11)]  # processes, workers, forward passes, first step


def test_weights_that_change_are_exact_and_resumable(write_shards):
    paths = write_shards([40, 40, 40])
    shards = {paths[0]: {0: 3.0, 5: 0.0, 10: 1.0}, paths[1]: 1.0, paths[2]: {0: 0.0, 10: 2.0}}
    whole = steps_of(shards, 0, 15, world_size=1, workers=0, accumulation=1)
    for steps, expected in [(slice(0, 5), [90, 30, 0]), (slice(5, 10), [0, 120, 0]), (slice(10, 15), [30, 30, 60])]:
        drawn = Counter(int(key.rpartition("/s")[2]) // 40 for step in whole[steps] for key, _ in step)
        # a phase may end within a shuffled round; a source of weight 0 gives no sample
        assert [drawn[source] for source in range(3)] == pytest.approx(expected, abs=8 if 30 in expected else 0)
    for world_size, workers, accumulation, first_step in SPLITS:
        found = steps_of(shards, first_step, 4, world_size, workers, accumulation)
        assert found == whole[first_step : first_step + 4]


def test_added_shards_join_with_the_next_epoch(write_shards):
    paths = write_shards([30, 42, 24])
    before = steps_of(paths[:2], 0, 6, world_size=1, workers=0, accumulation=1)
    whole = steps_of(paths, 0, 15, world_size=1, workers=0, accumulation=1, growth=((0, 2, 2),))
    assert whole[:6] == before  # two epochs of the first two shards
    assert len({key for step in whole[6:10] for key, _ in step}) == 96
    for world_size, workers, accumulation, first_step in SPLITS:
        found = steps_of(paths, first_step, 4, world_size, workers, accumulation, growth=((0, 2, 2),))
        assert found == whole[first_step : first_step + 4]


@pytest.mark.parametrize("growth", [((0, 3, 2),), ((0, 2, 3), (0, 2, 4)), ((0, 1, 3), (0, 2, 1)), ((0, 0, 1),)])
def test_growth_that_does_not_fit_the_shards(write_shards, growth):
    with pytest.raises(ShardError, match=r"has . shards, but stream\.growth of this run counts"):
        part(write_shards([30, 41, 33]), 0, 1, growth=growth)


def test_skipped_batches_are_left_out_everywhere(write_shards):
    shards = write_shards([120])
    plain = steps_of(shards, 0, 20, world_size=1, workers=0, accumulation=1)
    expected = plain[:3] + plain[6:10] + plain[11:]  # batches are counted from 1 in the setting, and from 0 here
    for world_size, workers, accumulation, first_step in [(1, 0, 1, 0), (2, 2, 1, 2), (3, 0, 2, 4), (4, 1, 1, 7)]:
        found = steps_of(shards, first_step, 4, world_size, workers, accumulation, skipped=batch_ranges("4-6,11"))
        assert found == expected[first_step : first_step + 4]
