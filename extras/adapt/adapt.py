"""Continue the pretraining of an encoder on your images, and measure whether this pays.

    tessera adapt --init_from WEIGHTS --data SHARDS --evaluation.val SHARDS --size 64 --methods lejepa,dino --minutes 30

    --init_from WEIGHTS     run folder, checkpoint, exported encoder, or `timm:NAME` for a pretrained model of timm
    --data SHARDS           images to train on; without --evaluation.train, they need labels
    --evaluation.val SHARDS labelled images that are scored

The encoder is continued by each method with several seeds, for equal compute, as `tessera compare` does. Give the size
of the crops that the encoder was trained with. The given encoder and all new ones are scored by k-NN and by a linear
probe, on images of this size. The error of a gain holds the choice of the scored images and the randomness of training,
and its p value is corrected for the number of methods and scores. The advice is "use" only if a gain is not chance.

Every training is a normal run folder in --output. If the command is stopped or killed, start it again: it goes on where
it was. At the end, it writes adapt.json, there and in each run folder; `tessera export` copies the advice to the model
card.
"""

# isort: off
from tessera.pretrain import run as _run  # noqa: F401, sets environment variables that torch reads when it is loaded
# isort: on

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from accelerate import Accelerator
from pydantic import model_validator
from rich.console import Console
from rich.table import Table

from tessera.data.shards import open_shards
from tessera.evaluation.results import data_name
from tessera.evaluation.splits import check_training_images, open_labelled_splits
from tessera.extras.adapt.verdict import GIVEN, Gain, Outcomes, Verdict, gains, verdict
from tessera.extras.compare.cells import FORGET, outcome_path
from tessera.extras.compare.compare import check_launcher, make_plan, train_all
from tessera.extras.compare.correct import Splits, correct
from tessera.extras.compare.outcomes import check_same_images, read_outcomes, store_outcomes
from tessera.extras.compare.plan import Plan, TrainingSettings, cells, check, load_settings
from tessera.extras.compare.results import Stopped
from tessera.pretrain.config import RunConfig
from tessera.pretrain.job import prepare
from tessera.runtime import stdio
from tessera.runtime.files import atomic_write
from tessera.runtime.lock import locked
from tessera.runtime.processes import exit_on_user_error, make_accelerator
from tessera.runtime.settings import SettingsError

FILE = "adapt.json"


