"""Encoders that wrap a model of timm, with the variant names `timm:NAME`, such as `timm:resnet50`."""

import difflib
import functools
from types import ModuleType
from typing import Any

from torch import nn

from tessera.encoders.errors import EncoderError, WeightsError
from tessera.encoders.module import ModuleEncoder, module_family
from tessera.runtime.user_error import printable

PREFIX = "timm:"
SIZES: tuple[dict[str, Any], ...] = ({"dynamic_img_size": True}, {"strict_img_size": False}, {})
"""Arguments with which models of timm take images of other sizes than `img_size`."""


def is_variant(name: Any) -> bool:
    """Return True if `name` is `timm:NAME`."""
    return isinstance(name, str) and name.startswith(PREFIX)


@functools.cache
def family(variant: str) -> type[ModuleEncoder]:
    """Return the encoder class of `timm:NAME`.

    Raises:
        EncoderError: timm is not installed, or has no model of this name.
    """
    name = variant.removeprefix(PREFIX)
    timm = import_timm(variant, EncoderError)
    if not timm.is_model(name):
        close = difflib.get_close_matches(name[:100], timm.list_models(), n=3)
        hint = f"Similar names: {', '.join(close)}." if close else "timm.list_models() lists the names."
        raise EncoderError(f"timm {timm.__version__} has no model {printable(repr(name)[:200])}. {hint}")

    def make(image_size: int | tuple[int, int], channels: int) -> nn.Module:
        try:
            return create(name, image_size, channels)[0]
        except AssertionError as error:
            raise EncoderError(f"timm cannot make {name} for images of {image_size} pixels. {error}") from error

    return module_family(variant, make, {"image_size": timm.get_pretrained_cfg(name).input_size[-1], "channels": 3})


def create(
    name: str, image_size: int | tuple[int, int], channels: int, *, pretrained: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model without class head, and the options of `timm.create_model` that made it.

    The model supports images of any size, if timm has an option for that. With `pretrained=True`, timm resizes position
    tables to `image_size`, and adapts the filters of the first layer to the number of channels.
    """
    timm = import_timm(f"{PREFIX}{name}", EncoderError)
    weights = {"pretrained": True} if pretrained else {}
    options: dict[str, Any] = {"num_classes": 0, "in_chans": channels}
    for sizes in SIZES:
        own = options | {"img_size": image_size} | sizes
        try:
            return timm.create_model(name, **weights, **own), own
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
    return timm.create_model(name, **weights, **options), options


def import_timm(needed_by: object, error_class: type[EncoderError] | type[WeightsError]) -> ModuleType:
    """Import timm, which is an optional dependency. Raise `error_class` if it is not installed."""
    try:
        import timm
    except ImportError as error:
        raise error_class(f"{needed_by} needs timm. Install it with `pip install timm`.") from error
    return timm
