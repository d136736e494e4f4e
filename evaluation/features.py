"""Features of labelled shards: which encoder, which pixels it sees, and the pass over them.

B images of S x S pixels, N images of this process's part of the shards, D features of an image.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate import Accelerator
from pydantic import Field
from rich.progress import track
from safetensors import SafetensorError
from torch import Tensor

import encoders
from data.augment import to_model_input
from data.collate import Transform
from data.crops import CenterCrop
from data.loader import Reading, evaluation_batches, require_labels
from data.shards import DEFAULT, ShardError, ShardList, Shards, SourceConfig, expand, open_shards
from data.workers import free_cores
from encoders.base import Encoder, Features
from encoders.images import Images
from runtime.collectives import all_gather
from runtime.errors import UserError
from runtime.settings import Settings

WEIGHTS = "encoder.safetensors"
PIXELS = "pixels"


class EvaluationError(UserError, ValueError):
    """An evaluation that cannot be done as asked."""


class FeatureSettings(Settings):
    """What every job over features is told."""

    checkpoint: str
    """run folder, checkpoint in it, or exported encoder; `pixels` for the pixels themselves"""
    image_size: int | None = Field(None, ge=1)
    """side of the images in pixels; without it, what the encoder was built for"""
    resize: int | None = Field(None, ge=1)
    """short side before the centre crop, pixels; without it, 8/7 of image_size from 128 pixels on, else image_size"""
    batch_size: int = Field(256, ge=1)
    """images of one forward pass in each process"""
    workers: int | None = Field(None, ge=0)
    """loader processes of each process; without it, one a free core, at most 8"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """arithmetic of the encoder"""
    source: SourceConfig = SourceConfig()

    def extraction_options(self) -> dict[str, Any]:
        """Arguments of `extract`."""
        names = ("image_size", "resize", "batch_size", "workers", "precision", "source")
        return {name: getattr(self, name) for name in names}


class Pixels(Encoder):
    """No encoder at all: the normalised pixels themselves are the features, for checking an evaluation."""

    stride = 1

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.dim, self.settings = 3 * image_size**2, {"image_size": image_size}

    def forward(self, images: Images, mask: object = None, *, drop: bool = False) -> Features:
        """(B, 3, S, S) -> pooled (B, 3 * S * S)."""
        if mask is not None or drop or not isinstance(images, Tensor):
            raise ValueError("pixels take images of one size, and no mask")
        return Features(images.flatten(1), images.permute(0, 2, 3, 1).flatten(0, 2), self.grids(images))


def resolve_checkpoint(path: str | Path) -> Path:
    """The `encoder.safetensors` of a run folder (of its newest checkpoint when the run is not finished) or of a
    checkpoint, or an exported file itself.

    Raises:
        EvaluationError: none of them; says what was looked for.
    """
    path = Path(path).expanduser()
    if path.is_file():
        if path.suffix != ".safetensors":
            raise EvaluationError(
                f"{path} is not an exported encoder (.safetensors); "
                "make one with encoders.build, encoders.load_weights and encoders.save"
            )
        return path
    wanted = [path / WEIGHTS, path / "checkpoints" / "latest" / WEIGHTS]
    for candidate in wanted:
        if candidate.is_file():
            return candidate
    looked = " and ".join(str(candidate) for candidate in (path, *wanted))
    raise EvaluationError(f"no encoder at {path}: looked for {looked}")


def load_encoder(checkpoint: str, image_size: int | None) -> tuple[Encoder, Path | None]:
    """The encoder of `--checkpoint`, in eval mode, and its file; the word `pixels` is an encoder without one.

    Raises:
        EvaluationError: there is none.
    """
    if checkpoint == PIXELS:
        if image_size is None:
            raise EvaluationError("pixels have no size of their own: give --image_size (32 for CIFAR-10)")
        return Pixels(image_size).eval(), None
    file = resolve_checkpoint(checkpoint)
    try:
        return encoders.load(file), file
    except (ValueError, OSError, SafetensorError) as error:
        raise EvaluationError(f"cannot load {file}: {error}") from error


def input_size(encoder: Encoder, image_size: int | None) -> int:
    """Side of the images in pixels: as asked, else as the encoder was built for.

    Raises:
        EvaluationError: the encoder was built for images that are not square.
    """
    size = image_size or encoder.settings["image_size"]
    if not isinstance(size, int):
        sides = list(size)
        if len(set(sides)) != 1:
            raise EvaluationError(
                f"the encoder was built for images of {sides} pixels: give the side with --image_size"
            )
        size = int(sides[0])
    return size


def resize_size(size: int, resize: int | None) -> int:
    """Short side before the centre crop in pixels: as asked, else 256 for 224 (DINO) and in that ratio from 128 pixels
    on; smaller images are seen whole.

    Raises:
        EvaluationError: the crop would not fit.
    """
    resize = resize or (round(size * 256 / 224) if size >= 128 else size)
    if resize < size:
        raise EvaluationError(f"a crop of {size} pixels does not fit in images resized to {resize}: raise --resize")
    return resize


def pooled(encoder: Encoder, images: Tensor) -> Tensor:
    """One vector an image: (B, 3, S, S) -> (B, D)."""
    return encoder(images).pooled


def extract(
    encoder: Encoder,
    shards: Shards,
    *,
    accelerator: Accelerator,
    image_size: int | None = None,
    resize: int | None = None,
    batch_size: int = 256,
    workers: int | None = None,
    precision: str = "fp32",
    take: Callable[[Encoder, Tensor], Tensor] = pooled,
    transform: Transform | None = None,
    labels: bool = True,
    progress: bool = True,
    keys: list[str] | None = None,
    source: SourceConfig = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Features and labels of this process's part of `shards`, on the CPU: (N, D) float32 and (N,) int64.

    Parts of the processes are neighbours in order of rank. Images are resized, cropped in the middle and normalised as
    in pretraining. The encoder is taken as it is: on its device and in its mode.

    Args:
        batch_size: images of one forward pass.
        precision: `fp32`, or `bf16` for autocast.
        take: what of the encoder is a feature.
        transform: what cuts out the pixels, in place of the centre crop.
        labels: whether the shards must have labels; without, all are -1.
        keys: gets the names of the samples appended.
        source: how shards are reached.

    Raises:
        ShardError: no labels, or shards that cannot be read.
        EvaluationError: the encoder does not take images of this size.
    """
    size = input_size(encoder, image_size)
    batches = evaluation_batches(
        shards,
        transform or CenterCrop(size, resize=resize_size(size, resize)),
        batch_size,
        part=(accelerator.process_index, accelerator.num_processes),
        labels=labels,
        reading=Reading(
            workers=free_cores(accelerator.num_processes) if workers is None else workers,
            source=source,
            preprocessing=encoder.preprocessing,
        ),
    )
    totals = {int(total) for total in all_gather(torch.tensor([batches.total]))}
    if len(totals) > 1:  # a process more or less would read the stretches of others
        raise ShardError(f"the processes see from {min(totals)} to {max(totals)} images: some miss shards; start again")
    device = accelerator.device
    found, found_labels = [], []
    shown = progress and accelerator.is_main_process
    for batch in track(batches, f"features of {batches.total:,} images", total=len(batches), disable=not shown):
        images = cast(Tensor, to_model_input(batch.to(device, non_blocking=True)).views[0].images)  # (B, 3, S, S)
        found.append(_take(encoder, images, take, precision))
        found_labels.append(batch.labels if batch.labels is not None else torch.full((len(images),), -1))
        if keys is not None:
            keys += batch.keys
    if not found:  # more processes than images, or all of them corrupt
        found = [_take(encoder, torch.zeros(1, 3, size, size, device=device), take, precision)[:0]]
        found_labels = [torch.zeros(0, dtype=torch.int64)]
    return torch.cat(found), torch.cat(found_labels)  # (N, D), (N,): outside of inference mode, so of the usual kind


