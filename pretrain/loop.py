"""The training loop."""

import gc
import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch.profiler import record_function

from tessera.data.batch import Batch
from tessera.pretrain.checkpoints.resume import CheckpointError, random_states, set_random_states
from tessera.pretrain.config import RunConfig
from tessera.pretrain.monitoring import verdict
from tessera.pretrain.monitoring.collapse import CollapseAlarm, CollapseError
from tessera.pretrain.monitoring.profile import WAIT, Profiler
from tessera.pretrain.monitoring.progress_bar import Progress
from tessera.pretrain.monitoring.slowest_rank import SlowestRank, rank_name
from tessera.pretrain.scoring import due, record_and_score, record_pictures
from tessera.pretrain.step import RunningStep, Step, finish_step, start_step, to_device
from tessera.pretrain.training_run import TrainingRun
from tessera.runtime import preemption
from tessera.runtime.collectives import (
    RankError,
    all_gather_rows,
    all_reduce_max,
    all_reduce_sum,
    first_rank,
    gather_on_main,
    local,
    sharing,
    world_size,
)
from tessera.runtime.user_error import UserError

log = logging.getLogger(__name__)


class NonFiniteError(UserError, RuntimeError):
    """Raised when the loss or the gradient was not finite in `optim.nonfinite_limit` steps in a row."""


def train(run: TrainingRun, batches: Iterator[Batch]) -> None:
    """Train from the step in `run.state` to the last step. Also record metrics, evaluate and save checkpoints.

    `batches` starts at the step in `run.state` and yields `config.accumulate` batches per step.

    Raises:
        NonFiniteError: `optim.nonfinite_limit` steps in a row were skipped.
        CollapseError: the run looks collapsed and `health.on_collapse` is `stop`.
        Preempted: a process received a stop signal. A checkpoint of the last completed step was written.
        UserError: the data cannot be read, or an evaluation fails. The last completed step is saved; see `_rescue`.
    """
    config, state = run.config, run.state
    alarm = CollapseAlarm(config.health, run.steps, run.method.rank_hint, state.alarm)
    progress = Progress(run.steps, state.step, enabled=run.accelerator.is_main_process)
    slowest = SlowestRank(gather_on_main(rank_name(run.accelerator.device)))
    save_due, micro_batches, failure = False, list[Batch](), None
    running: list[RunningStep] = []  # steps that are started but not finished: the newest, and for a moment two
    first = not state.scores and state.step < run.steps and (run.online or run.accuracy)  # of these images
    if state.step == 0 or state.unscored or first:
        record_and_score(run, state.unscored, None, alarm)
        state.unscored = {}
    progress.scored(verdict.Scores(state.scores).newest)
    waited_for = run.accelerator.num_processes > 1 or run.accelerator.device.type != "cpu"
    profiler = Profiler(config.profile, run.output, run.accelerator.device, main=run.recorder is not None)
    with progress, profiler, no_automatic_collection() if waited_for else nullcontext():
        meter = Meter()  # after the first evaluation, whose time is no training time
        while state.step < run.steps:
            step, started = state.step + len(running), time.perf_counter()
            profiler.begin(step + 1)
            if failure is None:
                with record_function(WAIT):
                    micro_batches, failure = _next_batches(run, batches, micro_batches, step)
            waited = time.perf_counter() - started
            if config.evaluation.pictures and step == 0:
                pictured = time.perf_counter()
                record_pictures(run, micro_batches[0])
                meter.leave_out(time.perf_counter() - pictured)
            previous, on_device = running[-1] if running else None, (to_device(run, batch) for batch in micro_batches)
            random, discard = random_states(), failure is not None
            running.append(start_step(run, step, on_device, discard=discard, waited=waited, previous=previous))
            # A step is finished while the device runs the next one. It is finished at once if its weights are used now.
            at_once = save_due or _uses_weights(config, step + 1) or profiler.ends(step + 1)
            result = _finish(run, running, at_once, meter, progress)
            if waited_for:
                gc.collect(1)  # the young objects: less than a millisecond, in the same step on all processes
            if result is None:
                continue
            profiler.end(state.step)
            stop = result.stop and state.step < run.steps
            evaluate = due(config.evaluate_every, state.step)
            if not result.discarded and (due(config.record_every, state.step) or evaluate or state.step == run.steps):
                record = _record(run, result, meter, slowest)
                if stop and evaluate:
                    # An evaluation would delay the stop. The resumed run evaluates this step.
                    state.unscored = record
                else:
                    with _rescuing(run, meter, record):
                        record_and_score(run, record, micro_batches[0], alarm)
                if waited_for:
                    gc.collect()
                progress.scored(record)
                progress.line(record)
                with _rescuing(run, meter):
                    rung = alarm.check(record, run.method.collapse_signs(record))
                for message in rung.values():
                    log.log(logging.WARNING if run.recorder else logging.DEBUG, message)
                meter = Meter()
            save_due = save_due or state.step % config.checkpoint_every == 0
            # After a skipped step, wait until a step updates the weights: a checkpoint now could replace the last one
            # from before the loss became non-finite.
            skipped = state.skipped_in_a_row > 0 if result.discarded else not result.updated
            if stop:
                if result.discarded:
                    set_random_states(random)  # the resumed run takes this step again
                _stop(run, meter, failure, keep_old=skipped)
            if (save_due and not skipped) or state.step == run.steps:
                save_due = False
                _save(run, meter, exiting=False, keep_old=skipped)
    run.saver.wait()


