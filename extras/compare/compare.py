"""Compare methods on your images at equal compute, and say which differences are not chance.

    tessera compare --data PHOTOS [--evaluation.val VAL] --methods lejepa,dino,dinov2,mae --minutes 60 --seeds 3

Each method is trained with each seed for equal compute, one training after the other, and scored beside the raw pixels,
the encoder before training, and the encoders of --beside. A few steps of each method are measured first; they decide
the number of its steps, so that its schedules end with the minutes. Every training is a normal run folder in --output.
If the command is stopped or killed, start it again: it goes on where it was. At the end, it writes compare.html and
compare.json.
"""

# isort: off
from tessera.pretrain import run as _run  # noqa: F401, sets environment variables that torch reads when it is loaded
# isort: on

import json
import sys
from collections.abc import Mapping, Sequence

from tessera.extras.compare.cells import is_done, measure, rung_score, train, train_other
from tessera.extras.compare.outcomes import score
from tessera.extras.compare.page import render
from tessera.extras.compare.plan import (
    RUNGS,
    Cell,
    CompareSettings,
    Plan,
    TrainingSettings,
    cells,
    check,
    check_others,
    load_settings,
    read_plan,
    write_plan,
)
from tessera.extras.compare.results import Stopped, results
from tessera.extras.report.report import write
from tessera.runtime import stdio
from tessera.runtime.lock import locked
from tessera.runtime.processes import exit_on_user_error, make_accelerator


def compare(argv: Sequence[str]) -> None:
    """Train all cells, score their encoders, and write compare.json and compare.html.

    Raises:
        UserError: a setting is wrong, a training failed, or the images cannot be read.
        StoppedError: a training was asked to stop, and saved a checkpoint.
    """
    if {"--help", "-h"} & {*argv}:
        print(__doc__)
    settings, words = load_settings(argv, "tessera compare")
    check_others(settings)
    check(words)
    settings.output.mkdir(parents=True, exist_ok=True)
    with locked(settings.output):
        plan = make_plan(settings, words)
        stopped = train_all(settings, words, plan)
        train_others(settings)
        write_result(settings, words, plan, stopped)


def make_plan(settings: TrainingSettings, words: dict[str, list[str]]) -> Plan:
    """Return the plan in the output folder. If there is none, measure the methods, and write it.

    Raises:
        UserError: the folder holds a comparison with other settings, or a trial failed.
    """
    plan = read_plan(settings, words)
    if plan is None:
        plan = measure(settings, words)
        write_plan(settings, words, plan)
    return plan


def train_all(settings: TrainingSettings, words: Mapping[str, Sequence[str]], plan: Plan) -> dict[str, Stopped]:
    """Train all cells that are not done. Return the methods that were stopped on the way."""
    stopped = dict[str, Stopped]()
    for share in (*(RUNGS if settings.halve else ()), 1.0):
        alive = [cell for cell in cells(settings, plan) if cell.method not in stopped]
        for number, cell in enumerate(alive, 1):
            rung = rung_step(cell, settings, share) if share < 1 else None
            output = settings.output / cell.name
            if is_done(output) or (rung is not None and rung_score(output, rung) is not None):
                continue
            planned = plan.planned.get(cell.method)
            length = f", about {planned * share / 60:.1f} minutes of compute" if planned else ""
            head = f"{number} of {len(alive)}: {cell.method}, seed {cell.seed}"
            print(f"\n{head}, {rung or cell.steps} steps{length}", flush=True)
            train(cell, words[cell.method], settings, rung)
        if share < 1:
            scores = dict[str, list[float]]()
            for cell in alive:
                found = rung_score(settings.output / cell.name, rung_step(cell, settings, share))
                scores.setdefault(cell.method, []).append(found or 0.0)
            for name, score in worse_half({name: sum(own) / len(own) for name, own in scores.items()}).items():
                print(f"{name} is stopped after {100 * share:.0f} % of its steps, with {100 * score:.1f} %", flush=True)
                stopped[name] = Stopped(share, score)
    return stopped


def train_others(settings: CompareSettings) -> None:
    """Train with all programs of other libraries that are not done."""
    for seed in range(settings.seeds):
        for name in settings.others:
            if not is_done(settings.output / f"{name}-{seed}"):
                print(f"\n{name}, seed {seed}", flush=True)
                train_other(name, seed, settings)


def rung_step(cell: Cell, settings: TrainingSettings, share: float) -> int:
    """Return the evaluated step of a cell that is nearest to a share of its steps."""
    return cell.every(settings.points) * max(round(settings.points * share), 1)


def worse_half(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the half of the methods with the lower scores, rounded down."""
    return dict(sorted(scores.items(), key=lambda item: item[1])[: len(scores) // 2])


def write_result(
    settings: CompareSettings, words: Mapping[str, Sequence[str]], plan: Plan, stopped: Mapping[str, Stopped]
) -> None:
    """Score the encoders, and write compare.json and compare.html."""
    done = [cell for cell in cells(settings, plan) if cell.method not in stopped]
    scored, config = score(settings, done, make_accelerator())
    found = results(settings, words, plan, done, scored, config, stopped)
    write(settings.output / "compare.json", json.dumps(found, indent=1) + "\n")
    page = settings.output / "compare.html"
    write(page, render(found))
    print(f"\n{found['verdict']}")
    for line in [*found["limits"], *found["cost"]["problems"]]:
        print(line)
    if found["command"]:
        print(f"next:    {found['command']}")
    print(f"Page written to {page}")


def main() -> None:
    stdio.protect()
    with exit_on_user_error():
        compare(sys.argv[1:])


if __name__ == "__main__":
    main()
