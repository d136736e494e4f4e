"""Evaluations during training: k-NN and a linear probe of the features, or the accuracy of a classifier."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.data.crops import CenterCrop
from tessera.data.loader import Reading, evaluation_batches
from tessera.data.shards import DEFAULT, Access, Source, describe_remote, open_shards
from tessera.encoders.base import Encoder, Preprocessing
from tessera.evaluation import logistic
from tessera.evaluation.features import (
    EvaluationError,
    LabelledFeatures,
    extract,
    pooled,
    resize_size,
    resolve_checkpoint,
    single_view,
    subtract_mean,
)
from tessera.evaluation.knn import knn_accuracy
from tessera.evaluation.results import Evaluation, write_result
from tessera.evaluation.splits import check_labels, open_labelled_splits
from tessera.evaluation.view_retrieval import crop_features, view_retrieval
from tessera.pretrain.config import EvaluationConfig, RunConfig
from tessera.pretrain.methods.method import Method
from tessera.pretrain.monitoring.verdict import Scores
from tessera.runtime.collectives import all_gather, all_reduce_max, all_reduce_sum
from tessera.runtime.plugins import Registry

PIXEL_SIDE = 32
"""Side in pixels to which larger images are shrunk before the k-NN accuracy of the raw pixels is computed."""
TOP = 5
"""Number of best-scored classes in top-5 accuracy. An image counts as correct if its class is one of them."""


class OnlineEvaluation:
    """Evaluation of a run on the images of shards. All processes must create the object and call `evaluate`."""

    queries = 0
    """Number of scored images; known after the first evaluation."""

    def __init__(
        self,
        config: EvaluationConfig,
        train: str | list[str],
        image_size: int,
        accelerator: Accelerator,
        source: Access = DEFAULT,
    ) -> None:
        """Open the shards, and match the classes of both sets by name.

        Args:
            config: settings of the evaluation. `config.val` names the labelled SHARDS of the scored images. If it is
                None, the images of `train` are scored, without labels.
            train: SHARDS of the training images of the evaluation, such as the bank of k-NN.
            image_size: side of the images in pixels.
            accelerator: accelerator of the run.
            source: options for reading remote shards.

        Raises:
            ShardError: a shard cannot be used, or a sample of labelled shards has no label.
            EvaluationError: a shard is both in `train` and in `config.val`, or the classes cannot be matched.
        """
        if config.val is None:
            source = describe_remote([train], source)
            self.train = self.val = open_shards(train, progress=accelerator.is_main_process, source=source)
        else:
            flags = ("--data" if config.train is None else "--evaluation.train", "--evaluation.val")
            self.train, self.val = open_labelled_splits(train, config.val, source, accelerator, flags)
        self.config, self.image_size = config, image_size
        self.accelerator, self.source = accelerator, source

    @property
    def name(self) -> str:
        """Name of the score in messages."""
        return ""

    def evaluate(self, model: Any, /) -> dict[str, float]:
        """Return the scores of an encoder, or of a supervised method. Collective."""
        raise NotImplementedError

    @property
    def options(self) -> dict[str, Any]:
        """Options of `evaluation.features.extract`."""
        precision = self.config.precision
        if precision == "auto":
            in_bf16 = self.accelerator.mixed_precision == "bf16" and self.accelerator.device.type == "cuda"
            precision = "bf16" if in_bf16 else "fp32"
        options = {"image_size": self.image_size, "batch_size": self.config.batch_size, "source": self.source}
        return options | {"precision": precision, "progress": False}

    def extract(
        self, model: nn.Module, encoder: Encoder, shards: list[Source], feature: Callable[[Encoder, Tensor], Tensor]
    ) -> list[LabelledFeatures]:
        """Return the features of centre crops for each item of `shards`; see `evaluation.features.extract`.

        `model` contains `encoder`.
        """
        with eval_mode(model):
            return [extract(encoder, one, self.accelerator, feature=feature, **self.options) for one in shards]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode within a `with` block, and restore its mode (train or eval) and the random states."""
    training = model.training
    model.eval()
    with torch.random.fork_rng(devices=[]):
        yield
    model.train(training)


