"""Compute the features of images in shards: load the encoder, prepare the images and encode them.

Shape letters: B images of one batch, C channels, S x S pixels, N images of this process, D features per image.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from accelerate import Accelerator
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor

from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.data.batch import Batch
from tessera.data.collate import Transform
from tessera.data.crops import CenterCrop
from tessera.data.loader import Reading, evaluation_batches
from tessera.data.shards import DEFAULT, ShardError, Shards, Source, SourceConfig, open_shards
from tessera.data.workers import free_cores
from tessera.encoders import published
from tessera.encoders.base import IMAGENET, Encoder, Features, Preprocessing
from tessera.encoders.images import Images
from tessera.runtime.collectives import all_gather, all_reduce_sum
from tessera.runtime.errors import UserError
from tessera.runtime.progress import track
from tessera.runtime.settings import Settings

PIXELS = "pixels"


class EvaluationError(UserError, ValueError):
    """Raised when an evaluation cannot run as requested."""


class EncoderSettings(Settings):
    """Settings of every command that encodes images."""

    checkpoint: str
    """run folder, checkpoint in a run folder, exported encoder, `timm:NAME` for a pretrained model of timm, or `pixels`
    to use the pixels as features"""
    image_size: int | None = Field(None, ge=1)
    """side of the images in pixels; default: the size that the encoder was built for"""
    channels: int = Field(3, ge=1)
    """number of image channels for --checkpoint pixels; any other encoder defines the number of channels itself"""
    batch_size: int = Field(256, ge=1)
    """number of images per forward pass in each process"""
    workers: int | None = Field(None, ge=0)
    """number of loader workers per process; default: one per free core, at most 8"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """precision of the encoder's forward pass"""
    source: SourceConfig = SourceConfig()


class FeatureSettings(EncoderSettings):
    """Settings of every command that computes features of centre crops."""

    resize: int | None = Field(None, ge=1)
    """short side to which images are resized before the centre crop, in pixels; default: 8/7 of image_size if
    image_size is at least 128, else image_size"""

    def extraction(self) -> "Extraction":
        """Return the settings as an argument for `extract`."""
        return Extraction(
            image_size=self.image_size,
            resize=self.resize,
            batch_size=self.batch_size,
            workers=self.workers,
            precision=self.precision,
            source=self.source,
        )


class LabelledFeatures(NamedTuple):
    """Features and labels of the part of a data set that belongs to this process."""

    features: Tensor
    """Features, (N, D) float32."""
    labels: Tensor
    """Labels, (N,) int64; -1 for images without a label."""
    keys: Sequence[str] = ()
    """Names `shard.tar/key` of the N samples."""


def pooled(encoder: Encoder, images: Tensor) -> Tensor:
    """Return the encoder's pooled output: (B, C, S, S) -> (B, D)."""
    return encoder(images).pooled


@dataclass(frozen=True)
class Extraction:
    """Options of `extract`."""

    image_size: int | None = None
    """Side of the images in pixels. None selects the size that the encoder was built for."""
    resize: int | None = None
    """Short side in pixels to which images are resized before the centre crop. None: the default of `resize_size`."""
    batch_size: int = 256
    """Number of images per forward pass."""
    workers: int | None = None
    """Number of loader workers per process. None selects one per free core, at most 8."""
    precision: str = "fp32"
    """Precision of the forward pass: `fp32`, or `bf16` for bfloat16 autocast."""
    source: SourceConfig = DEFAULT
    """Options for reading remote shards."""
    feature: Callable[[Encoder, Tensor], Tensor] = pooled
    """Function that maps the encoder and its input (B, C, S, S) to features (B, D)."""
    transform: Transform | None = None
    """Transform of the images. None selects the centre crop."""
    labels: bool = True
    """True if the labels are read. If False, all labels are -1."""
    progress: bool = True
    """True if the main process shows a progress bar."""


class Pixels(Encoder):
    """An encoder whose features are the normalised pixels. It is used to check an evaluation."""

    stride = 1

    def __init__(self, image_size: int, preprocessing: Preprocessing = IMAGENET) -> None:
        super().__init__()
        self.preprocessing, self.channels = preprocessing, preprocessing.channels
        self.dim, self.settings = self.channels * image_size**2, {"image_size": image_size}

    def forward(self, images: Images, mask: object = None, *, drop: bool = False) -> Features:
        """Return the pixels of each image as its pooled features: (B, C, S, S) -> (B, C * S * S)."""
        if mask is not None or drop or not isinstance(images, Tensor):
            raise ValueError("The encoder `Pixels` takes only images of one size, and no mask.")
        return Features(images.flatten(1), images.permute(0, 2, 3, 1).flatten(0, 2), self.grids(images))


