"""Samples in the order of a run, as the source of a webdataset pipeline."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset
from webdataset.utils import pytorch_worker_info

from tessera.data.batch_sampler import BatchSampler
from tessera.data.dataset import MOST_DROPPED, Address, addresses, in_blocks, prepare, replacements
from tessera.data.failures import DroppedError
from tessera.data.loader import StreamConfig, mixture_sampler
from tessera.data.shards import ShardError, WeightedShards, open_sources
from tessera.data.shards.access import Access, SourceConfig
from tessera.data.shards.samples import SampleKeys
from tessera.data.user_code import load_stages


class OrderedShards(IterableDataset[dict[str, Any]]):
    """Yields the samples of SHARDS as webdataset's dictionaries, in the exact order of a run.

    A sample has the keys `__key__`, `__url__`, `__position__` (position in the run, counted from 0), and one key for
    each member of the sample in the tar. Put webdataset's stages behind it:

        source = OrderedShards("train-{000000..000099}.tar", batch_size=256, first_step=step)
        pipeline = wds.DataPipeline(source, wds.decode("pil"), wds.to_tuple("jpg", "cls"), wds.batched(128))
        loader = DataLoader(pipeline, batch_size=None, num_workers=8)

    Each process gets its part of the samples of a step (here, 256 samples over two processes). The parts of three
    processes have 86, 85 and 85 samples. With n loader workers, each worker takes every n-th step, so batches must have
    exactly as many samples as a process takes in a step. A
    stage behind this source that drops or splits samples shifts all later batches: pass such a stage as `stages`. Pass
    stages that draw random numbers in the same way, or seed them from `__position__`.

    Args:
        shards: SHARDS, a map-style data set, or a mixture.
        batch_size: number of samples of a step, over all processes.
        first_step: step at which the iteration begins, to continue a run.
        steps: step before which the iteration ends.
        seed: seed of the order, 0 to 2**64 - 1.
        stages: stages of webdataset that yield one sample for each sample, or none. For a dropped sample, a sample of a
            later batch is yielded. Random numbers are seeded by position.
        stream: settings of the order of samples.
        source: settings for access to shards.
        image: name of the image in a sample, such as `left.jpg`; None for the usual names.
        label: name of the label in a sample, or `NAME:FIELD` for a field of a JSON object; None for the usual names.

    Raises:
        ShardError: the shards cannot be used.
        ValueError: `batch_size` is less than 1. Raised by the iteration.
    """

    def __init__(
        self,
        shards: WeightedShards,
        *,
        batch_size: int,
        first_step: int = 0,
        steps: int = 2**40,
        seed: int = 0,
        stages: Sequence[Callable[..., Any]] = (),
        stream: StreamConfig = StreamConfig(),  # noqa: B008 - the default is immutable
        source: SourceConfig = SourceConfig(),  # noqa: B008 - the default is immutable
        image: str | None = None,
        label: str | None = None,
    ) -> None:
        self.batch_size, self.first_step, self.steps, self.seed = batch_size, first_step, steps, seed
        access = Access(source, SampleKeys(image, label), load_stages(stages))
        sources, weights = open_sources(shards, progress=False, source=access)
        self._sampler = mixture_sampler(sources, weights, seed, stream, batch_size)
        self._sources = in_blocks(sources, self._sampler)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank, world_size, worker, workers = pytorch_worker_info()
        steps = BatchSampler(self.batch_size, self.first_step, self.steps, rank, world_size)
        for step in range(self.first_step + worker, self.steps, workers):
            wanted = addresses(self._sources, self._sampler, steps.positions(step))
            prepare(self._sources, wanted)
            yield from map(self._sample, wanted)

    def _sample(self, address: Address) -> dict[str, Any]:
        """Return the sample at an address, or the first of its replacements that the stages do not drop."""
        position = address.position
        others = replacements(self._sources, self._sampler, position)
        for _ in range(MOST_DROPPED):
            try:
                found = self._sources[address.source].members(address.number, (self.seed, position))
                return found | {"__position__": position} if isinstance(found, dict) else found
            except DroppedError:
                address = next(others)
        raise ShardError(f"the stages drop {MOST_DROPPED} samples in a row. Correct the stages.")
