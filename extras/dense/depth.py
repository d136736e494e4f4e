"""Errors of a linear prediction of depth.

Errors of a linear prediction of depth from frozen patch tokens, as in DINOv2 (2304.07193).

    tessera depth --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS --depth_scale 1000

Each sample of the shards is an image KEY.jpg with a depth map KEY.depth.png or KEY.depth.npy (`data.maps`). The head of
`segmentation` gives each token a score s_k for each of K = 256 depths d_k, which are spaced evenly from
`--min_depth` to `--max_depth`. The scores are resized bilinearly to 4 times the grid, and the depth is the mean of the
d_k with weights max(s_k, 0) + 0.1, as in AdaBins (2011.14141). The depths are resized bilinearly to the map.

The loss is that of Eigen et al. (1406.2283), with the weights of AdaBins: sqrt(mean(g^2) - 0.85 mean(g)^2), where g is
the difference of the logarithms of prediction and target, over the pixels of a step. Pixels outside of the range of
depths are neither trained on nor scored. In contrast to DINOv2, the tokens are not concatenated with the class token,
and images are resized to squares.

Shape letters: b images of this process in a step, h x w tokens and S x S pixels of an image, K depths.
"""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from tessera.data.batches import Batches
from tessera.data.crops import Areas, WholeImage
from tessera.evaluation.command import Result, Subject, make_command, open_subject
from tessera.evaluation.features import EvaluationError, full_float32, single_view
from tessera.extras.dense.frozen import DenseSettings, evaluation_set, freeze, model_inputs
from tessera.extras.dense.segmentation import resized, train_head
from tessera.runtime.collectives import all_reduce_sum

TIME_LIMIT = "24:00:00"
"""Time limit of a SLURM job (`tessera slurm`)."""

DEPTHS, ENLARGED, FLOOR, BALANCE = 256, 4, 0.1, 0.85
"""The constants of the formulas above, in this order."""
SMALLEST_LOSS = 1e-6
"""Loss below which the gradient shrinks. The gradient of a square root is infinite at 0."""


class DepthSettings(DenseSettings):
    """Measure the errors of a linear prediction of depth from an encoder's frozen patch tokens."""

    depth_scale: float = Field(gt=0)
    """units of the maps per metre: 1000 for millimetres, 256 for KITTI, 1 for metres"""
    min_depth: float = Field(1e-3, gt=0)
    """smallest depth in metres"""
    max_depth: float = Field(10.0, gt=0)
    """largest depth in metres: 10 for NYU Depth v2, 80 for KITTI"""
    scale: Areas = (1.0, 1.0)
    """smallest and largest area of a training crop before the resize, as a share of the image's area; an enlarged part
    of an image shows objects too large for their depth"""


def depths(scores: Tensor, size: tuple[int, int], settings: DepthSettings) -> Tensor:
    """Return the depth of each pixel in metres: (b, K, h, w) -> (b, *size)."""
    rows, columns = (min(ENLARGED * cells, side) for cells, side in zip(scores.shape[2:], size, strict=True))
    weights = resized(scores, (rows, columns)).relu() + FLOOR
    values = torch.linspace(settings.min_depth, settings.max_depth, scores.shape[1], device=scores.device)
    mean = torch.einsum("bkhw,k->bhw", weights, values) / weights.sum(1)
    return resized(mean[:, None], size).squeeze(1)


def metres(maps: Tensor, settings: DepthSettings) -> Tensor:
    """Convert maps to metres. Pixels without a depth, or outside of the range of depths, are 0: (b, S, S)."""
    found = maps / settings.depth_scale
    return torch.where((found >= settings.min_depth) & (found <= settings.max_depth), found, 0)


