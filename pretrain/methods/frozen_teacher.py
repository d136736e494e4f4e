"""The frozen encoder from which a student learns: find its file, load it, and compute its features.

Shape letters: B images per process, of C channels and H x W pixels.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera import encoders
from tessera.encoders.base import Encoder, Features, Preprocessing
from tessera.encoders.errors import EncoderError
from tessera.encoders.weights import fitting


def teacher_file(path: str | None) -> Path:
    """Return the weight file of a teacher. `path` is a weight file, or the folder of a run or of a checkpoint.

    Raises:
        ValueError: there is no encoder at `path`, or `path` is None.
    """
    if path is None:
        raise ValueError(
            "The teacher is not set. Set distill.teacher to a run folder, an encoder.safetensors or a published weight "
            "file."
        )
    given = Path(path).expanduser()
    for file in (given, *encoders.places(given)):
        if file.is_file():
            return file
    raise ValueError(f"No encoder found at {given}. Give a run folder, an encoder.safetensors or a weight file.")


def teacher_hash(file: Path) -> str:
    """Return the SHA-256 of a weight file and of the .json file beside it, if there is one."""
    digest = hashlib.sha256()
    for part in (file, file.with_suffix(".json")):
        if part.is_file():
            with part.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


class Teacher:
    """A frozen encoder that is loaded beside the method.

    The teacher is not a module of the method. Engines therefore do not shard it, checkpoints do not store it, and each
    process holds all of its weights.
    """

    def __init__(self, encoder: Encoder, size: int) -> None:
        """Freeze `encoder`. `size` is the side in pixels of its input images."""
        self.encoder, self.size = encoder.eval().requires_grad_(False), size

    def __deepcopy__(self, memo: dict[int, Any]) -> "Teacher":
        return self  # copies of the method share the teacher, because its weights never change

    @torch.no_grad()
    def features(self, images: Tensor, preprocessing: Preprocessing) -> Features:
        """Return the teacher's features of images (B, C, H, W) that are normalised by `preprocessing`.

        Raises:
            EncoderError: the teacher does not support images of its size.
        """
        if images.shape[-2:] != (self.size, self.size):
            images = F.interpolate(images, size=(self.size, self.size), mode="bicubic", antialias=True)
        images = renormalized(images, preprocessing, self.encoder.preprocessing)
        try:
            return self._encode(images)
        except EncoderError as error:
            hint = f"distill.teacher_size sets the size of these images, which is {self.size} pixels."
            raise EncoderError(f"The teacher does not support its images: {error} {hint}") from error

    def _encode(self, images: Tensor) -> Features:
        if images.is_meta:  # the check before a run needs only the shapes
            tensors = {**dict(self.encoder.named_parameters()), **dict(self.encoder.named_buffers())}
            empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
            return torch.func.functional_call(self.encoder, empty, (images,))
        if next(self.encoder.parameters()).device != images.device:
            self.encoder.to(images.device)
        return self.encoder(images)


def load_teacher(path: str | None, size: int) -> Teacher:
    """Return the encoder at `path` as a teacher for images of `size` pixels.

    Raises:
        ValueError: there is no encoder at `path`, its format is not recognised, or an image is smaller than a token.
    """
    with torch.device("cpu"):  # an export builds methods on the meta device
        encoder, _ = fitting(teacher_file(path), None, {})
    if min(encoder.grid(size, size)) < 1:
        raise ValueError(
            f"Images of {size} pixels are smaller than a token of the teacher, which has {encoder.stride} pixels. "
            "Raise distill.teacher_size."
        )
    return Teacher(encoder, size)


def renormalized(images: Tensor, given: Preprocessing, wanted: Preprocessing) -> Tensor:
    """Return images (B, C, H, W) that are normalised by `given` as images that are normalised by `wanted`."""
    if given == wanted:
        return images
    images = images.clone()
    statistics = zip(given.mean, given.std, wanted.mean, wanted.std, strict=True)
    for channel, (mean, std, other_mean, other_std) in enumerate(statistics):
        images[:, channel].mul_(std / other_std).add_((mean - other_mean) / other_std)
    return images