def resolve_checkpoint(path: str | Path) -> Path:
    """Return the `encoder.safetensors` of a run folder or of a checkpoint, or `path` itself if it is an exported
    encoder.

    A run folder without `encoder.safetensors` belongs to an unfinished run. The newest checkpoint of the run is used.

    Raises:
        EvaluationError: there is no encoder at `path`.
    """
    path = Path(path).expanduser()
    if path.is_file():
        if path.suffix != ".safetensors":
            raise EvaluationError(
                f"{path} is not an exported encoder (.safetensors). "
                "Make one with encoders.build, encoders.load_weights and encoders.save."
            )
        return path
    candidates = encoders.places(path)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    tried = ", ".join(str(candidate) for candidate in (path, *candidates))
    raise EvaluationError(f"No encoder found. Tried: {tried}. Give a run folder, a checkpoint or an exported encoder.")


def load_encoder(settings: EncoderSettings) -> tuple[Encoder, Path | None]:
    """Return the encoder of `--checkpoint` in eval mode, and the encoder's file.

    The file is None for `pixels` and for `timm:NAME`.

    Raises:
        EvaluationError: the encoder cannot be found or loaded.
    """
    if settings.checkpoint == PIXELS:
        if settings.image_size is None:
            raise EvaluationError("--checkpoint pixels has no size. Give --image_size (32 for CIFAR-10).")
        half = (0.5,) * settings.channels
        preprocessing = IMAGENET if settings.channels == IMAGENET.channels else Preprocessing(half, half)
        return Pixels(settings.image_size, preprocessing).eval(), None
    if published.is_name(settings.checkpoint):
        return encoders.load(settings.checkpoint), None
    file = resolve_checkpoint(settings.checkpoint)
    try:
        return encoders.load(file), file
    except (ValueError, OSError, SafetensorError) as error:
        raise EvaluationError(f"Cannot load the encoder {file}: {error}") from error


def input_size(encoder: Encoder, image_size: int | None) -> int:
    """Return the side of the images in pixels: `image_size`, or the size that the encoder was built for.

    Raises:
        EvaluationError: the encoder was built for images that are not square, and `image_size` is None.
    """
    size = image_size or encoder.settings["image_size"]
    if not isinstance(size, int):
        sides = list(size)
        if len(set(sides)) != 1:
            raise EvaluationError(
                f"The encoder was built for images of {sides} pixels, which are not square. Give --image_size."
            )
        size = int(sides[0])
    return size


def resize_size(size: int, resize: int | None) -> int:
    """Return the short side in pixels to which images are resized before a centre crop of `size` pixels.

    If `resize` is None, crops of 128 pixels or more use DINO's ratio: a short side of 256 for a crop of 224. The short
    side for smaller crops is the crop size.

    Raises:
        EvaluationError: `resize` is smaller than `size`.
    """
    resize = resize or (round(size * 256 / 224) if size >= 128 else size)
    if resize < size:
        raise EvaluationError(f"A crop of {size} pixels does not fit in images resized to {resize}. Raise --resize.")
    return resize


def extract(
    encoder: Encoder, shards: Shards, accelerator: Accelerator, extraction: Extraction | None = None
) -> LabelledFeatures:
    """Encode this process's part of the images in `shards`, and return the features on the CPU.

    Each process takes a contiguous part of the images, in order of rank. Images are resized, cropped at the centre and
    normalised with `encoder.preprocessing`. The encoder's device and train or eval mode do not change.

    Raises:
        ShardError: the shards cannot be read, or `extraction.labels` is True and the shards have no labels.
        EvaluationError: the encoder does not accept images of this size.
    """
    extraction = extraction or Extraction()
    size = input_size(encoder, extraction.image_size)
    workers = free_cores(accelerator.num_processes) if extraction.workers is None else extraction.workers
    batches = evaluation_batches(
        shards,
        extraction.transform or CenterCrop(size, resize=resize_size(size, extraction.resize)),
        extraction.batch_size,
        part=(accelerator.process_index, accelerator.num_processes),
        labels=extraction.labels,
        reading=Reading(workers=workers, source=extraction.source, preprocessing=encoder.preprocessing),
    )
    check_total(batches.total)
    device = accelerator.device
    features, labels, keys = [], [], []
    shown = extraction.progress and accelerator.is_main_process
    for batch in track(batches, f"features of {batches.total:,} images, batches", total=len(batches), shown=shown):
        images = single_view(to_model_input(batch.to(device, non_blocking=True)))  # (B, C, S, S)
        features.append(_features(encoder, images, extraction))
        labels.append(batch.labels if batch.labels is not None else torch.full((len(batch),), -1))
        keys += batch.keys
    # A process has no features if there are fewer images than processes, or if all of its images are corrupt. In
    # this case, a black image is encoded, to get an empty tensor of the right width.
    if not features:
        empty = torch.zeros(1, encoder.preprocessing.channels, size, size, device=device)
        features = [_features(encoder, empty, extraction)[:0]]
        labels = [torch.zeros(0, dtype=torch.int64)]
    # concatenate outside of inference mode, so that the results are normal tensors that allow in-place changes
    return LabelledFeatures(torch.cat(features), torch.cat(labels), keys)  # (N, D), (N,)


