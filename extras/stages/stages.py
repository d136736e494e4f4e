"""Stages of the user (`data.stages`): changes of single samples, in the convention of webdataset.

A stage takes an iterator of samples and yields samples. A sample is a dictionary with the members of a shard, such as
`{"__key__": "000", "jpg": ..., "cls": ...}`. The stages run in the loader workers, for one sample at a time, before the
crops. A stage may drop a sample, which is then replaced by a sample of a later batch (`data.sampler`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from webdataset import DataPipeline

from tessera.data.failures import DroppedError, ShardError
from tessera.data.python_objects import kind
from tessera.data.user_code import load_function, named_errors
from tessera.runtime.settings import SettingsError

Stage = Callable[[Iterator[dict[str, Any]]], Iterator[Any]]
OF_STREAMS = ("shuffle", "detshuffle", "batched", "unbatched", "islice")
"""Stages of webdataset that need a stream of samples."""


@dataclass(frozen=True)
class Stages:
    """Stages as one function of a sample."""

    stages: tuple[Stage, ...]

    def __call__(self, sample: dict[str, Any], name: str) -> Any:
        """Return what the stages make of one sample.

        Args:
            sample: the sample as a dictionary.
            name: name of the sample in error messages.

        Raises:
            DroppedError: a stage dropped the sample.
            ImageError: a stage cannot decode the image.
            ShardError: a stage raises another error, or yields several samples.
        """
        with named_errors(name):
            found = list(DataPipeline(lambda: iter([sample]), *self.stages))
        if not found:
            raise DroppedError(f"the stages drop {name}")
        if len(found) > 1:
            raise ShardError(
                f"data.stages makes {len(found)} samples of {name}. A stage must yield one sample for each sample, or "
                "none."
            )
        return found[0]


def load_stages(given: str | Sequence[str | Stage]) -> Stages:
    """Return stages as one function. Names are loaded by `data.user_code.load_function`.

    Raises:
        SettingsError: a stage cannot be imported, or needs a stream of samples.
    """
    each = [given] if isinstance(given, str) else given
    stages = tuple(load_function(one, "data.stages") if isinstance(one, str) else one for one in each)
    for stage in stages:
        if (name := kind(stage).removeprefix("_")) in OF_STREAMS and type(stage).__module__.startswith("webdataset"):
            raise SettingsError(
                f"data.stages: webdataset's {name} needs a stream of samples, but stages get one sample at a time. "
                "Leave it out: the run shuffles and batches the samples."
            )
    return Stages(stages)
