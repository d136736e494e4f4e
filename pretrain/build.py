"""Build the method of a run from its settings, with its encoder and the weights from which the run starts."""

import logging
from pathlib import Path

import torch
from accelerate import Accelerator

import encoders
from evaluation.features import resolve_checkpoint
from pretrain.config import ResolvedRun
from pretrain.engines import Engine
from pretrain.methods import METHODS
from pretrain.methods.base import Method
from pretrain.preflight import dry_forward
from pretrain.start import start_from_run
from runtime.collectives import broadcast_object, patient_group
from runtime.errors import UserError
from runtime.settings import SettingsError

log = logging.getLogger(__name__)


def build_for_engine(config: ResolvedRun, engine: type[Engine], accelerator: Accelerator, *, fresh: bool) -> Method:
    """Build the method as the engine expects it on this process, from the seed of the run. Collective.

    Under most engines, all processes build equal weights. Under an engine that sends the weights of the main process,
    the other processes build the method on the meta device, where it takes no memory.

    Args:
        fresh: see `build_method`.

    Raises:
        SettingsError: the encoder or the method does not support the settings.
    """
    torch.manual_seed(config.seed)
    if not engine.sends_weights:
        return build_method(config, fresh=fresh)
    method, error = None, None
    if accelerator.is_main_process:
        try:
            method = build_method(config, fresh=fresh)
        except UserError as raised:
            error = raised
    with patient_group() as group:  # the main process may initialise or read the weights for minutes
        failure = broadcast_object(error and str(error), group)
    if error is not None:
        raise error
    if failure is not None:
        raise SettingsError(failure)
    if method is not None:
        return method
    with torch.device("meta"):
        return build_method(config, fresh=False, check=False)


def build_method(config: ResolvedRun, *, fresh: bool, check: bool = True) -> Method:
    """Build the method with its encoder.

    Processes with equal random states get equal weights.

    Args:
        fresh: True for a new run. The encoder then gets the weights of `config.init_from`, if this setting is given. A
            resumed run takes its weights from the checkpoint.
        check: True to check the method by a dry forward pass.

    Raises:
        SettingsError: the encoder or the method does not support the settings.
    """
    encoder_settings = config.encoder_settings
    try:
        encoder = encoders.build(encoder_settings.pop("variant"), **encoder_settings)
        if config.init_from and fresh:
            folder = Path(config.init_from).is_dir()
            source = resolve_checkpoint(config.init_from) if folder else config.init_from
            log.info("%s", encoders.load_weights(encoder, source))
        encoder.preprocessing = config.data.preprocessing
    except (ValueError, OSError) as error:
        raise SettingsError(f"encoder: {error}") from error
    try:
        method = METHODS[config.method](encoder, config.method_config, config.steps)
        if fresh and method.needs_start and not config.init_from:
            raise ValueError("the Gram teacher of gram_start 0 is the teacher of an earlier run. Set --init_from RUN.")
        if config.init_from and fresh and method.continues:
            start_from_run(method, Path(config.init_from))
        if config.init_from and method.other_encoders() and config.optim.encoder_lr_factor != 1:
            raise ValueError(
                f"optim.encoder_lr_factor {config.optim.encoder_lr_factor} is for the encoder of init_from, but the "
                f"encoders {', '.join(method.other_encoders())} start untrained. Set --optim.encoder_lr_factor 1, or "
                "train them in a run without --init_from."
            )
        if check:
            dry_forward(method)
    except ValueError as error:
        raise SettingsError(f"{config.method}: {error}") from error
    if config.compile:
        compile_blocks(method)
    return method


def compile_blocks(method: Method) -> None:
    """Apply `torch.compile` to each block of every encoder in the method."""
    import torch._dynamo.config  # imported here, because the import takes seconds

    # the compiled variants for all stages and crop sizes count towards this limit
    torch._dynamo.config.recompile_limit = 64
    for part in method.modules():
        if isinstance(part, encoders.Encoder):
            for block in part.blocks:
                block.compile()
