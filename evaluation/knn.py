"""k-NN accuracy of frozen features with DINO's votes (2104.14294), the bank spread over all processes.

    accelerate launch evaluation/knn.py --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS

A neighbour of cosine similarity s votes for its class with exp(s / 0.07). DINOv2's softmax of s / 0.07 over the
neighbours ranks the classes alike.

`--checkpoint pixels` checks the evaluation itself: its features are the normalised pixels less the mean training image
(without that subtraction all images point the same way). CIFAR-10 at 32 pixels, 50,000 in the bank: 20-NN 0.458.

N images of this process's part of the bank, M of its part of the scored ones, Q of these at a time; D features of an
image; K neighbours.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from evaluation.features import (
    PIXELS,
    EvaluationError,
    FeatureSettings,
    check_disjoint,
    check_labels,
    extract,
    input_size,
    load_encoder,
    open_labelled,
    resize_size,
)
from evaluation.results import NEVER, places, report, result_path
from runtime.collectives import all_gather, all_reduce_sum
from runtime.processes import exit_on_user_error, make_accelerator
from runtime.settings import parse

HEADLINE = 20
LOW = 2**32 - 1
NONE = -(2**63)


class KNNSettings(FeatureSettings):
    """k-NN accuracy of an encoder's frozen features."""

    train: str | list[str]
    """labelled SHARDS of the bank"""
    val: str | list[str]
    """labelled SHARDS that are scored"""
    k: list[int] = Field([10, 20, 100, 200], min_length=1)
    """numbers of neighbours; the headline is 20, or the first when 20 is not among them"""
    temperature: float = Field(0.07, gt=0)
    """a neighbour votes with exp(similarity / temperature)"""
    output: str | None = None
    """JSON file; without it, evaluation/knn.json in the run folder or beside the encoder"""


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    val_features: Tensor,
    val_labels: Tensor,
    *,
    classes: int | None = None,
    k: Sequence[int] = (10, 20, 100, 200),
    temperature: float = 0.07,
    accelerator: Accelerator | None = None,
    queries: int = 2048,
    chunk: int = 8192,
) -> dict[int, tuple[float, float]]:
    """Top-1 and top-5 accuracy, 0 to 1, for each k.

    Called on all processes together, each with its part of the bank, (N, D) and (N,), and of the scored images, (M, D)
    and (M,); parts in order of rank make the whole. Works in float32 on the accelerator's device, to which `queries`
    scored images and `chunk` of the bank go at a time, whatever the size of the bank. Of neighbours equally near the
    first in the bank is taken, of classes with equal votes the lowest, so the number of processes does not matter.

    Args:
        classes: labels lie below it; the largest label plus one when None.
        accelerator: None for one process on the device of the features.

    Raises:
        EvaluationError: k larger than the bank, nothing to score, labels out of range, features that are not finite.
    """
    device = train_features.device if accelerator is None else accelerator.device
    labels = torch.cat(all_gather(train_labels.to(device)))
    scored = torch.cat(all_gather(val_labels.to(device)))
    finite = train_features.isfinite().all() & val_features.isfinite().all()
    broken = all_reduce_sum((~finite).to(device, torch.int64))
    classes = _check(labels, scored, classes, k, bool(broken))
    bank = train_features.float()
    offset = _offset(train_labels, accelerator)
    right = {n: torch.zeros(2, dtype=torch.int64) for n in k}
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _full_float32():
        for query, target in _queries(val_features.float(), val_labels, queries, device, accelerator):
            keys = _nearest(query, bank, offset, max(k), chunk)
            keys = torch.cat(all_gather(keys.T.contiguous())).T  # (Q, processes * K)
            similarity, index = _unpack(keys.topk(max(k)).values)  # (Q, K)
            for n, place in _vote(similarity, labels[index], target, classes, k, temperature).items():
                right[n] += torch.stack([(place < 1).sum(), (place < 5).sum()]).cpu()
    return {n: (int(top1) / len(scored), int(top5) / len(scored)) for n, (top1, top5) in right.items()}


def _check(labels: Tensor, scored: Tensor, classes: int | None, k: Sequence[int], broken: bool) -> int:
    """Number of classes. Sees the same on all processes, so that all stop together."""
    if not len(labels) or not len(scored):
        raise EvaluationError(f"{len(labels)} images in the bank and {len(scored)} to score: both need some")
    if min(k) < 1 or max(k) > len(labels):
        raise EvaluationError(f"k must lie between 1 and the {len(labels)} images of the bank, not {list(k)}")
    if broken:
        raise EvaluationError("features that are not finite numbers: the encoder has diverged, or try --precision fp32")
    both = torch.cat([labels, scored])
    largest = int(both.max())
    if int(both.min()) < 0 or (classes is not None and largest >= classes):
        raise EvaluationError(f"labels from {int(both.min())} to {largest} do not fit {classes} classes")
    return largest + 1 if classes is None else classes


def _offset(labels: Tensor, accelerator: Accelerator | None) -> int:
    """Place in the whole bank of this process's first image."""
    if accelerator is None:
        return 0
    counts = all_gather(torch.tensor([len(labels)], device=accelerator.device))
    return int(torch.cat(counts)[: accelerator.process_index].sum())


class _full_float32:  # noqa: N801
    """Products of float32 matrices without TF32, whatever training has set: its three digits move neighbours."""

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self.before)


