"""Linear segmentation of frozen patch tokens, after DINOv2 (2304.07193), with the mean intersection over union.

    accelerate launch evaluation/segmentation.py --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS

The samples of the shards are KEY.jpg with KEY.seg.png, a PNG of class numbers (`data.maps`). The tokens of the last
block pass a batch norm and a 1 x 1 convolution to the classes. The logits are resized bilinearly to the map, and the
loss is the mean cross-entropy over the pixels that are not ignored. Only the batch norm and the convolution are
trained: by AdamW, with a linear warm-up and then a linear decay to 0. The confusion matrix of all pixels of `--val`
gives the IoU of each class, correct / (pixels of the class + pixels predicted as the class - correct), and their mean.

Every training step encodes new images, and no features are kept, so that the memory does not depend on the number of
images. A run of several processes computes what one process computes, up to rounding.

There are four differences from DINOv2, whose linear evaluation uses mmsegmentation:

- An image of `--val` is resized to a square and encoded once. DINOv2 slides a window over the image, which keeps its
  aspect ratio, and scores the map in its own size. Here, all images weigh the same.
- A training crop is a random box with 25 to 100 % of the image's area, resized to the square. DINOv2 resizes the image
  by a factor of 0.5 to 2, and cuts a square.
- Colours are not changed.
- The length is given in epochs. 32 epochs of 16 images are the 40,000 steps of DINOv2 on ADE20K's 20,210 images.

Shape letters: b images of this process in a step, D features per token, h x w tokens and S x S pixels of an image, K
classes that are not ignored.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from tessera.data.augment import Share, to_model_input
from tessera.data.batches import Batches
from tessera.data.crops import Areas, RandomCrop, RandomCropConfig, WholeImage
from tessera.data.decode import ImageError
from tessera.data.loader import Reading, evaluation_batches, training_batches
from tessera.data.maps import IGNORED, decode_map
from tessera.data.sampler import BatchSampler
from tessera.data.shards import ShardError, Source, open_shards
from tessera.data.shards.tar import MAP
from tessera.data.workers import free_cores
from tessera.encoders.base import Encoder
from tessera.evaluation.features import (
    EncoderSettings,
    EvaluationError,
    check_total,
    encoding,
    input_size,
    load_encoder,
    single_view,
)
from tessera.evaluation.labelled import full_float32
from tessera.evaluation.overlap import check_contents, check_disjoint
from tessera.evaluation.results import Evaluation, check_output, report
from tessera.evaluation.segmentation_head import Head, backward, resized
from tessera.runtime import streams
from tessera.runtime.collectives import all_reduce_max, all_reduce_sum, rank
from tessera.runtime.processes import exit_on_user_error, make_accelerator
from tessera.runtime.progress import track
from tessera.runtime.settings import parse

WARMUP = 1500 / 40_000
"""Share of the steps in which the learning rate rises, as in DINOv2."""


class SegmentationSettings(EncoderSettings):
    """Measure the mean IoU of a linear segmentation of an encoder's frozen patch tokens."""

    train: str | list[str]
    """SHARDS with segmentation maps to train on"""
    val: str | list[str]
    """test SHARDS with segmentation maps; never used to choose hyperparameters"""
    classes: int | None = Field(None, ge=1, le=IGNORED)
    """number of classes; values of maps are 0 to classes - 1, or 255 for ignored pixels; default: counted in the maps
    of --train, which reads every map"""
    ignore: list[Annotated[int, Field(ge=0, lt=IGNORED)]] = Field([])
    """further values whose pixels are ignored, such as 0 for the official maps of ADE20K"""
    batch_size: int = Field(16, ge=1)
    """number of images in a training step, over all processes; each process encodes its share of them at a time"""
    epochs: int = Field(32, ge=1)
    """number of passes over the training images"""
    lr: float = Field(1e-3, gt=0)
    """peak learning rate of AdamW"""
    weight_decay: float = Field(1e-4, ge=0)
    """weight decay of AdamW"""
    scale: Areas = (0.25, 1.0)
    """smallest and largest area of a training crop before the resize, as a share of the image's area"""
    flip: Share = 0.5
    """probability that a training crop is mirrored left to right"""
    seed: int = Field(0, ge=0, lt=2**31)
    """seed of the initial weights, of the order of the images and of the crops"""
    output: str | None = None
    """JSON result file, which must not exist; default: a new file in OUTPUT/evaluation, or next to the encoder"""


class Scores(NamedTuple):
    """Quality of a segmentation."""

    mean_iou: float
    """Mean of the IoU (0 to 1) over the classes that occur in a map or in a prediction."""
    pixel_accuracy: float
    """Share of the pixels with the right class, without ignored pixels."""
    iou: list[float | None]
    """IoU of each class (K), or None for a class that neither occurs nor is predicted."""


