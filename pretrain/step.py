"""One optimizer step.

A GPU runs a step while the process already prepares and starts the next one. A step is therefore started and finished
by two functions: `start_step` queues all work of the step on the device without waiting, and `finish_step` waits for
its loss. Everything that depends on whether the loss is finite, such as the update of the weights, is decided on the
device.
"""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.data.augment import to_model_input
from tessera.data.batch import Batch
from tessera.encoders.randomness import random_keys
from tessera.pretrain.optim.adamw import apply_schedules, clip_gradients
from tessera.pretrain.optim.running_statistics import StepStatistics
from tessera.pretrain.training_run import TrainingRun
from tessera.runtime import preemption
from tessera.runtime.collectives import Share, all_reduce_sum, before_first_collective, sharing, world_size


@dataclass
class Step:
    """Result of one optimizer step."""

    loss: float
    """Loss of the step, averaged over the images of all processes."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    updated: bool
    """True if the weights and the teacher were updated; False if the loss or the gradient was not finite."""
    overflow: bool
    """True if the step was skipped because a gradient overflowed float16. The loss scale is then lowered."""
    stop: bool
    """True if any process received a stop signal."""
    discarded: bool
    """True if a process got no data before it was asked to stop. The step is then neither applied nor counted."""
    metrics: dict[str, Tensor]
    """Metrics that the method returned, averaged over the forward passes of this process in this step. Each is
    multiplied by the weight of the loss of this process, so that the mean over processes is that over images."""
    share: Share | None
    """Share of this process in the images of the last forward pass."""
    samples: list[str]
    """Names of the samples of this process."""
    corrupt: int
    """Number of corrupt images that the loader of this process replaced in this step."""
    waited: float
    """Seconds for which the device had no work because this process waited for the loader."""
    own: float
    """Seconds of own work (monitoring/slowest_rank.py); 0 with one process."""


@dataclass
class RunningStep:
    """A step whose work is queued on the device."""

    numbers: Tensor
    """Loss, gradient norm and flags of `_agree`, and the loss scale if there is one. They are in host memory when the
    step is done."""
    metrics: dict[str, Tensor]
    share: Share | None
    samples: list[str]
    corrupt: int
    waited: float
    """Seconds for which this process waited for the loader before it started the step."""
    begin: torch.cuda.Event | None
    end: torch.cuda.Event | None
    """Points in the device's queue of work at which the step begins and ends; None on a CPU."""
    first_wait: "float | torch.cuda.Event | None"
    """Point at which this process first waits for others. On a CPU, it is given in seconds since the start of the step.
    None with one process."""
    free: torch.cuda.Event | None
    """Point at which the device ends the step before, if that was still to be finished when this one was started."""


def start_step(
    run: TrainingRun,
    step: int,
    batches: Iterable[Batch],
    *,
    discard: bool = False,
    waited: float = 0.0,
    previous: RunningStep | None = None,
) -> RunningStep:
    """Queue one optimizer step on the device, without waiting for it. Collective.

    Two engines wait all the same: DeepSpeed, which looks for overflows itself, and those that keep moments on the CPU.

    Args:
        step: Number of steps before this one.
        batches: `config.accumulate` batches of this process as `to_device` returns them, one per forward pass.
        discard: If True on any process, the step is neither applied nor counted.
        waited: Seconds for which this process waited for the batches.
        previous: The step before this one, if it is still to be finished.
    """
    config, engine, method = run.config, run.engine, run.method
    started, begin = time.perf_counter(), _event(run)
    first_wait: list[float | torch.cuda.Event] = []

    def waits(*_: object) -> None:
        if not first_wait and world_size() > 1:
            first_wait.append(_event(run) or time.perf_counter() - started)

    apply_schedules(engine.optimizer, config.optim, step, run.steps, config.batch_size)
    method.before_step(step)
    statistics = StepStatistics(method)
    losses, metrics, shares, samples, corrupt = [], [], list[Share | None](), list[str](), 0
    for count, batch in enumerate(batches, start=1):
        loss, of_batch = _forward_backward(run, step, batch, waits, last=count == config.accumulate)
        losses.append(loss)
        metrics.append(of_batch)
        shares.append(batch.share)
        if batch.share is None or batch.share.images:  # the images of an empty share belong to another process
            samples += batch.keys
            corrupt += len(batch.skipped)
    gradients = engine.local_gradients(method.trained_parts())
    norm = clip_gradients(
        gradients, config.optim.clip, config.optim.clip_by, sharded=engine.sharded, copies=engine.copies
    )
    numbers = _agree(torch.stack(losses).mean(), norm.to(run.accelerator.device), discard)
    _, _, finite, _, discarded = numbers.unbind()
    scaler = run.accelerator.scaler
    if scaler is not None:
        numbers = torch.cat([numbers, scaler._scale.view(1)])  # the scale before this step changes it
    updated = ((finite == 1) & (discarded == 0)).to(numbers.dtype)
    engine.step(updated)
    statistics.settle(updated, sum(1.0 if share is None else share.weight for share in shares) / len(shares))
    method.after_step(step, updated)
    averages = {name: torch.stack([each[name] for each in metrics]).mean() for name in metrics[0]}
    # On a GPU, the copy lands in pinned memory, and `finish_step` waits for `end` before it reads it.
    copied = numbers.to("cpu", non_blocking=True)
    free = previous.end if previous else None
    met = first_wait[0] if first_wait else None
    return RunningStep(copied, averages, shares[-1], samples, corrupt, waited, begin, _event(run), met, free)


