"""Weight formats of the Twins-SVT (Meituan, timm and this project), and export to timm.

Letters in shapes: D is the width of a stage. A patch of the first stage has C channels and p x p pixels.
"""

import inspect
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from tessera.encoders import twins
from tessera.encoders.base import Encoder
from tessera.encoders.errors import WeightsError
from tessera.encoders.loading import Report, Source, State
from tessera.encoders.twins import Layout, Twins
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
PIXEL_NORM = "patch_embeds.0.pixel_norm.weight"

OTHER_HEADS, OTHER_HEAD_DIM = 8, 64  # of all models with the layout "vit_pytorch"
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
    _check_size(encoder, state)
    state = checked_names(encoder, state, report, DECIDES, left_out=("head", "mask_token"))
    return _fit_channels(encoder, state, report)


def describe(state: State) -> dict[str, Any]:
    """Return arguments for `encoders.build` that make the encoder fit the weights without resizing.

    The weights determine neither the number of heads nor the window size. The window size is that of the nearest
    variant. If this variant has stages of the same widths, the numbers of heads are also those of the variant. For
    other widths, each head is assumed to be 32 wide, as in all models of the paper. With the layout "vit_pytorch", each
    stage is assumed to have 8 heads of width 64.

    Raises:
        WeightsError: required tensors are missing, or the number of heads is unknown.
    """
    layout = _layout(state)
    dims, blocks = _sizes(state)
    depths = _depths(layout, blocks)
    variant = _nearest(layout, dims, depths)
    stages = range(len(dims))
    first = [f"blocks.{stage}.0." for stage in stages]
    check_present(state, [FIRST, *(name + part for name in first for part in ("attn.proj.weight", "mlp.fc1.weight"))])
    channels, patch_size = _pixels(state[FIRST])
    widths = [state[name + "attn.proj.weight"].shape[1] for name in first]
    known = _settings(variant)
    heads, head_dim = _heads(layout, dims, widths, known)
    otherwise = _each(known["reductions"], len(dims)) if len(known["dims"]) == len(dims) else (1,) * len(dims)
    found = {
        "layout": layout,
        "dims": dims,
        "depths": depths,
        "heads": heads,
        "head_dim": head_dim,
        "reductions": tuple(_reduction(state, stage, layout, otherwise[stage]) for stage in stages),
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
    differences = {
        f'layout is "{encoder.layout}"': encoder.layout != "meituan",
        "qkv_bias is not set": not encoder.qkv_bias,
        "qk_scale is set": encoder.qk_scale is not None,
        "head_dim is set": encoder.head_dim is not None,
        f"norm_eps is {encoder.norm_eps}, not 1e-6": encoder.norm_eps != 1e-6,
        "window_size is 1": 1 in encoder.window_size,
    }
    check_equivalent(differences, "timm")
    size = encoder.image_size
    height, width = tuple(size) if isinstance(size, Sequence) else (size, size)
    _check_timm_size(encoder, height, width)
    name = _nearest("meituan", encoder.dims, encoder.depths, PUBLISHED)
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


def _layout(state: State) -> Layout:
    return "vit_pytorch" if PIXEL_NORM in state else "meituan"


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


def _depths(layout: Layout, blocks: Sequence[int]) -> tuple[int, ...]:
    """Return the setting `depths` of an encoder with `blocks[i]` blocks in stage i."""
    if layout == "meituan":
        return tuple(blocks)
    return (*(count // 2 - 1 for count in blocks[:-1]), blocks[-1] - 1)


def _check_size(encoder: Twins, state: State):
    """Raise `WeightsError` unless the weights have the encoder's layout, widths and depths."""
    layout, (dims, blocks) = _layout(state), _sizes(state)
    depths = _depths(layout, blocks)
    if layout == encoder.layout and (dims, depths) == (encoder.dims, encoder.depths):
        return
    variant, *changes = describe(state).items()
    fitting = ", ".join([str(variant[1]), *(f"{name}={value!r}" for name, value in changes)])
    raise WeightsError(
        f'The checkpoint has layout="{layout}", dims {dims} and depths {depths}. This encoder has '
        f'layout="{encoder.layout}", dims {encoder.dims} and depths {encoder.depths}. Build {fitting}.'
    )


def _fit_channels(encoder: Twins, state: State, report: Report) -> State:
    """Adapt the first layer to the encoder's number of channels.

    Raises:
        WeightsError: the checkpoint and the encoder have patches of different sizes.
    """
    state, first = dict(state), state[FIRST]
    if encoder.layout == "meituan":
        state[FIRST] = adapt_channels(first, encoder.channels, FIRST, report)
        return state
    if first.shape[1] == encoder.channels * encoder.patch_size**2:
        return state
    channels, patch_size = _pixels(first)
    if patch_size != encoder.patch_size:
        raise WeightsError(
            f"The checkpoint has patches of side {patch_size}, and this encoder has patches of side "
            f"{encoder.patch_size}. Build the encoder with patch_size={patch_size}."
        )
    filters = first.unflatten(1, (channels, patch_size, patch_size))
    state[FIRST] = adapt_channels(filters, encoder.channels, FIRST, report).flatten(1)
    for name in (PIXEL_NORM, PIXEL_NORM.replace("weight", "bias")):
        in_turn = [channel % channels for channel in range(encoder.channels)]
        state[name] = state[name].unflatten(0, (channels, -1))[in_turn].flatten()
    report.resized.append(
        f"patch_embeds.0.pixel_norm repeated cyclically from {channels} to {encoder.channels} channels"
    )
    return state


def _pixels(first: Tensor) -> tuple[int, int]:
    """Return the number of channels and the side of a patch, given the filters of the first layer.

    The filters have the shape (D, C, p, p) or, if they are flat, (D, C * p * p). Flat filters are assumed to have three
    channels if this gives square patches. Otherwise, the patches are assumed to have 4 x 4 pixels.
    """
    if first.ndim == 4:
        return first.shape[1], first.shape[2]
    values = first.shape[1]
    side = math.isqrt(values // 3)
    if values == 3 * side**2:
        return 3, side
    if values % 16:
        raise WeightsError(
            f"The number of channels is unknown for patches of {values} values. Build the encoder with the "
            "channels and the patch_size of the weights."
        )
    return values // 16, 4


def _reduction(state: State, stage: int, layout: Layout, otherwise: int) -> int:
    """Return the subsampling factor of global attention in a stage. Without global attention, return `otherwise`."""
    part = "kv" if layout == "vit_pytorch" else "sr"
    found = [t for name, t in state.items() if re.fullmatch(rf"blocks\.{stage}\.\d+\.attn\.{part}\.weight", name)]
    if found:
        return found[0].shape[-1]
    is_global = any(re.fullmatch(rf"blocks\.{stage}\.\d+\.attn\.q\.weight", name) for name in state)
    return 1 if is_global else otherwise


def _heads(
    layout: Layout, dims: tuple[int, ...], widths: Sequence[int], known: dict[str, Any]
) -> tuple[tuple[int, ...], int | None]:
    """Return the number of heads of each stage, and the setting `head_dim`.

    Args:
        layout: layout of the weights.
        dims: width of each stage.
        widths: number of heads times width of a head, for each stage.
        known: settings of the nearest variant.

    Raises:
        WeightsError: the number of heads is unknown, because no published model has these widths.
    """
    if layout == "vit_pytorch" and set(widths) == {OTHER_HEADS * OTHER_HEAD_DIM}:
        return (OTHER_HEADS,) * len(dims), OTHER_HEAD_DIM
    if layout == "meituan" and dims == tuple(widths):
        if dims == known["dims"]:
            return _each(known["heads"], len(dims)), None
        if not any(dim % PUBLISHED_HEAD_DIM for dim in dims):
            return tuple(dim // PUBLISHED_HEAD_DIM for dim in dims), None
    raise WeightsError(
        f"The number of heads is unknown, because no published model has stages of widths {dims} and attention "
        f"widths {tuple(widths)}. Build the encoder with heads and head_dim, and load the weights with load_weights."
    )


def _nearest(layout: Layout, dims: Sequence[int], depths: Sequence[int], among: Iterable[str] = twins.VARIANTS) -> str:
    """Return the variant of this layout whose widths and depths are nearest to `dims` and `depths`."""

    def distance(name: str) -> tuple[bool, bool, float, int]:
        known = _settings(name)
        wider = sum(abs(math.log(dim / other)) for dim, other in zip(dims, known["dims"], strict=False))
        deeper = sum(abs(depth - other) for depth, other in zip(depths, known["depths"], strict=False))
        return known["layout"] != layout, len(known["dims"]) != len(dims), wider, deeper

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
