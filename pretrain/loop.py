"""The training loop."""

import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from data.augment import to_model_input
from data.batch import Batch
from pretrain.checkpoints.resume import TrainState
from pretrain.checkpoints.save import Saver
from pretrain.config import ResolvedRun
from pretrain.engines import Engine
from pretrain.methods.base import Method
from pretrain.monitoring import pictures
from pretrain.monitoring.collapse import CollapseAlarm
from pretrain.monitoring.metrics import Progress, Recorder
from pretrain.monitoring.online_knn import OnlineKNN
from pretrain.optim.adamw import apply_schedules, clip_gradients
from runtime import preemption
from runtime.collectives import all_reduce_sum, gather_objects, world_size
from runtime.errors import UserError

log = logging.getLogger(__name__)


class NonFiniteError(UserError, RuntimeError):
    """Too many steps in a row gave no finite loss or gradient."""


@dataclass
class Run:
    """Everything that a training step touches."""

    config: ResolvedRun
    output: Path
    accelerator: Accelerator
    method: Method
    engine: Engine
    """what carries the method over processes"""
    recorder: Recorder | None
    """None beside the main process"""
    online_knn: OnlineKNN | None
    saver: Saver
    position: TrainState = field(default_factory=TrainState)

    @property
    def steps(self) -> int:
        """Length of the run."""
        return self.config.steps


@dataclass
class Step:
    """What one optimizer step gave."""

    loss: float
    """mean over all images of the step"""
    grad_norm: float
    """global norm before clipping"""
    finite: bool
    """whether the optimizer and the teacher moved"""
    overflow: bool
    """whether they stood still because float16 overflowed under the loss scale, which falls after it"""
    stop: bool
    """whether any process was asked to stop"""
    metrics: dict[str, Tensor]


def training_step(run: Run, batches: Iterable[Batch]) -> Step:
    """One optimizer step over this process's `batches`, `config.accumulate` of them, one a forward pass."""
    accelerator, engine, method, step = run.accelerator, run.engine, run.method, run.position.step
    apply_schedules(engine.optimizer, run.config.optim, step, run.steps, run.config.batch_size)
    losses, metrics = [], []
    for count, batch in enumerate(batches, start=1):
        loss, numbers = engine.forward_backward(batch, step, last=count == run.config.accumulate)
        losses.append(loss)
        metrics.append(numbers)
    clip, clip_by = run.config.optim.clip, run.config.optim.clip_by
    norm = clip_gradients(engine.local_gradients(method.trained_parts()), clip, clip_by, sharded=engine.sharded)
    norm = norm.to(accelerator.device)  # gradients may have been moved to the host
    mean = torch.stack(losses).mean()
    finite = (mean.isfinite() & norm.isfinite()).to(mean.dtype)
    asked = torch.full_like(mean, preemption.stop_requested())
    # all processes must agree, and this is the one place in a step that waits for the device
    means = all_reduce_sum(torch.stack([mean, finite, norm, asked])) / world_size()
    total, agreed, norm_value, stop = means.tolist()
    moved, scaler = agreed == 1.0, accelerator.scaler
    # a finite loss whose scaled gradients overflow float16 is the loss scale's business, until it can fall no lower
    overflow = not moved and scaler is not None and math.isfinite(total) and scaler.get_scale() > 1
    if moved:
        engine.step()
        method.after_step(step)
    else:
        engine.skip()
    run.position.skipped_steps += not moved
    run.position.skipped_in_a_row = 0 if moved else run.position.skipped_in_a_row + (not overflow)
    run.position.step += 1
    run.position.images += run.config.batch_size
    averages = {name: torch.stack([numbers[name] for numbers in metrics]).mean() for name in metrics[0]}
    return Step(total, norm_value, moved, overflow, stop > 0, averages)