def check_total(images: int) -> None:
    """Check that all processes see the same number of images in the shards. Call this function on all processes.

    Raises:
        ShardError: the numbers differ.
    """
    totals = {int(total) for total in all_gather(torch.tensor([images]))}
    if len(totals) > 1:  # different counts give parts that overlap or leave gaps
        raise ShardError(
            f"The processes see different numbers of images, from {min(totals)} to {max(totals)}. "
            "Some shards are missing on some nodes. Check the shards and start again."
        )


def single_view(batch: Batch) -> Tensor:
    """Return the images (B, C, S, S) of a batch of centre crops."""
    (view,) = batch.views
    if not isinstance(view.images, Tensor):
        raise TypeError("The batch holds packed images. A batch of centre crops must hold one tensor.")
    return view.images


def _features(encoder: Encoder, images: Tensor, extraction: Extraction) -> Tensor:
    """Encode images, and return the features on the CPU: (B, C, S, S) -> (B, D) float32."""
    with torch.inference_mode(), encoding(encoder, images, extraction.precision):
        return extraction.feature(encoder, images).float().cpu()


@contextmanager
def encoding(encoder: Encoder, images: Tensor, precision: str) -> Iterator[None]:
    """Return a context for the forward pass of images (B, C, H, W): `fp32`, or `bf16` for bfloat16 autocast.

    Raises:
        EvaluationError: the encoder does not accept images of this size. The message names the size.
    """
    try:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16"):
            yield
    except (ValueError, NotImplementedError) as error:
        size = " x ".join(str(side) for side in images.shape[2:])
        raise EvaluationError(f"{type(encoder).__name__} cannot encode images of {size} pixels: {error}") from error


def open_labelled(shards: Shards, source: SourceConfig, accelerator: Accelerator) -> Source:
    """Open shards, and check that all samples have labels before any image is encoded.

    Raises:
        ShardError: a shard cannot be used, or a sample has no label.
    """
    opened = open_shards(shards, source=source, progress=accelerator.is_main_process)
    opened.require_labels()
    return opened


def check_labels(train: Tensor, val: Tensor, classes: Sequence[str] | None = None) -> None:
    """Check the labels of the training set and the validation set.

    Args:
        train: labels (N,) of the training images of all processes.
        val: labels (M,) of the validation images of all processes.
        classes: class names that both sets share. None if the classes have no names. In this case, both sets must have
            the same largest label, because a set that lacks a class may have been numbered without this class.

    Raises:
        EvaluationError: a set is empty, a label is negative, a class of `val` is not in `train`, or the classes have no
            names and the sets differ in their largest label.
    """
    for name, labels in (("train", train), ("val", val)):
        if not len(labels):
            raise EvaluationError(f"--{name} has no readable image. Check the shards with `tessera check_shards`.")
        if int(labels.min()) < 0:
            raise EvaluationError(f"--{name} has the label {int(labels.min())}. Number the classes from 0.")
    missing = sorted(set(val.unique().tolist()) - set(train.unique().tolist()))
    if missing:
        example = str(missing[0]) if classes is None else repr(classes[missing[0]])
        raise EvaluationError(
            f"{len(missing)} classes of --val are not in --train, for example {example}. "
            "Check that --train and --val belong to the same data set."
        )
    largest, other = int(train.max()), int(val.max())
    if classes is None and largest != other:
        raise EvaluationError(
            f"The labels of --train end at {largest}, but those of --val end at {other}, and no classes.json names the "
            "classes. The sets may number their classes differently. Write the class names of each set, a JSON list in "
            "the order of the class numbers, to a classes.json beside its shards."
        )


def check_finite(train: Tensor, val: Tensor) -> None:
    """Check the training and validation features on all processes. Call this function on all processes.

    Raises:
        EvaluationError: a feature is NaN or infinite.
    """
    broken = ~(train.isfinite().all() & val.isfinite().all())
    if all_reduce_sum(broken.to(torch.int64)):
        raise EvaluationError(
            "Some features are NaN or infinite. Check whether the encoder has diverged, or try --precision fp32."
        )
