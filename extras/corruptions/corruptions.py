"""k-NN accuracy on corrupted images.

Robustness of frozen features: k-NN accuracy on corrupted images, as in ImageNet-C (1903.12261).

    tessera corruptions --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS

The centre crops of `--val` are corrupted in fifteen ways at five severities (`images`), and classified by
their nearest neighbours among the features of the clean images of `--train`. The score is the mean accuracy over all
corruptions and severities. The relative accuracy is its ratio to the accuracy on clean images. The corrupted images are
made here, so the scores compare encoders with each other, but not with published ones on ImageNet-C.

With `--checkpoint pixels`, the features are the normalised pixels, without the subtraction of their mean.

Shape letters: B images, S severities, D features per image.
"""

from statistics import fmean
from typing import ClassVar

import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from tessera.encoders.base import Encoder
from tessera.evaluation.command import LabelledData, LabelledSettings, Result, make_command
from tessera.evaluation.features import LabelledFeatures, extract, input_size, resize_size
from tessera.evaluation.knn import knn_accuracy
from tessera.extras.corruptions.images import CORRUPTIONS, SEVERITIES, CorruptedCrop
from tessera.runtime.progress import track

TIME_LIMIT = "24:00:00"
"""Time limit of a SLURM job (`tessera slurm`)."""


class CorruptionSettings(LabelledSettings):
    """k-NN accuracy of an encoder's frozen features on corrupted images."""

    centre_pixels: ClassVar[bool] = False

    train: str | list[str]
    """labelled SHARDS of the bank, in which the neighbours are searched"""
    val: str | list[str]
    """labelled SHARDS of the images that are corrupted and classified"""
    k: int = Field(20, ge=1)
    """number of neighbours"""
    temperature: float = Field(0.07, gt=0)
    """temperature of the vote; each neighbour has the weight exp(similarity / temperature)"""


def by_severity(encoder: Encoder, crops: Tensor) -> Tensor:
    """Return the features of all severities of each image in one row: (S * B, C, H, W) -> (B, S * D)."""
    return torch.cat(encoder(crops).pooled.chunk(SEVERITIES), 1)


def score(settings: CorruptionSettings, data: LabelledData, accelerator: Accelerator) -> Result:
    """Return the accuracy for each corruption and severity."""

    def accuracy(val: LabelledFeatures) -> float:
        found = knn_accuracy(data.train, val, [settings.k], settings.temperature, device=accelerator.device)
        return found[settings.k][0]

    size, clean = input_size(data.encoder, settings.image_size), accuracy(data.val)
    options = settings.options() | {"feature": by_severity, "batch_size": max(settings.batch_size // SEVERITIES, 1)}
    options |= {"progress": False}
    found = {}
    for name in track(CORRUPTIONS, "corruptions", total=len(CORRUPTIONS), shown=accelerator.is_main_process):
        crop = CorruptedCrop(name, size, resize_size(size, settings.resize), data.encoder.preprocessing)
        options |= {"transform": crop, "cut_for": crop.cut_for}
        features, labels, _ = extract(data.encoder, data.val_shards, accelerator, **options)
        found[name] = [accuracy(LabelledFeatures(part, labels)) for part in features.chunk(SEVERITIES, 1)]
    mean = fmean(one for accuracies in found.values() for one in accuracies)
    relative = mean / clean if clean else 0.0
    entries = {
        "protocol": f"{settings.k}-NN of corrupted images",
        "top1": mean,
        "clean_top1": clean,
        "relative_top1": relative,
        "corruptions": found,
    }
    rows = [["clean", clean], ["all corruptions", mean], ["all, relative to clean", relative]]
    rows = [[*row, *[""] * SEVERITIES] for row in rows] + [[name, fmean(one), *one] for name, one in found.items()]
    return Result(entries, ["images", "top-1", *(f"severity {n}" for n in range(1, SEVERITIES + 1))], rows)


run, main = make_command("corruptions", CorruptionSettings, score)
