"""Score the encoder of a run, and write its metrics and pictures."""

import logging
from typing import Any

import numpy as np

from tessera.data.batch import Batch
from tessera.data.pictures import crops, panels
from tessera.pretrain.monitoring import feature_maps, verdict
from tessera.pretrain.monitoring.collapse import CollapseAlarm
from tessera.pretrain.monitoring.online import Accuracy, OnlineKNN, OnlineViews
from tessera.pretrain.step import to_device
from tessera.pretrain.training_run import TrainingRun

log = logging.getLogger(__name__)


def due(every: int | None, step: int) -> bool:
    """Return True if something that happens every `every` steps happens after `step` steps."""
    return bool(every) and step % every == 0


def record_and_score(run: TrainingRun, record: dict[str, Any], batch: Batch | None, alarm: CollapseAlarm) -> None:
    """Write the metrics of a step.

    Before the first step, after the last step, every `evaluate_every` steps, and if there are no scores yet, also run
    the evaluation, print its verdict, and draw pictures.
    """
    step = run.state.step
    if step in (0, run.steps) or due(run.config.evaluate_every, step) or not record:
        shown: dict[str, np.ndarray | None] = {}
        if run.config.evaluation.pictures and batch is not None:
            shown |= _pictures(run, to_device(run, batch))
        if run.online is not None or run.dense is not None:
            shown |= _score(run, record, alarm)
        if run.accuracy is not None:
            record |= _classify(run, run.accuracy)
        if run.recorder:
            run.recorder.pictures(step, {name: picture for name, picture in shown.items() if picture is not None})
    if run.recorder and record:
        run.recorder.scalars({"step": step, "images": run.state.images} | record)


def _score(run: TrainingRun, record: dict[str, Any], alarm: CollapseAlarm) -> dict[str, np.ndarray | None]:
    """Evaluate the features and tokens of the encoder, add the scores to `record`, and return pictures. Collective."""
    shown: dict[str, np.ndarray | None] = {}
    encoder = run.engine.gather_full_parameters(run.method.trained_encoder())
    if isinstance(run.online, OnlineKNN):
        record |= run.online.evaluate(encoder, pixels=run.state.step == 0 or not run.state.scores)
        if run.recorder and run.config.evaluation.pictures:
            images, training = run.online.shown_images(encoder.preprocessing), encoder.training
            bands = run.config.evaluation.bands
            encoder.eval()  # batch norm would use statistics of all processes, but only the main process is here
            shown = {
                "attention": feature_maps.attention(encoder, images, bands=bands),
                "pca": feature_maps.pca(encoder, images, bands=bands),
            }
            encoder.train(training)
    elif run.online is not None:
        record |= run.online.evaluate(encoder)
    if run.online is not None:
        log.info("%s", _verdict(run, run.online, record, alarm))
    if run.dense is not None:
        found = run.dense.evaluate(encoder)
        for score in found.values():
            log.info("step %d: %s %.1f %%", run.state.step, run.dense.name, 100 * score)
        record |= found
    return shown


def _classify(run: TrainingRun, evaluation: Accuracy) -> dict[str, float]:
    """Evaluate the classifier, log its accuracies, and return them. Collective.

    The accuracies are also added to the scores of the run.
    """
    found = evaluation.evaluate(run.engine.gather_full_parameters(run.method))
    scores = verdict.Scores(run.state.scores)
    scores.add(run.state.step, found)
    scores.memory["last"] = found
    log.info("%s", verdict.accuracy_line(scores, found))
    return found


def _verdict(
    run: TrainingRun, evaluation: OnlineKNN | OnlineViews, record: dict[str, Any], alarm: CollapseAlarm
) -> str:
    """Add the accuracies in `record` to the scores of the run, and return a one-line verdict on the run."""
    step, scores = run.state.step, verdict.Scores(run.state.scores)
    scores.add(step, record)
    if len(scores.history) == 1:
        return f"step {step}: {evaluation.name} {verdict.baselines(scores)}{verdict.linear(scores)}"
    signs = alarm.signs(record, run.method.collapse_signs(record))
    early = max(run.config.optim.warmup_steps, int(run.config.health.grace * run.steps))
    found = verdict.outcome(scores.history, evaluation.queries, early, signs, scores.linear)
    advice = list(signs.values()) or run.method.advice(record)
    return verdict.line(scores, evaluation.name, evaluation.queries, found, advice)


def record_pictures(run: TrainingRun, batch: Batch) -> None:
    """Draw the pictures of a batch from the loader, without those of an evaluation. Collective."""
    shown = _pictures(run, to_device(run, batch))
    if run.recorder:
        run.recorder.pictures(run.state.step, shown)


def _pictures(run: TrainingRun, batch: Batch) -> dict[str, np.ndarray]:
    """Return pictures by name: the crops of a batch, and the method's predictions for this batch. Collective."""
    images, bands = run.config.evaluation.pictures, run.config.evaluation.bands
    shown = {"crops": crops(batch, images, bands=bands)}
    if run.method.has_panels:
        method = run.engine.gather_on_main(run.method)
        if method is not None:
            method.to(run.accelerator.device)
            found = method.panels(batch, images)
            shown |= {name: panels(rows, batch.preprocessing, bands=bands) for name, rows in found.items()}
    return shown
