"""Train one method with one seed, in a process of its own: `tessera pretrain` with the sink `compute`."""

import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from tessera import encoders
from tessera.encoders import WEIGHTS
from tessera.extras.compare.compute import are_others, spent
from tessera.extras.compare.plan import TRIALS, Cell, CompareSettings, Plan, TrainingSettings
from tessera.extras.report.run_folders import read_lines
from tessera.pretrain.build import build_method
from tessera.pretrain.command_line import load
from tessera.pretrain.config import RunConfig
from tessera.pretrain.job import prepare
from tessera.pretrain.resolve import with_precision
from tessera.runtime import preemption
from tessera.runtime.lock import check_free, holder
from tessera.runtime.machine import signal_at_end_of_parent
from tessera.runtime.processes import make_accelerator
from tessera.runtime.user_error import UserError

TRIAL = 16
"""Steps of the trial that measures the compute of a step."""
FORGET = "-forget"
"""End of the name of outcomes on other images, which `adapt --forget_val` scores."""
DECIDING = ("linear_top1", "knn_top1", "view_retrieval")
"""Metrics of a run, of which the first one that it has decides."""
PATIENCE = 120.0
"""Longest wait in seconds for a training of a killed comparison, which still saves its checkpoint."""


class CompareError(UserError):
    """A comparison cannot go on."""


class StoppedError(SystemExit):
    """The comparison was asked to stop. A training that ran has saved a checkpoint."""

    def __init__(self) -> None:
        super().__init__(preemption.EXIT_CODE)
        print("The comparison was stopped. To go on, start the same command again.", file=sys.stderr, flush=True)


