"""Encoders that wrap a model of timm, with the variant names `timm:NAME`, such as `timm:resnet50`."""

import difflib
import functools
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

from tessera.encoders.errors import EncoderError, WeightsError
from tessera.encoders.module import ModuleEncoder, module_family
from tessera.runtime.synonyms import ENCODERS
from tessera.runtime.user_error import printable

PREFIX = "timm:"
SIZES: tuple[dict[str, Any], ...] = ({"dynamic_img_size": True}, {"strict_img_size": False}, {})
"""Arguments with which models of timm take images of other sizes than `img_size`."""
FIXED = (
    "model_name",
    "num_classes",
    "in_chans",
    "img_size",
    "features_only",
    "out_indices",
    "feature_cfg",
    "scriptable",
)
"""Arguments of `timm.create_model` that an encoder sets itself, or that change the output."""
FILES = ("pretrained", "checkpoint", "cache")
"""Starts of the names of arguments that name files. The settings of an encoder may come from an untrusted file."""


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

    def make(image_size: int | tuple[int, int], channels: int, **options: Any) -> nn.Module:
        settings = {"image_size": image_size, "channels": channels, "options": options}
        try:
            return create(name, settings)[0]
        except AssertionError as error:
            raise EncoderError(f"timm cannot make {name} for images of {image_size} pixels. {error}") from error

    return module_family(variant, make, {"image_size": timm.get_pretrained_cfg(name).input_size[-1], "channels": 3})


def other_name(name: str) -> tuple[str, str | None] | None:
    """Return the variant that another project calls `name`, and the name of its published weights or None.

    Models of timm and torchvision may be written as in lightly-train, such as `timm/resnet50`. The result is None if
    no project is known to have an encoder of this name.
    """
    if name.lower() in ENCODERS:
        return ENCODERS[name.lower()]
    try:
        import timm
    except ImportError:
        return None
    own = re.sub(r"^(timm|torchvision)[/:]|^hf[-_]hub:timm/", "", name)
    if not timm.is_model(own.partition(".")[0]):
        return None
    return f"timm:{own.partition('.')[0]}", f"timm:{own}" if timm.is_model_pretrained(own) else None


def create(name: str, settings: Mapping[str, Any], *, pretrained: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model without class head, and the options of `timm.create_model` that made it.

    The model supports images of any size, if timm has an option for that. With `pretrained=True`, timm resizes position
    tables to the image size, and adapts the filters of the first layer to the number of channels.

    Args:
        name: name of the model.
        settings: settings of the encoder: `image_size`, `channels` and `options`.
        pretrained: load pretrained weights.

    Raises:
        EncoderError: `options` has an argument that the encoder sets itself, or that names files.
    """
    timm, given = import_timm(f"{PREFIX}{name}", EncoderError), dict(settings["options"] or {})
    if fixed := [key for key in given if key in FIXED or key.startswith(FILES)]:
        raise EncoderError(f"options of {PREFIX}{name} cannot contain {printable(fixed[0])}. Remove it.")
    weights = {"pretrained": True} if pretrained else {}
    given = {"num_classes": 0, "in_chans": settings["channels"]} | given
    for sizes in SIZES:
        own = given | {"img_size": settings["image_size"]} | sizes
        try:
            return timm.create_model(name, **weights, **own), own
        except TypeError as error:
            if "unexpected keyword" not in str(error) or not any(repr(key) in str(error) for key in own.keys() - given):
                raise
    return timm.create_model(name, **weights, **given), given


def import_timm(needed_by: object, error_class: type[EncoderError] | type[WeightsError]) -> ModuleType:
    """Import timm, which is an optional dependency. Raise `error_class` if it is not installed."""
    try:
        import timm
    except ImportError as error:
        raise error_class(f"{needed_by} needs timm. Install it with `pip install timm`.") from error
    return timm
