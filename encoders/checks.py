"""Checks of encoder settings, which may come from an untrusted file."""

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from tessera.encoders.errors import EncoderError
from tessera.runtime.user_error import printable

LARGEST = 2**16
"""Largest magnitude of a number in the settings, such as a width or a side in pixels."""
MOST_BLOCKS = 1024
"""Largest number of blocks of an encoder."""
MOST_ITEMS = 64
"""Largest number of items of a setting that is a list."""


def check_settings(variant: str, settings: Mapping[str, Any], constructor: Any) -> None:
    """Check the types of settings and the limits of their values.

    Args:
        variant: name of the encoder variant, for messages.
        settings: settings by name. Names that the constructor does not know are not checked.
        constructor: class of the encoder, whose annotations are the types of the settings.

    Raises:
        EncoderError: a value has the wrong type, is not finite or is too large.
    """
    known = inspect.signature(constructor).parameters
    for name, value in settings.items():
        if name in known and not _fits(value, known[name].annotation):
            wanted = _description(known[name].annotation)
            raise EncoderError(f"{name} of {variant} must be {wanted}, not {printable(repr(value)[:100])}.")
    blocks = settings.get("depth", settings.get("depths", 0))
    if (sum(blocks) if isinstance(blocks, list | tuple) else blocks) > MOST_BLOCKS:
        raise EncoderError(f"{variant} has {blocks} blocks, but at most {MOST_BLOCKS} are supported.")


def _description(kind: Any) -> str:
    """Return a phrase for the values that an annotation allows, such as `a bool`."""
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_description, members))
    if origin is Literal:
        return f"one of {', '.join(map(str, members))}" if members[1:] else repr(members[0])
    if kind in (bool, types.NoneType):
        return "a bool" if kind is bool else "None"
    return f"{kind.__name__} of at most {LARGEST}" if kind in (int, float) else str(kind)


def _fits(value: Any, kind: Any) -> bool:
    """Return True if a value has the type of an annotation, and is within the limits. Lists count as tuples."""
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in members)
    if origin is Literal:
        return isinstance(value, str | int) and value in members
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) > MOST_ITEMS:
            return False
        if members[1:] == (...,):
            return all(_fits(item, members[0]) for item in value)
        return len(value) == len(members) and all(map(_fits, value, members))
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    if kind in (bool, types.NoneType):
        return isinstance(value, bool) if kind is bool else value is None
    return True  # other annotations occur only in encoder families of other packages


def check_finite(name: str, values: Any) -> tuple[float, ...]:
    """Convert a list of finite numbers to a tuple of floats.

    Raises:
        ValueError: `values` is not a list of finite numbers, is empty or has more than `LARGEST` items.
    """
    if not isinstance(values, list) or not 0 < len(values) <= LARGEST:
        raise ValueError(f"{name} must be a list of numbers")
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise ValueError(f"{name} must hold numbers only")
    if not all(abs(value) < 1e30 for value in values):  # this comparison is also False for NaN
        raise ValueError(f"{name} must hold finite numbers only")
    return tuple(map(float, values))


def check_counts(**counts: int | Sequence[int]):
    """Raise `EncoderError` if a number is less than 1, or if a sequence is empty or contains a number less than 1."""
    for name, value in counts.items():
        values = value if isinstance(value, Sequence) else (value,)
        if not values or min(values) < 1:
            raise EncoderError(f"{name} must be at least 1, not {', '.join(map(str, values)) or 'empty'}.")


def check_heads(dim: int, heads: int, head_dim: int | None = None) -> None:
    """Raise `EncoderError` if a number is less than 1, or if `head_dim` is None and `heads` does not divide `dim`."""
    check_counts(dim=dim, heads=heads, head_dim=1 if head_dim is None else head_dim)
    if head_dim is None and dim % heads:
        raise EncoderError(
            f"A width (dim) of {dim} does not split into {heads} heads. Change dim or heads, or set head_dim."
        )


def check_block_count(count: int, available: int) -> None:
    """Raise `EncoderError` unless `count`, the number of requested blocks, is from 1 to `available`."""
    if not 1 <= count <= available:
        raise EncoderError(f"Features of {count} blocks were requested. The number must be from 1 to {available}.")