def patch_tokens(encoder: Encoder, images: Tensor, precision: str) -> Tensor:
    """Return the tokens of normalised images on their grid: (b, C, S, S) -> (b, D, h, w) float32.

    Raises:
        EvaluationError: the encoder does not accept images of this size.
    """
    with torch.no_grad(), encoding(encoder, images, precision):
        features = encoder(images)
    rows, columns = features.grids[0].tolist()  # all images have one size
    return features.tokens.float().unflatten(0, (-1, rows, columns)).permute(0, 3, 1, 2)  # (T, D) -> (b, D, h, w)


def train_head(head: Head, encoder: Encoder, batches: Batches, numbers: Tensor, settings: SegmentationSettings) -> None:
    """Train the head. Call this function on all processes.

    Args:
        head: head on the device of the encoder.
        encoder: frozen encoder.
        batches: one batch of this process for each step.
        numbers: class number of each value of the maps (256,), or 255 for ignored values.
        settings: settings of the command.

    Raises:
        EvaluationError: the weights are not finite after the training.
    """
    device, steps = numbers.device, len(batches)
    optimizer = torch.optim.AdamW(head.parameters(), settings.lr, weight_decay=settings.weight_decay)
    head.train()
    shown = track(batches, f"{steps:,} training steps", total=steps, shown=rank() == 0)
    for step, batch in enumerate(shown):
        optimizer.param_groups[0]["lr"] = settings.lr * rate(step, steps)
        batch = to_model_input(batch.to(device, non_blocking=True))
        tokens = patch_tokens(encoder, single_view(batch), settings.precision)
        assert batch.maps is not None
        backward(head(tokens), numbers[batch.maps.long()])
        for parameter in head.parameters():
            assert parameter.grad is not None
            parameter.grad = all_reduce_sum(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    if not all(parameter.isfinite().all() for parameter in head.parameters()):
        raise EvaluationError(
            "The classifier's weights are NaN or infinite. Check whether the encoder has diverged, try --precision "
            "fp32, or lower --lr."
        )


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a linear rise in the first `WARMUP` of the steps, then a linear fall."""
    warmup = math.ceil(WARMUP * steps)
    return min((step + 1) / warmup, 1.0) * (1 - step / steps)


@torch.no_grad()
def confusion(head: Head, encoder: Encoder, batches: Batches, numbers: Tensor, precision: str) -> tuple[Tensor, int]:
    """Return the confusion matrix of all processes (K, K) int64 on the CPU, and the number of images.

    Entry [i, j] is the number of pixels of class i that are predicted as class j. Call this function on all processes.
    """
    device, classes = numbers.device, head.classifier.out_channels
    counts, images = torch.zeros(classes**2, dtype=torch.int64), 0
    head.eval()
    shown = track(batches, f"{batches.total:,} images", total=len(batches), shown=rank() == 0)
    for batch in shown:
        batch = to_model_input(batch.to(device, non_blocking=True))
        logits = head(patch_tokens(encoder, single_view(batch), precision))  # (b, K, h, w)
        assert batch.maps is not None
        for image, target in zip(logits.split(1), numbers[batch.maps.long()], strict=True):
            predicted = resized(image, (target.shape[0], target.shape[1])).argmax(1)[0]  # (S, S)
            seen = target != IGNORED
            counts += (target[seen] * classes + predicted[seen]).bincount(minlength=classes**2).cpu()
        images += len(batch.keys)
    return all_reduce_sum(counts).view(classes, classes), int(all_reduce_sum(torch.tensor(images)))


def scores(matrix: Tensor) -> Scores:
    """Return the scores of a confusion matrix (K, K), whose rows are the true classes.

    Raises:
        EvaluationError: no pixel was counted.
    """
    if not int(matrix.sum()):
        raise EvaluationError("--val has no pixel that is scored. Check the maps with `tessera check_shards`.")
    correct = matrix.diagonal().double()
    union = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
    iou = correct / union  # NaN for a class without any pixel
    known = union > 0
    values = [float(value) if there else None for value, there in zip(iou, known, strict=True)]
    return Scores(float(iou[known].mean()), float(correct.sum() / matrix.sum()), values)


def largest_value(opened: Source, accelerator: Accelerator, name: str) -> int:
    """Return the largest value of all maps other than 255, or -1 if there is none. Call this function on all processes.

    Each process reads a part of the maps.

    Raises:
        ShardError: a map is missing or damaged.
    """
    numbers = range(accelerator.process_index, opened.images, accelerator.num_processes)
    found = -1
    shown = track(numbers, f"classes of --{name}", total=len(numbers), shown=accelerator.is_main_process)
    for number in shown:
        encoded = opened.target(number)
        try:
            values = decode_map(encoded)
        except ImageError as error:
            raise ShardError(
                f"the segmentation map of {opened.name(number)}: {error}. Correct the member KEY.{MAP}."
            ) from None
        found = max(found, int(values.masked_fill(values == IGNORED, 0).max()) if (values != IGNORED).any() else -1)
    return int(all_reduce_max(torch.tensor(found)))


def count_values(train: Source, val: Source, classes: int | None, accelerator: Accelerator) -> int:
    """Return the number of values of the maps: `classes`, or one more than the largest value in `train`.

    All maps of `val` are read, so that a damaged map or an unknown class is found before the training.

    Raises:
        ShardError: a map is missing or damaged.
        EvaluationError: a map of `val` has a larger value, or no map of `train` has a class.
    """
    values = classes or largest_value(train, accelerator, "train") + 1
    largest = largest_value(val, accelerator, "val")
    if not values:
        raise EvaluationError("All pixels of the maps of --train are ignored. Check the maps.")
    if largest >= values:
        raise EvaluationError(
            f"The maps of --val have the value {largest}, but --train has {values} classes, numbered from 0. Check "
            "that --train and --val belong to the same data set, or give --classes."
        )
    return values


def class_numbers(values: int, ignore: Sequence[int]) -> Tensor:
    """Return the class number of each value of a map: (256,) int64.

    The values 0 to `values` - 1 without those of `ignore` are numbered from 0. All other values become 255.

    Raises:
        EvaluationError: no value is left.
    """
    numbers = torch.full((256,), IGNORED)
    kept = [value for value in range(values) if value not in ignore]
    if not kept:
        raise EvaluationError("--ignore leaves no class. Remove a value.")
    numbers[kept] = torch.arange(len(kept))
    return numbers


def training_set(
    opened: Source, settings: SegmentationSettings, size: int, reading: Reading, accelerator: Accelerator
) -> Batches:
    """Return one batch of random crops for each training step of this process.

    Raises:
        ShardError: the shards cannot be read, or a map is missing.
        EvaluationError: the batch size does not fit the number of images or of processes.
    """
    crop = RandomCrop(RandomCropConfig(size=size, scale=settings.scale, flip=settings.flip))
    steps = max(settings.epochs * opened.images // settings.batch_size, 1)
    try:
        order = BatchSampler(
            settings.batch_size, steps=steps, rank=accelerator.process_index, world_size=accelerator.num_processes
        )
        return training_batches(opened, crop, order, seed=settings.seed, reading=reading)
    except ShardError:
        raise
    except ValueError as error:
        raise EvaluationError(str(error)) from error


def run(settings: SegmentationSettings) -> None:
    """Train the head, compute the mean IoU, print the result and write it to a file."""
    accelerate = make_accelerator()
    check_output(settings.output)
    check_disjoint(settings.train, settings.val, settings.source)
    train, val = (
        open_shards(shards, source=settings.source, progress=accelerate.is_main_process)
        for shards in (settings.train, settings.val)
    )
    check_contents(train, val)
    encoder, file = load_encoder(settings)
    encoder.to(accelerate.device).requires_grad_(False)
    size = input_size(encoder, settings.image_size)
    values = count_values(train, val, settings.classes, accelerate)
    numbers = class_numbers(values, settings.ignore).to(accelerate.device)
    workers = free_cores(accelerate.num_processes) if settings.workers is None else settings.workers
    reading = Reading(workers, source=settings.source, preprocessing=encoder.preprocessing, maps=values)
    training = training_set(train, settings, size, reading, accelerate)
    test = evaluation_batches(
        val,
        WholeImage(size),
        max(settings.batch_size // accelerate.num_processes, 1),
        part=(accelerate.process_index, accelerate.num_processes),
        labels=False,
        reading=reading,
    )
    for batches in (training, test):
        check_total(batches.total)
    blank = torch.zeros(1, encoder.channels, size, size, device=accelerate.device)
    width = patch_tokens(encoder, blank, settings.precision).shape[1]
    classes = int((numbers != IGNORED).sum())
    head = Head(width, classes, settings.seed).to(accelerate.device)
    with full_float32():
        train_head(head, encoder, training, numbers, settings)
        matrix, images = confusion(head, encoder, test, numbers, settings.precision)
    if accelerate.is_main_process:
        facts = {"image_size": size, "steps": len(training), "processes": accelerate.num_processes}
        result = describe(scores(matrix), matrix, numbers) | {"train_images": training.total, "val_images": images}
        result["checkpoint"] = str(file or settings.checkpoint)
        result["settings"] = settings.model_dump(mode="json") | facts
        row = [classes, result["pixel_accuracy"], result["mean_iou"]]
        columns = ["classes", "pixel accuracy", "mean IoU"]
        report(Evaluation("segmentation", file, settings.val, settings.output), result, columns, [row])


def describe(found: Scores, matrix: Tensor, numbers: Tensor) -> dict[str, Any]:
    """Return the entries of the result file for the scores. `per_class` is keyed by the values of the maps."""
    values = (numbers != IGNORED).nonzero().squeeze(1).tolist()  # value of each class
    pixels = matrix.sum(1).tolist()
    per_class = {str(value): {"iou": found.iou[row], "pixels": pixels[row]} for row, value in enumerate(values)}
    result = {"mean_iou": found.mean_iou, "pixel_accuracy": found.pixel_accuracy, "protocol": "linear segmentation"}
    return result | {"classes": len(values), "per_class": per_class}


if __name__ == "__main__":
    streams.protect()
    with exit_on_user_error():
        run(parse(SegmentationSettings))
