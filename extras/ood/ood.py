"""Separation of known images from images of another data set, by the distance of frozen features (2204.06507).

    tessera ood --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS --ood OTHER_SHARDS

The score of an image is the cosine similarity of its features to those of the k-th most similar image of `--train`. The
AUROC is the probability that a random image of `--val` has a higher score than a random image of `--ood`, where equal
scores count one half. FPR at 95 % TPR is the share of images of `--ood` that count as known with the largest threshold
that at least 95 % of the images of `--val` reach. Labels are not read.

Shape letters: M known images of all processes, O other images of all processes.
"""

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from tessera.data.shards import describe_remote, open_shards
from tessera.evaluation.command import run_command
from tessera.evaluation.features import (
    EvaluationError,
    FeatureSettings,
    LabelledFeatures,
    check_finite,
    extract,
    input_size,
    load_encoder,
    resize_size,
)
from tessera.evaluation.knn import neighbours
from tessera.evaluation.results import Evaluation, check_output, data_name, write_result
from tessera.evaluation.splits import open_splits
from tessera.runtime.collectives import all_reduce_sum
from tessera.runtime.processes import make_accelerator

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


def scores(train: LabelledFeatures, val: LabelledFeatures, k: int, device: torch.device) -> Tensor:
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


def run(settings: OODSettings) -> dict[str, Any]:
    """Compute the separation, print it and write it to a file. Return the contents of the file on the main process.

    Raises:
        ResultError: `settings.output` exists.
        ShardError: the shards cannot be read.
        EvaluationError: the encoder cannot be loaded or used, the sets overlap, there are too few images, or a feature
            is not finite.
    """
    accelerator = make_accelerator()
    check_output(settings.output)
    options = settings.options() | {"labels": False}
    options["source"] = describe_remote([settings.train, settings.val, settings.ood], options["source"])
    train, val = open_splits(settings.train, settings.val, options["source"], accelerator)
    other = open_shards(settings.ood, source=options["source"], progress=accelerator.is_main_process)
    encoder, file = load_encoder(settings)
    encoder.to(accelerator.device)
    bank, *sets = (extract(encoder, shards, accelerator, **options) for shards in (train, val, other))
    known, unknown = (scores(bank, one, settings.k, accelerator.device) for one in sets)
    auroc, fpr = separation(known, unknown)
    if not accelerator.is_main_process:
        return {}
    size = input_size(encoder, settings.image_size)
    facts = {"image_size": size, "resize": resize_size(size, settings.resize), "processes": accelerator.num_processes}
    result = {
        "protocol": f"distance to neighbour {settings.k}, against {data_name(settings.ood)}",
        "auroc": auroc,
        "fpr_at_95_tpr": fpr,
        "val_images": len(known),
        "ood_images": len(unknown),
        "checkpoint": str(file or settings.checkpoint),
        "settings": settings.model_dump(mode="json") | facts,
    }
    evaluation = Evaluation("ood", file, settings.val, settings.output, val.content())
    rows = [[len(known), len(unknown), auroc, fpr]]
    return write_result(evaluation, result, ["known", "others", "AUROC", "FPR at 95 % TPR"], rows)


def main() -> None:
    run_command(OODSettings, run)


if __name__ == "__main__":
    main()
