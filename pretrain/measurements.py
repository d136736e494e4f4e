"""Facts about the training shards that the main process measures and all processes receive."""

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator

from tessera.data.shards import ShardError, Sources
from tessera.data.statistics import count_classes, pixel_statistics
from tessera.encoders.base import Preprocessing
from tessera.pretrain.config import RunConfig
from tessera.pretrain.methods import METHODS
from tessera.runtime.collectives import broadcast_object

T = TypeVar("T")


def measure_pixels(config: RunConfig, opened: Sources, accelerator: Accelerator) -> Preprocessing | None:
    """Return the pixel statistics of the shards, or None if the settings do not need statistics. Collective.

    Raises:
        ShardError: the shards cannot be read.
    """
    if not config.data.needs_statistics:
        return None
    return _measured(accelerator, lambda: pixel_statistics(opened, config.data.channels), "pixel statistics")


def measure_classes(config: RunConfig, opened: Sources, accelerator: Accelerator) -> int | None:
    """Return the number of classes of the training images. Collective.

    Return None if the method uses no labels, or if the settings give the number of classes.

    Raises:
        ShardError: the shards cannot be read, or a label is missing.
    """
    if not METHODS[config.method].supervised or getattr(config.method_config, "classes", None) is not None:
        return None
    return _measured(accelerator, lambda: count_classes(opened), "number of classes")


def _measured(accelerator: Accelerator, measure: Callable[[], T], name: str) -> T:
    """Call `measure` on the main process, and return its result on all processes.

    Raises:
        ShardError: `measure` failed.
    """
    found: T | ShardError | None = None
    if accelerator.is_main_process:
        try:
            found = measure()
        except (ValueError, OSError) as error:  # broadcast the error, because the other processes wait for the result
            found = ShardError(f"data: the {name} cannot be measured: {error}")
    result = broadcast_object(found)
    if isinstance(result, ShardError):
        raise result
    return result  # pyright: ignore[reportReturnType] - None only if `measure` returns None
