"""Encoders by name.

Another package registers its encoder family by adding one entry per variant to `VARIANTS`. The value of an entry holds
the class of the encoder and the settings that differ from the defaults of the constructor:

    encoders.VARIANTS["my_vit_small"] = {"family": MyViT, "dim": 384, "depth": 12}

`MyViT` derives from `Encoder` and takes all settings as keyword arguments with defaults. To load published weights into
encoders of the new family, also add a module for their file format to `encoders.formats.checkpoint.FORMATS`.
"""

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from tessera.encoders import navit, sam_vit, swin, timm_models, twins, vit
from tessera.encoders.base import Encoder
from tessera.encoders.checks import check_settings
from tessera.encoders.errors import EncoderError
from tessera.encoders.navit import NaViT
from tessera.encoders.sam_vit import SAMViT
from tessera.encoders.swin import Swin
from tessera.encoders.twins import Twins
from tessera.encoders.vit import ViT
from tessera.runtime.user_error import printable

VARIANTS: dict[str, dict[str, Any]] = {
    name: {"family": family, **settings}
    for family, variants in (
        (ViT, vit.VARIANTS),
        (Swin, swin.VARIANTS),
        (NaViT, navit.VARIANTS),
        (SAMViT, sam_vit.VARIANTS),
        (Twins, twins.VARIANTS),
    )
    for name, settings in variants.items()
}
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
        hint = _nearest(variant, VARIANTS)
        raise EncoderError(
            f"Unknown encoder {printable(repr(variant)[:200])}.{hint} Known encoders: {', '.join(VARIANTS)}, "
            "and timm:NAME for any model of timm."
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


def _nearest(unknown: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(unknown)[:100], list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
