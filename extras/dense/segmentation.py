"""Mean IoU of a linear segmentation.

Mean intersection over union (IoU) of a linear segmentation of frozen patch tokens, as in DINOv2 (2304.07193).

    tessera segmentation --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS

Each sample of the shards is an image KEY.jpg with a map KEY.seg.png, a PNG of class numbers (`data.maps`). A batch norm
and a 1 x 1 convolution map the tokens of the last block to the logits of the classes. The logits are resized bilinearly
to the map, and the loss is the mean cross-entropy over the pixels that are not ignored. Only the batch norm and the
convolution are trained, by AdamW. The learning rate rises linearly in a warm-up and then falls linearly to 0. The IoU
of each class is computed over all pixels of `--val` at once, and the mean over the classes is reported. The IoU of a
class is correct / (pixels of the class + pixels predicted as the class - correct).

Differences from DINOv2's own evaluation:

- Images of `--val` and their maps are resized to a square of `--image_size`. DINOv2 keeps the aspect ratio, and scores
  maps in their own size.
- A training crop is a box of 25 to 100 % of the image or window (`--scale`), resized to a square. DINOv2 resizes by 0.5
  to 2 and cuts a square.

Shape letters: b images of this process in a step, D features per token, h x w tokens and S x S pixels of an image, K
classes that are not ignored.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor, nn

from tessera.data.batch import Batch
from tessera.data.batches import Batches
from tessera.data.crops import WholeImage
from tessera.data.decode import ImageError
from tessera.data.maps import IGNORED, decode_map
from tessera.data.shards import ShardError, Source
from tessera.data.shards.tar_index import MAP
from tessera.evaluation.command import Result, Subject, make_command, open_subject
from tessera.evaluation.features import (
    EvaluationError,
    full_float32,
    single_view,
)
from tessera.extras.dense.frozen import (
    DenseSettings,
    Frozen,
    TokenSettings,
    evaluation_set,
    freeze,
    model_inputs,
    train_heads,
    training_set,
    window_tokens,
)
from tessera.runtime.collectives import all_reduce_max, all_reduce_sum
from tessera.runtime.progress import track

TIME_LIMIT = "24:00:00"
"""Time limit of a SLURM job (`tessera slurm`)."""

RISE, EPSILON = 0.1, 1e-5
"""Momentum and epsilon of the batch norm: torch's defaults."""


class MapSettings(TokenSettings):
    """Settings of every command that reads segmentation maps."""

    classes: int | None = Field(None, ge=1, le=IGNORED)
    """number of classes; maps contain the values 0 to classes - 1, and 255 for ignored pixels; default: one more than
    the largest value in the maps of --train, all of which are read"""
    ignore: list[Annotated[int, Field(ge=0, lt=IGNORED)]] = Field([])
    """further map values whose pixels are ignored, such as 0 for the official maps of ADE20K"""


class SegmentationSettings(MapSettings, DenseSettings):
    """Measure the mean IoU of a linear segmentation of an encoder's frozen patch tokens."""


class Head(nn.Module):
    """Batch norm and 1 x 1 convolution: tokens (b, D, h, w) -> logits (b, K, h, w).

    In training mode, the mean and the variance are those of the tokens of all processes. The tokens must not require a
    gradient.
    """

    def __init__(self, dim: int, classes: int, seed: int) -> None:
        """
        Args:
            dim: width D of the tokens.
            classes: number of classes K.
            seed: seed of the initial weights, which have the standard deviation 0.01.
        """
        super().__init__()
        self.norm = nn.BatchNorm2d(dim, EPSILON)
        self.classifier = nn.Conv2d(dim, classes, 1)
        weight = 0.01 * torch.randn(classes, dim, 1, 1, generator=torch.Generator().manual_seed(seed))
        self.classifier.load_state_dict({"weight": weight, "bias": torch.zeros(classes)})

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each token: (b, D, h, w) -> (b, K, h, w)."""
        norm = self.norm
        mean, variance = norm.running_mean, norm.running_var
        if self.training:
            mean, variance = self._update(tokens)
        return self.classifier(F.batch_norm(tokens, mean, variance, norm.weight, norm.bias, eps=EPSILON))

    @torch.no_grad()
    def _update(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and variance (D,) of the tokens of all processes, and update the running values."""
        x = tokens.double()
        count = all_reduce_sum(torch.tensor(x.numel() / x.shape[1], dtype=torch.float64, device=x.device))
        mean = all_reduce_sum(x.sum((0, 2, 3))) / count  # (D,)
        variance = all_reduce_sum((x - mean[:, None, None]).square().sum((0, 2, 3))) / count  # (D,)
        unbiased = variance * count / (count - 1).clamp(min=1)
        for running, new in ((self.norm.running_mean, mean), (self.norm.running_var, unbiased)):
            assert running is not None
            running.lerp_(new.to(running.dtype), RISE)
        return mean.to(tokens.dtype), variance.to(tokens.dtype)