class OnlineViews(OnlineEvaluation):
    """Score without labels (`evaluation.view_retrieval`)."""

    name = "view retrieval"

    def evaluate(self, encoder: Encoder) -> dict[str, float]:
        """Return the share of images whose crops find each other, 0 to 1, as `view_retrieval`.

        Raises:
            EvaluationError: fewer than 2 images can be read.
        """
        with eval_mode(encoder):
            features = crop_features(encoder, self.train, self.accelerator, self.config.view_images, **self.options)
        share, self.queries = view_retrieval(features, self.accelerator.device)
        return {"view_retrieval": share}


class OnlineKNN(OnlineEvaluation):
    """k-NN and linear probe on the same features of an encoder."""

    @property
    def name(self) -> str:
        return f"{self.config.k}-NN"

    _shown: Tensor | None = None

    def shown_images(self, preprocessing: Preprocessing) -> Tensor:
        """Return `config.pictures` images of `config.val`, spaced evenly, as normalised model input: (N, C, S, S)."""
        if self._shown is None:
            transform = CenterCrop(self.image_size, resize=resize_size(self.image_size, None))
            count = self.config.pictures
            reading = Reading(source=self.source, preprocessing=preprocessing)
            options = {"labels": False, "images": max(count, 1), "reading": reading}
            batch = next(iter(evaluation_batches(self.val, transform, max(count, 1), **options)), None)
            if batch is None:
                raise EvaluationError("None of the images for the pictures can be read. Set evaluation.pictures to 0.")
            self._shown = single_view(to_model_input(batch.to(self.accelerator.device)))[:count]
        return self._shown

    def evaluate(self, encoder: Encoder, *, pixels: bool = False) -> dict[str, float]:
        """Return the top-1 accuracies, 0 to 1: `knn_top1` for k-NN, and `linear_top1` for the linear probe.

        The linear probe is left out if `config.linear_iterations` is 0.

        Args:
            encoder: encoder to evaluate.
            pixels: also return the accuracy of the raw pixels, as `knn_pixels`. The images are shrunk to `PIXEL_SIDE`
                pixels, and the mean image of the bank is subtracted.

        Raises:
            EvaluationError: the labels fail `check_labels`, which only the first evaluation calls.
        """
        feature = pooled_and_pixels if pixels else pooled
        train, val = self.extract(encoder, encoder, [self.train, self.val], feature)
        if not self.queries:  # later evaluations read the same labels
            bank, queries = (torch.cat(all_gather(part.labels)) for part in (train, val))
            check_labels(bank, queries, self.train.classes)
        self.queries = int(all_reduce_sum(torch.tensor(len(val.labels))))
        own = [part._replace(features=part.features[:, : encoder.dim]) for part in (train, val)]
        scores = {"knn_top1": self._knn(*own)}
        if iterations := self.config.linear_iterations:
            scores["linear_top1"] = logistic.probe(*own, iterations, self.accelerator.device)
        if pixels:
            centred = subtract_mean(*(part.features[:, encoder.dim :] for part in (train, val)))
            raw = [part._replace(features=one) for part, one in zip((train, val), centred, strict=True)]
            scores["knn_pixels"] = self._knn(*raw)
        return scores

    def _knn(self, bank: LabelledFeatures, val: LabelledFeatures) -> float:
        return knn_accuracy(bank, val, [self.config.k], device=self.accelerator.device)[self.config.k][0]


def pooled_and_pixels(encoder: Encoder, images: Tensor) -> Tensor:
    """Return the encoder's pooled output, concatenated with the pixels of the shrunk images.

    (B, C, S, S) -> (B, D + C * s * s), where s is the smaller of S and `PIXEL_SIDE`.
    """
    side = min(images.shape[-1], PIXEL_SIDE)
    return torch.cat([pooled(encoder, images), F.adaptive_avg_pool2d(images.nan_to_num(), side).flatten(1)], 1)


