"""Image retrieval.

Mean average precision of image retrieval by cosine similarity of frozen features.

    tessera retrieval --checkpoint OUTPUT --train GALLERY_SHARDS [--val QUERY_SHARDS]

Each query ranks all images of the gallery by the cosine similarity of their features. An image is relevant if it has
the class of the query. The average precision of a query is the mean, over its relevant images i, of the precision at i:

    images that are relevant and at least as similar as i / images that are at least as similar as i

Equally similar images therefore share a rank, as in scikit-learn's `average_precision_score`. Without `--val`, every
image of `--train` is a query, and its gallery consists of all other images. A query without any relevant image is left
out. The gallery is spread over all processes. At most `CELLS` similarities are in memory at a time.

Shape letters: N gallery images of this process, Q queries per pass, D features per image, R relevant images of a query,
padded to the largest number in each process and concatenated over the processes.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from tessera.evaluation.command import LabelledData, LabelledSettings, Result, make_command
from tessera.evaluation.features import EvaluationError, LabelledFeatures, full_float32
from tessera.evaluation.knn import queries
from tessera.runtime.collectives import all_gather, all_reduce_sum, rank

TIME_LIMIT = "02:00:00"
"""Time limit of a SLURM job (`tessera slurm`)."""

CELLS = 2**25
"""Largest number of similarities between queries and gallery images that are computed at a time, over all processes."""
STEPS = 2.0**20
"""Number of steps into which the range of cosines from 0 to 1 is divided. A step is larger than the rounding errors of
float32, so copies of an image are equally similar to a query on every device and for any number of processes."""
EXCLUDED = -2 * STEPS
"""Similarity of an image that is not in the gallery of a query, in steps. It is smaller than any cosine."""


class RetrievalSettings(LabelledSettings):
    """Mean average precision of image retrieval with an encoder's frozen features."""

    train: str | list[str]
    """labelled SHARDS of the gallery, whose images are ranked"""
    val: str | list[str] | None = None  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    """labelled SHARDS of the queries; default: every image of --train, with all others as its gallery"""


class Retrieval(NamedTuple):
    """Quality of a retrieval."""

    mean_average_precision: float
    """Mean of the average precision (0 to 1) over the queries that have a relevant image."""
    queries: int
    """Number of queries that have a relevant image."""
    left_out: int
    """Number of queries without a relevant image."""


@torch.no_grad()
def retrieve(
    gallery: LabelledFeatures,
    val: LabelledFeatures | None,
    *,
    device: torch.device | None = None,
    cells: int = CELLS,
) -> Retrieval:
    """Return the mean average precision. Call this function on all processes.

    The computation is in float32.

    Args:
        gallery: features (N, D) and labels (N,) of this process's part of the gallery.
        val: this process's part of the queries. None uses every image of the gallery as a query, and excludes it from
            its own gallery.
        device: device of the computation. None selects the device of the features.
        cells: largest number of similarities to compute at a time, over all processes.

    Raises:
        EvaluationError: no query has a relevant image.
    """
    device = device or gallery.features.device
    parts = [len(labels) for labels in all_gather(gallery.labels)]
    bank = F.normalize(gallery.features.to(device).float(), dim=1)  # (N, D)
    labels, start = gallery.labels.to(device), sum(parts[: rank()])
    found, seen = [], 0
    with torch.autocast(device.type, enabled=False), full_float32():
        for query, target in queries(val or gallery, max(cells // sum(parts), 1), device):
            similarity = (query @ bank.T).mul_(STEPS).round_()  # (Q, N)
            relevant = labels == target[:, None]  # (Q, N)
            if val is None:
                own = torch.arange(seen, seen + len(target), device=device) - start  # index of each query in `bank`
                here = ((own >= 0) & (own < len(labels))).nonzero().squeeze(1)
                similarity[here, own[here]] = EXCLUDED
                relevant[here, own[here]] = False
            precision, counts = average_precision(similarity, relevant)
            found += precision[counts > 0].tolist()
            seen += len(target)
    if not found:
        raise EvaluationError("No query has another image of its class in the gallery. Give more images in --train.")
    return Retrieval(math.fsum(found) / len(found), len(found), seen - len(found))


def average_precision(similarity: Tensor, relevant: Tensor) -> tuple[Tensor, Tensor]:
    """Return the average precision (Q,) float64 of each query, and its number of relevant images (Q,) int64.

    Call this function on all processes. Each process passes its part of the gallery. The average precision of a query
    without relevant images is NaN.

    Args:
        similarity: similarity of each query to each gallery image (Q, N). Images with the value `EXCLUDED` are not in
            the gallery of the query.
        relevant: mask (Q, N) of the relevant images. It is False for images that are not in the gallery of the query.
    """
    counts = relevant.sum(1)  # (Q,)
    most = int(counts.max()) if counts.numel() else 0
    own = similarity.masked_fill(~relevant, EXCLUDED).topk(most, dim=1).values  # (Q, relevant images here)
    thresholds = torch.cat(all_gather(own.T.contiguous())).T.contiguous().sort(dim=1).values  # (Q, R), ascending
    ahead = all_reduce_sum(_at_least(similarity.sort(dim=1).values, thresholds))  # (Q, R)
    precision = _at_least(thresholds, thresholds).double() / ahead
    counts = all_reduce_sum(counts)
    precision = precision.masked_fill(thresholds == EXCLUDED, 0.0)  # `EXCLUDED` marks padding
    return precision.sum(1) / counts, counts


def _at_least(values: Tensor, thresholds: Tensor) -> Tensor:
    """Return the number of values of each row that are at least as large as a threshold: (Q, N), (Q, R) -> (Q, R).

    The rows of `values` are sorted in ascending order.
    """
    return values.shape[1] - torch.searchsorted(values, thresholds)


def score(settings: RetrievalSettings, data: LabelledData, accelerator: Accelerator) -> Result:
    """Return the mean average precision of the queries in `data.val`.

    Without `settings.val`, every training image is a query, and its gallery consists of all other training images.
    """
    found = retrieve(data.train, None if settings.val is None else data.val, device=accelerator.device)
    protocol = "retrieval, leave one out" if settings.val is None else "retrieval"
    row = [found.queries, found.left_out, found.mean_average_precision]
    return Result({"protocol": protocol, **found._asdict()}, ["queries", "left out", "mAP"], [row])


run, main = make_command("retrieval", RetrievalSettings, score)