class AdaptSettings(TrainingSettings):
    """Continue the pretraining of an encoder. All other flags are those of `tessera pretrain`; a flag of the section of
    a method, such as --dino.momentum, goes to the runs of this method."""

    fixed: ClassVar[tuple[str, ...]] = (*TrainingSettings.fixed, "forget_train", "forget_val")
    methods: tuple[str, ...] = ("lejepa",)
    """methods that continue the encoder"""
    forget_train: str | list[str] | None = None
    """other labelled SHARDS, on which to measure what the encoder forgets: k-NN bank and images of the linear probe"""
    forget_val: str | list[str] | None = None
    """labelled SHARDS of these images that are scored"""
    output: Path = Path("runs/adapt")
    """folder of the trainings and of the result; a command that is started again goes on there"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.forget_train is None) != (self.forget_val is None):
            raise ValueError("--forget_train and --forget_val belong together. Give both, or remove both.")
        return self


def adapt(argv: Sequence[str], launcher: Sequence[str] = ()) -> None:
    """Train all methods and seeds, score the encoders, and write adapt.json. `launcher` holds flags of `accelerate
    launch` for the trainings.

    Raises:
        UserError: a setting is wrong, a training failed, or the images cannot be read.
        StoppedError: a training was asked to stop, and saved a checkpoint.
    """
    if {"--help", "-h"} & {*argv}:
        print(__doc__)
    settings, words = load_settings(argv, "tessera adapt", AdaptSettings)
    given = check(words)
    check_launcher(launcher)
    if given.init_from is None or given.evaluation.val is None:
        missing = "--init_from WEIGHTS" if given.init_from is None else "--evaluation.val SHARDS"
        raise SettingsError(f"{missing} is missing. It names what is scored before and after the training.")
    settings.output.mkdir(parents=True, exist_ok=True)
    with locked(settings.output):
        accelerator = make_accelerator()
        config, sets = open_sets(settings, given, accelerator)
        plan = make_plan(settings, words, launcher)  # refuses other settings, for which stored outcomes do not hold
        before = [score(settings, GIVEN, given.init_from, name, config, sets, accelerator) for name in sets]
        stopped = train_all(settings, words, plan, launcher)
        done = [cell for cell in cells(settings, plan) if cell.method not in stopped]
        found = []
        for name, own in zip(sets, before, strict=True):
            after: dict[str, Any] = {}
            for cell in done:
                path = str(settings.output / cell.name)
                rows = score(settings, cell.name, path, name, config, sets, accelerator)
                after.setdefault(cell.method, []).append(rows)
            names = [GIVEN, *(cell.name for cell in done)]
            check_same_images(outcome_path(settings.output, f"{one}{name}") for one in names)
            methods = {
                method: {one: np.concatenate([rows[one] for rows in all_rows]) for one in own}
                for method, all_rows in after.items()
            }
            found.append(gains(own, methods, tried=len(plan.steps)))
        write_result(settings, config, plan, found, stopped)


def open_sets(
    settings: AdaptSettings, given: RunConfig, accelerator: Accelerator
) -> tuple[RunConfig, dict[str, Splits]]:
    """Return the settings of the first method with all derived values, and the sets of images to score by their name.

    Raises:
        ShardError: the shards cannot be read, or a sample has no label.
        EvaluationError: an image is in two sets that must differ.
    """
    config, shards, sources, *_ = prepare(given, accelerator)
    own = config.evaluation
    bank = own.train or (list(shards) if isinstance(shards, dict) else shards)
    names = ("--evaluation.train" if own.train else "--data", "--evaluation.val")
    sets: dict[str, Splits] = {"": (bank, own.val, names)}
    if settings.forget_val is not None:
        sets[FORGET] = (settings.forget_train, settings.forget_val, ("--forget_train", "--forget_val"))
    for train, val, flags in sets.values():
        open_labelled_splits(train, val, config.access, accelerator, flags)
        if flags[0] != "--data":  # otherwise, they were compared above
            scored = open_shards(val, source=config.labelled_access, progress=accelerator.is_main_process)
            check_training_images(sources.lists, scored, flags[1])
    return config, sets


def score(
    settings: AdaptSettings,
    encoder: str,
    checkpoint: str,
    name: str,
    config: RunConfig,
    sets: Mapping[str, Splits],
    accelerator: Accelerator,
) -> Outcomes:
    """Return the outcomes (1, n) of an encoder on a set of images. They are computed once, and stored."""
    path = outcome_path(settings.output, f"{encoder}{name}")
    if not path.exists():
        print(f"scoring {encoder}", flush=True)
        store_outcomes(path, checkpoint, correct(checkpoint, sets[name], config, accelerator))
    return {score: row[None] for score, row in read_outcomes(path).items()}


def write_result(
    settings: AdaptSettings,
    config: RunConfig,
    plan: Plan,
    found: Sequence[Sequence[Gain]],
    stopped: Mapping[str, Stopped],
) -> None:
    """Print the gains and the advice, and write adapt.json in the folder of the command and in the run folders.

    Args:
        settings: settings of the command.
        config: settings of the first method.
        plan: steps of each method.
        found: gains on the user's images, and with --forget_val those on other images.
        stopped: methods that --halve has stopped.
    """
    own, forgotten = found[0], found[1] if len(found) > 1 else ()
    other = data_name(settings.forget_val) if settings.forget_val else ""
    whole = verdict(own, forgotten, other)
    table = Table("", "score", "before", "after", "gain", "p", title="further pretraining")
    for name, rows in zip(("", other), found, strict=False):
        for one in rows:
            score, sign = f"{one.score}, {name}" if name else one.score, "+" if one.gain >= 0 else "-"
            before, after = f"{100 * one.before:.1f} %", f"{100 * (one.before + one.gain):.1f} %"
            gain = f"{sign}{100 * abs(one.gain):.1f} ± {100 * one.error:.1f}"
            table.add_row(one.method, score, before, after, gain, "–" if math.isnan(one.p) else f"{one.p:.2g}")
    Console().print(table)
    result = {
        "init_from": config.init_from,
        "data": data_name(config.evaluation.val or ""),
        "seeds": settings.seeds,
        "steps": plan.steps,
        "gains": [one.entries() for one in own],
        "forgetting": [one.entries() for one in forgotten],
        "stopped": {name: one._asdict() for name, one in stopped.items()},
    }
    for cell in cells(settings, plan):
        gained, lost = ([one for one in group if one.method == cell.method] for group in (own, forgotten))
        if cell.method not in stopped:
            own_result = result | {"method": cell.method, "step": cell.steps}
            write(settings.output / cell.name / FILE, own_result, verdict(gained, lost, other))
    write(settings.output / FILE, result, whole)
    print(whole.text)
    if whole.use:
        print(f"encoder: {settings.output / f'{whole.use}-0'}")


def write(path: Path, result: Mapping[str, Any], advice: Verdict) -> None:
    """Write adapt.json."""
    with atomic_write(path) as part:
        part.write_text(json.dumps({"use": advice.use, "advice": advice.text, **result}, indent=1) + "\n")


def main(launcher: Sequence[str] = ()) -> None:
    stdio.protect()
    with exit_on_user_error():
        adapt(sys.argv[1:], launcher)


if __name__ == "__main__":
    main()
