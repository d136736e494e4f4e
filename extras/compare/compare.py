"""Compare methods on your images at equal compute, and say which differences are not chance.

    tessera compare --data PHOTOS [--evaluation.val VAL] --methods lejepa,dino,dinov2,mae --minutes 60 --seeds 3

Each method is trained with each seed for equal compute, one training after the other, and scored beside the raw pixels,
the encoder before training, and the encoders of --beside. A few steps of each method are measured first; they decide
the number of its steps, so that its schedules end with the minutes. Every training is a normal run folder in --output.
If the command is stopped or killed, start it again: it goes on where it was. At the end, it writes compare.html,
compare.json and compare.md, a table for a document.

With --jobs, the trainings are submitted to SLURM. `tessera --num_processes 2 compare` trains on two processes.
"""

# isort: off
from tessera.pretrain import run as _run  # noqa: F401, sets environment variables that torch reads when it is loaded
# isort: on

import json
import signal
import sys
from collections.abc import Mapping, Sequence

from tessera.extras.compare.cells import (
    CompareError,
    StoppedError,
    check_data,
    check_device,
    is_done,
    measure,
    rung_score,
    train,
    train_other,
)
from tessera.extras.compare.jobs import submit
from tessera.extras.compare.outcomes import score
from tessera.extras.compare.page import render, table
from tessera.extras.compare.plan import (
    RUNGS,
    TRIALS,
    Cell,
    CompareSettings,
    Plan,
    TrainingSettings,
    cells,
    check,
    check_own,
    load_settings,
    other_cells,
    read_plan,
    write_plan,
)
from tessera.extras.compare.results import Stopped, results
from tessera.extras.report.report import write
from tessera.runtime import preemption, stdio
from tessera.runtime.lock import locked
from tessera.runtime.processes import exit_on_user_error, make_accelerator
from tessera.runtime.settings import SettingsError


def compare(argv: Sequence[str], launcher: Sequence[str] = ()) -> None:
    """Train all cells, score their encoders, and write the result. `launcher` holds flags of `accelerate launch`.

    Raises:
        UserError: a setting is wrong, a training failed, or the images cannot be read.
        StoppedError: a training was asked to stop, and saved a checkpoint.
    """
    if {"--help", "-h"} & {*argv}:
        print(__doc__)
    settings, words = load_settings(argv, "tessera compare")
    check_own(settings)
    check(words)
    check_launcher(launcher)
    settings.output.mkdir(parents=True, exist_ok=True)
    if settings.jobs is not None:
        submit(settings, words, argv, launcher)
        return
    if settings.only not in (None, TRIALS):
        train_only(settings, words, launcher)
        return
    with locked(settings.output):
        plan = make_plan(settings, words, launcher)
        if settings.only is None:
            stopped = train_all(settings, words, plan, launcher)
            train_others(settings, words, plan)
            write_result(settings, words, plan, stopped, launcher)


def check_launcher(launcher: Sequence[str]) -> None:
    """Check the flags of `accelerate launch`.

    Raises:
        SettingsError: a flag needs several machines.
    """
    if any(word.replace("-", "_").startswith("__num_machines") for word in launcher):
        raise SettingsError("--num_machines: each training runs on one machine here. Remove it.")


def make_plan(settings: TrainingSettings, words: Mapping[str, Sequence[str]], launcher: Sequence[str] = ()) -> Plan:
    """Return the plan in the output folder. Measure the methods that it lacks, and write it.

    Raises:
        UserError: the folder holds a comparison with other settings, or a trial failed.
    """
    plan = read_plan(settings, words) or Plan({}, {}, gpu=False)
    if new := {method: own for method, own in words.items() if method not in plan.steps}:
        check_device(plan, settings.output)
        measured = measure(settings, new, launcher)
        write_plan(settings, words, measured)
        gpu = plan.gpu if plan.steps else measured.gpu
        plan = Plan(plan.steps | measured.steps, plan.planned | measured.planned, gpu)
    return plan


def train_only(settings: CompareSettings, words: Mapping[str, Sequence[str]], launcher: Sequence[str]) -> None:
    """Train the cell that `only` names.

    Raises:
        SettingsError: there is no plan yet.
    """
    plan = read_plan(settings, words)
    if plan is None or not {*words} <= plan.steps.keys():
        raise SettingsError(f"--only: {settings.output} has no plan of all methods yet. Start with --only {TRIALS}.")
    for cell in cells(settings, plan):
        if cell.name == settings.only and not is_done(settings.output / cell.name):
            check_device(plan, settings.output)
            train(cell, words[cell.method], settings, launcher=launcher)
    for name, seed in other_cells(settings):
        if f"{name}-{seed}" == settings.only and not is_done(settings.output / settings.only):
            check_device(plan, settings.output)
            train_other(name, seed, next(iter(words.values())), settings)


