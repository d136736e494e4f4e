"""Published weights by name: `timm:NAME` is a pretrained model of timm, such as `timm:vit_small_patch16_224.dino`.

timm downloads the weights to its cache, unless the cache already contains them. Only the weights and the normalisation
of the images come from timm. The encoder class comes from this project.
"""

import difflib
from pathlib import Path
from types import ModuleType

from tessera.encoders.base import Preprocessing
from tessera.encoders.errors import WeightsError
from tessera.encoders.formats.loading import State

PREFIX = "timm:"


def is_name(source: str | Path) -> bool:
    """Return True if `source` is a name of published weights. All other sources are files or folders."""
    return str(source).startswith(PREFIX)


def fetch(source: str | Path) -> tuple[State, Preprocessing]:
    """Return the weights of a pretrained model of timm, with timm's tensor names, and the normalisation of its images.

    Raises:
        WeightsError: timm is not installed, has no pretrained model of this name, or cannot download the weights.
    """
    name = str(source).removeprefix(PREFIX)
    timm = _timm(source)
    if not timm.is_model_pretrained(name):
        known = timm.list_pretrained()
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"Similar names: {', '.join(close)}." if close else "timm.list_pretrained() lists the names."
        raise WeightsError(f"timm {timm.__version__} has no pretrained model {name!r}. {hint}")
    try:
        model = timm.create_model(name, pretrained=True)
    # A failed download raises exceptions of several packages, such as huggingface_hub.
    except Exception as error:
        raise WeightsError(
            f"timm could not load the weights of {name!r}: {error}. Check the network connection."
        ) from error
    config = model.pretrained_cfg
    return model.state_dict(), Preprocessing(tuple(config["mean"]), tuple(config["std"]))


def _timm(source: str | Path) -> ModuleType:
    try:
        import timm  # an optional dependency
    except ImportError as error:
        raise WeightsError(f"{source} needs timm. Install it with `pip install timm`.") from error
    return timm
