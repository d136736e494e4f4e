"""Attentive probe.

A classifier learns which frozen tokens to look at, as in AIM (2401.08541).

    tessera attentive_probe --checkpoint OUTPUT --train TRAIN_SHARDS --val VAL_SHARDS

One learned query per head attends to the normed tokens of the last block, and a linear layer maps the result to the
logits of the classes. Methods such as MAE and I-JEPA do not train a global feature, and a linear probe of the pooled
features understates them. The classifier is trained by AdamW on random crops, and the encoder stays frozen.

One classifier is trained for each learning rate of `--rates`. The learning rate is chosen by the accuracy on a held-out
part of `--train`, with classifiers that are not trained on this part; of equal accuracies, the one with the lowest
cross-entropy there wins. The accuracy of a second classifier with the chosen learning rate, trained on all of
`--train`, is reported. AIM normalises tokens by a batch norm; here, each token is normalised by itself.

Shape letters: b images of this process in a step, n tokens of an image, D features per token, K classes.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor, nn

from tessera.data.batch import Batch
from tessera.data.batches import Batches
from tessera.data.crops import Areas, CenterCrop
from tessera.data.shards import Source
from tessera.data.shards.open import Sources
from tessera.data.statistics import count_classes
from tessera.encoders.base import Encoder
from tessera.evaluation.accuracy import true_class_rank
from tessera.evaluation.command import Result, Subject, make_command, open_subject
from tessera.evaluation.features import (
    EvaluationError,
    full_float32,
    resize_size,
    single_view,
)
from tessera.evaluation.linear_probe import chosen_row, held_out
from tessera.evaluation.memory import limit
from tessera.evaluation.tokens import patch_tokens
from tessera.extras.dense.frozen import (
    HeadSettings,
    evaluation_set,
    freeze,
    model_inputs,
    train_heads,
    training_set,
)
from tessera.runtime.collectives import all_reduce_sum

TIME_LIMIT = "24:00:00"
"""Time limit of a SLURM job (`tessera slurm`)."""

COPIES = 8
"""Number of tensors of the size of the tokens that a head needs for its gradients."""
HEAD_WIDTH = 64
"""Width of an attention head, if the width of the tokens is a multiple of it."""


class AttentiveSettings(HeadSettings):
    """Measure the accuracy of a classifier that attends to an encoder's frozen tokens."""

    labelled_only: ClassVar[bool] = True

    classes: int | None = Field(None, ge=2)
    """number of classes; default: the number of class names, or else one more than the largest label of --train"""
    batch_size: int = Field(256, ge=1)
    """number of images in a training step, over all processes; each process encodes its share in one forward pass"""
    epochs: int = Field(20, ge=1)
    """number of passes over the training images"""
    rates: list[float] = Field([3e-4, 1e-3, 3e-3], min_length=1)
    """peak learning rates to try"""
    weight_decay: float = Field(0.05, ge=0)
    """weight decay of AdamW"""
    scale: Areas = (0.3, 1.0)
    """smallest and largest area of a training crop before the resize, as a share of the image's area"""
    holdout: float = Field(0.1, ge=0, lt=1)
    """share of the training images that is held out to choose the learning rate"""


