"""Encoders by name.

Another package registers its encoder family with one entry per variant, from Python or by an entry point in the group
`tessera.encoders`. The value of an entry holds the class of the encoder and the settings that differ from the defaults
of the constructor:

    encoders.VARIANTS.register("my_vit_small", {"family": MyViT, "dim": 384, "depth": 12})

`MyViT` derives from `Encoder` and takes all settings as keyword arguments with defaults. One of them is `image_size`,
the size at which evaluations encode images. A package that also loads published weights into encoders of the family
adds their format to `encoders.weight_files.FORMATS`.

`BACKBONES` holds further encoders and weights, whose names begin with a prefix, such as `timm:NAME`.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from tessera.encoders import navit, sam_vit, swin, twins, vit
from tessera.encoders.base import Encoder, Preprocessing
from tessera.encoders.checks import check_settings
from tessera.encoders.errors import EncoderError
from tessera.encoders.loading import State
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


class Backbone(Protocol):
    """Encoders and weights of another project. Their names are `PREFIX:NAME`; PREFIX is the key in `BACKBONES`."""

    NAMES: str
    """Names of the variants for messages, such as "timm:NAME for any model of timm"."""

    def family(self, variant: str) -> type[Encoder]:
        """Return the encoder class of a variant `PREFIX:NAME`."""
        ...

    def fetch(self, name: str | Path, encoder: Encoder | None = None) -> tuple[State, Preprocessing]:
        """Return the weights `PREFIX:NAME`, and the normalisation of their images.

        The weights may be adapted to the size and the channels of `encoder`, which receives them.
        """
        ...

    def settings(self, name: str | Path, state: State) -> dict[str, Any]:
        """Return the arguments of `build` for an encoder that fits the weights `state` of `name`."""
        ...

    def other_name(self, name: str) -> tuple[str, str | None] | None:
        """Return the variant that another project calls `name`, and the name of its published weights or None.

        The result is None if no project is known to have an encoder of this name.
        """
        ...


BACKBONES: Registry[Backbone] = Registry(
    "backbone",
    {},
    group="tessera.backbones",
    expected="a module with the functions of `encoders.registry.Backbone`",
    valid=lambda value: all(hasattr(value, name) for name in ("NAMES", "family", "fetch", "settings", "other_name")),
)
"""Backbones of extras and of other packages, by prefix."""
WRAPPERS: Registry[Callable[..., Encoder]] = Registry(
    "wrapper of modules", {}, group="tessera.wrappers", expected="a function that returns an encoder", valid=callable
)
"""Functions that make a variant of a module of the user."""


def backbone(name: object) -> Backbone | None:
    """Return the backbone with the prefix of a variant or of weights, such as `timm:NAME`, or None."""
    prefix, colon, _ = str(name).partition(":")
    return BACKBONES[prefix] if colon and prefix in BACKBONES else None


def unknown_prefix(name: object) -> str:
    """Return a sentence for messages if a name has the form PREFIX:NAME but no backbone has this prefix, else ""."""
    prefix, colon, rest = str(name).partition(":")
    if not colon or not prefix.isidentifier() or rest.startswith("//") or prefix in BACKBONES:
        return ""
    known = ", ".join(BACKBONES.names()) or "none"
    return f" No backbone has the prefix {prefix[:100]}: (known: {known}). {BACKBONES.elsewhere}"


def other_name(name: str) -> tuple[str, str | None] | None:
    """Return the variant that another project calls `name`, and the name of its published weights or None.

    The result is None if no project is known to have an encoder of this name.
    """
    return next((found for one in BACKBONES.names() if (found := BACKBONES[one].other_name(name))), None)


def entry(variant: str) -> dict[str, Any]:
    """Return the entry of a variant in `VARIANTS`. The variant may also be that of a backbone, such as `timm:NAME`.

    Raises:
        EncoderError: the variant is unknown, or needs a package that is not installed.
    """
    if isinstance(variant, str) and (origin := backbone(variant)):
        return {"family": origin.family(variant)}
    if not isinstance(variant, str) or variant not in VARIANTS:
        unknown = f"Unknown encoder {printable(repr(variant)[:200])}."
        if meant := other_name(str(variant)):
            ours, published = meant
            weights = f" Its published weights are --init_from {published}." if published else ""
            raise EncoderError(f"{unknown} Did you mean {ours!r}?{weights}")
        known, others = VARIANTS.names(), [BACKBONES[name].NAMES for name in BACKBONES.names()]
        more = ", and ".join(["", *filter(None, others)])
        raise EncoderError(
            f"{unknown}{_nearest(variant, known)} Known encoders: {', '.join(known)}{more}. {VARIANTS.elsewhere} A "
            f"program that uses encoders.from_module must call it first.{unknown_prefix(variant)}"
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


def from_module(module: nn.Module | Callable[..., nn.Module], name: str, **options: Any) -> Encoder:
    """Register a module as the encoder variant `name`, and return an encoder of this variant (docs/backbones.md).

    Args:
        module: class of the module, a function that returns a new module, or a module to copy.
        name: name of the variant.
        options: `image_size`, `channels` and `stride`, as in the docstring of the entry of `WRAPPERS`.

    Raises:
        EncoderError: the name belongs to another kind of encoder, or the output is neither a map nor tokens.
    """
    return WRAPPERS["from_module"](module, name, **options)


def _nearest(unknown: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(unknown)[:100], list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
