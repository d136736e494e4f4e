"""Build the method of a run with its encoder, and load their initial weights."""

import logging
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator
from rich.filesize import decimal
from torch import Tensor

from tessera import encoders
from tessera.encoders.compiling import compile_blocks
from tessera.encoders.errors import WeightsError
from tessera.encoders.loading import Report
from tessera.encoders.unused import ON_META
from tessera.encoders.weight_files import read, recognise, unwrap
from tessera.evaluation.features import resolve_checkpoint
from tessera.pretrain.config import RunConfig
from tessera.pretrain.engines.engine import Shards
from tessera.pretrain.method_state import load_run
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.batch_norm import over_all_processes
from tessera.pretrain.methods.method import Method
from tessera.pretrain.preflight import dry_forward, state_bytes
from tessera.runtime.collectives import broadcast_object, patient_group, rank
from tessera.runtime.machine import memory
from tessera.runtime.settings import SettingsError

T = TypeVar("T")

log = logging.getLogger(__name__)


def build_method(config: RunConfig, *, fresh: bool, main: bool | None = None) -> Method:
    """Build the method with its encoder. The main process also checks the method by a dry forward pass. Collective.

    Processes with equal random states get equal weights.

    Args:
        fresh: True for a new run. The encoder then gets the weights of `config.init_from`, if this setting is given. A
            resumed run takes its weights from the checkpoint.
        main: None to build the weights on every process. Otherwise, True on the main process and False on the others,
            which build the method on the meta device, where weights take no memory.

    Raises:
        SettingsError: the encoder or the method does not support the settings.
    """
    method = _on_main(lambda: _build(config, fresh=fresh), main)
    if method is None:
        method = _build_empty(config)
    if fresh and config.init_from and method.continues:
        folder = Path(config.init_from)
        other = load_run(folder, method.continues, weights=main is not False)
        if other is not None:
            _on_main(lambda: take_weights(method, other, folder), main)
    return method


def check_memory(empty: Method | None, config: RunConfig, accelerator: Accelerator, shards: Shards) -> None:
    """Check that weights, gradients and optimizer state fit in the memory of the device, before they are made.

    Without this check, the kernel kills a process that takes too much memory of the machine, without a message.

    Args:
        empty: result of `build_on_meta`. There is no check without it.
        shards: result of `Engine.shards`.

    Raises:
        SettingsError: they do not fit.
    """
    if empty is None:
        return
    needed, device = state_bytes(empty, shards), accelerator.device
    what = "Weights, gradients and optimizer state take"
    if config.gpu is not None:  # the plan compares the run with the GPU, and this machine only builds the weights
        needed, what = sum(t.nbytes for t in [*empty.parameters(), *empty.buffers()]), "The weights take"
    if device.type == "cuda":
        size, where = torch.cuda.get_device_properties(device).total_memory, "a GPU"
    else:
        size, where = memory(), "this machine"
        needed *= int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    if needed > size:
        advice = ", or shard them over several processes (tessera --num_processes N --config_file fsdp2)"
        advice = "" if shards.weights > 1 else advice
        raise SettingsError(
            f"{what} {decimal(needed)}, but {where} has {decimal(size)} of memory. Choose a smaller encoder{advice}."
        )


def build_on_meta(config: RunConfig) -> Method | None:
    """Return the method on the meta device, where weights take no memory; None if it cannot be built there."""
    try:
        with torch.device("meta"):
            return _build(config, fresh=False, check=False)
    except Exception:  # an encoder of the user may need tensors with values; `build_method` raises other errors
        return None