def resized(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize logits bilinearly: (b, K, h, w) -> (b, K, *size).

    The result equals that of `F.interpolate(logits, size, mode="bilinear")`. This function uses matrix products,
    because the gradient of `F.interpolate` is not deterministic on a GPU.
    """
    rows, columns = (
        F.interpolate(torch.eye(side, device=logits.device)[None], length, mode="linear")[0]  # (side, length)
        for side, length in zip(logits.shape[2:], size, strict=True)
    )
    return rows.T @ logits @ columns


def backward(logits: Tensor, targets: Tensor) -> None:
    """Compute the gradients of this process's part of the loss, which is the mean cross-entropy over the pixels of all
    processes that are not ignored.

    The logits are resized for one image at a time to limit the memory.

    Args:
        logits: logits (b, K, h, w) of this process's images.
        targets: class of each pixel (b, S, S) int64, or 255 for ignored pixels.
    """
    pixels = all_reduce_sum((targets != IGNORED).sum()).clamp(min=1)
    leaf = logits.detach().requires_grad_()
    for image, target in zip(leaf.split(1), targets.split(1), strict=True):
        (cross_entropy(resized(image, (target.shape[1], target.shape[2])), target) / pixels).backward()
    logits.backward(leaf.grad)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropy over the pixels that are not ignored: (b, K, S, S), (b, S, S) -> ()."""
    seen = targets != IGNORED
    own = logits.gather(1, torch.where(seen, targets, 0)[:, None]).squeeze(1)  # (b, S, S)
    return (logits.logsumexp(1) - own).masked_fill(~seen, 0).sum()


@torch.no_grad()
def confusion(
    predict: Callable[[Tensor], Sequence[Tensor]], predictions: int, batches: Batches, numbers: Tensor, classes: int
) -> tuple[Tensor, int]:
    """Return one confusion matrix for each prediction, (R, K, K) int64 on the CPU, and the number of images.

    Entry [r, i, j] is the number of pixels of class i that prediction r takes for class j, over all processes.
    Collective.

    Args:
        predict: function that returns predictions for normalised images (b, C, S, S). Each is a score for each token
            and class, (b, K, h, w).
        predictions: number R of predictions.
        batches: images of this process with their maps.
        numbers: class index of each value of the maps (256,), or 255 for ignored values.
        classes: number of classes K.
    """
    counts, images = torch.zeros(predictions, classes**2, dtype=torch.int64), 0
    for batch in model_inputs(batches, f"{batches.total:,} images", numbers.device):
        assert batch.maps is not None
        for matrix, scores_of_tokens in zip(counts, predict(single_view(batch)), strict=True):
            for image, target in zip(scores_of_tokens.split(1), numbers[batch.maps.long()], strict=True):
                predicted = resized(image, (target.shape[0], target.shape[1])).argmax(1)[0]  # (S, S)
                seen = target != IGNORED
                matrix += (target[seen] * classes + predicted[seen]).bincount(minlength=classes**2).cpu()
        images += len(batch.keys)
    return all_reduce_sum(counts).view(-1, classes, classes), int(all_reduce_sum(torch.tensor(images)))


def scores(matrix: Tensor, values: Sequence[int], protocol: str = "linear segmentation") -> dict[str, Any]:
    """Return the entries of the result file for a confusion matrix (K, K), whose rows are the true classes.

    `mean_iou` is the mean of the IoU (0 to 1) over the classes that occur in a map or in a prediction. All other
    classes have the IoU None. `pixel_accuracy` is the fraction of correctly classified pixels among those that are not
    ignored.

    Args:
        matrix: confusion matrix.
        values: value of each class in the maps (K). These values are the keys of `per_class`.
        protocol: name of the evaluation in reports.

    Raises:
        EvaluationError: no pixel was counted.
    """
    if not int(matrix.sum()):
        raise EvaluationError("--val has no pixel that is scored. Check the maps with `tessera check_shards`.")
    correct, pixels = matrix.diagonal().double(), matrix.sum(1)
    union = matrix.sum(0) + pixels - matrix.diagonal()
    iou = correct / union  # NaN for a class without any pixel
    rows = zip(values, iou.tolist(), pixels.tolist(), union.tolist(), strict=True)
    return {
        "mean_iou": float(iou[union > 0].mean()),
        "pixel_accuracy": float(correct.sum() / matrix.sum()),
        "protocol": protocol,
        "classes": len(values),
        "per_class": {str(value): {"iou": one if seen else None, "pixels": n} for value, one, n, seen in rows},
    }


def largest_value(opened: Source, accelerator: Accelerator, name: str) -> int:
    """Return the largest value other than 255 in all maps, or -1 if there is none. Call this function on all processes.

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
                f"The segmentation map of {opened.name(number)} is invalid: {error}. Correct the member KEY.{MAP}."
            ) from None
        found = max(found, int(values.masked_fill(values == IGNORED, 0).max()) if (values != IGNORED).any() else -1)
    return int(all_reduce_max(torch.tensor(found)))


def count_values(train: Source, val: Source, classes: int | None, accelerator: Accelerator) -> int:
    """Return the number of map values: `classes` if it is not None, else one more than the largest value in `train`.

    All maps of `val` are also read, to find a damaged map or an unknown class before the training.

    Raises:
        ShardError: a map is missing or damaged.
        EvaluationError: a map of `val` contains a value that is not a class, or all pixels of `train` are ignored.
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
    """Return the class index of each value of a map: (256,) int64.

    The values 0 to `values` - 1, without those in `ignore`, get consecutive indices from 0. All other values get 255.

    Raises:
        EvaluationError: no value is left.
    """
    numbers = torch.full((256,), IGNORED)
    kept = [value for value in range(values) if value not in ignore]
    if not kept:
        raise EvaluationError("--ignore leaves no class, because it contains all map values. Remove a value from it.")
    numbers[kept] = torch.arange(len(kept))
    return numbers


def train_head(
    settings: DenseSettings,
    frozen: Frozen,
    train: Source,
    outputs: int,
    backward: Callable[[Tensor, Tensor], None],
    accelerator: Accelerator,
) -> tuple[Callable[[Tensor], list[Tensor]], Batches]:
    """Train a head on the patch tokens of images with maps. Collective.

    Return a function that returns the outputs of the head for normalised images, (b, C, S, S) -> [(b, K, h, w)], and
    the training batches.

    Args:
        settings: settings of the command.
        frozen: encoder, and how images and maps are read.
        train: training images with maps.
        outputs: number K of outputs of the head per token.
        backward: function that computes the gradients of this process's part of the loss, from the outputs of the head
            (b, K, h, w) and the maps (b, S, S).
        accelerator: accelerator of all processes.
    """
    encoder, size = frozen.encoder, frozen.size
    side = settings.window or size
    batches = training_set(train, settings, side, frozen.reading, accelerator, (side / size) ** 2)
    blank = torch.zeros(1, encoder.channels, size, size, device=accelerator.device)
    width = window_tokens(encoder, blank, settings.precision, side).shape[1]
    head = Head(width, outputs, settings.seed).to(accelerator.device)

    def predict(images: Tensor) -> list[Tensor]:
        return [head(window_tokens(encoder, images, settings.precision, side))]

    def gradients(batch: Batch) -> None:
        assert batch.maps is not None
        backward(predict(single_view(batch))[0], batch.maps)

    train_heads([(head.train(), settings.lr)], batches, gradients, settings.weight_decay, accelerator.device)
    head.eval()
    return predict, batches


def score(settings: SegmentationSettings, subject: Subject, accelerator: Accelerator) -> Result:
    """Train the head, and return the mean IoU."""
    train, val = subject.train_shards, subject.val_shards
    values = count_values(train, val, settings.classes, accelerator)
    frozen = freeze(settings, subject.encoder, accelerator, maps=values)
    numbers = class_numbers(values, settings.ignore).to(accelerator.device)
    test = evaluation_set(val, WholeImage(frozen.size), settings.batch_size, frozen.reading, accelerator)
    kept = (numbers != IGNORED).nonzero().squeeze(1).tolist()  # value of each class

    def gradients(logits: Tensor, maps: Tensor) -> None:
        backward(logits, numbers[maps.long()])

    with full_float32():
        logits, training = train_head(settings, frozen, train, len(kept), gradients, accelerator)
        (matrix,), images = confusion(logits, 1, test, numbers, len(kept))
    found = scores(matrix, kept) | {"train_images": training.total, "val_images": images}
    row = [len(kept), found["pixel_accuracy"], found["mean_iou"]]
    return Result(found, ["classes", "pixel accuracy", "mean IoU"], [row], {"steps": len(training)})


run, main = make_command("segmentation", SegmentationSettings, score, open_subject)
