"""Forecasts of `--dry_run`, which come in by entry points: how fast a run trains, and on which GPU it fits."""

from collections.abc import Callable
from typing import Protocol

from accelerate import Accelerator

from tessera.data.batches import Batches
from tessera.pretrain.config import RunConfig
from tessera.pretrain.engines import Engine
from tessera.pretrain.methods.method import Method
from tessera.pretrain.preflight import Plan
from tessera.runtime.plugins import Registry
from tessera.runtime.settings import SettingsError


class Forecast(Protocol):
    """A module that forecasts a run."""

    def gpu_memory(self, config: RunConfig, processes: int) -> tuple[str, int]:
        """Return a name of the memory of the GPU that `config.gpu` names, and its size in bytes.

        Raises:
            SettingsError: the forecast does not support the launch or the settings.
        """
        ...

    def forecast(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        engine: Engine | None,
        method: Method,
        loader: Callable[[int], Batches],
        plan: Plan,
        *,
        fits: bool,
    ) -> dict[str, str]:
        """Return the rows of a table. Collective. `method` cannot be used afterwards.

        Args:
            config: Settings of the run.
            accelerator: Accelerator of the run.
            engine: Engine of the run. None if `config.gpu` names a GPU, for which the steps are counted.
            method: Method of the run.
            loader: Returns a loader without workers whose steps have the given number of images over all processes.
            plan: Plan of the run.
            fits: True if the memory of the machine holds a step.
        """
        ...


FORECASTS: Registry[Forecast] = Registry(
    "forecast",
    {},
    group="tessera.forecasts",
    expected="a module with the functions of `pretrain.forecasts.Forecast`",
    valid=lambda value: all(hasattr(value, name) for name in ("gpu_memory", "forecast")),
)
"""Forecasts of extras and of other packages."""


def gpu_memory(config: RunConfig, processes: int) -> tuple[str, int]:
    """Return a name of the memory of the GPU that `config.gpu` names, and its size in bytes.

    Raises:
        SettingsError: no forecast is installed, or it does not support the launch or the settings.
    """
    for name in FORECASTS.names():
        return FORECASTS[name].gpu_memory(config, processes)
    raise SettingsError(
        f"--gpu {config.gpu} needs the extra `forecast`, which is not installed. Install it, or remove --gpu."
    )
