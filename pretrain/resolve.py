"""Complete the settings of a run: derive the settings that the user did not give, and measure what they depend on."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

from tessera import encoders
from tessera.data.colors import BANDS_DEFAULTS, BANDS_OFF, ColorConfig, colors_for
from tessera.data.demo import demo_shards
from tessera.data.shards import ShardError, Source, Sources, WeightedShards
from tessera.data.statistics import MeasuredPixels, PixelSettings, count_classes, measure_pixels
from tessera.encoders.base import Preprocessing
from tessera.pretrain import engines
from tessera.pretrain.checkpoints.resume import open_checkpoint
from tessera.pretrain.config import EncoderConfig, RunConfig
from tessera.pretrain.engines import Engine
from tessera.pretrain.method_state import find_on_main
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.method import Method, RunSize
from tessera.runtime import bf16, processes
from tessera.runtime.collectives import broadcast_object, first_rank, patient_group
from tessera.runtime.settings import SettingsError

CONTINUED = 0.1
"""Default of `optim.encoder_lr_factor` if the encoder is pretrained and the heads are new (docs/methods.md)."""
SIZES = {
    "images": "the number of images",
    "batch_size": "the batch size",
    "steps": "the number of steps",
    "classes": "the number of classes",
    "accumulate": "accumulate",
}
"""Attributes of `RunSize` from which a method derives settings, in words."""
T = TypeVar("T")

log = logging.getLogger(__name__)


def resolve(
    config: RunConfig, images: int, statistics: Preprocessing | None = None, classes: int | None = None
) -> RunConfig:
    """Return the settings with all derived values: steps, normalisation, and settings of the method and the encoder.

    Args:
        images: Number of training images.
        statistics: Type, range and pixel statistics of the shards. None means uint8, and is allowed unless
            `config.data.needs_statistics` is true or the range is to be measured.
        classes: Number of classes of the training images. Required if the method is supervised and its settings do not
            give this number.

    Raises:
        SettingsError: a setting is invalid, or two settings contradict each other.
    """
    batch_size = config.batch_size or default_batch_size(images)
    if config.steps and config.epochs:
        raise SettingsError("steps and epochs both set the length of the run. Give only one of them.")
    steps = config.steps or max(int((config.epochs or 100) * images / batch_size), 1)
    method = METHODS[config.method]
    size = RunSize(images, batch_size, steps, classes, config.accumulate, config.init_from is not None)
    optim = config.optim
    if optim.encoder_lr_factor is None and not method.supervised and _has_new_heads(config, method):
        optim = optim.model_copy(update={"encoder_lr_factor": CONTINUED})
    method_config, optim = method.resolve(config.method_config, optim, size)
    if optim.warmup_steps >= steps:
        origin = config.origins.get("optim.warmup_steps", "derived")
        raise SettingsError(
            f"optim.warmup_steps is {optim.warmup_steps} ({origin}), but the length of the run is {steps}. Give a "
            f"smaller number, such as --optim.warmup_steps {steps // 10}."
        )
    data = config.data.with_statistics(statistics)
    if max(config.evaluation.bands or [0]) > data.channels:
        raise SettingsError(
            f"evaluation.bands names band {max(config.evaluation.bands or [0])}, but data.channels is {data.channels}. "
            "Bands are counted from 1."
        )
    if isinstance(method_config, ColorConfig):
        try:
            method_config = colors_for(method_config, data.channels, data.fewer_channels)
        except ValueError as error:
            raise SettingsError(f"{config.method}: {error}") from error
    defaults = method.encoder_defaults(method_config, config.encoder.variant, size)
    config = with_precision(config)
    if torch.cuda.is_available() or config.gpu is not None:
        defaults |= gpu_defaults(config.encoder.variant, config.precision)
    if config.init_from:
        defaults.pop("layer_scale", None)  # a new layer scale near 0 would undo the pretraining
    encoder = _resolved_encoder(config, defaults, data.channels)
    own = {"steps": steps, "epochs": None, "batch_size": batch_size, "optim": optim, "data": data, "encoder": encoder}
    own[config.method] = method_config
    own["record_every"] = config.record_every or max(min(steps // 10, 50), 1)
    if method.supervised and config.evaluate_every is None:
        own["evaluate_every"] = size.epoch
    return config.derive(own, _reasons(config, size), otherwise=f"default of {config.method}")


def _reasons(config: RunConfig, size: RunSize) -> dict[str, str]:
    """Return why the run derives the values of settings that `config` does not give."""
    reasons = {
        "batch_size": f"a 64th of {size.images:,} images, as a power of two from 64 to 512",
        "steps": f"{config.epochs or 100:g} epochs of {size.images:,} images",
        "record_every": "a tenth of the steps, at most 50",
        "evaluate_every": "one epoch",
        "data.mean": "measured on the images",
        "data.std": "measured on the images",
        "data.pixel_type": "the type of sampled images",
        "data.range": "measured on the images",
        "encoder.channels": "data.channels",
        "encoder.bf16_residuals": "precision bf16 on a GPU",
    }
    reasons |= {f"{config.method}.{name}": "data.channels" for name in ("colors", *BANDS_OFF, *BANDS_DEFAULTS)}
    own, depends = _of_method(config, size), dict[str, list[str]]()
    for attribute, words in SIZES.items():
        try:
            other = _of_method(config, replace(size, **{attribute: 4 * (getattr(size, attribute) or 1)}))
        except ValueError:
            continue  # the method does not support this size
        for name, value in own.items():
            if other[name] != value:
                depends.setdefault(name, []).append(words)
    return reasons | {name: " and ".join(words) for name, words in depends.items()}


def _of_method(config: RunConfig, size: RunSize) -> dict[str, Any]:
    """Return the settings of the method and of the optimizer for a size of the run, by their dotted names."""
    method, optim = METHODS[config.method].resolve(config.method_config, config.optim, size)
    return {f"{config.method}.{name}": value for name, value in method} | {f"optim.{n}": value for n, value in optim}


def _has_new_heads(config: RunConfig, method: type[Method]) -> bool:
    """Return True if `init_from` gives a pretrained encoder but no heads. Collective."""
    if config.init_from is None:
        return False
    return not gives_heads(config.init_from, method.continues)


def default_batch_size(images: int) -> int:
    """Return the power of two that is nearest to `images / 64`, but at least 64 and at most 512."""
    return 2 ** round(math.log2(min(max(images / 64, 64), 512)))


def _resolved_encoder(config: RunConfig, defaults: dict[str, Any], channels: int) -> EncoderConfig:
    """Return the encoder settings with the method's defaults and the number of image channels filled in."""
    variant, started, given = config.encoder.variant, config.encoder.started, config.encoder_settings
    unused = encoders.family(variant).unused_settings(encoders.entry(variant) | started | given)
    given = started | {name: value for name, value in defaults.items() if name not in unused} | given
    own = given.get("channels", getattr(config.encoder, "channels", channels))
    if own != channels and "channels" in given:
        raise SettingsError(f"encoder.channels is {own}, but data.channels is {channels}. Remove encoder.channels.")
    if own != channels:
        given["channels"] = channels
    return type(config.encoder)(**given)


