"""Encoders by name.

Another package registers its encoder family with one entry per variant, from Python or by an entry point in the group
`tessera.encoders`. The value of an entry holds the class of the encoder and the settings that differ from the defaults
of the constructor:

    encoders.VARIANTS.register("my_vit_small", {"family": MyViT, "dim": 384, "depth": 12})

`MyViT` derives from `Encoder` and takes all settings as keyword arguments with defaults. One of them is `image_size`,
the size at which evaluations encode images. To load published weights into encoders of the new family, also add a
module for their file format to `encoders.formats.checkpoint.FORMATS`.

`from_module` registers any module that returns a map or tokens. `timm:NAME` is a model of timm.
"""

import copy
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from tessera.encoders import navit, sam_vit, swin, timm_models, twins, vit
from tessera.encoders.base import Encoder
from tessera.encoders.checks import check_settings
from tessera.encoders.errors import EncoderError
from tessera.encoders.module import ModuleEncoder, module_family
from tessera.encoders.navit import NaViT
from tessera.encoders.sam_vit import SAMViT
from tessera.encoders.swin import Swin
from tessera.encoders.twins import Twins
from tessera.encoders.vit import ViT
from tessera.runtime.plugins import Registry
from tessera.runtime.user_error import printable


def _is_variant(value: Any) -> bool:
    family = value.get("family") if isinstance(value, dict) else None
    if not (isinstance(family, type) and issubclass(family, Encoder)):
        return False
    parameters = inspect.signature(family).parameters
    return "image_size" in parameters and all(p.default is not p.empty for p in parameters.values())


VARIANTS: Registry[dict[str, Any]] = Registry(
    "encoder",
    {
        name: {"family": family, **settings}
        for family, variants in (
            (ViT, vit.VARIANTS),
            (Swin, swin.VARIANTS),
            (NaViT, navit.VARIANTS),
            (SAMViT, sam_vit.VARIANTS),
            (Twins, twins.VARIANTS),
        )
        for name, settings in variants.items()
    },
    group="tessera.encoders",
    expected='a dictionary whose entry "family" is a subclass of Encoder, with the argument image_size and with '
    "defaults for all arguments",
    valid=_is_variant,
)
"""Map from the name of each variant to a dictionary. The entry "family" of the dictionary is the class of the encoder.
All other entries are settings that differ from the defaults of the class."""


def entry(variant: str) -> dict[str, Any]:
    """Return the entry of a variant in `VARIANTS`. The variant may also be `timm:NAME`, any model of timm.

    Raises:
        EncoderError: the variant is unknown, or needs timm, which is not installed.
    """
    if timm_models.is_variant(variant):
        return {"family": timm_models.family(variant)}
    if not isinstance(variant, str) or variant not in VARIANTS:
        unknown = f"Unknown encoder {printable(repr(variant)[:200])}."
        if meant := timm_models.other_name(str(variant)):
            ours, published = meant
            weights = f" Its published weights are --init_from {published}." if published else ""
            raise EncoderError(f"{unknown} Did you mean {ours!r}?{weights}")
        known = VARIANTS.names()
        raise EncoderError(
            f"{unknown}{_nearest(variant, known)} Known encoders: {', '.join(known)}, and timm:NAME for any model of "
            f"timm. {VARIANTS.elsewhere} A program that uses encoders.from_module must call it first."
        )
    return VARIANTS[variant]


def family(variant: str) -> type[Encoder]:
    """Return the encoder class of a variant. The settings of an encoder are the constructor arguments of its class.

    Raises:
        EncoderError: the variant is unknown.
    """
    return entry(variant)["family"]


def supported(variant: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `settings` that have an effect in an encoder of this variant.

    All other settings are left out. `positions` and `token_init` are also left out if the variant defines them.
    """
    constructor = family(variant)
    known = inspect.signature(constructor).parameters.keys() - constructor.unused_settings(entry(variant)).keys()
    fixed = entry(variant).keys() & {"positions", "token_init"}
    return {name: value for name, value in settings.items() if name in known - fixed}


def build(variant: str, **settings: Any) -> Encoder:
    """Build an encoder with newly initialised weights. `settings` override the settings of the variant.

    The attribute `settings` of the encoder holds the name of the variant and all settings, including defaults.

    Raises:
        EncoderError: the variant or a setting is unknown, or a setting has an invalid value.
    """
    constructor = family(variant)
    known = inspect.signature(constructor).parameters
    for name in settings:
        if name not in known:
            raise EncoderError(f"Unknown setting {printable(repr(name)[:200])} of {variant}.{_nearest(name, known)}")
    defaults = {name: parameter.default for name, parameter in known.items()}
    published = {name: value for name, value in entry(variant).items() if name != "family"}
    resolved = defaults | published | settings
    check_settings(variant, resolved, constructor)
    for name, cause in constructor.unused_settings(resolved).items():
        if resolved[name] != defaults[name]:
            raise EncoderError(
                f"{name} of {variant} has no effect with {cause}={resolved[cause]!r}. Remove {name}, or change {cause}."
            )
    try:
        encoder = constructor(**resolved)
    except (TypeError, ZeroDivisionError, OverflowError) as error:
        raise EncoderError(f"{variant} cannot be built with these settings: {error}.") from error
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in resolved.items()}
    encoder.settings = {"variant": variant, **plain}
    return encoder


def from_module(
    module: nn.Module | Callable[..., nn.Module],
    name: str,
    *,
    image_size: int | tuple[int, int] = 224,
    channels: int = 3,
    stride: int | None = None,
) -> Encoder:
    """Register a module as the encoder variant `name`, and return an encoder of this variant.

    The module maps images (B, C, H, W) to a map (B, D, h, w) or (B, h, w, D), or to tokens (B, P + h * w, D); see
    `encoders.module.ModuleEncoder`. Runs and evaluations in this process then know the variant. In another process,
    call this function again before a run is resumed or its encoder is loaded.

    Args:
        module: class of the module or a function that returns a new module, which gets those of the arguments
            `image_size` and `channels` that it names. For a module, each encoder of the variant is a copy, which
            starts with the weights of the module.
        name: name of the variant.
        image_size: default of the setting `image_size`, one side or (height, width) in pixels.
        channels: number of channels of an image.
        stride: side, in pixels, of the square that one token covers. None computes it from the output.

    Raises:
        EncoderError: the name belongs to another kind of encoder, or the output is neither a map nor tokens.
    """
    taken = name in VARIANTS and not issubclass(VARIANTS[name]["family"], ModuleEncoder)
    if taken or timm_models.is_variant(name):
        raise EncoderError(f"The name {name!r} belongs to another encoder. Choose another name.")
    make = functools.partial(copy.deepcopy, module) if isinstance(module, nn.Module) else module
    VARIANTS[name] = {"family": module_family(name, make, {"image_size": image_size, "channels": channels}, stride)}
    try:
        return build(name)
    except EncoderError:
        del VARIANTS[name]
        raise


def _nearest(unknown: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(unknown)[:100], list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
