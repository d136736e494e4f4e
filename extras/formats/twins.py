"""Weight formats of the Twins-SVT (Meituan, timm and this project), and export to timm.

Letters in shapes: D is the width of a stage. A patch of the first stage has C channels and p x p pixels.
"""

import inspect
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tessera.encoders import twins
from tessera.encoders.base import Encoder
from tessera.encoders.errors import WeightsError
from tessera.encoders.loading import Report, Source, State
from tessera.encoders.twins import Twins
from tessera.extras.formats.conversion import (
    adapt_channels,
    check_equivalent,
    check_present,
    checked_names,
    refuse_padding,
)

NAME: str = "a Twins-SVT"
ACCEPTS: tuple[str, ...] = (NAME,)

DECIDES = {
    "patch_embeds.0": "patch_size",
    "attn.qkv.bias": "qkv_bias",
    "attn.q.bias": "qkv_bias",
    "attn.kv.bias": "qkv_bias",
    "attn.qkv.weight": "head_dim",
    "attn.q.weight": "head_dim",
    "attn.proj": "head_dim",
    "attn.sr": "reductions",
    "attn.norm": "reductions",
    "attn.kv.weight": "reductions",
    "mlp.fc": "mlp_ratios",
    "mask_token": "mask_token",
}

FIRST = "patch_embeds.0.proj.weight"

PUBLISHED_HEAD_DIM = 32
"""Width of one attention head in all models of the paper."""

PUBLISHED = ("twins_svt_small", "twins_svt_base", "twins_svt_large")
TIMM_OPTIONS = {
    "dims": "embed_dims",
    "depths": "depths",
    "heads": "num_heads",
    "reductions": "sr_ratios",
    "window_size": "wss",
    "mlp_ratios": "mlp_ratios",
    "patch_size": "patch_size",
    "channels": "in_chans",
}
"""Map from settings of this project to the names of these settings in timm."""


def converts_for(encoder: Encoder) -> bool:
    """Return True for a Twins-SVT."""
    return type(encoder) is Twins


def recognises(state: State) -> bool:
    """Return True for weights of a Twins-SVT, and False for a Twins-PCPVT, which has no local attention."""
    local = any(re.fullmatch(r"blocks\.0\.\d+\.attn\.qkv\.weight", name) for name in state)
    return local and any(name.startswith("patch_embeds.0.") for name in state)


def fit(encoder: Twins, state: State, source: Source, report: Report) -> State:
    """Return the weights with the tensor names and number of channels of `encoder`, and without the class head."""
    del source
    state = checked_names(encoder, state, report, DECIDES, left_out=("head", "mask_token"))
    if encoder.layout == "meituan":
        state[FIRST] = adapt_channels(state[FIRST], encoder.channels, FIRST, report)
    return state


def describe(state: State) -> dict[str, Any]:
    """Return arguments for `encoders.build` that make the encoder fit the weights without resizing.

    The weights determine neither the number of heads nor the window size. The window size is that of the nearest
    variant. If this variant has stages of the same widths, the numbers of heads are also those of the variant. For
    other widths, each head is assumed to be 32 wide, as in all models of the paper.

    Raises:
        WeightsError: required tensors are missing, or the number of heads is unknown.
    """
    if FIRST in state and state[FIRST].ndim != 4:
        raise WeightsError(
            "Weights with vit-pytorch's layout do not tell their settings. Keep the .json file beside them."
        )
    dims, depths = _sizes(state)
    variant = _nearest(dims, depths, [name for name, known in twins.VARIANTS.items() if "layout" not in known])
    stages = range(len(dims))
    first = [f"blocks.{stage}.0." for stage in stages]
    check_present(state, [FIRST, *(name + part for name in first for part in ("attn.proj.weight", "mlp.fc1.weight"))])
    _, channels, patch_size, _ = state[FIRST].shape
    widths = [state[name + "attn.proj.weight"].shape[1] for name in first]
    known = _settings(variant)
    otherwise = _each(known["reductions"], len(dims)) if len(known["dims"]) == len(dims) else (1,) * len(dims)
    found = {
        "dims": dims,
        "depths": depths,
        "heads": _heads(dims, widths, known),
        "reductions": tuple(_reduction(state, stage, otherwise[stage]) for stage in stages),
        "patch_size": patch_size,
        "mlp_ratios": tuple(len(state[name + "mlp.fc1.weight"]) / dim for name, dim in zip(first, dims, strict=True)),
        "qkv_bias": any(re.search(r"attn\.(qkv|q)\.bias$", name) for name in state),
        "channels": channels,
        "mask_token": "mask_token" in state,
    }
    return {"variant": variant, **_differing(found, known, len(dims))}


