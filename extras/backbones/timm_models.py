"""Models of timm by name: encoders `timm:NAME`, such as `timm:resnet50`, and pretrained weights of the same names.

timm downloads weights to its cache, unless the cache already contains them. Of pretrained weights, such as
`timm:vit_small_patch16_224.dino`, the encoder class comes from this project, if it has a class for the architecture.
Otherwise, the encoder wraps the model of timm itself.
"""

import difflib
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from tessera.encoders.base import Encoder, Preprocessing
from tessera.encoders.errors import EncoderError, WeightsError
from tessera.encoders.loading import State
from tessera.encoders.weight_files import recognise
from tessera.extras.backbones.module import ModuleEncoder, module_family
from tessera.extras.backbones.other_names import ENCODERS
from tessera.runtime.user_error import printable

PREFIX = "timm:"
NAMES = "timm:NAME for any model of timm"
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


def fetch(name: str | Path, encoder: Encoder | None = None) -> tuple[State, Preprocessing]:
    """Return the weights of a pretrained model, with timm's tensor names, and the normalisation of its images.

    For an encoder that is a model of timm, the weights fit its image size and channels.

    Raises:
        WeightsError: timm is not installed, has no pretrained model of this name, or cannot download the weights.
    """
    if isinstance(encoder, ModuleEncoder) and is_variant(encoder.label):
        model = _pretrained(name, lambda known: create(known, encoder.settings, pretrained=True)[0])
    else:
        model = _pretrained(name, lambda known: import_timm(name, WeightsError).create_model(known, pretrained=True))
    config = model.pretrained_cfg
    return model.state_dict(), Preprocessing(tuple(config["mean"]), tuple(config["std"]))


def _pretrained(source: str | Path, create: Callable[[str], Any]) -> Any:
    """Return `create(name)` for `timm:NAME`. The errors are those of `fetch`."""
    name = str(source).removeprefix(PREFIX)
    timm = import_timm(source, WeightsError)
    if not timm.is_model_pretrained(name):
        known = timm.list_pretrained()
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"Similar names: {', '.join(close)}." if close else "timm.list_pretrained() lists the names."
        raise WeightsError(f"timm {timm.__version__} has no pretrained model {name!r}. {hint}")
    try:
        return create(name)
    # A failed download raises exceptions of several packages, such as huggingface_hub.
    except Exception as error:
        raise WeightsError(
            f"timm could not load the weights of {name!r}: {error}. Check the network connection."
        ) from error


def settings(name: str | Path, state: State) -> dict[str, Any]:
    """Return the arguments of `encoders.build` for the pretrained weights `timm:NAME`.

    If no class of this project has the architecture, the encoder wraps the model of timm. The rule for positions at
    other image sizes is timm's, except for the weights of DINO.
    """
    try:
        form = recognise(state)
    except WeightsError:
        known, timm = str(name).removeprefix(PREFIX), import_timm(name, WeightsError)
        side = timm.get_pretrained_cfg(known).input_size[-1]
        return {"variant": f"{PREFIX}{known.partition('.')[0]}", "image_size": side}
    described = form.describe(state)
    if described.get("interpolation") == "dino" and "dino" not in str(name):
        described["interpolation"] = "antialias"
    return described


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
