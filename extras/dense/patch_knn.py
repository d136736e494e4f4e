"""Mean IoU of a k-NN segmentation.

Mean intersection over union (IoU) of a k-NN segmentation of frozen patch tokens, as in CAPI (2502.08769).

    tessera patch_knn --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS

Nothing is trained. The bank holds tokens of the images of `--train`, each with the class that most of its pixels have.
Each token of an image of `--val` takes the classes of its k nearest tokens in the bank by cosine similarity s, which
have the weight exp(s / temperature). The votes are resized bilinearly to the map. The IoU is that of
`segmentation`.

The bank has about `--bank` tokens, if there are so many: the same number of random tokens of each image, which depend
only on the name of the image. CAPI tries several k and reports the best one; here, the first of `--k` is the result,
and the file has all.

Shape letters: b images of this process, h x w tokens and S x S pixels of an image, D features per token, N tokens of
the bank, K classes.
"""

import hashlib
from typing import Annotated

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from tessera.data.batches import Batches
from tessera.data.crops import WholeImage
from tessera.data.maps import IGNORED
from tessera.data.shards import Source
from tessera.encoders.base import Encoder
from tessera.evaluation.command import Result, Subject, make_command, open_subject
from tessera.evaluation.features import (
    EvaluationError,
    full_float32,
    input_size,
    single_view,
)
from tessera.evaluation.tokens import patch_tokens
from tessera.extras.dense.frozen import Frozen, evaluation_set, freeze, model_inputs
from tessera.extras.dense.segmentation import MapSettings, class_numbers, confusion, count_values, scores
from tessera.runtime.collectives import all_gather

TIME_LIMIT = "12:00:00"
"""Time limit of a SLURM job (`tessera slurm`)."""

COMPARED = 2**26
"""Largest number of similarities that are in memory at a time."""


class PatchKNNSettings(MapSettings):
    """Measure the mean IoU of a k-NN segmentation of an encoder's frozen patch tokens."""

    k: list[Annotated[int, Field(ge=1)]] = Field([10, 1, 3, 30], min_length=1)
    """numbers of nearest tokens; the result is that of the first"""
    temperature: float = Field(0.07, gt=0)
    """temperature of the vote"""
    bank: int = Field(200_000, ge=1)
    """number of tokens in the bank, on average; fewer if the images have fewer"""


def token_classes(targets: Tensor, rows: int, columns: int, classes: int) -> Tensor:
    """Return the class that most pixels of each token have: (b, S, S) -> (b, rows, columns).

    Pixels that are ignored do not count, and a token without other pixels gets `IGNORED`. Of equally frequent classes,
    the smallest counts. A pixel belongs to the token that covers its centre.
    """
    b, height, width = targets.shape
    row, column = (
        (2 * torch.arange(side, device=targets.device) + 1) * cells // (2 * side)
        for side, cells in ((height, rows), (width, columns))
    )
    token = (row[:, None] * columns + column).expand(height, width)
    found = targets.new_full((b, rows, columns), IGNORED)
    for image, target in zip(found, targets, strict=True):  # one image at a time, to limit the memory
        seen = target != IGNORED
        counts = (token[seen] * classes + target[seen]).bincount(minlength=rows * columns * classes)
        most, number = counts.view(rows, columns, classes).max(2)
        image.copy_(torch.where(most > 0, number, IGNORED))
    return found


def seed_of(key: str) -> int:
    """Return a seed that depends only on the name of an image, 0 to 2**56 - 1."""
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=7).digest())


def chosen_tokens(key: str, tokens: int, share: float) -> Tensor:
    """Return the indices of random tokens of an image, in order. They depend only on the name of the image.

    Their number is `share`, rounded down or up at random, so that its mean is `share`.
    """
    generator = torch.Generator().manual_seed(seed_of(key))
    count = int(share + float(torch.rand((), generator=generator, dtype=torch.float64)))
    return torch.randperm(tokens, generator=generator)[:count].sort().values