@contextmanager
def no_automatic_collection() -> Iterator[None]:
    """Turn off Python's automatic collection of reference cycles, and exclude the present objects from collections.

    A collection of all objects pauses a process for about 0.2 s. Without this context, each process collects in another
    step, and all processes wait for it at the next gradient.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def _finish(
    run: TrainingRun, running: list[RunningStep], at_once: bool, meter: "Meter", progress: Progress
) -> Step | None:
    """Finish all steps but the newest one, or all steps if `at_once` is True or a process received a stop signal.

    Return the result of the last step if no step is left, else None.
    """
    result = None
    while len(running) > (0 if at_once or (result and result.stop) else 1):
        result = finish_step(run, running.pop(0))
        if not result.discarded:
            meter.add(run.config.batch_size, result)
            progress.update(run.state.step, result.loss, meter.images_per_second, meter.data_wait)
            if not result.updated:
                _report_skipped(run, result)
    return None if running else result


def _uses_weights(config: RunConfig, step: int) -> bool:
    """Return True if metrics, an evaluation or a checkpoint are due after `step` steps."""
    every = (config.record_every, config.evaluate_every, config.checkpoint_every)
    return step == config.steps or any(due(interval, step) for interval in every)


def _next_batches(
    run: TrainingRun, batches: Iterator[Batch], previous: list[Batch], step: int
) -> tuple[list[Batch], UserError | None]:
    """Return the batches of the next step, and None or the error because of which the step is to be discarded.

    If this process cannot read its data, or was asked to stop while it waits for data, return the batches of the
    previous step, and the error. The other processes may already be in the next step and wait for this process in a
    collective. This process therefore takes part in that step, and all processes discard it.

    Raises:
        UserError: this process has no batch of a previous step.
    """
    try:
        return list(itertools.islice(batches, run.config.accumulate)), None
    except UserError as error:
        if not previous:
            raise
        if isinstance(error, preemption.WaitInterruptedError):
            log.warning("%s. Step %d is discarded. The run saves a checkpoint and ends.", error, step + 1)
        return previous, error


def _save(run: TrainingRun, meter: "Meter", *, exiting: bool, keep_old: bool) -> None:
    """Write a checkpoint. Exclude the time that this takes from the training time in `meter`."""
    started = time.perf_counter()
    _count_corrupt(run, meter)
    run.saver.save(run.state, run.method.trained_encoder(), exiting=exiting, keep_old=keep_old)
    meter.leave_out(time.perf_counter() - started)


def _stop(run: TrainingRun, meter: "Meter", failure: UserError | None, *, keep_old: bool) -> NoReturn:
    """Save the last completed step, and end a run that received a stop signal or cannot read its data. Collective.

    Args:
        failure: error of `_next_batches` on this process, or None.

    Raises:
        Preempted: a process received a stop signal.
        UserError: the failure of this process.
    """
    failed = failure is not None and not isinstance(failure, preemption.WaitInterruptedError)
    if first_rank(failed) is not None:
        _rescue(run, meter, keep_old=keep_old)
        if failed:
            raise failure
        run.accelerator.wait_for_everyone()  # fails, and the watchdog names the failed process
    else:
        _save(run, meter, exiting=True, keep_old=keep_old)
    if run.recorder:
        run.recorder.close()
    run.accelerator.wait_for_everyone()  # because the launcher kills all processes when one exits
    raise preemption.Preempted(run.state.step, run.output)


@contextmanager
def _rescuing(run: TrainingRun, meter: "Meter", unscored: dict[str, Any] | None = None) -> Iterator[None]:
    """Save the last completed step if the context ends with a `UserError`, and raise the error again.

    An error of only one process cannot be followed by a checkpoint, because the other processes wait in a collective of
    the evaluation.

    Args:
        unscored: metrics of this step, which the resumed run evaluates. None if the evaluation of this step is done.
    """
    try:
        yield
    except UserError as error:
        if world_size() == 1 or isinstance(error, CollapseError | RankError):
            run.state.unscored = unscored or {}
            _rescue(run, meter, keep_old=isinstance(error, CollapseError))
        else:
            log.warning("Step %d is not saved, because only one process has failed.", run.state.step)
        raise


def _rescue(run: TrainingRun, meter: "Meter", *, keep_old: bool) -> None:
    """Save the last completed step of a run that ends with an error, unless a weight is not finite. Collective."""
    broken = not all(local(parameter).isfinite().all() for parameter in run.method.parameters())
    tell, step = log.warning if run.recorder else log.debug, run.state.step
    if float(all_reduce_max(torch.tensor(float(broken), device=run.accelerator.device))):
        tell("Step %d is not saved, because a weight is not finite.", step)
        return
    try:
        _save(run, meter, exiting=True, keep_old=keep_old)
    except CheckpointError as error:
        tell("The run ends with an error, and step %d is not saved: %s", step, error)
    else:
        tell("The run ends with an error. Step %d is done and saved.", step)


class Meter:
    """Training time, waiting time, own work, images and corrupt images since metrics were last recorded."""

    def __init__(self) -> None:
        self.started, self.steps, self.images, self.corrupt = time.perf_counter(), 0, 0, 0
        self.waited, self.own = 0.0, 0.0

    def add(self, images: int, result: Step) -> None:
        """Add one step of `images` images over all processes."""
        self.steps += 1
        self.images += images
        self.waited += result.waited
        self.own += result.own
        self.corrupt += result.corrupt

    def leave_out(self, seconds: float) -> None:
        """Exclude the last `seconds` from the training time."""
        self.started += seconds

    @property
    def seconds(self) -> float:
        """Training time in seconds."""
        return max(time.perf_counter() - self.started, 1e-9)

    @property
    def images_per_second(self) -> float:
        """Training throughput of all processes, in images per second."""
        return self.images / self.seconds

    @property
    def data_wait(self) -> float:
        """Fraction of the training time that this process spent waiting for the loader, 0 to 1."""
        return self.waited / self.seconds


def _count_corrupt(run: TrainingRun, meter: Meter) -> None:
    """Add the corrupt images in the meters of all processes to `run.state`, and reset their count. Collective."""
    run.state.corrupt_images += int(all_reduce_sum(torch.tensor(meter.corrupt)))
    meter.corrupt = 0


def _record(run: TrainingRun, result: Step, meter: Meter, slowest: SlowestRank) -> dict[str, Any]:
    """Return the training metrics of this step, without evaluation metrics. Collective.

    Metrics of the method are averages over processes. Times and memory are those of the process with the largest value.
    """
    memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    measured = [meter.seconds, meter.waited, meter.own, memory, meter.corrupt]
    of_ranks = all_gather_rows(torch.tensor([measured], dtype=torch.float64)).T.tolist()
    seconds, waited, peak_memory = max(of_ranks[0]), max(of_ranks[1]), max(of_ranks[3])
    run.state.corrupt_images += int(sum(of_ranks[4]))
    meter.corrupt = 0
    names = sorted(result.metrics)
    means: list[float] = []
    if names:
        stacked = torch.stack([result.metrics[name].float() for name in names])
        means = (all_reduce_sum(stacked) / world_size()).tolist()
    moving = [group["lr"] for group in run.engine.optimizer.param_groups if not group["frozen_steps"]]
    decays = [group["weight_decay"] for group in run.engine.optimizer.param_groups if group["decays"]]
    record = {
        "step": run.state.step,
        "images": run.state.images,
        "epoch": run.state.images / run.images,
        "loss": result.loss,
        "lr": max(moving),
        "weight_decay": max(decays),
        "grad_norm": result.grad_norm,
        "images_per_second": meter.images / seconds,
        "data_wait": waited / seconds,
        "skipped_steps": run.state.skipped_steps,
        "corrupt_images": run.state.corrupt_images,
    }
    if torch.cuda.is_available():
        record["peak_memory_gb"] = peak_memory
    if run.work is not None:
        record |= run.work.metrics(record["images_per_second"], run.accelerator.num_processes)
    record |= slowest.judge(of_ranks[2], seconds, meter.steps)
    with sharing(result.share):  # the method remembers the features of its last forward pass
        return record | dict(zip(names, means, strict=True)) | run.method.health()


def _report_skipped(run: TrainingRun, result: Step) -> None:
    """Log that a step was skipped, and write the names of its samples to skipped.jsonl.

    If a gradient overflowed float16, the names are not written.

    Raises:
        NonFiniteError: too many steps in a row were skipped.
    """
    step = run.state.step
    if result.overflow:
        log.info("Step %d was skipped because a gradient overflowed float16. The loss scale is lowered.", step)
        return
    reason = f"loss {result.loss}, gradient norm {result.grad_norm}"
    samples = gather_on_main(result.samples)  # the names of one batch, whatever the number of processes
    if run.recorder and samples is not None:
        keys = [key for of_rank in samples for key in of_rank]
        run.recorder.skipped(step, reason, keys)
        log.warning(
            "Step %d was skipped because the loss or the gradient was not finite (%s). "
            "The samples of the step are listed in skipped.jsonl.",
            step,
            reason,
        )
    limit = run.config.optim.nonfinite_limit
    if run.state.skipped_in_a_row >= limit:
        raise NonFiniteError(
            f"The loss or the gradient was not finite in {limit} steps in a row up to step {step} ({reason}). "
            f"The samples are listed in {run.output / 'skipped.jsonl'}. Earlier checkpoints are kept. "
            "Try a lower optim.lr, a longer optim.warmup_steps, a smaller optim.clip, or --precision fp32."
        )
