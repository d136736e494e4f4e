"""What carries a method over processes: one module an engine, each with the same methods."""

import os

from accelerate import Accelerator
from accelerate.utils import DistributedType

from pretrain.engines import fsdp2, zero
from pretrain.engines.ddp import DDP
from pretrain.engines.fsdp2 import FSDP2
from pretrain.engines.zero import ZeRO
from runtime.settings import SettingsError

Engine = DDP | FSDP2 | ZeRO


def check(accelerator: Accelerator, precision: str, accumulate: int) -> type[Engine]:
    """The engine that the launcher asks for.

    Raises:
        SettingsError: one that is not there, or settings that it cannot take.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        zero.settings(accelerator, precision, accumulate)
        return ZeRO
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":  # accelerate forgets it where CUDA is absent
        fsdp2.check(accelerator, precision)
        return FSDP2
    if accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        return DDP
    raise SettingsError(
        f"{accelerator.distributed_type} is not supported: launch with one process, --multi_gpu (DDP), or a file of "
        "configs/accelerate/"
    )