def gives_heads(init_from: str, methods: Sequence[str]) -> bool:
    """Return True if `init_from` is a run of one of `methods`, so that its heads can be loaded too. Collective."""
    checkpoint = find_on_main(Path(init_from))  # None for a weight file, a name, or a folder without a checkpoint
    return checkpoint is not None and open_checkpoint(checkpoint).settings["method"] in methods


def gpu_defaults(variant: str, precision: str) -> dict[str, Any]:
    """Return defaults of the encoder on a GPU. A run in bf16 keeps the tokens between blocks in bf16, as DINOv3
    (2508.10104) does."""
    return encoders.supported(variant, {"bf16_residuals": True}) if precision == "bf16" else {}


def with_precision(config: RunConfig) -> RunConfig:
    """Return the settings with the precision of the forward pass: fp32, tf32, bf16 or fp16.

    `auto` becomes the launcher's precision if the launcher sets one. Otherwise it becomes bf16 where bf16 is faster,
    and fp32 elsewhere; see `faster_in_bf16`.

    Raises:
        SettingsError: the precision is fp16 or tf32, but the machine has no CUDA device that supports it; or
            `encoder.bf16_residuals` is true, but the precision is not bf16.
    """
    precision = config.precision
    if precision == "auto":
        launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if launcher != "no":
            precision, reason = launcher, "that of the launcher"
        elif config.gpu is not None:
            precision, reason = "bf16", "faster on the named GPU"
        elif faster_in_bf16(config):
            precision, reason = "bf16", "faster on this device"
        else:
            precision, reason = "fp32", "bf16 is not faster on this device"
        config = config.derive({"precision": precision}, {"precision": reason})
    if precision == "fp16" and not torch.cuda.is_available() and config.gpu is None:
        raise SettingsError("--precision fp16 needs a CUDA device, but this machine has none. Use bf16 or fp32.")
    if precision == "tf32" and config.gpu is None and not torch.cuda.is_tf32_supported():
        raise SettingsError(
            "--precision tf32 needs a GPU with TF32 (compute capability 8.0 or more), but this machine has none. Use "
            "fp32."
        )
    if precision != "bf16" and config.encoder_settings.get("bf16_residuals"):
        raise SettingsError(
            f"encoder.bf16_residuals needs --precision bf16, but the precision of this run is {precision}. "
            "Set --precision bf16, or remove encoder.bf16_residuals."
        )
    return config


def faster_in_bf16(config: RunConfig) -> bool:
    """Return True if the device computes the encoder's matrix products faster in bf16 than in fp32.

    A GPU is faster in bf16 if it has bf16 instructions, and a CPU if the encoder has at least 128 output channels, too.
    In narrower encoders, the conversions between bf16 and fp32 take as much time as bf16 saves.
    """
    if torch.cuda.is_available() or not bf16.has_instructions():
        return bf16.has_instructions()
    settings = config.encoder_settings
    try:
        with torch.device("meta"):
            return encoders.build(settings.pop("variant"), **settings).dim >= 128
    except ValueError:
        return False  # invalid settings; `build_method` reports them


