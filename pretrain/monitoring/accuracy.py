"""Classification accuracy of a supervised method on held-out images, during training and as a result file."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from tessera.data.shards import DEFAULT, SourceConfig
from tessera.encoders.base import Encoder
from tessera.evaluation.classes import open_labelled_pair
from tessera.evaluation.features import (
    EvaluationError,
    Extraction,
    extract,
    resolve_checkpoint,
)
from tessera.evaluation.results import Evaluation, report
from tessera.pretrain.config import EvaluationConfig, RunConfig
from tessera.pretrain.methods.base import Method
from tessera.pretrain.monitoring.verdict import Scores
from tessera.runtime.collectives import all_reduce_max, all_reduce_sum

TOP = 5
"""Number of classes among which top-5 accuracy looks for the true class."""


class Accuracy:
    """Evaluation of a classifier on labelled shards. All processes must create the object and call `evaluate`."""

    def __init__(
        self,
        config: EvaluationConfig,
        train: str | list[str],
        image_size: int,
        accelerator: Accelerator,
        source: SourceConfig = DEFAULT,
    ) -> None:
        """Open the held-out shards, and match their classes with those of the training set by name.

        Args:
            config: settings of the evaluation. `config.val` names the labelled SHARDS of the held-out images.
            train: SHARDS of the training set.
            image_size: side of the images in pixels.
            accelerator: accelerator of the run, which knows the processes and the device.
            source: options for reading remote shards.

        Raises:
            ShardError: a shard cannot be used, or a sample has no label.
            EvaluationError: a shard is both in `train` and in `config.val`, or the classes cannot be matched.
        """
        assert config.val is not None
        _, self.val = open_labelled_pair(train, config.val, source, accelerator)
        self.config, self.image_size = config, image_size
        self.accelerator, self.source = accelerator, source

    def evaluate(self, method: Method) -> dict[str, float]:
        """Return the top-1 and top-5 accuracies, 0 to 1, as `val_top1` and `val_top5`, and the number `val_images`.

        The images are centre crops, as in `evaluation.features.extract`. The method's mode (train or eval) and the
        random states are the same afterwards. Among equal scores, the class with the smaller number ranks first.

        Raises:
            EvaluationError: there is no readable image, or a label is not the number of a class.
        """

        def best_classes(_: Encoder, images: Tensor) -> Tensor:
            scores = method.logits(images).float()  # (B, K)
            ranked = scores.sort(dim=1, descending=True, stable=True).indices[:, :TOP]  # (B, 5)
            return ranked.masked_fill(scores.isnan().any(1, keepdim=True), -1)  # NaN is never correct

        training = method.training
        method.eval()
        extraction = Extraction(
            image_size=self.image_size,
            batch_size=self.config.batch_size,
            progress=False,
            source=self.source,
            feature=best_classes,
        )
        with torch.random.fork_rng(devices=[]):
            found = extract(method.trained_encoder(), self.val, self.accelerator, extraction)
        method.train(training)
        self._check(found.labels, method.classes or 0)
        correct = found.features.long() == found.labels[:, None]  # (N, 5)
        counts = torch.tensor([int(correct[:, 0].sum()), int(correct.sum()), len(correct)], dtype=torch.float64)
        top1, top5, images = all_reduce_sum(counts).tolist()
        return {"val_top1": top1 / images, "val_top5": top5 / images, "val_images": images}

    def _check(self, labels: Tensor, classes: int) -> None:
        """Check the labels (N,) of this process's images, on all processes."""
        ends = torch.stack([labels.max(), -labels.min()]) if len(labels) else torch.full((2,), -(2**62))
        largest, smallest = (int(end) for end in all_reduce_max(ends))
        if largest == -(2**62):
            raise EvaluationError("evaluation.val has no readable image. Check the shards with `tessera check_shards`.")
        wrong = largest if largest >= classes else -smallest
        if not 0 <= wrong < classes:
            raise EvaluationError(
                f"evaluation.val has the label {wrong}, but the training images have {classes} classes, numbered from "
                "0. Check that both sets belong to the same data set, or set finetune.classes."
            )


def accuracy_line(scores: Scores, record: dict[str, Any]) -> str:
    """Return the accuracies of one evaluation as one line, beside the best accuracy so far."""
    history = scores.history
    best = max(history, key=lambda score: score.accuracy)
    text = f"step {history[-1].step}: top-1 {100 * record['val_top1']:.1f} %, top-5 {100 * record['val_top5']:.1f} %"
    return f"{text} (best top-1 {100 * best.accuracy:.1f} % at step {best.step})"


def write_result(config: RunConfig, output: Path, scores: Scores) -> None:
    """Print the accuracies of a finished run, and write them to a result file. Call it only on the main process.

    The result belongs to the encoder that the run started from. If `init_from` is a run, a checkpoint or an encoder of
    this project, the path is that of `evaluation.results.result_path`. Otherwise, it is
    OUTPUT/evaluation/finetune.json. `top1` and `top5` are those of the last step. The best step is only informative,
    because it is chosen on the images that score it.
    """
    last = scores.memory["last"]
    best = max(scores.history, key=lambda score: score.accuracy)
    result = {
        "protocol": "fine-tuning",
        "top1": last["val_top1"],
        "top5": last["val_top5"],
        "best_top1": best.accuracy,
        "best_step": best.step,
        "steps": config.steps,
        "val_images": round(last["val_images"]),
        "checkpoint": config.init_from,
        "run": str(output),
        "settings": config.model_dump(mode="json"),
    }
    rows = [["last", config.steps, last["val_top1"], last["val_top5"]], ["best", best.step, best.accuracy, ""]]
    report(_evaluation(config, output), result, ["", "step", "top-1", "top-5"], rows)


def _evaluation(config: RunConfig, output: Path) -> Evaluation:
    """Return what `evaluation.results.report` needs to name the result file."""
    assert config.evaluation.val is not None
    source = None if config.init_from is None else Path(config.init_from).expanduser()
    if source is not None and source.is_dir():
        source = resolve_checkpoint(source)
    if source is None or not source.with_suffix(".json").is_file():
        return Evaluation("finetune", None, config.evaluation.val, str(output / "evaluation" / "finetune.json"))
    return Evaluation("finetune", source, config.evaluation.val, None)
