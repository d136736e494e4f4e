"""k-NN accuracy of frozen features with DINO's weighted vote (2104.14294). The bank of labelled images, in which the
neighbours are searched, is spread over all processes.

    accelerate launch evaluation/knn.py --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS

A neighbour with cosine similarity s votes for its class with weight exp(s / 0.07). DINOv2 uses the softmax of s / 0.07
over the neighbours, which gives the same ranking of the classes.

`--checkpoint pixels` is a check of this evaluation. With it, the features are the normalised pixels minus the mean
training image. (Without this subtraction, all features point in nearly the same direction.) On CIFAR-10 at 32 pixels
with 50,000 images in the bank, the 20-NN accuracy is 0.458.

Shape letters: N images in this process's part of the bank, M images in its part of the queries, Q queries per pass, D
features per image, K neighbours.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from tessera.evaluation.accuracy import UNRANKED, true_class_rank
from tessera.evaluation.command import LabelledData, LabelledSettings, Result, make_command
from tessera.evaluation.features import EvaluationError, LabelledFeatures, check_finite, full_float32
from tessera.runtime.collectives import all_gather, all_reduce_sum, rank, world_size

HEADLINE = 20
"""Number of neighbours k for which the accuracy is reported as `top1`."""
LOW = 2**32 - 1
"""Mask of the low 32 bits of a sort key. These bits hold the index of an image in the bank."""
NONE = -(2**63)
"""Sort key of a missing neighbour. It is smaller than the sort key of any image."""
BLOCK_IMAGES = 16
"""Number of images in a block. `_candidates` searches the bank in blocks of consecutive images."""


class KNNSettings(LabelledSettings, frozen=True):
    """k-NN accuracy of an encoder's frozen features."""

    train: str | list[str]
    """labelled SHARDS of the bank, in which the neighbours are searched"""
    val: str | list[str]
    """labelled SHARDS of the queries, which are classified"""
    k: list[int] = Field([10, 20, 100, 200], min_length=1)
    """numbers of neighbours k; `top1` in the result is for k = 20, or for the first k if 20 is not among them"""
    temperature: float = Field(0.07, gt=0)
    """temperature of the vote; each neighbour has the weight exp(similarity / temperature)"""


def knn_accuracy(
    train: LabelledFeatures, val: LabelledFeatures, k: Sequence[int], temperature: float = 0.07, **options: Any
) -> dict[int, tuple[float, float]]:
    """Return the top-1 and top-5 accuracy (0 to 1) for each k. Arguments and errors are those of `knn_ranks`."""
    ranks = knn_ranks(train, val, k, temperature, **options)
    return {n: (int((place < 1).sum()) / len(place), int((place < 5).sum()) / len(place)) for n, place in ranks.items()}


def knn_ranks(
    train: LabelledFeatures,
    val: LabelledFeatures,
    k: Sequence[int],
    temperature: float = 0.07,
    *,
    classes: int | None = None,
    device: torch.device | None = None,
    pass_size: int = 2048,
    chunk: int = 8192,
) -> dict[int, Tensor]:
    """Return the rank of the true class of the queries of all processes for each k, on the CPU. Call this function on
    all processes.

    Each process passes its part of the bank and of the queries. The parts are joined in order of rank. The computation
    is in float32, and its memory on `device` does not grow with the bank. Of equally similar images, the first one in
    the bank counts as the nearest. Of classes with equal votes, the class with the smallest index wins. The result
    therefore does not depend on the number of processes.

    Args:
        train: features (N, D) and labels (N,) of this process's part of the bank.
        val: features (M, D) and labels (M,) of this process's part of the queries.
        k: numbers of neighbours.
        temperature: temperature of the vote; each neighbour has the weight exp(similarity / temperature).
        classes: number of classes. None selects the largest label plus one.
        device: device of the computation. None selects the device of the features.
        pass_size: number of queries that are compared with the bank at a time.
        chunk: number of images of the bank that are compared with the queries at a time.

    Raises:
        EvaluationError: a k is larger than the bank, a set is empty, a label is out of range, or a feature is not
            finite.
    """
    device = device or train.features.device
    labels, targets = (torch.cat(all_gather(part.labels.to(device))) for part in (train, val))
    classes = _check(labels, targets, k, classes)
    check_finite(train.features, val.features)
    found: dict[int, list[Tensor]] = {n: [] for n in k}
    for similarity, index, target in neighbours(train, val, max(k), device, pass_size=pass_size, chunk=chunk):
        # subtract the largest similarity, because exp could overflow
        votes = (similarity.double() - similarity[:, :1].double()) / temperature
        for n, place in _vote(votes.exp(), labels[index], target, k, classes).items():
            found[n].append(place.cpu())
    return {n: torch.cat(places) for n, places in found.items()}