def emulates_bf16(config: RunConfig) -> bool:
    """Return True if a run is in bf16 on a device without bf16 instructions."""
    return config.precision == "bf16" and config.gpu is None and not bf16.has_instructions()


def make_accelerator(config: RunConfig) -> tuple[Accelerator, type[Engine]]:
    """Return an accelerator with the settings of the run, and the engine class that the launcher's settings choose.

    Raises:
        SettingsError: the engine's package is not installed, or the engine does not support the settings.
    """
    precision = with_precision(config).precision
    if precision == "tf32":  # cuDNN's convolutions are in TF32 by PyTorch's default, in every precision
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch requires it for CUDA's matrix products
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    accelerator = processes.make_accelerator(
        config.collective_timeout,
        # DeepSpeed's own mixed precision would cast the teacher's weights, so its engine uses autocast (zero.py)
        mixed_precision="no" if deepspeed or precision in ("fp32", "tf32") else precision,
        # the loader is not passed to `Accelerator.prepare`, so accelerate cannot detect the end of the loader
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config.accumulate, sync_with_dataloader=False
        ),
        # with this option, gradients are views of DDP's communication buckets and need no additional memory
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    return accelerator, engines.select(accelerator, precision, config.accumulate)


def training_shards(config: RunConfig) -> tuple[WeightedShards, RunConfig]:
    """Return the SHARDS to train on, and the settings of the run.

    Without --data, the run trains on the embedded digits. The evaluation then also uses the digits, unless the user
    gave other SHARDS for it.
    """
    if config.data.shards is not None:
        return config.data.shards, config
    train_shards, val_shards = demo_shards()
    evaluation = config.evaluation.model_copy(
        update={"train": config.evaluation.train or train_shards, "val": config.evaluation.val or val_shards}
    )
    digits = "the embedded digits"
    reasons = {"evaluation.train": digits, "evaluation.val": digits}
    return train_shards, config.derive({"evaluation": evaluation}, reasons)


def agree(opened: list[Source], buffers: list[int]) -> str:
    """Check that all processes see the same shards, and return the fingerprint of the sample order. Collective.

    Raises:
        ShardError: two processes see different shards.
    """
    own, images = fingerprint(opened, buffers), sum(source.images for source in opened)
    expected, of_main = broadcast_object((own, images))
    process = first_rank(own != expected)
    if process is not None:
        images = broadcast_object(images, source=process)
        raise ShardError(
            f"Process {process} sees {images} images, and process 0 sees {of_main} images, "
            "but all processes must see the same shards. Start again, or check the disks of the nodes."
        )
    return own


def fingerprint(opened: list[Source], buffers: list[int]) -> str:
    """Return a hash of everything that determines the sample order.

    The sample order depends on the names, image counts and order of the shards, and on the sizes of the shuffle
    buffers.
    """
    counts = [shard for source in opened for shard in source.identity]
    return hashlib.sha256(json.dumps([counts, buffers]).encode()).hexdigest()


def measure_data(config: RunConfig, opened: Sources, accelerator: Accelerator) -> MeasuredPixels | None:
    """Return the type, range and statistics of the images; None for uint8 if nothing else is needed. Collective.

    Raises:
        ShardError: the shards cannot be read, or hold images of several types.
        SettingsError: `data.range` has a wrong number of values.
    """
    data = config.data
    settings = PixelSettings(
        data.channels,
        data.pixel_type,
        "auto" if data.range == "auto" else data.given_range,
        data.nodata,
        data.needs_statistics,
        isinstance(data.mean, tuple) and isinstance(data.std, tuple),
        data.fewer_channels,
    )
    if data.pixel_type == "uint8" and data.range is None and not data.needs_statistics:
        return None
    found = _measured(accelerator, lambda: measure_pixels(opened, settings), "pixel statistics")
    origins = [config.origins.get(f"data.{name}", "") for name in ("mean", "range")]
    if found and found.summary and [origin.startswith("weights ") for origin in origins] == [True, False]:
        kept = f"; {origins[0]} were trained on uint8 without a range, and their mean and std are kept"
        found = found._replace(summary=found.summary + kept)
    return found


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
    """Call `measure` on the main process, and return its result on all processes. Collective.

    Raises:
        ShardError: `measure` failed.
    """
    found: T | ShardError | None = None
    if accelerator.is_main_process:
        try:
            found = measure()
        except (ValueError, OSError) as error:  # broadcast the error, because the other processes wait for the result
            found = ShardError(f"data: the {name} cannot be measured: {error}")
    with patient_group() as group:  # the other processes wait here while the main process reads, which may take hours
        result = broadcast_object(found, group)
    if isinstance(result, ShardError):
        raise result
    return result  # pyright: ignore[reportReturnType] - None only if `measure` returns None
