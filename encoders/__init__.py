"""Build encoders by name, load weights into them, save them and load them.

- `base` defines `Encoder` and its output, `Features`; `images` the batches of images and masks that it gets.
- `vit`, `swin`, `twins`, `navit`, `sam_vit`: one family each, built from `layers`, `attention`, `blocks` and `rope`.
- `registry` maps names to families; `saving` writes and reads encoder.safetensors with encoder.json; `weight_files`
  reads files of any format in `FORMATS`.
"""

from tessera.encoders.base import IMAGENET, Encoder, Features, Preprocessing
from tessera.encoders.errors import EncoderError, WeightsError
from tessera.encoders.loading import Report
from tessera.encoders.registry import VARIANTS, backbone, build, entry, family, from_module, other_name, supported
from tessera.encoders.saving import (
    WEIGHTS,
    load,
    places,
    read_description,
    read_step,
    save,
)
from tessera.encoders.weight_files import load_weights

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
    "backbone",
    "build",
    "entry",
    "family",
    "from_module",
    "load",
    "load_weights",
    "other_name",
    "places",
    "read_description",
    "read_step",
    "save",
    "supported",
]
