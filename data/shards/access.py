"""Access to shards: the settings, and what a run knows beside its settings when it opens shards."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, model_validator

from tessera.data.failures import ShardError
from tessera.data.shards.samples import SampleKeys
from tessera.runtime.settings import Section


class SourceConfig(Section):
    """Settings for access to shards. No setting of this group changes the order of samples."""

    retries: int = Field(default=5, ge=0)
    """maximum number of repetitions of a failed request; each pause is about twice as long as the previous pause"""
    timeout: float = Field(default=60, gt=0)
    """time in seconds after which a request without an answer fails"""
    allow_overlap: bool = False
    """accept validation images that are also training images; their scores say nothing about new images"""
    cache_gb: float = Field(default=64, gt=0)
    """maximum size in GB, on each node, of the cache below $TESSERA_CACHE: downloaded and decompressed shards, and the
    indices of all shards"""
    commands: bool | None = None
    """run the commands of pipe:COMMAND shards; only a flag can set this; by default, a command in a flag is run,
    and a command in a settings file is refused"""

    @model_validator(mode="before")
    @classmethod
    def _without_old_settings(cls, values: Any) -> Any:
        """Remove `verify` and `unreadable`, which config.yaml files of older runs contain.

        Raises:
            ValueError: an older run was to leave out shards that cannot be read.
        """
        if not isinstance(values, dict):
            return values
        if values.get("unreadable", "stop") != "stop":
            raise ValueError(
                "source.unreadable is no longer supported, because the order of samples would depend on the time of a "
                "failure. A run stops at a shard that cannot be read. Remove source.unreadable from the settings file."
            )
        return {name: value for name, value in values.items() if name not in ("unreadable", "verify")}


@dataclass(frozen=True)
class Access:
    """How shards are opened, and how their samples are read."""

    settings: SourceConfig = SourceConfig()  # noqa: RUF009 - the default is immutable
    keys: SampleKeys = SampleKeys()  # noqa: RUF009
    """How the image and the label are taken from a sample."""
    stages: Callable[[dict[str, Any], str], Any] | None = None
    """Stages of the user, as one function that gets a sample and its name, and returns the sample that the stages make
    of it (`data.stages`). It raises `DroppedError` for a dropped sample."""
    described: Mapping[str, tuple[int, str] | ShardError] = field(default_factory=dict)
    """Size and version of remote shards, or the error for a shard, as rank 0 has found them: maps URLs to them."""


DEFAULT = Access()