@torch.no_grad()
def make_bank(
    encoder: Encoder, batches: Batches, numbers: Tensor, classes: int, settings: PatchKNNSettings
) -> tuple[Tensor, Tensor]:
    """Return the tokens of the bank as unit vectors, (N, D), and their classes, (N,). Collective.

    Raises:
        EvaluationError: the bank has fewer tokens than the largest k.
    """
    found, labels = [], []
    for batch in model_inputs(batches, f"tokens of {batches.total:,} images", numbers.device):
        assert batch.maps is not None
        tokens = patch_tokens(encoder, single_view(batch), settings.precision)  # (b, D, h, w)
        own = token_classes(numbers[batch.maps.long()], tokens.shape[2], tokens.shape[3], classes).flatten(1)
        for key, image, its in zip(batch.keys, tokens.flatten(2).mT, own, strict=True):
            chosen = chosen_tokens(key, len(image), settings.bank / batches.total).to(image.device)
            chosen = chosen[its[chosen] != IGNORED]
            found.append(F.normalize(image[chosen], dim=1))
            labels.append(its[chosen])
    if not found:  # this process has no readable image
        size = input_size(encoder, settings.image_size)
        blank = torch.zeros(1, encoder.channels, size, size, device=numbers.device)
        found = [patch_tokens(encoder, blank, settings.precision).flatten(2).mT[0, :0]]
        labels = [numbers[:0]]
    bank, classes_of = (torch.cat(all_gather(torch.cat(parts))) for parts in (found, labels))
    if len(bank) < max(settings.k):
        raise EvaluationError(f"The bank has {len(bank)} tokens, fewer than --k {max(settings.k)}. Lower --k.")
    return bank, classes_of


def votes(tokens: Tensor, bank: Tensor, labels: Tensor, classes: int, settings: PatchKNNSettings) -> list[Tensor]:
    """Return the share of the votes that each class gets, for each k: (b, D, h, w) -> (b, K, h, w) float32."""
    rows, columns = tokens.shape[2:]
    shares = [tokens.new_zeros(len(tokens), classes, rows * columns) for _ in settings.k]
    for number, image in enumerate(tokens.flatten(2).mT):  # (h * w, D), one image at a time, to limit the memory
        queries = F.normalize(image, dim=1)
        nearest = [(part @ bank.T).topk(max(settings.k)) for part in queries.split(max(1, COMPARED // len(bank)))]
        similarity, index = (torch.cat(parts) for parts in zip(*nearest, strict=True))
        weights = ((similarity - similarity[:, :1]) / settings.temperature).exp()
        for k, share in zip(settings.k, shares, strict=True):
            normed = weights[:, :k] / weights[:, :k].sum(1, keepdim=True)
            share[number].scatter_add_(0, labels[index[:, :k]].T, normed.T)
    return [share.unflatten(2, (rows, columns)) for share in shares]


def segment(
    frozen: Frozen,
    opened: tuple[Source, Source],
    numbers: Tensor,
    settings: PatchKNNSettings,
    accelerator: Accelerator,
) -> tuple[Tensor, int, int]:
    """Segment images by k-NN. Return one confusion matrix for each k, the number of images, and that of the bank's
    tokens. Collective.

    Args:
        frozen: encoder, and how images are read, with their maps.
        opened: training images and test images, with maps.
        numbers: class index of each value of the maps (256,), or 255 for ignored values.
    """
    encoder, size, reading = frozen
    classes = int((numbers != IGNORED).sum())
    train, val = (evaluation_set(one, WholeImage(size), settings.batch_size, reading, accelerator) for one in opened)
    with full_float32():
        bank, labels = make_bank(encoder, train, numbers, classes, settings)

        def predict(images: Tensor) -> list[Tensor]:
            return votes(patch_tokens(encoder, images, settings.precision), bank, labels, classes, settings)

        matrices, images = confusion(predict, len(settings.k), val, numbers, classes)
    return matrices, images, len(bank)


def score(settings: PatchKNNSettings, subject: Subject, accelerator: Accelerator) -> Result:
    """Return the mean IoU for each k."""
    opened = subject.train_shards, subject.val_shards
    values = count_values(*opened, settings.classes, accelerator)
    frozen = freeze(settings, subject.encoder, accelerator, maps=values)
    numbers = class_numbers(values, settings.ignore).to(accelerator.device)
    kept = (numbers != IGNORED).nonzero().squeeze(1).tolist()  # value of each class
    matrices, images, tokens = segment(frozen, opened, numbers, settings, accelerator)
    found = [scores(matrix, kept, f"{k}-NN of patches") for k, matrix in zip(settings.k, matrices, strict=True)]
    rows = [[k, one["pixel_accuracy"], one["mean_iou"]] for k, one in zip(settings.k, found, strict=True)]
    entries = found[0] | {"train_images": opened[0].images, "val_images": images}
    entries["all"] = [dict(zip(("k", "pixel_accuracy", "mean_iou"), row, strict=True)) for row in rows]
    return Result(entries, ["k", "pixel accuracy", "mean IoU"], rows, {"tokens": tokens})


run, main = make_command("patch_knn", PatchKNNSettings, score, open_subject)