def command(cell: Cell, words: Sequence[str], points: int, output: Path, launcher: Sequence[str]) -> list[str]:
    """Return the command line of a cell. It continues the run that is in the folder, or starts it.

    `launcher` holds flags of `accelerate launch`.
    """
    every = cell.every(points)
    own = {"seed": cell.seed, "steps": cell.steps, "evaluate_every": every, "checkpoint_every": every}
    own |= {"record_every": max(every // 5, 1), "metrics.sinks": "jsonl,compute", "output": output}
    flags = [word for name, value in own.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "tessera", *launcher, "pretrain", *words, "--resume", *flags]


def is_done(run: Path) -> bool:
    """Return True if a cell is trained: its run has exported its encoder, or has a folder and stored outcomes."""
    return (run / WEIGHTS).exists() or (run.is_dir() and outcome_path(run.parent, run.name).exists())


def outcome_path(output: Path, name: str) -> Path:
    """Return the path of the outcomes of an encoder, which is a cell or stands beside the cells."""
    return output / "outcomes" / f"{name}.json"


def train(
    cell: Cell,
    words: Sequence[str],
    settings: TrainingSettings,
    until: int | None = None,
    launcher: Sequence[str] = (),
) -> None:
    """Train a cell, or continue it. With `until`, stop it as soon as this step is scored, or later.

    Raises:
        CompareError: the training failed. Its message was printed.
        StoppedError: the training was stopped.
    """
    output = settings.output / cell.name
    _forget_outcomes(output)
    _wait_until_free(output)
    _call(command(cell, words, settings.points, output, launcher), output, until)


def _forget_outcomes(run: Path) -> None:
    """Remove the stored outcomes of an earlier run, whose folder was deleted."""
    for name in (run.name, f"{run.name}{FORGET}"):
        outcome_path(run.parent, name).unlink(missing_ok=True)


def _wait_until_free(run: Path) -> None:
    """Wait until no process writes to a run folder, at most `PATIENCE` seconds."""
    since = time.monotonic()
    while run.is_dir() and holder(run) and time.monotonic() - since < PATIENCE:
        time.sleep(0.2)


def train_other(name: str, seed: int, words: Sequence[str], settings: CompareSettings) -> None:
    """Train with the adapter of another library, from the beginning.

    Args:
        words: flags of the runs of a method, from which the data, the encoder and the precision are taken.

    Raises:
        CompareError: the adapter failed.
        LockedError: another command trains there.
        StoppedError: the training was stopped.
    """
    output = settings.output / f"{name}-{seed}"
    _wait_until_free(output)
    if output.is_dir():
        check_free(output)
    _forget_outcomes(output)
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    before = settings.output / "before" / f"seed-{seed}.safetensors"
    if not before.exists():
        given = with_precision(load([*words, "--seed", str(seed)]))
        untrained(prepare(given, make_accelerator()).config, before)
    _call(other_command(name, seed, words, settings, output), output)


def other_command(name: str, seed: int, words: Sequence[str], settings: CompareSettings, output: Path) -> list[str]:
    """Return the command line that trains with the adapter of another library."""
    *python, adapter = shlex.split(settings.others[name])
    length = ["--steps", str(settings.steps)] if settings.steps else ["--minutes", f"{settings.minutes:g}"]
    own = ["--adapter", adapter, "--encoder", str(settings.output / "before" / f"seed-{seed}.safetensors"), *length]
    run = [*words, "--seed", str(seed), "--output", str(output)]
    return [*python, "-m", "tessera.extras.compare.other", *own, "--", *run]


def untrained(config: RunConfig, path: Path) -> None:
    """Write the encoder with which a run begins."""
    torch.manual_seed(config.seed)  # as in `pretrain.job.run_job`
    method = build_method(config, fresh=True)
    path.parent.mkdir(exist_ok=True)
    encoders.save(method.trained_encoder(), path)


def rung_score(run: Path, step: int) -> float | None:
    """Return the score of a run after a step: of the linear probe, of k-NN, or without labels. None if there is none
    yet."""
    lines = (line for line in read_lines(run / "metrics.jsonl", []) if line.get("step") == step)
    found = next(lines, {})
    return next((found[name] for name in DECIDING if name in found), None)


def _call(words: Sequence[str], output: Path, until: int | None = None) -> None:
    """Run a training, and pass signals on to it."""
    ended = partial(signal_at_end_of_parent, signal.SIGTERM)  # if this process is killed, the training saves and ends
    process = subprocess.Popen(words, preexec_fn=ended)
    asked = list[int]()

    def pass_on(number: int, frame: object) -> None:
        asked.append(number)
        if number != signal.SIGINT:  # Ctrl-C reaches both processes; the training saves and ends
            process.send_signal(number)

    heard = [one for one in (*preemption.SIGNALS, signal.SIGINT) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in heard}
    stopped = False
    try:
        while (code := process.poll()) is None:
            if until is not None and not stopped and rung_score(output, until) is not None:
                process.send_signal(signal.SIGTERM)
                stopped = True
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1 if until is not None else 1.0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped and code == preemption.EXIT_CODE:
        return
    if asked or code in (preemption.EXIT_CODE, 130) or -code in (*preemption.SIGNALS, signal.SIGINT):
        raise StoppedError
    if code:
        raise CompareError(
            f"The training in {output} ended with exit code {code}; its message is above. To go on, start the same "
            "command again, or start it without this method."
        )


def check_device(plan: Plan, output: Path) -> None:
    """Check that trainings here have the kind of compute that was planned.

    Raises:
        CompareError: the minutes are those of processors, and there is a GPU, or the reverse.
    """
    if plan.planned and plan.gpu != torch.cuda.is_available():
        there, here = ("GPU", "no GPU") if plan.gpu else ("processor", "a GPU")
        raise CompareError(
            f"{output} was planned in minutes of {there} time, and this machine has {here}. Go on with a machine of "
            "the first kind, or choose another --output."
        )


def check_data(output: Path, names: Iterable[str]) -> None:
    """Check that cells were trained on the same images.

    Raises:
        CompareError: a cell saw other images, because the data have changed.
    """
    found = {name: run.samples for name in names if (run := spent(output / name)) and run.samples}
    for name, samples in found.items():
        first = next(iter(found))
        if are_others(samples, found[first]):
            raise CompareError(
                f"{output / name} was trained on other images than {output / first}, because --data has changed. "
                f"Restore the images and delete {output / name}, or choose another --output."
            )


def measure(settings: TrainingSettings, words: Mapping[str, Sequence[str]], launcher: Sequence[str] = ()) -> Plan:
    """Measure the compute of a step of each method, and return the steps that fit into the minutes.

    Raises:
        CompareError: a trial failed.
        StoppedError: a trial was stopped.
    """
    steps, planned, gpu = dict[str, int](), dict[str, float](), False
    for method, own in words.items():
        if settings.steps is not None:
            steps[method] = settings.steps
            continue
        output = settings.output / TRIALS / method
        print(f"{method}: {TRIAL} steps on trial, to measure the compute of a step", flush=True)
        no_scores = ["--evaluation.view_images", "0", "--evaluation.pictures", "0"]
        start = [sys.executable, "-m", "tessera", *launcher, "pretrain"]
        call = [*start, *_without_evaluation(own), *no_scores, "--overwrite"]
        call += ["--seed", "0", "--steps", str(TRIAL), "--record_every", "1", "--metrics.sinks", "jsonl,compute"]
        _call([*call, "--output", str(output)], output)
        found = spent(output)
        if found is None or not found.per_step:
            raise CompareError(f"The trial in {output} recorded no compute. Give --steps in place of --minutes.")
        steps[method] = fitting(60 * settings.minutes / found.per_step, settings.points)
        planned[method], gpu = steps[method] * found.per_step, found.gpu
    return Plan(steps, planned, gpu)


def fitting(steps: float, points: int) -> int:
    """Return the largest whole number of steps that is a multiple of the number of evaluations, if it is above it."""
    whole = max(int(steps), 1)
    return whole - whole % points if whole > points else whole


def _without_evaluation(words: Sequence[str]) -> list[str]:
    """Return the flags of a run without the scored images."""
    kept, found = True, list[str]()
    for word in words:
        if word.startswith("--"):
            kept = not word.startswith(("--evaluation.val", "--evaluation.train"))
        if kept:
            found.append(word)
    return found
