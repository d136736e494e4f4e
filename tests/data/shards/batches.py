"""Batches of shards with short arguments."""

from tessera.data.crops import CenterCrop
from tessera.data.loader import Reading, StreamConfig, evaluation_batches, training_batches
from tessera.data.sampler import BatchSampler
from tessera.data.shards.source import DEFAULT


def train(shards, *, size=4, seed, workers=0, source=DEFAULT, block=None, window=1024, window_gb=8, **batches):
    """Batches of a training run; `batches` are arguments of the batch sampler."""
    stream = StreamConfig(block=block, window=window, window_gb=window_gb)
    reading = Reading(workers=workers, source=source)
    sampler = BatchSampler(**batches)
    return training_batches(shards, CenterCrop(size), sampler, seed=seed, stream=stream, reading=reading)


def evaluate(shards, batch_size, *, workers=0, source=DEFAULT):
    """Batches of an evaluation."""
    return evaluation_batches(shards, CenterCrop(4), batch_size, reading=Reading(workers=workers, source=source))
