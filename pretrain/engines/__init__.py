"""Engines: distributed backends for training. Each backend is one module, and all share the interface `Engine`."""

import os

from accelerate import Accelerator
from accelerate.utils import DistributedType

from tessera.pretrain.engines import fsdp2, zero
from tessera.pretrain.engines.ddp import DDP
from tessera.pretrain.engines.engine import Engine
from tessera.pretrain.engines.fsdp2 import FSDP2
from tessera.pretrain.engines.zero import ZeRO
from tessera.runtime.settings import SettingsError

__all__ = ["Engine", "select"]


def select(accelerator: Accelerator, precision: str, accumulate: int) -> type[Engine]:
    """Check the launcher's settings, and return the engine class that they choose.

    Raises:
        SettingsError: the launcher's settings choose a backend or an option that is not supported.
    """
    # Read the environment variable, because accelerate ignores the launcher's FSDP settings on machines without CUDA.
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if not fsdp and fsdp2.groups().total_size > 1:
        raise SettingsError(
            "parallelism_config is only supported under FSDP2. Remove it from the launcher's configuration, or launch "
            "with configs/accelerate/hsdp.yaml."
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        zero.complete_config(accelerator, precision, accumulate)
        return ZeRO
    if fsdp:
        fsdp2.check_options(accelerator, precision)
        return FSDP2
    if accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        return DDP
    raise SettingsError(
        f"{accelerator.distributed_type} is not supported. Launch with one process, with --multi_gpu (DDP), or with "
        "--config_file and a file of configs/accelerate/."
    )
