"""Errors of encoders and of their weight files."""

from runtime.errors import UserError


class EncoderError(UserError, ValueError):
    """A setting, an image batch or a mask that an encoder does not take."""


class WeightsError(UserError, ValueError):
    """A weight file that cannot be read, or weights that do not fit an encoder."""
