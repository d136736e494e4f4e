"""Check that an exported encoder equals the encoder: all its tensors, its features for images of three sizes, and the
preparation of a photograph.

Letters in shapes: B images; C channels, H x W pixels; N tokens of an image; D width of the features.
"""

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tessera.encoders.base import Encoder, Features
from tessera.encoders.errors import EncoderError, WeightsError
from tessera.encoders.loading import State, listed
from tessera.encoders.preprocessing import image_size
from tessera.encoders.unused import unused_parameters
from tessera.extras.exports.preparation import description
from tessera.runtime.machine import version, versions

TOLERANCE = 1e-3
"""Default of the largest difference between two features, as a fraction of the largest feature."""
LEVELS = 2
"""Largest difference between a pixel of two preparations of a photograph, in 255ths of white. Pillow and torch round
differently after each of the two directions of a resize."""


class Exported(NamedTuple):
    """An exported encoder, which was loaded again with the library that reads the format."""

    tensors: State
    """Tensors that were written."""
    loaded: State
    """Tensors that the library loaded, with its own names."""
    names: dict[str, list[str]]
    """Map from the name of each tensor of the encoder to the names of the `tensors` that hold its values."""
    run: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Function of the library: images (B, C, H, W) -> pooled features (B, D) and tokens (B, N, D)."""
    use: str
    """Python expression that loads the file."""
    packages: tuple[str, ...] = ()
    """Packages of the format, whose versions the certificate states."""
    dynamic_size: bool = False
    """True if the file takes images of other sizes than that of the encoder."""
    prepare: Callable[[Any], Tensor] | None = None
    """Preparation of a Pillow image by the library, or by the description in the file: (C, S, S) float32."""


class Photograph(NamedTuple):
    """A photograph with which the preparation of images is compared."""

    image: Any
    """Pillow image, RGB."""
    pixels: Tensor
    """The image as the evaluations prepare it for the encoder, (3, S, S) float32."""


def certify(
    encoder: Encoder,
    exported: Exported,
    file: Path,
    form: str,
    tolerance: float = TOLERANCE,
    photograph: Photograph | None = None,
) -> dict[str, Any]:
    """Return the certificate of an export, a dictionary for a JSON file.

    Args:
        encoder: encoder in eval mode.
        exported: the export.
        file: file that was written.
        form: format of the file.
        tolerance: largest accepted difference between two features, as a fraction of the largest feature.
        photograph: photograph for the comparison of preparations, or None for no comparison.

    Raises:
        WeightsError: tensors are missing from the export, the features differ, or the preparations differ.
    """
    left_out = _check_tensors(encoder, exported)
    outputs = [_compare(encoder, exported, shape, tolerance) for shape in shapes(encoder, exported.dynamic_size)]
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256")
    return {
        "format": form,
        "file": file.name,
        "sha256": digest.hexdigest(),
        "encoder": encoder.settings,
        "tensors": {
            "encoder": len(encoder.state_dict()),
            "exported": len(exported.tensors),
            "loaded": len(exported.loaded),
            "left_out": left_out,
            "names": exported.names,
        },
        "outputs": outputs,
        "tolerance": tolerance,
        "preprocessing": description(encoder),
        "photograph": None if photograph is None else _compare_photograph(encoder, exported, photograph),
        "versions": versions() | {name: version(name) for name in exported.packages},
    }


def shapes(encoder: Encoder, dynamic_size: bool) -> list[tuple[int, int, int, int]]:
    """Return the shapes of three batches of images: 1, 2 and 3 images, and with `dynamic_size`, of three sizes.

    Raises:
        EncoderError: the encoder does not take images of three sizes.
    """
    (height, width), step = image_size(encoder), encoder.stride
    sizes = [(height, width)] * 3
    if dynamic_size:
        others = [
            (height + step, width),
            (height, width + 2 * step),
            (height - step, width),
            (height, width - 2 * step),
        ]
        sizes = [(height, width), *(size for size in others if _takes(encoder, size))][:3]
        if len(sizes) < 3:
            raise EncoderError(f"{type(encoder).__name__} takes images of {height} x {width} pixels only.")
    return [(count, encoder.channels, *size) for count, size in enumerate(sizes, 1)]


@torch.no_grad()
def _takes(encoder: Encoder, size: tuple[int, int]) -> bool:
    try:
        encoder(torch.zeros(1, encoder.channels, *size))
    except EncoderError:
        return False
    return True


def tokens_of(features: Features) -> tuple[Tensor, Tensor]:
    """Return the pooled features (B, D) and the tokens (B, N, D) of images of one size."""
    return features.pooled, features.tokens.unflatten(0, (features.pooled.shape[0], -1))


def names_after(encoder: Encoder, convert: Callable[[Encoder], State], tensors: State) -> dict[str, list[str]]:
    """Return the names that the tensors of an encoder have after a conversion.

    A copy of the encoder, whose parameters have the values 1, 2, ..., is converted, so that the converted values tell
    the parameters. Buffers keep their values, which may determine the settings of the converted model.

    Args:
        encoder: encoder to convert.
        convert: function that returns the converted tensors of an encoder.
        tensors: converted tensors of `encoder`.
    """
    numbered = copy.deepcopy(encoder)
    parameters = [name for name, _ in numbered.named_parameters()]
    with torch.no_grad():
        for number, parameter in enumerate(numbered.parameters(), 1):
            parameter.fill_(number)
    found: dict[str, list[str]] = {}
    for name, tensor in convert(numbered).items():
        for number in set(tensor.flatten().unique_consecutive().tolist()):
            if number in range(1, len(parameters) + 1):
                found.setdefault(parameters[int(number) - 1], []).append(name)
    for name, buffer in encoder.named_buffers():
        equal = [new for new, tensor in tensors.items() if name.endswith(new) and torch.equal(tensor, buffer)]
        found |= {name: equal} if equal else {}
    return found


def _check_tensors(encoder: Encoder, exported: Exported) -> list[str]:
    """Check that the library loaded all tensors. Return the names of those that the export leaves out.

    Raises:
        WeightsError: the library did not load a tensor, made another tensor itself, or the export lacks a parameter
            that the features depend on.
    """
    written, loaded = ({name: _digest(t) for name, t in state.items()} for state in (exported.tensors, exported.loaded))
    lost = _without(written, loaded.values())
    new = _without(loaded, written.values())
    # A library may split and join tensors, as transformers does with the gates of MLPs.
    if not torch.equal(_values(exported.tensors, lost), _values(exported.loaded, new)):
        raise WeightsError(
            f"The export was loaded only in part. Not loaded: {listed(lost)}. Not from the file: {listed(new)}."
        )
    left_out = [name for name in encoder.state_dict() if name not in exported.names]
    needed = set(left_out) & {name for name, _ in encoder.named_parameters()}
    if needed:
        needed -= unused_parameters(encoder, [min(image_size(encoder))], tokens=True)
    if needed:
        raise WeightsError(
            f"The export lacks tensors on which the features depend: {listed(sorted(needed))}. Export with --to ours."
        )
    return left_out


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).digest()


def _values(state: State, names: Iterable[str]) -> Tensor:
    """Return all values of the tensors of these names, sorted."""
    return torch.cat([torch.empty(0), *(state[name].flatten().float() for name in names)]).sort().values


def _without(digests: dict[str, bytes], others: Iterable[bytes]) -> list[str]:
    """Return the names of `digests` whose values are not in `others`, where each value counts as often as it occurs."""
    free = Counter(others)
    missing = []
    for name, digest in digests.items():
        if not free[digest]:
            missing.append(name)
        free[digest] -= 1
    return missing


@torch.no_grad()
def _compare(
    encoder: Encoder, exported: Exported, shape: tuple[int, int, int, int], tolerance: float
) -> dict[str, Any]:
    """Return the largest differences of pooled features and of tokens for random images of this shape.

    Raises:
        WeightsError: a difference is larger than `tolerance` times the largest feature.
    """
    images = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))
    ours = tokens_of(encoder(images))
    try:
        theirs = exported.run(images)
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise WeightsError(f"The export does not run for images of shape {shape}: {reason}") from error
    found: dict[str, Any] = {"images": list(shape)}
    for name, own, other in zip(("pooled", "tokens"), ours, theirs, strict=True):
        if own.shape != other.shape:
            raise WeightsError(f"{name} of the export have the shape {tuple(other.shape)}, not {tuple(own.shape)}.")
        difference, largest = float((own - other).abs().max()), float(own.abs().max())
        if not difference <= tolerance * largest:
            raise WeightsError(
                f"{name} of the export differ by up to {difference:.2g} from those of the encoder, whose largest value "
                f"is {largest:.2g}, for images of shape {shape}. Nothing was written. Export with --to ours, or accept "
                f"the difference with --tolerance {difference / largest:.1g}."
            )
        found[name] = difference
    return found


@torch.no_grad()
def _compare_photograph(encoder: Encoder, exported: Exported, photograph: Photograph) -> dict[str, Any]:
    """Return the largest differences between a photograph that each side prepares and encodes.

    Features are differences as a fraction of the largest feature. They have no limit, because a pixel that is rounded
    differently may change them by any amount.

    Raises:
        WeightsError: a pixel differs by more than `LEVELS`.
    """
    image, pixels = photograph
    prepared = pixels if exported.prepare is None else exported.prepare(image)
    std = torch.tensor(encoder.preprocessing.std).view(-1, 1, 1)
    levels = 255 * float(((prepared - pixels) * std).abs().max()) if prepared.shape == pixels.shape else float("inf")
    if not levels <= LEVELS + 0.5:
        raise WeightsError(
            f"The preparation of images of the export differs by {levels:.3g} of 255 levels for a photograph of "
            f"{image.width} x {image.height} pixels. Nothing was written. Export with --to ours."
        )
    ours, theirs = tokens_of(encoder(pixels[None])), exported.run(prepared[None])
    found: dict[str, Any] = {"image": [image.height, image.width], "input": list(pixels.shape), "levels": levels}
    for name, own, other in zip(("pooled", "tokens"), ours, theirs, strict=True):
        found[name] = float((own - other).abs().max() / own.abs().max())
    return found