class AttentiveHead(nn.Module):
    """Attention of one learned query per head, and a linear classifier: tokens (b, n, D) -> logits (b, K)."""

    def __init__(self, dim: int, classes: int, seed: int) -> None:
        """
        Args:
            dim: width D of the tokens.
            classes: number of classes K.
            seed: seed of the initial weights, which have the standard deviation 0.02.
        """
        super().__init__()
        heads = dim // HEAD_WIDTH if dim % HEAD_WIDTH == 0 else 1
        self.norm = nn.LayerNorm(dim)
        self.query = nn.Parameter(torch.empty(heads, 1, dim // heads))
        self.kv = nn.Linear(dim, 2 * dim, bias=False)  # a bias would change nothing that the classifier's does not
        self.classifier = nn.Linear(dim, classes)
        generator = torch.Generator().manual_seed(seed)
        for weight in (self.query, self.kv.weight, self.classifier.weight):
            nn.init.normal_(weight, std=0.02, generator=generator)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of images: (b, n, D) -> (b, K)."""
        keys, values = self.kv(self.norm(tokens)).unflatten(2, (2, len(self.query), -1)).permute(2, 0, 3, 1, 4)
        query = self.query.expand(len(tokens), -1, -1, -1)  # (b, heads, 1, D / heads)
        return self.classifier(F.scaled_dot_product_attention(query, keys, values).flatten(1))


class Probe:
    """Attentive heads on the tokens of a frozen encoder: for each rate, one of all images and one for the choice."""

    def __init__(
        self, encoder: Encoder, classes: int, settings: AttentiveSettings, size: int, device: torch.device
    ) -> None:
        self.encoder, self.settings, self.device, self.classes = encoder, settings, device, classes
        blank = self._tokens(torch.zeros(1, encoder.channels, size, size, device=device))  # (1, n, D)
        width, self.at_once = blank.shape[2], max(1, limit(device) // (COPIES * blank.nbytes))

        def heads() -> list[AttentiveHead]:
            return [AttentiveHead(width, classes, settings.seed).to(device) for _ in settings.rates]

        self.final, self.choosing = heads(), heads() if len(settings.rates) > 1 else []

    def _tokens(self, images: Tensor) -> Tensor:
        """Return the tokens of images: (b, C, S, S) -> (b, n, D)."""
        return patch_tokens(self.encoder, images, self.settings.precision).flatten(2).mT

    def train(self, batches: Batches) -> None:
        """Train all heads. Collective."""
        rates = self.settings.rates
        heads = [*zip(self.final, rates, strict=True), *zip(self.choosing, rates, strict=bool(self.choosing))]
        train_heads(heads, batches, self._backward, self.settings.weight_decay, self.device)

    def _backward(self, batch: Batch) -> None:
        """Compute the gradients of this process's part of the losses, the mean cross-entropies over all processes."""
        images, labels = single_view(batch), batch.labels
        assert labels is not None
        kept = (~held_out(batch.keys, self.settings.holdout)).to(self.device)
        counts = all_reduce_sum(torch.stack([torch.ones_like(kept).sum(), kept.sum()])).clamp(min=1)
        for start in range(0, len(labels), self.at_once):
            rows = slice(start, start + self.at_once)
            tokens, answers, trains = self._tokens(images[rows]), labels[rows], kept[rows]
            for head in self.final:
                (F.cross_entropy(head(tokens), answers, reduction="sum") / counts[0]).backward()
            for head in self.choosing:
                (F.cross_entropy(head(tokens[trains]), answers[trains], reduction="sum") / counts[1]).backward()

    @torch.no_grad()
    def evaluate(self, heads: Sequence[AttentiveHead], batches: Batches, share: float = 1.0) -> tuple[Tensor, int]:
        """Return the top-1 and top-5 accuracy and the mean cross-entropy of each head over all processes, (R, 3)
        float64, and the image count. The cross-entropy of a head that diverged is infinite.

        Collective. Only the images that `held_out` selects for `share` count; a share of 1 selects all.
        """
        total, images = torch.zeros(len(heads), 3, dtype=torch.float64), 0
        for batch in model_inputs(batches, f"{batches.total:,} images", self.device):
            seen = held_out(batch.keys, share).nonzero().squeeze(1)
            if not len(seen):
                continue
            assert batch.labels is not None
            crops, labels = (x[seen.to(self.device)] for x in (single_view(batch), batch.labels))
            if int(labels.max()) >= self.classes:
                raise EvaluationError(
                    f"An image has the label {int(labels.max())}, but there are {self.classes} classes, numbered from "
                    "0."
                )
            for part, answers in zip(crops.split(self.at_once), labels.split(self.at_once), strict=True):
                tokens = self._tokens(part)
                logits = [head(tokens) for head in heads]
                places = torch.stack([true_class_rank(one, answers) for one in logits])  # (R, b)
                losses = torch.stack([F.cross_entropy(one, answers, reduction="none") for one in logits])
                total += torch.stack([places < 1, places < 5, losses]).sum(2).T.cpu()
            images += len(seen)
        images = int(all_reduce_sum(torch.tensor(images)))
        if not images:
            raise EvaluationError("No image could be read. Check the shards with `tessera check_shards`.")
        return (all_reduce_sum(total) / images).nan_to_num(nan=math.inf), images


def score(settings: AttentiveSettings, subject: Subject, accelerator: Accelerator) -> Result:
    """Train the classifiers, and return the accuracies of the chosen one and of all."""
    train, val = subject.train_shards, subject.val_shards
    classes = settings.classes or shared_classes(train, val)
    encoder, size, reading = freeze(settings, subject.encoder, accelerator, places=False, classes=classes)
    held = int(held_out([train.name(number) for number in range(train.images)], settings.holdout).sum())
    choose = len(settings.rates) > 1
    if choose and not 0 < held < train.images:
        raise EvaluationError(
            f"--holdout {settings.holdout} holds out {held} of {train.images} training images. Some images must be "
            "held out, and some must remain. Change --holdout, or give only one learning rate."
        )
    training = training_set(train, settings, size, reading, accelerator)
    crop = CenterCrop(size, resize=resize_size(size, None))
    seen, scored = (evaluation_set(one, crop, settings.batch_size, reading, accelerator) for one in (train, val))
    probe, held_images = Probe(encoder, classes, settings, size, accelerator.device), 0
    by_holdout = [(None, None, 0.0)]
    with full_float32():
        probe.train(training)
        if choose:
            held_scores, held_images = probe.evaluate(probe.choosing, seen, settings.holdout)
            by_holdout = held_scores.tolist()
        by_val, images = probe.evaluate(probe.final, scored)
    rows = [
        {"rate": rate, "holdout_top1": held_top1, "top1": top1, "top5": top5}
        for rate, (held_top1, *_), (top1, top5, _) in zip(settings.rates, by_holdout, by_val.tolist(), strict=True)
    ]
    best = chosen_row(rows, [loss for *_, loss in by_holdout])
    counts = {"holdout_images": held_images, "train_images": training.total, "val_images": images, "classes": classes}
    found = {"top1": best["top1"], "top5": best["top5"], "chosen": best, "all": rows, "protocol": "attentive probe"}
    table = [[f"{row['rate']:g}", *list(row.values())[1:], "<- chosen" if row is best else ""] for row in rows]
    return Result(found | counts, ["rate", "held out", "top-1", "top-5", ""], table, {"steps": len(training)})


def shared_classes(train: Source, val: Source) -> int:
    """Return the number of classes of both sets.

    Raises:
        EvaluationError: the validation set has more classes than the training set, or another number without names.
    """
    classes, others = (count_classes(Sources([one], [1.0])) for one in (train, val))
    if others > classes or (train.classes is None and others != classes):
        raise EvaluationError(
            f"The largest label is {classes - 1} in --train, but {others - 1} in --val. The sets may number their "
            "classes differently. Write the class names of each set to a classes.json beside its shards, or give "
            "--classes if both number the classes alike."
        )
    return classes


run, main = make_command("attentive_probe", AttentiveSettings, score, open_subject)
