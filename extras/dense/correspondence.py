"""Score of patch tokens without labels.

How often the nearest token in another crop shows the same place.

    tessera correspondence --checkpoint OUTPUT --data SHARDS

Each image is copied twice with the colour changes of DINO's global crops (2104.14294), for every method alike. A random
box of each copy, with 40 to 100 % of its area, is resized to a crop and mirrored with probability 0.5. So the place of
each token of the first crop in the second crop is known. A token is found if the token of the second crop with the
largest cosine similarity is at most one row and one column from this place. The score is the share of the tokens that
are found, of those whose centre is visible in both crops. It is the mean over the images.

Shape letters: h x w tokens of a crop, D features per token, Q tokens of the first crop whose centre is visible in both.
"""

import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from tessera.data.batch import ViewParameters
from tessera.data.colors import colors_for
from tessera.data.crops import MultiCrop, MultiCropConfig, RandomCropConfig, random_boxes
from tessera.data.loader import evaluation_batches
from tessera.data.sampler import sample_rng
from tessera.evaluation.command import Result, Subject, make_command, open_subject
from tessera.evaluation.features import EvaluationError, encoding, full_float32, single_view
from tessera.evaluation.memory import images_at_once
from tessera.evaluation.tokens import patch_tokens
from tessera.evaluation.view_retrieval import ViewRetrievalSettings, first_shards
from tessera.extras.dense.frozen import freeze, model_inputs
from tessera.extras.dense.patch_knn import COMPARED, seed_of
from tessera.runtime.collectives import all_reduce_sum

SMALLEST = 0.4
"""Smallest area of a crop, as a share of the area of the image: that of DINO's global crops."""


class CorrespondenceSettings(ViewRetrievalSettings):
    """Score of an encoder's frozen patch tokens without labels: tokens of two crops find the same place."""


class Copies(MultiCrop):
    """Draws two copies of a whole image, resized to a square, with the colour changes of DINO's global crops."""

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[ViewParameters]:
        """Draw the parameters of the copies of an image of `size` (H, W)."""
        (view,) = super().draw(size, rng)
        return [replace(view, boxes=np.array([(0, 0, *size)] * 2))]


def places(view: ViewParameters, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the row in the second crop of each row of tokens of the first crop, (h,), and the same for columns, (w,).

    Positions are fractional token indices of the second crop: 0 is the centre of its first token.
    """
    (start, other), found = view.boxes.tolist(), []
    for axis, cells in enumerate((rows, columns)):
        at = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
        mirrored, mirrored_other = view.flips.tolist() if axis else (False, False)
        at = start[axis] + start[axis + 2] * (1 - at if mirrored else at)  # in pixels of the image
        at = (at - other[axis]) / other[axis + 2]
        found.append((1 - at if mirrored_other else at) * cells - 0.5)
    return found[0], found[1]


def found_tokens(tokens: Tensor, places: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a mask of the tokens that are found, (Q,) bool, and the probability of each to be found by chance, (Q,).

    Args:
        tokens: tokens of both crops, (2, D, h, w). The similarity of tokens that are not finite finds nothing.
        places: row (h,) and column (w,) of the tokens of the first crop in the second crop.
    """
    sides = tokens.shape[2:]
    visible = [(place >= -0.5) & (place < side - 0.5) for place, side in zip(places, sides, strict=True)]
    row, column = ((visible[0][:, None] & visible[1]).nonzero()).to(tokens.device).unbind(1)  # (Q,)
    near = [
        ((place[:, None] - torch.arange(side)).abs() <= 1).to(tokens.device)  # (h, h), (w, w)
        for place, side in zip(places, sides, strict=True)
    ]
    first, second = F.normalize(tokens.flatten(2).mT, dim=2)  # (h * w, D)
    queries = first[row * sides[1] + column].split(max(1, COMPARED // len(second)))
    similarity, index = (torch.cat(parts) for parts in zip(*((one @ second.T).max(1) for one in queries), strict=True))
    found = near[0][row, index // sides[1]] & near[1][column, index % sides[1]] & similarity.isfinite()
    return found, near[0].sum(1)[row] * near[1].sum(1)[column] / len(second)


def cut(copies: Tensor, view: ViewParameters) -> Tensor:
    """Cut one crop from each of the two copies of an image: (2, C, H, W) -> (2, C, S, S)."""
    crops = []
    for copy, (top, left, height, width), flip in zip(copies.split(1), view.boxes.tolist(), view.flips, strict=True):
        box = copy[:, :, top : top + height, left : left + width]
        crop = F.interpolate(box, view.size, mode="bicubic", antialias=True)
        crops.append(crop.flip(3) if flip else crop)
    return torch.cat(crops)


@torch.no_grad()
def score(settings: CorrespondenceSettings, subject: Subject, accelerator: Accelerator) -> Result:
    """Return the share of the tokens that find the same place in another crop. Collective.

    The crops depend only on the name of the image, so all encoders get the same crops. Only the first shards that have
    as many images are read, because the others may be far away.

    Raises:
        ShardError: the shards cannot be read.
        EvaluationError: the encoder does not accept images of this size, or no image can be read.
    """
    encoder, size, reading = freeze(settings, subject.encoder, accelerator)
    device, precision, channels = accelerator.device, settings.precision, encoder.preprocessing.channels
    side = math.ceil(size / math.sqrt(SMALLEST))  # crops are not enlarged
    copies = MultiCropConfig(global_size=side, flip=0.0, local_crops=0, colors="rgb")
    crop = RandomCropConfig(size=size, scale=(SMALLEST, 1.0))
    blank = torch.zeros(2, channels, side, side, device=device)
    with encoding(encoder, blank[..., :size, :size], precision):
        batch_size = images_at_once(lambda pairs: encoder(pairs[..., :size, :size]), blank, settings.batch_size)
    batches = evaluation_batches(
        first_shards(subject.val_shards, settings.images),
        Copies(colors_for(copies, channels)),
        batch_size,
        part=(accelerator.process_index, accelerator.num_processes),
        labels=False,
        images=settings.images,
        reading=reading,
    )
    total = torch.zeros(3, dtype=torch.float64)
    for batch in model_inputs(batches, "batches of crops", device):
        whole = single_view(batch).unflatten(0, (2, -1)).transpose(0, 1)
        views = [random_boxes((side, side), sample_rng(0, seed_of(key)), 2, crop) for key in batch.keys]
        pairs = [cut(pair, view) for pair, view in zip(whole, views, strict=True)]
        tokens = patch_tokens(encoder, torch.cat(pairs), precision).unflatten(0, (-1, 2))  # (b, 2, D, h, w)
        for own, view in zip(tokens, views, strict=True):
            with full_float32():
                found, chance = found_tokens(own, places(view, own.shape[2], own.shape[3]))
            if len(found):
                total += torch.tensor([found.double().mean(), chance.double().mean(), 1.0])
    *sums, scored = all_reduce_sum(total).tolist()
    if not scored:
        raise EvaluationError("No image could be read. Check the shards with `tessera check_shards`.")
    top1, chance = (one / scored for one in sums)
    entries = {"protocol": "correspondence", "top1": top1, "chance": chance, "val_images": int(scored)}
    return Result(entries, ["images", "tokens found", "by chance"], [[int(scored), top1, chance]])


run, main = make_command("correspondence", CorrespondenceSettings, score, open_subject)
