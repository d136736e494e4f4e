"""Compute features of the images in shards: load the encoder, prepare and encode the images, normalise the features.

Shape letters: B images of one batch, C channels, S x S pixels, N images of this process, D features per image.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from accelerate import Accelerator
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor

from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.data.batch import Batch
from tessera.data.batches import Batches
from tessera.data.collate import CutView, Transform
from tessera.data.crops import CenterCrop
from tessera.data.dataset import EvaluationDataset, cure_of
from tessera.data.loader import Reading, evaluation_batches
from tessera.data.pages import Pages
from tessera.data.shards import DEFAULT, Access, ShardError, Shards, SourceConfig
from tessera.data.shards.samples import SampleKeys
from tessera.data.user_code import load_stages
from tessera.data.workers import free_cores
from tessera.encoders.base import IMAGENET, Encoder, Features, Preprocessing
from tessera.encoders.images import Images
from tessera.encoders.preprocessing import short_side
from tessera.encoders.registry import unknown_prefix
from tessera.evaluation.memory import images_at_once
from tessera.runtime import bf16
from tessera.runtime.collectives import all_gather, all_reduce_sum, broadcast_object, first_rank
from tessera.runtime.progress import track
from tessera.runtime.settings import Settings
from tessera.runtime.user_error import UserError, printable

PIXELS = "pixels"
EPSILON = 1e-6
"""Epsilon of the batch norm in MAE's linear probe."""


class EvaluationError(UserError, ValueError):
    """Raised when an evaluation cannot run as requested."""


class EncoderSettings(Settings):
    """Settings of every command that encodes images."""

    checkpoint: str
    """run folder, checkpoint in a run folder, exported encoder, `timm:NAME` for a pretrained model of timm, or `pixels`
    (with --image_size) to use the pixels as features"""
    image_size: int | None = Field(None, ge=1)
    """side of the images in pixels; default: the size that the encoder was built for; --checkpoint pixels has none, so
    give it there, such as 32 for CIFAR-10"""
    channels: int = Field(3, ge=1)
    """number of image channels for --checkpoint pixels; any other encoder defines the number of channels itself"""
    batch_size: int = Field(256, ge=1)
    """largest number of images per forward pass in each process; fewer if the encoder needs much memory for them"""
    workers: int | None = Field(None, ge=0)
    """number of loader workers per process; default: one per free core, as in a run"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """precision of the encoder's forward pass"""
    source: SourceConfig = SourceConfig()
    image: str | None = None
    """name of the image in a sample, as for data.image of a run"""
    label: str | None = None
    """name of the label in a sample, as for data.label of a run"""
    labels: str | None = None
    """CSV with the labels of images in folders: columns path and label, paths relative to it"""
    pages: Pages | None = None
    """images of files that hold several, as for data.pages of a run"""

    labelled_only: ClassVar[bool] = False
    """True if images without a label in `labels` are left out."""

    @property
    def access(self) -> Access:
        """Access to shards."""
        return Access(self.source, SampleKeys(self.image, self.label, self.labels, self.labelled_only, self.pages))

    def facts(self, encoder: Encoder) -> dict[str, Any]:
        """Return the settings that depend on the encoder, for the result file."""
        return {"image_size": input_size(encoder, self.image_size)}


class PooledSettings(EncoderSettings):
    """Settings of every command that computes pooled features."""

    stages: str | list[str] | None = None
    """stages of your own, as module:function, as for data.stages of a run"""

    @property
    def access(self) -> Access:
        """Access to shards. Modules of the user's stages are imported."""
        return replace(super().access, stages=load_stages(self.stages))

    def options(self) -> dict[str, Any]:
        """Return the settings as arguments for `extract`."""
        names = ("image_size", "batch_size", "workers", "precision")
        return {name: getattr(self, name) for name in names} | {"source": self.access}


class FeatureSettings(PooledSettings):
    """Settings of every command that computes features of centre crops."""

    resize: int | None = Field(None, ge=1)
    """short side to which images are resized before the centre crop, in pixels; default: 8/7 of image_size if
    image_size is at least 128, else image_size"""

    def options(self) -> dict[str, Any]:
        """Return the settings as arguments for `extract`."""
        return super().options() | {"resize": self.resize}

    def facts(self, encoder: Encoder) -> dict[str, Any]:
        """Return the settings that depend on the encoder, for the result file."""
        found = super().facts(encoder)
        return found | {"resize": resize_size(found["image_size"], self.resize)}


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