def neighbours(
    train: LabelledFeatures,
    val: LabelledFeatures,
    k: int,
    device: torch.device,
    *,
    pass_size: int = 2048,
    chunk: int = 8192,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the k nearest images of the queries of all processes, at most `pass_size` queries at a time.

    Call this function on all processes. It yields cosine similarities (Q, K) in descending order, indices in the bank
    (Q, K), and labels of the queries (Q,). The bank needs k images. The arguments are those of `knn_ranks`.
    """
    # index in the bank of the first image of this process
    offset = sum(len(part) for part in all_gather(train.labels.to(device))[: rank()])
    bank = train.features.float()
    for query, target in queries(val, pass_size, device):
        with torch.no_grad(), torch.autocast(device.type, enabled=False), full_float32():
            keys = _nearest(query, bank, offset, k, chunk)
            keys = torch.cat(all_gather(keys.T.contiguous())).T  # (Q, processes * K)
            similarity, index = _unpack(keys.topk(k).values)
        yield similarity, index, target


def _check(labels: Tensor, targets: Tensor, k: Sequence[int], classes: int | None) -> int:
    """Return the number of classes. Every process checks the labels of all processes, so that all processes raise the
    same error."""
    if not len(labels) or not len(targets):
        raise EvaluationError(
            f"The bank has {len(labels)} images, and there are {len(targets)} queries. Each needs at least one image."
        )
    if min(k) < 1 or max(k) > len(labels):
        raise EvaluationError(
            f"k is {list(k)}. Each k must be from 1 to {len(labels)}, the number of images in the bank."
        )
    both = torch.cat([labels, targets])
    smallest, largest = int(both.min()), int(both.max())
    if smallest < 0 or (classes is not None and largest >= classes):
        most = "" if classes is None else f" and less than `classes` ({classes})"
        raise EvaluationError(f"The labels run from {smallest} to {largest}. They must be at least 0{most}.")
    return largest + 1 if classes is None else classes


def queries(val: LabelledFeatures, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the queries of all processes as unit vectors (Q, D) and labels (Q,), at most `size` queries at a time.

    Call this function on all processes. It yields the same queries on every process.
    """
    features = val.features.float()
    for owner, labels in enumerate(all_gather(val.labels)):
        for start in range(0, len(labels), size):
            target = labels[start : start + size].to(device)
            if owner == rank():
                query = features[start : start + size].to(device).contiguous()
            else:
                query = torch.empty(len(target), features.shape[1], device=device)
            if world_size() > 1:
                dist.broadcast(query, owner)
            yield F.normalize(query, dim=1), target


def _nearest(query: Tensor, bank: Tensor, offset: int, k: int, chunk: int) -> Tensor:
    """Return the sort keys of the k nearest images in this process's part of the bank: (Q, D), (N, D) -> (Q, K) int64.

    The keys of a query are in no particular order.
    """
    best = query.new_full((len(query), k), NONE, dtype=torch.int64)
    for start in range(0, len(bank), chunk):
        part = F.normalize(bank[start : start + chunk].to(query.device), dim=1)
        keys = _candidates(query @ part.T, offset + start, k)
        best = torch.cat([best, keys], dim=1).topk(k, sorted=False).values
    return best


def _candidates(similarity: Tensor, offset: int, k: int) -> Tensor:
    """Return sort keys that include those of the k nearest images: (Q, chunk) -> (Q, at most chunk).

    The k nearest images lie in the k blocks with the largest maximum similarity. Selecting blocks first is several
    times faster than selecting among all images. `similarity` may be overwritten.
    """
    index = torch.arange(offset, offset + similarity.shape[1], device=similarity.device)
    whole = similarity.shape[1] // BLOCK_IMAGES * BLOCK_IMAGES
    if whole < 2 * k * BLOCK_IMAGES:
        return _pack(similarity, index)
    blocks = similarity[:, :whole].unflatten(1, (-1, BLOCK_IMAGES))
    numbers = torch.arange(whole // BLOCK_IMAGES, device=similarity.device)
    _, chosen = _unpack(_pack(blocks.amax(dim=2), numbers).topk(k, sorted=False).values)  # (Q, k)
    near = blocks.gather(1, chosen[..., None].expand(-1, -1, BLOCK_IMAGES)).flatten(1)
    keys = _pack(near, index[:whole].unflatten(0, (-1, BLOCK_IMAGES))[chosen].flatten(1))
    return torch.cat([keys, _pack(similarity[:, whole:], index[whole:])], dim=1)


def _pack(similarity: Tensor, index: Tensor) -> Tensor:
    """Pack similarities and indices of bank images into sort keys: (Q, N) float32, (N,) or (Q, N) -> (Q, N) int64.

    A more similar image has a larger key. Among equally similar images, an image that comes earlier in the bank has a
    larger key. All keys of a query differ, so the largest keys do not depend on how the bank is split over processes.
    `similarity` is overwritten.
    """
    bits = similarity.add_(0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)  # now the integers have the same order as the floats
    return bits.to(torch.int64).mul_(2**32).add_(LOW - index)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack sort keys (Q, K) into similarities (Q, K) float32 and indices in the bank (Q, K) int64."""
    bits = (keys >> 32).to(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32), LOW - (keys & LOW)


def _vote(votes: Tensor, labels: Tensor, target: Tensor, k: Sequence[int], classes: int) -> dict[int, Tensor]:
    """Return the rank of the true class (Q,) for each k.

    Args:
        votes: weights of the neighbours (Q, K), the nearest first.
        labels: classes of the neighbours (Q, K).
        target: true classes (Q,).
        k: numbers of neighbours.
        classes: number of classes.
    """
    sums = torch.zeros(len(target), classes, dtype=torch.float64, device=target.device)
    found = {}
    for n in range(1, max(k) + 1):  # add one neighbour at a time, because rounding depends on the order
        sums.scatter_add_(1, labels[:, n - 1 : n], votes[:, n - 1 : n])
        if n in k:
            without_vote = sums.gather(1, target[:, None]).squeeze(1) == 0
            found[n] = true_class_rank(sums, target).masked_fill(without_vote, UNRANKED)
    return found


def score(settings: KNNSettings, data: LabelledData, accelerator: Accelerator) -> Result:
    """Return the k-NN accuracies for each k that is at most the number of images in the bank.

    Raises:
        EvaluationError: every k is larger than the bank.
    """
    images = int(all_reduce_sum(torch.tensor(len(data.train.labels))))
    asked = list(dict.fromkeys(settings.k))
    k, left_out = [n for n in asked if n <= images], [n for n in asked if n > images]
    if not k:
        raise EvaluationError(f"Every k is larger than the bank of {images} images. Give a smaller --k.")
    if left_out:
        accelerator.print(f"k {left_out} is left out, because the bank has only {images} images.")
    accuracy = knn_accuracy(data.train, data.val, k, settings.temperature, device=accelerator.device)
    headline = HEADLINE if HEADLINE in k else k[0]
    entries = {
        "top1": accuracy[headline][0],
        "top5": accuracy[headline][1],
        "protocol": f"{headline}-NN",
        "k": {str(n): {"top1": top1, "top5": top5} for n, (top1, top5) in accuracy.items()},
        "k_left_out": left_out,
    }
    return Result(entries, ["k", "top-1", "top-5"], [[n, *accuracy[n]] for n in k])


run, main = make_command("knn", KNNSettings, score)


if __name__ == "__main__":
    main()
