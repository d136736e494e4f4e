"""Build encoders by name, fill them with published weights, save them and load them.

- `base` defines `Encoder` and its output, `Features`; `images` the batches of images and masks that it gets.
- `vit`, `swin`, `twins`, `navit`, `sam_vit`: one family each, built from `layers`, `attention`, `blocks` and `rope`.
- `registry` maps names to families; `saving` writes and reads encoder.safetensors with encoder.json.
"""

from tessera.encoders.base import IMAGENET, Encoder, Features, Preprocessing
from tessera.encoders.errors import EncoderError, WeightsError
from tessera.encoders.formats.checkpoint import load_weights
from tessera.encoders.formats.loading import Report
from tessera.encoders.registry import VARIANTS, build, entry, family, from_module, supported
from tessera.encoders.saving import (
    WEIGHTS,
    describe_published,
    load,
    places,
    published_settings,
    read_description,
    read_step,
    save,
)

__all__ = [
    "IMAGENET",
    "VARIANTS",
    "WEIGHTS",
    "Encoder",
    "EncoderError",
    "Features",
    "Preprocessing",
    "Report",
    "WeightsError",
    "build",
    "describe_published",
    "entry",
    "family",
    "from_module",
    "load",
    "load_weights",
    "places",
    "published_settings",
    "read_description",
    "read_step",
    "save",
    "supported",
]
