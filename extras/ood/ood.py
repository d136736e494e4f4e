"""Separation of known images from those of another data set.

Known images are told from others by the distance of frozen features (2204.06507).

    tessera ood --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS --ood OTHER_SHARDS

The score of an image is the cosine similarity of its features to those of the k-th most similar image of `--train`. The
AUROC is the probability that a random image of `--val` has a higher score than a random image of `--ood`, where equal
scores count one half. FPR at 95 % TPR is the share of images of `--ood` that count as known with the largest threshold
that at least 95 % of the images of `--val` reach. Labels are not read.

Shape letters: M known images of all processes, O other images of all processes.
"""

import math

import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from tessera.data.shards import describe_remote, open_shards
from tessera.evaluation.command import Result, Subject, make_command, open_subject
from tessera.evaluation.features import (
    EvaluationError,
    FeatureSettings,
    LabelledFeatures,
    check_finite,
    extract,
)
from tessera.evaluation.knn import neighbours
from tessera.evaluation.results import data_name
from tessera.evaluation.splits import check_disjoint
from tessera.runtime.collectives import all_reduce_sum

TIME_LIMIT = "02:00:00"
"""Time limit of a SLURM job (`tessera slurm`)."""

TPR = 0.95
"""Share of the known images that reach the threshold of the false positive rate."""


class OODSettings(FeatureSettings):
    """Separation of known images from images of another data set by the distance of frozen features."""

    train: str | list[str]
    """SHARDS of known images, in which the neighbours are searched; labels are not read"""
    val: str | list[str]
    """SHARDS of other known images"""
    ood: str | list[str]
    """SHARDS of images of another kind (out of distribution)"""
    k: int = Field(50, ge=1)
    """the score is the similarity to the k-th nearest image"""
    output: str | None = None
    """JSON result file, which must not exist; default: a new file in OUTPUT/evaluation, or next to the encoder"""


def separation(known: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the AUROC and the false positive rate at 95 % TPR, both 0 to 1.

    Args:
        known: scores (M,) of the known images. A higher score means a more typical image.
        other: scores (O,) of the other images.
    """
    ordered = known.sort().values
    below, reached = (torch.searchsorted(ordered, other, right=right) for right in (False, True))
    auroc = 1 - float((below + reached).double().mean()) / (2 * len(known))
    threshold = ordered[len(known) - math.ceil(TPR * len(known))]
    return auroc, float((other >= threshold).double().mean())


def similarities(train: LabelledFeatures, val: LabelledFeatures, k: int, device: torch.device) -> Tensor:
    """Return the similarity of each query of all processes to its k-th nearest image in the bank, on the CPU.

    Collective.

    Raises:
        EvaluationError: the bank has fewer than k images, there are no queries, or a feature is not finite.
    """
    images, queries = (int(all_reduce_sum(torch.tensor(len(part.features)))) for part in (train, val))
    if images < k or not queries:
        raise EvaluationError(
            f"--train has {images} readable images, and a set to score has {queries}. They need at least k = {k} "
            "images and 1 image. Lower --k, or give more images."
        )
    check_finite(train.features, val.features)
    return torch.cat([similarity[:, -1].cpu() for similarity, _, _ in neighbours(train, val, k, device)])


def score(settings: OODSettings, subject: Subject, accelerator: Accelerator) -> Result:
    """Return the separation of the images of `--val` from those of `--ood`.

    Raises:
        ShardError: the shards of `--ood` cannot be read.
        EvaluationError: the encoder cannot be used, there are too few images, or a feature is not finite.
    """
    access = describe_remote([settings.ood], settings.access)
    other = open_shards(settings.ood, source=access, progress=accelerator.is_main_process)
    if not settings.source.allow_overlap:
        check_disjoint(subject.train_shards, other, ("--train", "--ood"))
        check_disjoint(subject.val_shards, other, ("--val", "--ood"))
    opened, options = (subject.train_shards, subject.val_shards, other), settings.options() | {"labels": False}
    bank, *sets = (extract(subject.encoder, shards, accelerator, **options) for shards in opened)
    known, unknown = (similarities(bank, one, settings.k, accelerator.device) for one in sets)
    auroc, fpr = separation(known, unknown)
    entries = {
        "protocol": f"distance to neighbour {settings.k}, against {data_name(settings.ood)}",
        "auroc": auroc,
        "fpr_at_95_tpr": fpr,
        "val_images": len(known),
        "ood_images": len(unknown),
    }
    row = [len(known), len(unknown), auroc, fpr]
    return Result(entries, ["known", "others", "AUROC", "FPR at 95 % TPR"], [row])


run, main = make_command("ood", OODSettings, score, open_subject)
