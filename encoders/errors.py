"""Errors of encoders and of their weight files."""

from tessera.runtime.user_error import UserError


class EncoderError(UserError, ValueError):
    """Raised for a setting, an image batch or a mask that an encoder does not support."""


class WeightsError(UserError, ValueError):
    """Raised if a weight file cannot be read, or if weights do not fit an encoder."""