def _take(encoder: Encoder, images: Tensor, take: Callable[[Encoder, Tensor], Tensor], precision: str) -> Tensor:
    """(B, 3, S, S) -> (B, D) float32 on the CPU."""
    with torch.inference_mode(), torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16"):
        try:
            return take(encoder, images).float().cpu()
        except (ValueError, NotImplementedError) as error:
            size = " x ".join(str(side) for side in images.shape[2:])
            raise EvaluationError(f"{type(encoder).__name__} on images of {size} pixels: {error}") from error


def open_labelled(shards: Shards, source: SourceConfig, accelerator: Accelerator) -> ShardList:
    """Shards all of whose samples have labels, which is found out before the first image is encoded.

    Raises:
        ShardError: names a shard that cannot be used, or a sample without a label.
    """
    opened = open_shards(shards, source=source, progress=accelerator.is_main_process)
    require_labels(opened)
    return opened


def check_disjoint(train: Shards, val: Shards) -> None:
    """Refuse to score images that the bank or the classifier has seen: each would find itself.

    Raises:
        EvaluationError: names a shard of both.
    """
    seen = {os.path.realpath(path) for path in expand(train)}
    if both := [path for path in expand(val) if os.path.realpath(path) in seen]:
        raise EvaluationError(f"{both[0]} is among the shards to train on and those to score: hold some shards out")


def check_labels(train: Tensor, val: Tensor) -> None:
    """Labels of all images of both sets.

    Raises:
        EvaluationError: a set without a good image, a negative label, or a class that is scored and not trained on.
    """
    for name, labels in (("train", train), ("val", val)):
        if not len(labels):
            raise EvaluationError(f"--{name} has no image that is not corrupt")
        if int(labels.min()) < 0:
            raise EvaluationError(f"--{name} has the label {int(labels.min())}: classes are numbered from 0")
    missing = sorted(set(val.unique().tolist()) - set(train.unique().tolist()))
    if missing:
        raise EvaluationError(
            f"{len(missing)} classes of --val are not in --train, for example {missing[0]}: is it the same data set?"
        )