def backward(scores: Tensor, targets: Tensor, settings: DepthSettings) -> None:
    """Compute the gradients of this process's part of the loss over the pixels of all processes.

    The scores are resized for one image at a time to limit the memory. Therefore the means of the loss are computed
    first, and the gradient with respect to g is (g - 0.85 mean(g)) / (pixels * loss).

    Args:
        scores: scores (b, K, h, w) of this process's images.
        targets: depths in metres (b, S, S), or 0 for pixels that are not trained on.
        settings: settings of the command.
    """
    leaf = scores.detach().requires_grad_()

    def differences(image: Tensor, target: Tensor) -> Tensor:
        known = target > 0
        predicted = depths(image, (target.shape[1], target.shape[2]), settings)
        return torch.where(known, predicted.log() - torch.where(known, target, 1).log(), 0)

    images = [*zip(leaf.split(1), targets.split(1), strict=True)]
    with torch.no_grad():
        found = torch.cat([differences(*one) for one in images]).double()
    pixels, *sums = all_reduce_sum(torch.stack([(targets > 0).sum(), found.sum(), found.square().sum()]))
    mean, square = (one / pixels.clamp(min=1) for one in sums)
    loss = (square - BALANCE * mean**2).clamp(min=SMALLEST_LOSS**2).sqrt()
    for image, target in images:
        g = differences(image, target)
        ((g.detach() - BALANCE * mean) / (pixels.clamp(min=1) * loss) * g).sum().backward()
    scores.backward(leaf.grad)


def errors(predicted: Tensor, target: Tensor) -> Tensor:
    """Return three scores of the pixels of an image, (P,), (P,) -> (3,) float64.

    They are the root of the mean squared error in metres, the mean of the error divided by the target, and the share of
    pixels whose ratio of prediction to target, or its inverse, is below 1.25 (delta1).
    """
    predicted, target = predicted.double(), target.double()
    ratio = torch.maximum(predicted / target, target / predicted)
    error = predicted - target
    return torch.stack([error.square().mean().sqrt(), (error.abs() / target).mean(), (ratio < 1.25).double().mean()])


@torch.no_grad()
def mean_errors(
    predict: Callable[[Tensor], list[Tensor]], batches: Batches, settings: DepthSettings, device: torch.device
) -> tuple[list[float], int]:
    """Return the means of `errors` over the images of all processes that have a depth, and the number of these images.
    Collective.

    Raises:
        EvaluationError: no image has a depth.
    """
    total = torch.zeros(4, dtype=torch.float64, device=device)
    for batch in model_inputs(batches, f"{batches.total:,} images", device):
        assert batch.maps is not None
        (scores,) = predict(single_view(batch))
        for image, target in zip(scores.split(1), metres(batch.maps, settings), strict=True):
            if (known := target > 0).any():
                predicted = depths(image, (target.shape[0], target.shape[1]), settings)[0]
                total += torch.cat([errors(predicted[known], target[known]), total.new_ones(1)])
    *sums, images = all_reduce_sum(total).tolist()
    if not images:
        raise EvaluationError(
            f"--val has no depth from {settings.min_depth:g} to {settings.max_depth:g} m. Correct --depth_scale or "
            "--max_depth, or check the maps with `tessera check_shards`."
        )
    return [one / images for one in sums], int(images)


def score(settings: DepthSettings, subject: Subject, accelerator: Accelerator) -> Result:
    """Train the head, and return the errors."""
    frozen = freeze(settings, subject.encoder, accelerator, maps="depth")
    whole = WholeImage(frozen.size)
    test = evaluation_set(subject.val_shards, whole, settings.batch_size, frozen.reading, accelerator)

    def gradients(scores: Tensor, maps: Tensor) -> None:
        backward(scores, metres(maps, settings), settings)

    with full_float32():
        predict, training = train_head(settings, frozen, subject.train_shards, DEPTHS, gradients, accelerator)
        (rmse, relative, delta), images = mean_errors(predict, test, settings, accelerator.device)
    found = {"rmse": rmse, "abs_rel": relative, "delta1": delta, "protocol": "linear depth"}
    found |= {"train_images": training.total, "val_images": images}
    row = [f"{rmse:.4f}", f"{relative:.4f}", delta]
    return Result(found, ["RMSE, m", "AbsRel", "delta1"], [row], {"steps": len(training)})


run, main = make_command("depth", DepthSettings, score, open_subject)