def _queries(features: Tensor, labels: Tensor, size: int, device: torch.device, accelerator: Accelerator | None):
    """All scored images, `size` at a time, the same on all processes: yields (Q, D) of length 1 and (Q,)."""
    rank, processes = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    counts = [len(p) for p in all_gather(labels)]
    for owner, count in enumerate(counts):
        for start in range(0, count, size):
            many = min(size, count - start)
            if owner == rank:
                query = features[start : start + many].to(device).contiguous()
                target = labels[start : start + many].to(device)
            else:
                query = torch.empty(many, features.shape[1], device=device)
                target = torch.empty(many, dtype=torch.int64, device=device)
            if processes > 1:
                dist.broadcast(query, owner)
                dist.broadcast(target, owner)
            yield F.normalize(query, dim=1), target


def _nearest(query: Tensor, bank: Tensor, offset: int, k: int, chunk: int) -> Tensor:
    """The k nearest of this process's bank, as keys in any order: (Q, D), (N, D) -> (Q, K) int64."""
    best = query.new_full((len(query), k), NONE, dtype=torch.int64)
    for start in range(0, len(bank), chunk):
        part = F.normalize(bank[start : start + chunk].to(query.device), dim=1)
        keys = _pack(query @ part.T, offset + start)  # (Q, chunk)
        best = torch.cat([best, keys.topk(min(k, keys.shape[1]), sorted=False).values], dim=1)
        best = best.topk(k, sorted=False).values
    return best


def _pack(similarity: Tensor, offset: int) -> Tensor:
    """Similarity and place in the bank as one integer, larger for a nearer one and, among equals, for an earlier one.

    No two keys are equal, so the largest of them do not depend on how the bank is cut. (Q, chunk) float32, which is
    overwritten -> (Q, chunk) int64.
    """
    bits = similarity.add_(0.0).view(torch.int32)  # + 0.0: no negative zero
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)  # integers in the order of the floats
    index = torch.arange(offset, offset + similarity.shape[1], device=similarity.device)
    return bits.to(torch.int64).mul_(2**32).add_(LOW - index)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Similarities (Q, K) float32 and places in the bank (Q, K) int64 of keys."""
    bits = (keys >> 32).to(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32), LOW - (keys & LOW)


def _vote(
    similarity: Tensor, labels: Tensor, target: Tensor, classes: int, k: Sequence[int], temperature: float
) -> dict[int, Tensor]:
    """Place of the true class for each k: (Q, K) and (Q, K), nearest first, and (Q,) -> (Q,)."""
    votes = torch.zeros(len(target), classes, dtype=torch.float64, device=target.device)
    relative = similarity.double() - similarity[:, :1].double()  # a common factor less keeps the weights in range
    weights = (relative / temperature).exp()
    found = {}
    for n in range(1, max(k) + 1):  # one neighbour at a time: a fixed order of the sums, and every k on the way
        votes.scatter_add_(1, labels[:, n - 1 : n], weights[:, n - 1 : n])
        if n in k:
            place = places(votes, target)
            missed = votes.gather(1, target[:, None]).squeeze(1) == 0  # no neighbour named it
            found[n] = place.masked_fill(missed, NEVER)
    return found


def centre(train: Tensor, val: Tensor, accelerator: Accelerator) -> tuple[Tensor, Tensor]:
    """Both less the mean of the bank over all processes: (N, D), (M, D)."""
    count = all_reduce_sum(torch.tensor(len(train), dtype=torch.float64))
    mean = all_reduce_sum(train.sum(0, dtype=torch.float64)) / count  # (D,)
    return train - mean.float(), val - mean.float()


def run(settings: KNNSettings) -> None:
    """The command."""
    accelerate = make_accelerator()
    check_disjoint(settings.train, settings.val)
    bank_shards = open_labelled(settings.train, settings.source, accelerate)
    val_shards = open_labelled(settings.val, settings.source, accelerate)
    encoder, file = load_encoder(settings.checkpoint, settings.image_size)
    encoder.to(accelerate.device)
    options = settings.extraction_options()
    train, train_labels = extract(encoder, bank_shards, accelerator=accelerate, **options)
    val, val_labels = extract(encoder, val_shards, accelerator=accelerate, **options)
    if settings.checkpoint == PIXELS:
        train, val = centre(train, val, accelerate)
    bank, scored = (torch.cat(all_gather(labels)) for labels in (train_labels, val_labels))
    check_labels(bank, scored)
    asked = list(dict.fromkeys(settings.k))
    k = [n for n in asked if n <= len(bank)]
    if dropped := [n for n in asked if n > len(bank)]:
        accelerate.print(f"k {dropped} left out: the bank has {len(bank)} images")
    if not k:
        raise EvaluationError(f"every k is larger than the bank of {len(bank)} images")
    accuracy = knn_accuracy(
        train, train_labels, val, val_labels, k=k, temperature=settings.temperature, accelerator=accelerate
    )
    if not accelerate.is_main_process:
        return
    headline = HEADLINE if HEADLINE in k else k[0]
    size = input_size(encoder, settings.image_size)
    result = {
        "top1": accuracy[headline][0],
        "top5": accuracy[headline][1],
        "protocol": f"{headline}-NN",
        "k": {str(n): {"top1": top1, "top5": top5} for n, (top1, top5) in accuracy.items()},
        "k_left_out": dropped,
        "checkpoint": str(file or settings.checkpoint),
        "train_images": len(bank),
        "val_images": len(scored),
        "classes": int(bank.max()) + 1,
        "settings": settings.model_dump(mode="json")
        | {"image_size": size, "resize": resize_size(size, settings.resize), "processes": accelerate.num_processes},
    }
    path = Path(settings.output) if settings.output else result_path(file, "knn")
    report(path, result, ["k", "top-1", "top-5"], [[n, *accuracy[n]] for n in k])


if __name__ == "__main__":
    with exit_on_user_error():
        # the parser gives one-letter settings one dash
        run(parse(KNNSettings, [re.sub(r"^--k(?==|$)", "-k", argument) for argument in sys.argv[1:]]))