def _build(config: RunConfig, *, fresh: bool, check: bool = True) -> Method:
    """Build the method of a run. Of the weights of `config.init_from`, load only those of the encoder.

    `build_method` loads the weights of heads and teacher.

    Args:
        check: True to check the method by a dry forward pass.
    """
    encoder_settings = config.encoder_settings
    try:
        encoder = encoders.build(encoder_settings.pop("variant"), **encoder_settings)
        if config.init_from and fresh:
            folder = Path(config.init_from).is_dir()
            source = resolve_checkpoint(config.init_from) if folder else config.init_from
            try:
                log.info("%s", encoders.load_weights(encoder, source))
            except WeightsError as error:
                raise SettingsError(f"init_from: {error}{_fitting(source)}") from error
        encoder.preprocessing = config.data.preprocessing
        if config.data.fewer_channels and METHODS[config.method].needs_all_channels:
            raise SettingsError(
                f"{config.method} needs all channels of all images. Remove data.fewer_channels, or choose --method "
                "dino or lejepa."
            )
        if config.data.fewer_channels and not encoder.takes_fewer_channels:
            variant = config.encoder.variant
            raise SettingsError(
                f"data.fewer_channels needs an encoder that takes images with fewer channels, but {variant} does not. "
                f"Set --encoder each:{variant.removeprefix('each:')}, with --encoder.join mean."
            )
    except SettingsError:
        raise
    except (ValueError, OSError) as error:
        raise SettingsError(f"encoder: {error}") from error
    try:
        method = METHODS[config.method](encoder, config.method_config, config.steps)
        over_all_processes(method)
        if fresh and method.needs_start and not config.init_from:
            raise ValueError("gram_start 0 needs the teacher of an earlier run as Gram teacher. Set --init_from RUN.")
        if config.init_from and method.other_encoders() and config.optim.encoder_lr_factor != 1:
            raise ValueError(
                f"optim.encoder_lr_factor {config.optim.encoder_lr_factor} is meant for the encoder that init_from "
                f"loads, but the encoders {', '.join(method.other_encoders())} start untrained. "
                "Set --optim.encoder_lr_factor 1, or train these encoders in a run without --init_from."
            )
        if check:
            dry_forward(method)
    except ValueError as error:
        raise SettingsError(f"{config.method}: {error}") from error
    if config.compile:
        for part in method.modules():
            if isinstance(part, encoders.Encoder):
                compile_blocks(part, fixed_sizes=method.fixed_sizes)
    return method


def _fitting(source: str | Path) -> str:
    """Return a sentence that names the variant of a weight file, or an empty text if the variant is unknown."""
    try:
        state = unwrap(read(source), Report())
        return f" The weights are those of --encoder {recognise(state).describe(state)['variant']}."
    except (WeightsError, OSError):
        return ""


def _build_empty(config: RunConfig) -> Method:
    """Build the method on the meta device.

    A module of another package may read the values of a tensor, or store a tensor that is neither a parameter nor a
    buffer. In these cases, the method is built in host memory with all of its weights, and a warning is logged.
    """
    try:
        with torch.device("meta"):
            method = _build(config, fresh=False, check=False)
        reason = _tensor_attribute(method)
        if reason is None:
            return method
    except (RuntimeError, TypeError, SettingsError) as error:
        if not ON_META.search(str(error)):
            raise
        reason = str(error)
    log.warning(
        "Process %d builds the method with all of its weights in host memory, because it cannot build the method on "
        "the meta device: %s",
        rank(),
        reason,
    )
    torch.manual_seed(config.seed)
    return _build(config, fresh=False, check=False)


def _tensor_attribute(method: Method) -> str | None:
    """Return a message that names a tensor attribute that is neither a parameter nor a buffer, or None."""
    for module in method.modules():
        for name, value in vars(module).items():
            values = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(one, Tensor) for one in values):
                return (
                    f"{type(module).__name__}.{name} is a tensor, but neither a parameter nor a buffer. To save the "
                    "memory, register it with register_buffer."
                )
    return None


def _on_main(function: Callable[[], T], main: bool | None) -> T | None:
    """Return the result of `function` on the main process, and None on the other processes. Collective.

    If `function` fails, all processes raise an exception.

    Args:
        main: True on the main process, and False on the others. None to call `function` on every process, without
            communication.
    """
    if main is None:
        return function()
    result, error = None, None
    if main:
        try:
            result = function()
        except Exception as raised:
            error = raised
    with patient_group() as group:  # the other processes wait here while `function` runs, which may take minutes
        failure = broadcast_object(error and str(error), group)
    if error is not None:
        raise error
    if failure is not None:
        raise SettingsError(failure)
    return result


def take_weights(method: Method, other: Method, folder: Path) -> None:
    """Copy all weights of `other`, the method of the run in `folder`, to `method`.

    Raises:
        SettingsError: the weights of `other` do not fit `method`.
    """
    try:
        method.start_from(other)
    except ValueError as error:
        raise SettingsError(f"init_from: {error}") from error
    except RuntimeError as error:
        weights = shlex.quote(str(folder / "encoder.safetensors"))
        raise SettingsError(
            f"The heads of the run {folder} do not fit the settings ({error}). Copy the settings of the heads from "
            f"{folder / 'config.yaml'}, or load only the encoder: --init_from {weights}."
        ) from error
    log.info("Student, teacher and heads are initialised from %s", folder)
