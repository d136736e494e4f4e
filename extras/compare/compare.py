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

from tessera.extras.compare.cells import is_done, measure, train
from tessera.extras.compare.outcomes import score
from tessera.extras.compare.page import render
from tessera.extras.compare.plan import (
    Cell,
    CompareSettings,
    Plan,
    cells,
    check,
    load_settings,
    read_plan,
    write_plan,
)
from tessera.extras.compare.results import results
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
    check(words)
    settings.output.mkdir(parents=True, exist_ok=True)
    with locked(settings.output):
        plan = read_plan(settings, words)
        if plan is None:
            plan = measure(settings, words)
            write_plan(settings, words, plan)
        train_all(settings, words, plan)
        write_result(settings, words, plan)


def train_all(settings: CompareSettings, words: Mapping[str, Sequence[str]], plan: Plan) -> None:
    """Train all cells that are not done."""
    every = cells(settings, plan)
    for number, cell in enumerate(every, 1):
        if is_done(settings.output / cell.name):
            continue
        planned = plan.planned.get(cell.method)
        length = f", about {planned / 60:.1f} minutes of compute" if planned else ""
        print(f"\n{number} of {len(every)}: {cell.method}, seed {cell.seed}, {cell.steps} steps{length}", flush=True)
        train(cell, words[cell.method], settings)


def write_result(settings: CompareSettings, words: Mapping[str, Sequence[str]], plan: Plan) -> None:
    """Score the encoders, and write compare.json and compare.html."""
    done: list[Cell] = cells(settings, plan)
    scored, config = score(settings, done, make_accelerator())
    found = results(settings, words, plan, done, scored, config)
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
