"""Score of frozen features without labels: how often the nearest crop to a crop comes from the same image.

    accelerate launch evaluation/view_retrieval.py --checkpoint OUTPUT --data SHARDS

Two random crops with colour changes are drawn of each image, as DINO's global crops (2104.14294) and for every method
alike. The mean of all features is subtracted from them. The score is the share of images whose first crop is more
similar, by cosine, to the second crop of the same image than to the second crop of any other image.

The score compares checkpoints of one run, and less well those of several methods on the same images. Its agreement with
the accuracy of a linear probe is measured in benchmarks/results/small_data.md.

Shape letters: N images of this process, D features per crop.
"""

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from tessera.data.colors import colors_for
from tessera.data.crops import MultiCrop, MultiCropConfig
from tessera.data.shards import Source
from tessera.encoders.base import Encoder
from tessera.evaluation.command import Result, Subject, make_command, open_subject
from tessera.evaluation.features import (
    EvaluationError,
    PooledSettings,
    extract,
    full_float32,
    input_size,
)
from tessera.runtime.collectives import all_gather

IMAGES = 2048
"""Default number of images. The score of 2,048 images has a standard error of at most 1.1 points."""


class ViewRetrievalSettings(PooledSettings):
    """Score of an encoder's frozen features without labels: two crops of an image find each other."""

    data: str | list[str]
    """SHARDS of the images; labels are not read"""
    images: int = Field(IMAGES, ge=2)
    """number of images, spaced evenly over the first shards that have so many; fewer if all shards have fewer"""
    output: str | None = None
    """JSON result file, which must not exist; default: a new file in OUTPUT/evaluation, or next to the encoder"""

    val: ClassVar[None] = None

    @property
    def train(self) -> str | list[str]:
        """SHARDS of the only set of images."""
        return self.data


def crop_features(
    encoder: Encoder, shards: Source, accelerator: Accelerator, images: int = IMAGES, **options: Any
) -> Tensor:
    """Return the features of two crops of each image, (N, 2, D). Collective.

    The crops depend only on the index of the image, so all encoders get the same crops. Only the first shards that have
    as many images are read, because the others may be far away.

    Args:
        encoder: encoder on the accelerator's device.
        shards: opened shards of the images.
        accelerator: accelerator of all processes.
        images: number of images of all processes.
        options: options of `evaluation.features.extract`.

    Raises:
        ShardError: the shards cannot be read.
        EvaluationError: the encoder does not accept images of this size.
    """
    size = input_size(encoder, options.get("image_size"))
    config = MultiCropConfig(global_size=size, local_crops=0, colors="rgb")
    transform = MultiCrop(colors_for(config, encoder.preprocessing.channels))

    def pair(encoder: Encoder, crops: Tensor) -> Tensor:
        """Return the features of both crops of each image in one row: (2 * B, C, S, S) -> (B, 2 * D)."""
        return torch.cat(encoder(crops).pooled.chunk(2), 1)

    options |= {"transform": transform, "feature": pair, "labels": False, "images": images}
    return extract(encoder, first_shards(shards, images), accelerator, **options).features.unflatten(1, (2, -1))


def first_shards(shards: Source, images: int) -> Source:
    """Return the first shards that have `images` images, or all shards if they have fewer."""
    enough = int(np.searchsorted(np.cumsum(shards.counts), images)) + 1
    return shards.first(min(enough, len(shards.shards)))


@torch.no_grad()
def own_crop_found(features: Tensor, device: torch.device | None = None) -> Tensor:
    """Return True for each image of all processes whose first crop is nearest to its own second crop. Collective.

    Of equally similar crops, that of the first image counts as the nearest. A feature that is not finite finds nothing.

    Args:
        features: features of the two crops of each image of this process, (N, 2, D).
        device: device of the computation. None selects the device of the features.

    Raises:
        EvaluationError: there are fewer than 2 images.
    """
    every = torch.cat(all_gather(features.to(device or features.device).float()))  # (images of all processes, 2, D)
    count = len(every)
    if count < 2:
        raise EvaluationError(f"View retrieval needs at least 2 readable images, but there are {count}.")
    with torch.autocast(every.device.type, enabled=False), full_float32():
        first, second = F.normalize(every - every.mean((0, 1)), dim=2).unbind(1)
        similarity = first @ second.T
    own = similarity.diagonal()
    return (similarity.argmax(1) == torch.arange(count, device=every.device)) & own.isfinite()


def view_retrieval(features: Tensor, device: torch.device | None = None) -> tuple[float, int]:
    """Return the share of images, 0 to 1, for which `own_crop_found` is True, and the number of images. Collective.

    If a feature is not finite, the share is 0. Arguments and errors are those of `own_crop_found`.
    """
    found = own_crop_found(features, device)
    return found.double().mean().item(), len(found)


def score(settings: ViewRetrievalSettings, subject: Subject, accelerator: Accelerator) -> Result:
    """Return the share of images whose crops find each other."""
    options = settings.options() | {"images": settings.images}
    features = crop_features(subject.encoder, subject.val_shards, accelerator, **options)
    share, images = view_retrieval(features)
    entries = {"protocol": "view retrieval", "top1": share, "val_images": images}
    return Result(entries, ["images", "own crop is nearest"], [[images, share]])


run, main = make_command("view_retrieval", ViewRetrievalSettings, score, open_subject)


if __name__ == "__main__":
    main()