class Accuracy(OnlineEvaluation):
    """Accuracy of the classifier of a supervised method."""

    def evaluate(self, method: Method) -> dict[str, float]:
        """Return the top-1 and top-5 accuracies, 0 to 1, as `val_top1` and `val_top5`, and the number of images as
        `val_images`.

        Among equal scores, the class with the smaller index ranks first.

        Raises:
            EvaluationError: there is no readable image, or a label is not a class index.
        """

        def best_classes(_: Encoder, images: Tensor) -> Tensor:
            scores = method.logits(images).float()  # (B, K)
            ranked = scores.sort(dim=1, descending=True, stable=True).indices[:, :TOP]  # (B, 5)
            return ranked.masked_fill(scores.isnan().any(1, keepdim=True), -1)  # NaN is never correct

        (found,) = self.extract(method, method.trained_encoder(), [self.val], best_classes)
        _check_classes(found.labels, method.classes or 0)
        correct = found.features.long() == found.labels[:, None]  # (N, 5)
        counts = torch.tensor([int(correct[:, 0].sum()), int(correct.sum()), len(correct)], dtype=torch.float64)
        top1, top5, images = all_reduce_sum(counts).tolist()
        return {"val_top1": top1 / images, "val_top5": top5 / images, "val_images": images}


def _check_classes(labels: Tensor, classes: int) -> None:
    """Check the labels of all processes. Collective.

    Args:
        labels: labels of this process, (N,).
        classes: number of classes.

    Raises:
        EvaluationError: there is no readable image, or a label is not a class index.
    """
    ends = torch.stack([labels.max(), -labels.min()]) if len(labels) else torch.full((2,), -(2**62))
    largest, smallest = (int(end) for end in all_reduce_max(ends))
    if largest == -(2**62):
        raise EvaluationError("evaluation.val has no readable image. Check its images with `tessera check_shards`.")
    wrong = largest if largest >= classes else -smallest
    if not 0 <= wrong < classes:
        raise EvaluationError(
            f"evaluation.val has the label {wrong}, but the training images have {classes} classes, numbered from "
            "0. Check that both sets belong to the same data set, or set the number of classes."
        )


OF_MAPS: Registry[type[OnlineEvaluation]] = Registry(
    "evaluation of images with maps",
    {},
    group="tessera.online_evaluations",
    expected="a subclass of tessera.pretrain.monitoring.online.OnlineEvaluation",
    valid=lambda value: isinstance(value, type) and issubclass(value, OnlineEvaluation),
)
"""Evaluations of the images of `evaluation.maps_train` and `evaluation.maps_val`, by name. The scores are metrics."""


def write_accuracy(config: RunConfig, output: Path, scores: Scores, content: str | None) -> None:
    """Print the accuracies of a finished run, and write them to a result file. Call it only on the main process.

    The result describes the encoder from which the run started. If `init_from` is a run, a checkpoint or an encoder of
    this project, `evaluation.results.result_path` determines the path of the result file. Otherwise, the path is
    OUTPUT/evaluation/METHOD.json. `top1` and `top5` are the accuracies of the last step. The accuracy of the best
    step is not an unbiased result, because this step is chosen on the same images. `content` is the hash of the scored
    images (`Source.content`).
    """
    last, best = scores.memory["last"], scores.best
    result = {
        "protocol": "fine-tuning",
        "top1": last["val_top1"],
        "top5": last["val_top5"],
        "best_top1": best.accuracy,
        "best_step": best.step,
        "steps": scores.history[-1].step,
        "classes": getattr(config.method_config, "classes", None),
        "val_images": round(last["val_images"]),
        "checkpoint": config.init_from,
        "run": str(output),
        "settings": config.model_dump(mode="json"),
    }
    source = None if config.init_from is None else Path(config.init_from).expanduser()
    if source is not None and source.is_dir():
        source = resolve_checkpoint(source)
    own = source is None or not source.with_suffix(".json").is_file()
    file = str(output / "evaluation" / f"{config.method}.json") if own else None
    assert config.evaluation.val is not None
    step = None if own else encoders.read_step(source)
    evaluation = Evaluation(config.method, None if own else source, config.evaluation.val, file, step, content)
    rows = [
        ["last", scores.history[-1].step, last["val_top1"], last["val_top5"]],
        ["best", best.step, best.accuracy, ""],
    ]
    write_result(evaluation, result, ["", "step", "top-1", "top-5"], rows)
