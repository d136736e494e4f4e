"""A list of opened shards."""

from dataclasses import dataclass, field

import numpy as np

from tessera.data.shards.retry import DEFAULT, SourceConfig
from tessera.data.shards.shard import Shard


@dataclass(frozen=True)
class ShardList:
    """List of S opened shards."""

    shards: list[Shard]
    counts: np.ndarray
    """Number of samples of each shard: (S,) int64."""
    labelled: np.ndarray
    """Number of samples with a label in each shard, or -1 if not yet known: (S,) int64."""
    sizes: np.ndarray
    """Size of each shard file in bytes; for the output of a command, size of the output: (S,) int64."""
    unreadable: list[str] = field(default_factory=list)
    """Paths and URLs of shards that cannot be opened and are therefore left out."""
    source: SourceConfig = DEFAULT
    mean: tuple[float, ...] | None = None
    """Mean of each channel over all pixels, in [0, 1], from `index.json`; None if unknown."""
    std: tuple[float, ...] | None = None
    """Standard deviation of each channel over all pixels, for values in [0, 1], from `index.json`; None if unknown."""
    classes: tuple[str, ...] | None = None
    """Class names in the order of the numbers that a reader returns as labels; None if unknown or not yet read."""
    numbers: tuple[int, ...] | None = None
    """Number that a reader returns for each class number in the shards; None if it returns the labels unchanged."""

    @property
    def images(self) -> int:
        """Total number of samples in all shards."""
        return int(self.counts.sum())

    def all_labelled(self) -> bool:
        """Return True if every sample has a label.

        Raises:
            ShardError: `index.json` does not count the labels of a shard, and the shard cannot be read.
        """
        if ((self.labelled >= 0) & (self.labelled < self.counts)).any():
            return False
        unknown = np.flatnonzero(self.labelled < 0)
        return all(self.shards[shard].summary()[1] == self.counts[shard] for shard in unknown)

    @property
    def mean_bytes(self) -> float:
        """Mean size of a sample in bytes: total size of the shards divided by the number of samples."""
        return float(self.sizes.sum()) / self.images
