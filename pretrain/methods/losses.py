"""Losses of DINO (2104.14294), iBOT (2111.07832), KoLeo (1806.03198) and Gram anchoring (2508.10104), in float32.

Shape letters: B images per process; G global crops and S crops of an image; P tokens of a crop; M hidden tokens; N rows
of this process (images, crops or tokens); D width of the encoder; K prototypes.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.encoders.images import Mask
from tessera.runtime.collectives import all_gather_rows, all_reduce_max, all_reduce_sum, first_row
from tessera.runtime.user_error import UserError

Centering = Literal["mean", "sinkhorn"]

NEAREST = 1e-4
"""lower bound of the distances between normalised features in KoLeo; the gradient of a smaller distance is 0"""


def teacher_distribution(logits: Tensor, center: Tensor, temperature: float, centering: Centering) -> Tensor:
    """Return the teacher's distributions, centred and sharpened, for its float32 logits: (N, K) -> (N, K)."""
    if centering == "sinkhorn":
        return sinkhorn(logits, temperature)
    return F.softmax((logits - center) / temperature, dim=-1)


@torch.no_grad()
def sinkhorn(logits: Tensor, temperature: float, iterations: int = 3) -> Tensor:
    """Return Sinkhorn-Knopp assignments over the rows of all processes (SwAV, 2006.09882): (N, K) -> (N, K).

    Each row of the result is a distribution over the prototypes. The sum over all rows is about the same for each
    prototype.

    Args:
        logits: (N, K) float32; N may differ between processes, and may be 0.
    """
    scaled = logits / temperature
    own_peak = scaled.max() if len(scaled) else scaled.new_full((), -torch.inf)
    peak = all_reduce_max(own_peak)  # subtract the maximum, so that exp does not overflow
    assignment = (scaled - peak).exp()  # (N, K)
    rows = all_reduce_sum(scaled.new_full((), len(logits)))
    for _ in range(iterations):
        assignment = assignment / all_reduce_sum(assignment.sum(0)).clamp(min=1e-30) / logits.shape[1]
        assignment = assignment / assignment.sum(1, keepdim=True).clamp(min=1e-30) / rows
    return assignment * rows


def dino_loss(student: Tensor, teacher: Tensor, local_weight: float = 1.0) -> Tensor:
    """Return the cross-entropy between teacher and student, averaged over images and over pairs of different crops.

        loss = mean over pairs (g, s), s != g, over images b, of  - sum_k teacher[g, b, k] * student[s, b, k]

    Args:
        student: (S, B, K) log-probabilities of all crops, global crops first.
        teacher: (G, B, K) probabilities of the global crops.
        local_weight: factor of the pairs with a local crop s. The mean still divides by the number of all pairs.
    """
    crops, images, _ = student.shape
    # one product for each image: a GPU computes a single small product with a sum of millions of terms on few cores
    pairs = torch.einsum("gbk,sbk->bgs", teacher, student).sum(0)  # (G, S)
    if local_weight != 1:
        pairs = torch.cat([pairs[:, : len(teacher)], local_weight * pairs[:, len(teacher) :]], 1)
    skipped = pairs.diagonal().sum()
    return (skipped - pairs.sum()) / (images * (len(teacher) * crops - len(teacher)))


def ibot_loss(student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted cross-entropy between teacher and student over hidden tokens.

        loss = - sum over hidden tokens m of  weights[m] * sum_k teacher[m, k] * student[m, k]

    Args:
        student: (M, K) log-probabilities.
        teacher: (M, K) probabilities.
        weights: (M,) weight of each token, as returned by `token_weights`.
    """
    return -((teacher * student).sum(1) * weights).sum()


def token_weights(mask: Mask) -> Tensor:
    """Return the weight of each hidden token in the iBOT loss: (M,) float32 on the CPU.

    The weight of a token is 1 / (number of hidden tokens of its crop * number of crops). So all masked crops have the
    same weight, and a crop without hidden tokens counts as a crop whose loss is 0, as in the official code. All crops
    of the mask must have the same number of tokens.
    """
    hidden = len(mask.hidden) // len(mask.lengths) - mask.lengths  # (G * B,)
    return torch.repeat_interleave(1 / (hidden.clamp(min=1) * len(hidden)), hidden)


def koleo_loss(features: Tensor) -> Tensor:
    """Return the KoLeo loss of normalised features, over the features of all processes.

        loss = - mean over i of  log max(min over j != i of |x[i] - x[j]|, NEAREST),  x[i] = features[i] / |features[i]|

    The official code searches for the nearest neighbour only among the images of the same process. It adds 1e-8 to the
    distance, which has no effect in float16, where 1e-8 is rounded to 0.

    Args:
        features: (B, D) float32, one row per image of this process.

    Raises:
        UserError: all processes together have only one image.
    """
    own = F.normalize(features, dim=1, eps=1e-8)
    everyone = all_gather_rows(own)  # (N, D), of all N images
    if len(everyone) < 2:
        raise UserError(
            "The KoLeo loss needs at least two images per forward pass. Raise --batch_size, or set koleo_weight to 0."
        )
    with torch.no_grad():
        similarity = own @ everyone.T  # (B, N)
        first = first_row(len(own))
        similarity[:, first : first + len(own)].fill_diagonal_(-torch.inf)
        nearest = similarity.argmax(1)  # (B,)
    squares = (own - everyone.index_select(0, nearest)).square().sum(1)  # (B,)
    return -0.5 * squares.clamp(min=NEAREST**2).log().mean()


def gram_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared difference between the cosine similarities of the student's and a teacher's tokens.

        loss = mean over crops n, over tokens p, q of n, of  (cos(student[n, p], student[n, q]) - cos(teacher[n, p],
        teacher[n, q])) ** 2

    Args:
        student: (N, P, D) float32 token features.
        teacher: (N, P, D) float32 token features of the same crops.
    """
    student, teacher = F.normalize(student, dim=-1), F.normalize(teacher, dim=-1)
    return (student @ student.mT - teacher @ teacher.mT).square().mean()
