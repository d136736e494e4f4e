"""Functions that the weight formats share."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import Tensor

from tessera.encoders.base import Encoder
from tessera.encoders.errors import WeightsError
from tessera.encoders.loading import Report, State, check_names, listed


def check_present(state: State, needed: Iterable[str]) -> None:
    """Raise `WeightsError` if any of the `needed` tensors is missing from `state`."""
    missing = sorted(set(needed) - set(state))
    if missing:
        raise WeightsError(f"The checkpoint is incomplete. Missing from the checkpoint: {listed(missing)}.")


def check_size(found: tuple[int, int, int], own: tuple[int, int, int], variants: Mapping[str, dict[str, Any]]) -> None:
    """Raise `WeightsError` unless the weights have the width, depth and patch size of the encoder.

    `found` holds the width, depth and patch size of the weights, and `own` those of the encoder. The message names a
    variant that fits the weights.
    """
    if found == own:
        return
    dim, depth, patch_size = found
    names = [name for name, settings in variants.items() if (settings["dim"], settings["depth"]) == (dim, depth)]
    names.sort(key=lambda name: variants[name].get("patch_size") != patch_size)
    fitting = names[0] if names else f"an encoder with dim={dim}, depth={depth}"
    raise WeightsError(
        f"The checkpoint has width {dim}, {depth} blocks and patches of {patch_size} pixels. This encoder has width "
        f"{own[0]}, {own[1]} blocks and patches of {own[2]} pixels. To load the checkpoint, build {fitting} with "
        f"patch_size={patch_size}."
    )


NO_SCALE = "it has no layer scale (give --encoder.layer_scale 1e-5 to the training)"
"""Difference of an encoder that was trained without layer scale, which cannot be added afterwards."""


def check_equivalent(differences: Mapping[str, bool], library: str) -> None:
    """Raise `WeightsError` if an encoder differs from the models of a library.

    `differences` maps the description of each possible difference to True if the difference exists.
    """
    others = "timm or onnx" if library == "transformers" else "onnx"
    found = [difference for difference, exists in differences.items() if exists]
    if found:
        raise WeightsError(
            f"{library} has no equivalent of this encoder: {', '.join(found)}. Export the encoder with --to ours, "
            f"or try --to {others}."
        )


def refuse_padding(size: tuple[int, int], reason: str, multiple: int) -> NoReturn:
    """Raise `WeightsError`, because the encoder pads images of `size` and timm does not mask padding.

    `reason` says what the padding is for. Sides that are multiples of `multiple` pixels need none.
    """
    fitting = max(1, round(max(size) / multiple)) * multiple
    raise WeightsError(
        f"timm has no equivalent of this encoder: images of {size[0]} x {size[1]} pixels (image_size) need padding to "
        f"{reason}. Choose a multiple of {multiple} pixels, which needs none, such as --set image_size={fitting} "
        "(the weights do not depend on it), or try --to onnx."
    )


def split_off(state: State, parts: Iterable[str], report: Report) -> State:
    """Return `state` without the tensors whose name before the first dot is in `parts`.

    The names of the removed tensors are added to `report.left_out`.
    """
    parts = set(parts)
    report.left_out += [name for name in state if name.split(".")[0] in parts]
    return {name: tensor for name, tensor in state.items() if name.split(".")[0] not in parts}


def checked_names(
    encoder: Encoder,
    state: State,
    report: Report,
    decides: Mapping[str, str],
    left_out: Iterable[str],
    fresh: Iterable[str] = ("mask_token",),
) -> State:
    """Return the weights of an encoder's tensors, after a check of all names.

    Args:
        encoder: encoder that receives the weights.
        state: weights with the tensor names of this project.
        report: report of the tensors that are left out or keep their initial values.
        decides: see `encoders.weight_files.Format.DECIDES`.
        left_out: names up to the first dot of tensors that are left out unless the encoder has them.
        fresh: parts of the names of tensors that keep their initial values if the weights lack them.
    """
    own = encoder.state_dict()
    state = split_off(state, set(left_out) - {name.split(".")[0] for name in own}, report)
    report.fresh += [name for name in own if name not in state and any(part in name for part in fresh)]
    check_names(state, own, decides, report.fresh)
    return state


def depth_of(state: State) -> int:
    """Return the number of blocks in `state`. The tensors of block N have names of the form `blocks.N.*`."""
    return len({name.split(".")[1] for name in state if name.startswith("blocks.")})


def adapt_channels(weight: Tensor, channels: int, name: str, report: Report) -> Tensor:
    """Adapt the filters (D, C, h, w) of the first layer to images with `channels` channels.

    The C channels of the filters are repeated cyclically, and the filters are scaled by C / `channels`. If `channels`
    is a multiple of C and the channels of an image are repeated cyclically too, the output of the layer does not
    change.
    """
    before = weight.shape[1]
    if before == channels:
        return weight
    report.resized.append(f"{name} repeated cyclically from {before} to {channels} channels, times {before}/{channels}")
    return weight[:, [i % before for i in range(channels)]] * (before / channels)