def train(run: Run, batches: Iterator[Batch]) -> None:
    """Train from `run.position` to the last step, recording, evaluating and saving on the way.

    `batches` start at `run.position` and give `config.accumulate` batches a step.

    Raises:
        NonFiniteError: `optim.nonfinite_limit` steps in a row were skipped.
        Preempted: a process was asked to stop; the checkpoint of this moment is written.
    """
    config, accelerator = run.config, run.accelerator
    alarm = CollapseAlarm(config.health, run.steps, run.method.rank_hint, run.position.alarm)
    progress = Progress(run.steps, run.position.step, enabled=accelerator.is_main_process)
    window, corrupt, due = Window(), 0, False
    if run.position.step == 0 or run.position.unscored:
        _record_and_score(run, run.position.unscored, None)
        run.position.unscored = {}
    with progress:
        while run.position.step < run.steps:
            started = time.perf_counter()
            micro_batches = list(itertools.islice(batches, config.accumulate))
            waited = time.perf_counter() - started
            corrupt += sum(len(b.skipped) for b in micro_batches)
            if config.evaluation.pictures and run.position.step == 0:
                shown = _pictures(run, _on_device(run, micro_batches[0]))
                if run.recorder:
                    run.recorder.pictures(shown, 0)
            result = training_step(run, (_on_device(run, b) for b in micro_batches))  # one there at a time
            window.add(config.batch_size, waited)
            if not result.finite:
                _report_skipped(run, result, micro_batches)
            step = run.position.step
            stop = result.stop and step < run.steps
            progress.update(step, result.loss, window.images_per_second, window.data_wait)
            if step % config.record_every == 0 or step == run.steps or _due(config.evaluate_every, step):
                run.position.corrupt_images += int(all_reduce_sum(torch.tensor(corrupt)))
                record, corrupt = _record(run, result, window), 0
                if stop and _due(config.evaluate_every, step):
                    run.position.unscored = record  # who asks to stop may not wait for an evaluation: --resume makes it
                else:
                    _record_and_score(run, record, micro_batches[0])
                progress.line(record)
                for message in alarm.check(record, run.method.collapse_signs(record)).values():
                    log.log(logging.WARNING if run.recorder else logging.DEBUG, message)
                window = Window()
            due = due or step % config.checkpoint_every == 0
            # amid skipped steps it waits for a good one, or it would push out checkpoints from before the trouble
            if (due and result.finite) or step == run.steps or stop:
                due = False
                started = time.perf_counter()
                run.position.corrupt_images += int(all_reduce_sum(torch.tensor(corrupt)))
                corrupt = 0
                # after a skipped step the weights are those before the trouble, and push none out
                run.saver.save(run.position, run.method.trained_encoder(), exiting=stop, keep_old=not result.finite)
                window.leave_out(time.perf_counter() - started)
            if stop:
                _leave(run)
    run.saver.wait()


def _leave(run: Run) -> NoReturn:
    """End a run that was asked to stop and has saved."""
    if run.recorder:
        run.recorder.close()
    run.accelerator.wait_for_everyone()  # the launcher ends whoever is still busy when the first one leaves
    raise preemption.Preempted(preemption.message(run.position.step))


class Window:
    """Time and images since the last record."""

    def __init__(self) -> None:
        self.started, self.images, self.waited = time.perf_counter(), 0, 0.0

    def add(self, images: int, waited: float) -> None:
        self.images += images
        self.waited += waited

    def leave_out(self, seconds: float) -> None:
        """Time that was not training."""
        self.started += seconds

    @property
    def images_per_second(self) -> float:
        return self.images / max(time.perf_counter() - self.started, 1e-9)

    @property
    def data_wait(self) -> float:
        """Share of the time spent waiting for the loader, 0 to 1."""
        return self.waited / max(time.perf_counter() - self.started, 1e-9)


def _on_device(run: Run, batch: Batch) -> Batch:
    """A batch of the loader as the network sees it."""
    return to_model_input(batch.to(run.accelerator.device, non_blocking=True))


def _due(every: int | None, step: int) -> bool:
    return bool(every) and step % every == 0


