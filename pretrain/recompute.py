"""Choose the parts of an encoder that the backward pass recomputes, if `encoder.checkpoint_activations` is auto."""

import logging
import os
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from rich.filesize import decimal

from tessera.data.batch_sampler import share_bounds
from tessera.pretrain.activations import activations
from tessera.pretrain.build import build_on_meta
from tessera.pretrain.config import AUTO, RECOMPUTE, RunConfig, recomputes
from tessera.pretrain.engines.engine import Shards
from tessera.pretrain.forecasts import gpu_memory
from tessera.pretrain.methods.method import Method
from tessera.pretrain.preflight import HEADROOM, state_bytes
from tessera.runtime.collectives import all_reduce_max, broadcast_object
from tessera.runtime.machine import memory

KEPT = 5000
"""A forward pass keeps fewer bytes than this multiple of its images in float32: a ViT-7B keeps about 4,000."""
NAMES = {False: "nothing", "selective": "norms and activation functions", True: "whole blocks"}
"""Names of the recomputed parts, by value of `encoder.checkpoint_activations`."""

log = logging.getLogger(__name__)


class DeviceMemory(NamedTuple):
    """The memory that holds a process."""

    place: str
    """Name, such as `an H100 of 80 GB`."""
    size: int
    """Size in bytes."""
    sharing: int = 1
    """Number of processes that share this memory."""


class Recomputation(NamedTuple):
    """Choice of the parts that the backward pass recomputes."""

    value: Any
    """Value of `encoder.checkpoint_activations` for the encoder."""
    reason: str
    fits: bool = True
    """False if a step does not fit in the memory."""

    def __str__(self) -> str:
        return f"{NAMES[self.value]} (encoder.checkpoint_activations auto): {self.reason}"


def device_memory(config: RunConfig, accelerator: Accelerator) -> DeviceMemory:
    """Return the memory of the GPU that `config.gpu` names, or else of the device of this process."""
    if config.gpu is not None:
        return DeviceMemory(*gpu_memory(config, accelerator.num_processes))
    if accelerator.device.type == "cuda":
        found = torch.cuda.get_device_properties(accelerator.device)
        return DeviceMemory(f"the {found.name} of {found.total_memory / 1e9:.0f} GB", found.total_memory)
    size, sharing = memory(), int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    return DeviceMemory(f"this machine of {size / 1e9:.1f} GB", size, sharing)


def with_recomputation(
    config: RunConfig, empty: Method | None, accelerator: Accelerator, shards: Shards
) -> tuple[RunConfig, Recomputation | None]:
    """Return settings to build the method with, whose `encoder.checkpoint_activations` is not auto. Collective.

    Also return the choice, or None if the setting is not auto. All processes choose the same, for the smallest memory.
    config.yaml keeps auto, so a run that is resumed on another device chooses anew. `empty` is the result of
    `build_on_meta` for these settings.
    """
    if getattr(config.encoder, RECOMPUTE, None) != AUTO:
        return config, None
    found, chosen = device_memory(config, accelerator), None
    smallest = -int(all_reduce_max(torch.tensor(-found.size // found.sharing)))
    if accelerator.is_main_process:
        processes = config.gpus if config.gpu is not None else accelerator.num_processes
        on_gpu = config.gpu is not None or accelerator.device.type == "cuda"
        chosen = choose(config, empty, found.place, smallest, processes, shards, on_gpu=on_gpu)
    chosen = broadcast_object(chosen)
    assert chosen is not None
    return recomputing(config, chosen.value), chosen


def recomputing(config: RunConfig, value: Any) -> RunConfig:
    """Return the settings with a value of `encoder.checkpoint_activations`."""
    return config.model_copy(update={"encoder": config.encoder.model_copy(update={RECOMPUTE: value})})


def choose(
    config: RunConfig,
    empty: Method | None,
    place: str,
    size: int,
    processes: int,
    shards: Shards,
    *,
    on_gpu: bool,
) -> Recomputation:
    """Choose the parts that the backward pass recomputes, so that a step fits in the memory of a process.

    A CPU recomputes only if a run would otherwise end for lack of memory.

    Args:
        empty: result of `build_on_meta` for these settings.
        place: name of the memory.
        size: size of the memory of a process, in bytes.
        processes: number of processes.
        shards: result of `Engine.shards`.
        on_gpu: True if the run is on a GPU.
    """
    unknown = Recomputation(False, "the memory of this encoder or method is not known before it is built")
    if empty is None:
        return unknown
    limit, needed, block = round(HEADROOM * size) if on_gpu else size, list[str](), 0
    _, images = share_bounds(config.batch_size, processes, config.accumulate, empty.together)
    if not on_gpu and KEPT * images * _image_bytes(empty, config) < limit:
        return Recomputation(False, f"{images} images a forward pass surely fit {place}")
    values = [value for value in NAMES if recomputes(config.encoder.variant, value)]
    for value in values:
        method = build_on_meta(recomputing(config, value).model_copy(update={"compile": False}))
        if method is None:
            return unknown
        try:
            found = activations(method, config.precision, images)
        except Exception as error:  # a method of the user may not run on fake tensors
            return Recomputation(False, f"the memory of the activations is not known: {error}")
        block = max(block, found.block)
        state = state_bytes(method, shards)
        # the backward pass holds one block at a time that it has recomputed
        kept = found.kept + (block if value is True else 0)
        needed.append(decimal(state + kept))
        if state + kept <= limit:
            more = f"; {needed[-2]} with less recomputation do not" if needed[1:] else ""
            return Recomputation(value, f"{needed[-1]} of state and activations fit {place}{more}")
    return Recomputation(values[-1], f"even so, {needed[-1]} of state and activations do not fit {place}", fits=False)


def _image_bytes(method: Method, config: RunConfig) -> int:
    """Return the size of the crops of an image in float32."""
    return sum(4 * config.data.channels * view.crops * view.size**2 for view in method.transform().views)