def to_timm(encoder: Twins) -> tuple[str, dict[str, Any], State]:
    """Return a model name and options for `timm.create_model`, and the encoder's weights with timm's tensor names.

    For images that need no padding, such as images of `image_size`, the timm model computes the same features as the
    encoder. For other images, the features differ, because timm does not mask the padding of windows. If a size is not
    a multiple of the patch or of the subsampling factor, this project pads and timm crops. The mask token is not
    exported.

    Raises:
        WeightsError: timm has no equivalent model, or images of `image_size` need padding.
    """
    differences = {f'layout is "{encoder.layout}"': encoder.layout != "meituan"}
    differences[f"norm_eps is {encoder.norm_eps}, not 1e-6"] = encoder.norm_eps != 1e-6
    check_equivalent(differences, "timm")
    size = encoder.image_size
    height, width = tuple(size) if isinstance(size, Sequence) else (size, size)
    _check_timm_size(encoder, height, width)
    name = _nearest(encoder.dims, encoder.depths, PUBLISHED)
    known = _settings(name)
    ours = {setting: getattr(encoder, setting) for setting in TIMM_OPTIONS}
    differ = _differing(ours, known, 4)  # timm's default options describe 4 stages
    options = {"num_classes": 0, **{TIMM_OPTIONS[setting]: value for setting, value in differ.items()}}
    if (height, width) != (224, 224):
        options["img_size"] = (height, width)
    return name, options, {name: tensor for name, tensor in encoder.state_dict().items() if name != "mask_token"}


def _check_timm_size(encoder: Twins, height: int, width: int):
    """Raise `WeightsError` if images of `height` x `width` pixels need padding."""
    multiple = 1
    for stage, (window, reduction) in enumerate(zip(encoder.window_size, encoder.reductions, strict=True)):
        # A stage with a single block has only local attention, which does not subsample.
        tokens = math.lcm(window, reduction if encoder.depths[stage] > 1 else 1)
        multiple = math.lcm(multiple, encoder.patch_size * 2**stage * tokens)
    if height % multiple or width % multiple:
        refuse_padding((height, width), "fill windows", multiple)


def _sizes(state: State) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the width and the number of blocks of each stage."""
    widths: dict[int, int] = {}
    blocks: dict[int, set[int]] = {}
    for name, tensor in state.items():
        if match := re.match(r"blocks\.(\d+)\.(\d+)\.(norm[12]\.)?", name):
            blocks.setdefault(int(match[1]), set()).add(int(match[2]))
            if match[3]:
                widths[int(match[1])] = len(tensor)
    stages = sorted(widths)
    return tuple(widths[stage] for stage in stages), tuple(len(blocks[stage]) for stage in stages)


def _reduction(state: State, stage: int, otherwise: int) -> int:
    """Return the subsampling factor of global attention in a stage. Without global attention, return `otherwise`."""
    found = [t for name, t in state.items() if re.fullmatch(rf"blocks\.{stage}\.\d+\.attn\.sr\.weight", name)]
    if found:
        return found[0].shape[-1]
    is_global = any(re.fullmatch(rf"blocks\.{stage}\.\d+\.attn\.q\.weight", name) for name in state)
    return 1 if is_global else otherwise


def _heads(dims: tuple[int, ...], widths: Sequence[int], known: dict[str, Any]) -> tuple[int, ...]:
    """Return the number of heads of each stage.

    Args:
        dims: width of each stage.
        widths: number of heads times width of a head, for each stage.
        known: settings of the nearest variant.

    Raises:
        WeightsError: the number of heads is unknown, because no published model has these widths.
    """
    if dims == tuple(widths):
        if dims == known["dims"]:
            return _each(known["heads"], len(dims))
        if not any(dim % PUBLISHED_HEAD_DIM for dim in dims):
            return tuple(dim // PUBLISHED_HEAD_DIM for dim in dims)
    raise WeightsError(
        f"The number of heads is unknown, because no published model has stages of widths {dims} and attention "
        f"widths {tuple(widths)}. Build the encoder with heads and head_dim, and load the weights with load_weights."
    )


def _nearest(dims: Sequence[int], depths: Sequence[int], among: Iterable[str]) -> str:
    """Return the variant whose widths and depths are nearest to `dims` and `depths`."""

    def distance(name: str) -> tuple[bool, float, int]:
        known = _settings(name)
        wider = sum(abs(math.log(dim / other)) for dim, other in zip(dims, known["dims"], strict=False))
        deeper = sum(abs(depth - other) for depth, other in zip(depths, known["depths"], strict=False))
        return len(known["dims"]) != len(dims), wider, deeper

    return min(among, key=distance)


def _settings(variant: str) -> dict[str, Any]:
    """Return all settings of a variant, including the defaults of the constructor."""
    parameters = inspect.signature(Twins).parameters.items()
    return {name: parameter.default for name, parameter in parameters} | twins.VARIANTS[variant]


def _differing(settings: dict[str, Any], known: dict[str, Any], stages: int) -> dict[str, Any]:
    """Return the `settings` that differ from `known`. A single number applies to every stage."""
    return {name: value for name, value in settings.items() if _each(value, stages) != _each(known[name], stages)}


def _each(value: Any, stages: int) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,) * stages