class Pixels(Encoder):
    """Encoder whose features are the normalised pixels. It serves as a check of the evaluations and as a baseline."""

    stride = 1

    def __init__(self, image_size: int, preprocessing: Preprocessing = IMAGENET) -> None:
        super().__init__()
        self.preprocessing, self.channels = preprocessing, preprocessing.channels
        self.dim, self.settings = self.channels * image_size**2, {"image_size": image_size}

    def forward(self, images: Images, mask: object = None, *, drop: bool = False) -> Features:
        """Return the pixels of each image as its pooled features: (B, C, S, S) -> (B, C * S * S)."""
        if mask is not None or drop or not isinstance(images, Tensor):
            raise ValueError("`Pixels` requires one tensor of images. Pass no packed images, no mask, and drop=False.")
        images = images.nan_to_num()  # a missing channel has the mean of the channel
        return Features(images.flatten(1), images.permute(0, 2, 3, 1).flatten(0, 2), self.grids(images))


def resolve_checkpoint(path: str | Path) -> Path:
    """Return the `encoder.safetensors` of a run folder or of a checkpoint, or `path` itself if it is an exported
    encoder.

    If a run folder has no `encoder.safetensors`, because its run is not finished, the file of the newest checkpoint is
    returned.

    Raises:
        EvaluationError: there is no encoder at `path`.
    """
    path = Path(path).expanduser()
    if path.is_file():
        if path.suffix != ".safetensors":
            raise EvaluationError(
                f"{path} is not an exported encoder (.safetensors). "
                "Convert its weights with encoders.build, encoders.load_weights and encoders.save."
            )
        return path
    candidates = encoders.places(path)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if (meant := encoders.other_name(str(path))) and meant[1]:
        raise EvaluationError(f"There is no encoder {printable(str(path))}. Did you mean {meant[1]}?")
    tried = ", ".join(str(candidate) for candidate in (path, *candidates))
    raise EvaluationError(
        f"No encoder found. Tried: {tried}. Give a run folder, a checkpoint or an exported encoder."
        f"{unknown_prefix(path)}"
    )