def _forward_backward(
    run: TrainingRun, step: int, batch: Batch, waits: Callable[..., None], *, last: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the forward and backward pass of a batch, and return the loss and metrics of `Engine.forward_backward`.

    `waits` is called where this process first waits for the others.
    """
    # Drop path derives its random numbers from seed, step and sample, so that the result does not depend on the number
    # of processes.
    keys = None if batch.positions is None else torch.from_numpy(batch.positions)
    if run.engine.meta_copy is not None:  # the forward pass begins by gathering weights
        waits()
    with (
        nullcontext() if keys is None else random_keys(run.config.seed, step, keys),
        sharing(batch.share),
        before_first_collective(waits),
        run.method.register_forward_hook(waits),
    ):
        return run.engine.forward_backward(batch, step, last=last)


def finish_step(run: TrainingRun, running: RunningStep) -> Step:
    """Wait for a step, and count it in `run.state`."""
    if running.end is not None:
        running.end.synchronize()
    loss, norm, finite, stop, discarded, *scale = running.numbers.tolist()
    updated, state = finite == 1 and discarded == 0, run.state
    # While the loss scale can still be lowered, float16 gradients may overflow although the loss is finite. This is
    # normal, so `skipped_in_a_row` does not count such a step.
    overflow = not updated and math.isfinite(loss) and bool(scale) and scale[0] > 1
    waited = running.waited
    if running.free is not None and running.begin is not None:
        # While this process waited, the device may still have computed the step before.
        waited = min(waited, running.free.elapsed_time(running.begin) / 1e3)
    own = running.first_wait
    if running.begin is not None and isinstance(own, torch.cuda.Event):
        own = running.begin.elapsed_time(own) / 1e3
    if not discarded:
        state.skipped_steps += not updated
        state.skipped_in_a_row = 0 if updated else state.skipped_in_a_row + (not overflow)
        state.step += 1
        state.images += run.config.batch_size
    return Step(
        loss=loss,
        grad_norm=norm,
        updated=updated,
        overflow=overflow,
        stop=stop > 0 or discarded > 0,
        discarded=discarded > 0,
        metrics=running.metrics,
        share=running.share,
        samples=running.samples,
        corrupt=running.corrupt,
        waited=waited,
        own=waited + own if isinstance(own, float) else 0.0,
    )


def _agree(loss: Tensor, norm: Tensor, discard: bool) -> Tensor:
    """Return the averages of five numbers over all processes: the loss, the gradient norm, and three flags. Collective.

    On each process, the flags are 1 or 0. The first is 1 if loss and norm are finite, the second if a stop was
    requested, and the third if `discard` is True.
    """
    finite = (loss.isfinite() & norm.isfinite()).to(loss.dtype)
    stop = torch.full_like(loss, preemption.stop_requested())
    flags = [finite, stop, torch.full_like(loss, discard)]
    return all_reduce_sum(torch.stack([loss, norm, *flags])) / world_size()


def to_device(run: TrainingRun, batch: Batch) -> Batch:
    """Move a batch of the loader to the device of this process, and normalise it as input for the method.

    On a GPU, the copy runs beside the computation of the step before, on a stream of its own.
    """
    device = run.accelerator.device
    if device.type != "cuda":
        return to_model_input(batch.to(device), compile=run.config.compile)
    computing = torch.cuda.current_stream(device)
    with torch.cuda.stream(run.copy_stream):
        moved = batch.to(device, non_blocking=True)
    computing.wait_stream(run.copy_stream)
    moved.record_stream(computing)  # else the next copy could overwrite it while it is still used
    return to_model_input(moved, compile=run.config.compile)


def _event(run: TrainingRun) -> torch.cuda.Event | None:
    """Return an event at the present end of the device's queue of work; None on a CPU, which has no queue."""
    if run.accelerator.device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