def _record(run: Run, result: Step, window: Window) -> dict[str, Any]:
    """The record of this step, but for evaluations. Means over processes; called on all of them together."""
    names = sorted(result.metrics)
    means: list[float] = []
    if names:
        stacked = torch.stack([result.metrics[name].float() for name in names])
        means = (all_reduce_sum(stacked) / world_size()).tolist()
    moving = [group["lr"] for group in run.engine.optimizer.param_groups if not group["frozen_steps"]]
    decays = [group["weight_decay"] for group in run.engine.optimizer.param_groups if group["decays"]]
    record = {
        "step": run.position.step,
        "images": run.position.images,
        "loss": result.loss,
        "lr": max(moving),
        "weight_decay": max(decays),
        "grad_norm": result.grad_norm,
        "images_per_second": window.images_per_second,
        "data_wait": window.data_wait,
        "skipped_steps": run.position.skipped_steps,
        "corrupt_images": run.position.corrupt_images,
    }
    if torch.cuda.is_available():
        record["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return record | dict(zip(names, means, strict=True)) | run.method.health()


def _record_and_score(run: Run, record: dict[str, Any], batch: Batch | None) -> None:
    """Write a line; at the start, at the end and every `evaluate_every` steps with k-NN and pictures."""
    step = run.position.step
    if step in (0, run.steps) or _due(run.config.evaluate_every, step):
        shown: dict[str, np.ndarray | None] = {}
        if run.config.evaluation.pictures and batch is not None:
            shown |= _pictures(run, _on_device(run, batch))
        if run.online_knn is not None:
            encoder = run.engine.gather_full_parameters(run.method.trained_encoder())
            record |= run.online_knn.evaluate(encoder)
            if run.recorder:
                log.info("step %d: %d-NN accuracy %.1f %%", step, run.config.evaluation.k, 100 * record["knn_top1"])
            if run.recorder and run.config.evaluation.pictures:
                images = run.online_knn.first_images(encoder.preprocessing)
                shown |= {"attention": pictures.attention(encoder, images), "pca": pictures.pca(encoder, images)}
        if run.recorder:
            run.recorder.pictures({k: v for k, v in shown.items() if v is not None}, step)
    if run.recorder and record:
        run.recorder.scalars({"step": step, "images": run.position.images} | record)


def _pictures(run: Run, batch: Batch) -> dict[str, np.ndarray]:
    """What the network sees of a batch, and what the method does to it. Called on all processes together."""
    images = run.config.evaluation.pictures
    shown = {"crops": pictures.crops(batch, images)}
    if run.method.has_panels:
        method = run.engine.gather_on_main(run.method)
        if method is not None:
            panels = method.panels(batch, images)
            shown |= {name: pictures.panels(rows, batch.preprocessing) for name, rows in panels.items()}
    return shown


def _report_skipped(run: Run, result: Step, batches: list[Batch]) -> None:
    """Name the samples of a skipped step, and stop after too many in a row."""
    step = run.position.step
    if result.overflow:
        log.info("step %d skipped: float16 overflowed, the loss scale falls", step)
        return
    reason = f"loss {result.loss}, gradient norm {result.grad_norm}"
    keys = [key for of_rank in gather_objects([key for b in batches for key in b.keys]) for key in of_rank]
    if run.recorder:
        run.recorder.skipped(step, reason, keys)
        log.warning("step %d skipped: %s; its samples are in skipped.jsonl", step, reason)
    limit = run.config.optim.nonfinite_limit
    if run.position.skipped_in_a_row >= limit:
        raise NonFiniteError(
            f"{limit} steps in a row up to step {step} gave no finite loss or gradient ({reason}). Their samples are "
            f"in {run.output / 'skipped.jsonl'}; the checkpoints from before are still there. Try a lower optim.lr, "
            "a longer optim.warmup_steps, a smaller optim.clip, or --precision fp32."
        )