def load_encoder(settings: EncoderSettings) -> tuple[Encoder, Path | None]:
    """Return the encoder of `--checkpoint` in eval mode, and the encoder's file.

    The file is None for `pixels` and for `timm:NAME`.

    Raises:
        EvaluationError: the encoder cannot be found or loaded.
    """
    if settings.precision == "bf16" and not bf16.has_instructions():
        logging.getLogger(__name__).warning(bf16.EMULATED, "Use --precision fp32.")
    if settings.checkpoint == PIXELS:
        if settings.image_size is None:
            raise EvaluationError("--checkpoint pixels needs a size. Give --image_size, such as 32 for CIFAR-10.")
        half = (0.5,) * settings.channels
        preprocessing = IMAGENET if settings.channels == IMAGENET.channels else Preprocessing(half, half)
        return Pixels(settings.image_size, preprocessing).eval(), None
    if encoders.backbone(settings.checkpoint):
        return encoders.load(settings.checkpoint), None
    file = resolve_checkpoint(settings.checkpoint)
    file = file.parent.resolve() / file.name  # `latest` may point to another step before the evaluation ends
    try:
        saved = file.parent.glob("checkpoints/step-*")
        steps = sorted((int(one.name[5:]), one) for one in saved if one.name[5:].isdecimal())
        if steps and (step := encoders.read_step(file)) is not None and step < steps[-1][0]:
            logging.getLogger(__name__).warning("%s is of step %d. Newer: --checkpoint %s", file, step, steps[-1][1])
        return encoders.load(file), file
    except (ValueError, OSError, SafetensorError) as error:
        raise EvaluationError(f"Cannot load the encoder {file}. {error}") from error


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

    If `resize` is None, the result is that of `encoders.preprocessing.short_side`.

    Raises:
        EvaluationError: `resize` is smaller than `size`.
    """
    resize = resize or short_side(size)
    if resize < size:
        raise EvaluationError(
            f"A crop of {size} pixels does not fit in images whose short side is resized to {resize} pixels. Raise "
            f"--resize to {size} or more."
        )
    return resize


def extract(
    encoder: Encoder,
    shards: Shards,
    accelerator: Accelerator,
    *,
    image_size: int | None = None,
    resize: int | None = None,
    batch_size: int = 256,
    workers: int | None = None,
    precision: str = "fp32",
    source: Access = DEFAULT,
    feature: Callable[[Encoder, Tensor], Tensor] = pooled,
    transform: Transform | None = None,
    cut_for: Callable[[str], CutView] | None = None,
    labels: bool = True,
    images: int | None = None,
    part: tuple[int, int] | None = None,
    progress: bool = True,
) -> LabelledFeatures:
    """Encode this process's part of the images in `shards`, and return the features on the CPU.

    Each process takes a contiguous part of the images, in order of rank, unless `part` is given. Images are resized,
    cropped at the centre and normalised with `encoder.preprocessing`. The encoder stays on its device, and in its train
    or eval mode.

    Args:
        encoder: encoder on the accelerator's device.
        shards: SHARDS of the images, or opened shards.
        accelerator: accelerator of all processes.
        image_size: side of the images in pixels. None selects the size that the encoder was built for.
        resize: short side in pixels to which images are resized before the centre crop. None selects the default of
            `resize_size`.
        batch_size: largest number of images per forward pass; see `evaluation.memory.images_at_once`.
        workers: number of loader workers per process. None selects `free_cores`.
        precision: precision of the forward pass: `fp32`, or `bf16` for bfloat16 autocast.
        source: options for reading remote shards.
        feature: function that maps the encoder and its input, n crops of each image (n * B, C, S, S), to features
            (B, D).
        transform: transform with one view of n crops. None selects the centre crop.
        cut_for: see `evaluation_batches`.
        labels: True to read the labels. If False, all labels are -1.
        images: number of images, spaced evenly over the shards. None selects all images.
        part: index and number of the parts into which the images are split. The other processes may then encode other
            parts, or none.
        progress: True to show a progress bar on the main process.

    Raises:
        ShardError: the shards cannot be read, or `labels` is True and the shards have no labels.
        EvaluationError: the encoder does not accept images of this size, or none of the images can be read.
    """
    size, device = input_size(encoder, image_size), accelerator.device
    given, workers = workers is not None, free_cores(accelerator.num_processes) if workers is None else workers
    transform = transform or CenterCrop(size, resize=resize_size(size, resize))

    def encode(crops: Tensor) -> Tensor:
        """Return the features: (n * B, C, S, S) -> (B, D) float32."""
        with encoding(encoder, crops, precision):
            return feature(encoder, crops).float()

    blank = torch.zeros(transform.views[0].crops, encoder.preprocessing.channels, size, size, device=device)
    batches = evaluation_batches(
        shards,
        transform,
        images_at_once(encode, blank, batch_size),
        part=part or (accelerator.process_index, accelerator.num_processes),
        labels=labels,
        images=images,
        cut_for=cut_for,
        reading=Reading(workers, source=source, preprocessing=encoder.preprocessing, workers_given=given),
    )
    if part is None:
        check_total(batches.total)

    count = min(images or batches.total, batches.total)
    which = f", part {part[0] + 1} of {part[1]}" if part and part[1] > 1 else ""
    title, shown = f"features of {count:,} images{which}, batches", progress and accelerator.is_main_process
    found = _encoded(track(batches, title, total=len(batches), shown=shown), encode, device)
    if part is None or part[1] == 1:
        _check_readable(len(found), batches, encoder, together=part is None)
    # A process has no features if there are fewer images than processes, or if all of its images are corrupt. In this
    # case, a tensor of zeros is encoded to find the width D, and the result is an empty tensor (0, D).
    if not found:
        with torch.inference_mode():
            found = [(encode(blank)[:0].cpu(), torch.zeros(0, dtype=torch.int64), [])]
    features, numbers, keys = zip(*found, strict=True)
    # concatenate outside of inference mode, so that the results are normal tensors that allow in-place changes
    return LabelledFeatures(torch.cat(features), torch.cat(numbers), [*chain.from_iterable(keys)])  # (N, D), (N,)


def _encoded(
    batches: Iterable[Batch], encode: Callable[[Tensor], Tensor], device: torch.device
) -> list[tuple[Tensor, Tensor, Sequence[str]]]:
    """Return the features (B, D), the labels (B,) and the names of the images of each batch, on the CPU."""
    found = []
    for batch in batches:
        with torch.inference_mode():
            features = encode(single_view(to_model_input(batch.to(device, non_blocking=True)))).cpu()
        labels = batch.labels if batch.labels is not None else torch.full((len(batch),), -1)
        found.append((features, labels, batch.keys))
    return found


def _check_readable(used: int, batches: Batches, encoder: Encoder, *, together: bool) -> None:
    """Check that an image could be read, if there are any.

    Args:
        used: number of batches of this process with an image.
        batches: loader after its last batch.
        encoder: encoder that reads the images.
        together: True if all processes call this function, and the images of all of them count.

    Raises:
        EvaluationError: no image can be read. The message contains the first reason.
    """
    reason, unused = batches.first_skipped, used == 0
    if together and (process := first_rank(reason is not None)) is not None:
        unused = first_rank(used > 0) is None
        reason = broadcast_object(reason, source=process) if unused else reason
    if reason is not None and unused:
        assert isinstance(batches.dataset, EvaluationDataset)
        cure = cure_of([reason], batches.dataset.source, encoder.preprocessing.channels)
        raise EvaluationError(f"None of the images can be read. {cure} The first of them is {reason}")


def check_total(images: int) -> None:
    """Check that `images`, the number of images in the shards, is equal on all processes. Call this function on all
    processes.

    Raises:
        ShardError: the numbers differ.
    """
    totals = {int(total) for total in all_gather(torch.tensor([images]))}
    # Each process slices the data by its own count. If the counts differ, the slices overlap or leave gaps.
    if len(totals) > 1:
        raise ShardError(
            f"The processes found different numbers of images in the shards, from {min(totals)} to {max(totals)}. "
            "Some shards are missing on some nodes. Copy the same shards to all nodes, and start again."
        )


def single_view(batch: Batch) -> Tensor:
    """Return the crops (n * B, C, S, S) of a batch with one view of n crops."""
    (view,) = batch.views
    if not isinstance(view.images, Tensor):
        raise TypeError("The batch contains packed images. Its only view must be one tensor.")
    return view.images


@contextmanager
def encoding(encoder: Encoder, images: Tensor, precision: str) -> Iterator[None]:
    """Return a context for a forward pass of images (B, C, H, W). `precision` is `fp32`, or `bf16` for autocast.

    Raises:
        EvaluationError: the encoder does not accept the images. The message contains their size.
    """
    try:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16"):
            yield
    except (ValueError, NotImplementedError) as error:
        size = " x ".join(str(side) for side in images.shape[2:])
        raise EvaluationError(f"{type(encoder).__name__} cannot encode images of {size} pixels. {error}") from error


def check_finite(train: Tensor, val: Tensor) -> None:
    """Check that the training and validation features of all processes are finite. Call this function on all processes.

    Raises:
        EvaluationError: a feature is NaN or infinite.
    """
    broken = ~(train.isfinite().all() & val.isfinite().all())
    if all_reduce_sum(broken.to(torch.int64)):
        raise EvaluationError(
            "Some features are NaN or infinite. Check whether the encoder has diverged, or try --precision fp32."
        )


def subtract_mean(train: Tensor, val: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the mean of the training features of all processes from both sets of features: (N, D), (M, D)."""
    count = all_reduce_sum(torch.tensor(len(train), dtype=torch.float64))
    mean = all_reduce_sum(train.sum(0, dtype=torch.float64)) / count  # (D,)
    return train - mean.float(), val - mean.float()


def normaliser(train: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that normalises features in place with the mean and variance of the training features.

    The mean and the variance are computed once, over the training features `train` (N, D) of all processes. Applied to
    `train`, the function equals `BatchNorm1d(affine=False, eps=1e-6)` in training mode with all training features as
    one batch.
    """
    count = all_reduce_sum(torch.tensor(len(train)))
    mean = (all_reduce_sum(train.sum(0, dtype=torch.float64)) / count).float()  # (D,)
    squares = torch.zeros_like(mean, dtype=torch.float64)
    for rows in train.split(8192):
        squares += (rows - mean).square().sum(0, dtype=torch.float64)
    scale = (all_reduce_sum(squares) / count + EPSILON).rsqrt().float()  # (D,)
    return lambda features: features.sub_(mean).mul_(scale)


@contextmanager
def full_float32() -> Iterator[None]:
    """Disable TF32 in matrix products within a `with` block, because the low precision of TF32 would change results."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
