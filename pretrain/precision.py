"""The precision of the forward pass: fp32, bf16 or fp16."""

import os

import torch

from tessera import encoders
from tessera.pretrain.config import RunConfig
from tessera.runtime.settings import SettingsError


def with_precision(config: RunConfig) -> RunConfig:
    """Return the settings with the precision of the forward pass resolved to fp32, bf16 or fp16.

    `auto` becomes the launcher's precision if the launcher sets one. Otherwise it becomes bf16 where bf16 is faster,
    and fp32 elsewhere; see `faster_in_bf16`.

    Raises:
        SettingsError: the precision is fp16, and the machine has no CUDA device; or `encoder.bf16_residuals` is true,
            and the precision is not bf16.
    """
    precision = config.precision
    if precision == "auto":
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if precision == "no" and faster_in_bf16(config):
            precision = "bf16"
    if precision == "fp16" and not torch.cuda.is_available():
        raise SettingsError("--precision fp16 needs a CUDA device, and this machine has none. Use bf16 or fp32")
    precision = {"no": "fp32"}.get(precision, precision)
    if precision != "bf16" and config.encoder_settings.get("bf16_residuals"):
        raise SettingsError(
            f"encoder.bf16_residuals needs --precision bf16, and the precision of this run is {precision}"
        )
    return config.model_copy(update={"precision": precision})


def faster_in_bf16(config: RunConfig) -> bool:
    """Return True if the device computes the encoder's matrix products faster in bf16 than in fp32.

    This holds for a GPU that supports bf16. It also holds for a CPU with instructions for bf16 (AVX512-BF16 or AMX) and
    an encoder whose output has 128 channels or more. In narrower encoders, the conversions take as long as they save.
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    if not torch.cpu._is_avx512_bf16_supported():  # pyright: ignore[reportPrivateUsage]
        return False
    settings = config.encoder_settings
    try:
        with torch.device("meta"):
            return encoders.build(settings.pop("variant"), **settings).dim >= 128
    except ValueError:
        return False  # invalid settings; `build_method` reports them
