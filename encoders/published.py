"""Published weights by name: `timm:NAME` is a pretrained model of timm, such as `timm:vit_small_patch16_224.dino`.

timm downloads the weights to its cache, unless the cache already contains them. The encoder class comes from this
project, if it has a class for the architecture. Otherwise, the encoder is the model of timm itself
(`encoders.timm_models`).
"""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera.encoders.base import Preprocessing
from tessera.encoders.errors import WeightsError
from tessera.encoders.formats.loading import State
from tessera.encoders.timm_models import PREFIX, import_timm


def is_name(source: str | Path) -> bool:
    """Return True if `source` is a name of published weights. All other sources are files or folders."""
    return str(source).startswith(PREFIX)


def fetch(source: str | Path) -> tuple[State, Preprocessing]:
    """Return the weights of a pretrained model of timm, with timm's tensor names, and the normalisation of its images.

    Raises:
        WeightsError: timm is not installed, has no pretrained model of this name, or cannot download the weights.
    """
    model = pretrained_model(source, lambda name: import_timm(source, WeightsError).create_model(name, pretrained=True))
    config = model.pretrained_cfg
    return model.state_dict(), Preprocessing(tuple(config["mean"]), tuple(config["std"]))


def pretrained_model(source: str | Path, create: Callable[[str], Any]) -> Any:
    """Return `create(name)` for `timm:NAME`.

    Raises:
        WeightsError: timm is not installed, has no pretrained model of this name, or cannot download the weights.
    """
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


def architecture(source: str | Path) -> dict[str, Any]:
    """Return the arguments of `encoders.build` for `timm:NAME` that wrap the model of timm itself."""
    name, timm = str(source).removeprefix(PREFIX), import_timm(source, WeightsError)
    side = timm.get_pretrained_cfg(name).input_size[-1]
    return {"variant": f"{PREFIX}{name.partition('.')[0]}", "image_size": side}