def train_all(
    settings: TrainingSettings, words: Mapping[str, Sequence[str]], plan: Plan, launcher: Sequence[str] = ()
) -> dict[str, Stopped]:
    """Train all cells that are not done. Return the methods that were stopped on the way.

    Raises:
        CompareError: trainings failed. Before, the other methods are trained, with --halve to the next stop.
    """
    stopped, failed = dict[str, Stopped](), list[str]()
    for share in (*(RUNGS if settings.halve else ()), 1.0):
        alive = [cell for cell in cells(settings, plan) if cell.method not in stopped]
        for number, cell in enumerate(alive, 1):
            rung = rung_step(cell, settings, share) if share < 1 else None
            output = settings.output / cell.name
            if is_done(output) or (rung is not None and rung_score(output, rung) is not None):
                continue
            if cell.method in failed:
                continue
            planned = plan.planned.get(cell.method)
            length = f", about {planned * share / 60:.1f} minutes of compute" if planned else ""
            head = f"{number} of {len(alive)}: {cell.method}, seed {cell.seed}"
            check_device(plan, settings.output)
            print(f"\n{head}, {rung or cell.steps} steps{length}", flush=True)
            try:
                train(cell, words[cell.method], settings, rung, launcher)
            except CompareError as error:  # hours of the other methods need not wait for this one
                print(error, file=sys.stderr, flush=True)
                failed.append(cell.method)
                continue
            check_data(settings.output, [one.name for one in cells(settings, plan)])
        if failed:
            raise CompareError(
                f"A training of {', '.join(failed)} failed; its message is above. The other methods went on. To "
                f"try again, start the same command. To compare the others, start it without {', '.join(failed)}."
            )
        if share < 1:
            scores = dict[str, list[float]]()
            for cell in alive:
                found = rung_score(settings.output / cell.name, rung_step(cell, settings, share))
                scores.setdefault(cell.method, []).append(found or 0.0)
            for name, score in worse_half({name: sum(own) / len(own) for name, own in scores.items()}).items():
                print(f"{name} is stopped after {100 * share:.0f} % of its steps, with {100 * score:.1f} %", flush=True)
                stopped[name] = Stopped(share, score)
    return stopped


def train_others(settings: CompareSettings, words: Mapping[str, Sequence[str]], plan: Plan) -> None:
    """Train with all other libraries whose trainings are not done."""
    for name, seed in other_cells(settings):
        if not is_done(settings.output / f"{name}-{seed}"):
            check_device(plan, settings.output)
            print(f"\n{name}, seed {seed}", flush=True)
            train_other(name, seed, next(iter(words.values())), settings)


def rung_step(cell: Cell, settings: TrainingSettings, share: float) -> int:
    """Return the evaluated step of a cell that is nearest to a share of its steps."""
    return cell.every(settings.points) * max(round(settings.points * share), 1)


def worse_half(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the half of the methods with the lower scores, rounded down."""
    return dict(sorted(scores.items(), key=lambda item: item[1])[: len(scores) // 2])


def write_result(
    settings: CompareSettings,
    words: Mapping[str, Sequence[str]],
    plan: Plan,
    stopped: Mapping[str, Stopped],
    launcher: Sequence[str],
) -> None:
    """Score the encoders, and write compare.json, compare.md and compare.html."""
    done = [cell for cell in cells(settings, plan) if cell.method not in stopped]
    check_data(settings.output, [cell.name for cell in done])
    scored, config = score(settings, done, make_accelerator())
    found = results(settings, words, plan, done, scored, config, stopped, launcher)
    write(settings.output / "compare.json", json.dumps(found, indent=1) + "\n")
    write(settings.output / "compare.md", table(found))
    page = settings.output / "compare.html"
    write(page, render(found))
    print(f"\n{found['verdict']}")
    for line in [*found["limits"], *found["cost"]["problems"]]:
        print(line)
    if found["command"]:
        print(f"next:    {found['command']}")
    print(f"Page written to {page}")


def stop(number: int, frame: object) -> None:
    """End with the exit code of a stopped training. Nothing is lost, because all files are replaced as a whole."""
    raise StoppedError


def main(launcher: Sequence[str] = ()) -> None:
    stdio.protect()
    for number in preemption.SIGNALS:  # between trainings, too, so that a SLURM job is requeued
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    with exit_on_user_error():
        compare(sys.argv[1:], launcher)


if __name__ == "__main__":
    main()
