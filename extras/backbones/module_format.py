"""Weights of wrapped modules: the module's own state dict, with or without a class head."""

from collections.abc import Iterable
from typing import Any

from tessera.encoders.base import Encoder
from tessera.encoders.errors import WeightsError
from tessera.encoders.loading import Report, Source, State, check_names
from tessera.extras.backbones import timm_models
from tessera.extras.backbones.module import ModuleEncoder

NAME = "a wrapped module"
ACCEPTS: tuple[str, ...] = ()
DECIDES = {"mask_token": "mask_token", "pos": "image_size"}
INSIDE = "model."
"""Prefix of the module's tensors in the state dict of the encoder."""


def converts_for(encoder: Encoder) -> bool:
    """Return True for a wrapped module."""
    return isinstance(encoder, ModuleEncoder)


def recognises(state: State) -> bool:
    """Return False, because the names of the tensors are those of any module."""
    del state
    return False


def describe(state: State) -> dict[str, Any]:
    """Raise `WeightsError`, because the names of the tensors do not tell how to make the module."""
    raise WeightsError("The weights do not tell their module. Give the variant of the encoder.")


def fit(encoder: ModuleEncoder, state: State, source: Source, report: Report) -> State:
    """Return the weights with the tensor names of `encoder`. Tensors of a class head are left out.

    Raises:
        WeightsError: tensors are missing, or unknown to the encoder.
    """
    del source
    own = encoder.state_dict()
    if not any(name.startswith(INSIDE) for name in state):
        head = [name for name in state if INSIDE + name not in own and name.startswith(tuple(_head(encoder)))]
        report.left_out += head
        state = {INSIDE + name: tensor for name, tensor in state.items() if name not in head}
    report.fresh += [name for name in ("mask_token",) if name in own and name not in state]
    check_names(state, own, DECIDES, report.fresh)
    return state


def to_timm(encoder: ModuleEncoder) -> tuple[str, dict[str, Any], State]:
    """Return a model name and options for `timm.create_model`, and the state dict of the model.

    The colour of hidden tokens is not exported.

    Raises:
        WeightsError: the module is not a model of timm.
    """
    if not timm_models.is_variant(encoder.label):
        raise WeightsError(
            "timm has no equivalent of this encoder: a module of another package. Export the encoder with --to ours, "
            "or try --to onnx."
        )
    name = encoder.label.removeprefix(timm_models.PREFIX)
    _, options = timm_models.create(name, encoder.settings)
    return name, options, dict(encoder.model.state_dict())


def _head(encoder: ModuleEncoder) -> Iterable[str]:
    """Return the prefixes of the tensor names of the class heads of a model of timm."""
    config = getattr(encoder.model, "pretrained_cfg", None) or {}
    names = config.get("classifier") or ()
    return [f"{name}." for name in ([names] if isinstance(names, str) else names)]
