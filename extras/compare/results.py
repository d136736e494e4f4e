"""The result of a comparison: accuracies with errors, differences, a verdict, and the compute. It is compare.json."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata

from tessera.extras.compare.cells import other_command, outcome_path
from tessera.extras.compare.compute import spent
from tessera.extras.compare.correct import PROBE, VIEWS
from tessera.extras.compare.decision import Arm, Comparison, best, compare_arms
from tessera.extras.compare.outcomes import Scored, read_outcomes
from tessera.extras.compare.plan import BEFORE, RAW, Cell, CompareSettings, Plan, other_cells
from tessera.extras.report.run_folders import read_run
from tessera.pretrain.config import RunConfig

TOLERATED = 0.1
"""Relative difference of planned and true compute above which the result says so."""
WITHOUT_LABELS = (
    "Without labels, the score is view retrieval: how often an image is found again from another crop. It ranks the "
    "checkpoints of one method well, and different methods poorly: at equal accuracy, a method that learns to match "
    "crops, such as DINO, is ahead of one that is not, such as MAE. So no method is recommended. Label a few hundred "
    "images, and give them as --evaluation.val."
)
HALVED = (
    "{} was stopped after {:.0f} % of its steps, where it had {:.1f} % and was in the lower half (--halve). It might "
    "have caught up, so it is not called worse."
)
ONE_SEED = (
    "One seed shows nothing of the randomness of training, so no difference can be told from chance. Give --seeds 3. "
    "The trainings that are there stay."
)


class Stopped(NamedTuple):
    """A method that successive halving has stopped."""

    share: float
    """Share of its steps that it was trained."""
    score: float
    """Mean score over the seeds there (0 to 1)."""


def results(
    settings: CompareSettings,
    words: Mapping[str, Sequence[str]],
    plan: Plan,
    done: Sequence[Cell],
    scored: Sequence[Scored],
    config: RunConfig,
    stopped: Mapping[str, Stopped] = {},
    launcher: Sequence[str] = (),
) -> dict[str, Any]:
    """Return everything that compare.json holds.

    Args:
        settings: settings of the comparison.
        words: flags of the runs of each method.
        plan: steps of each method.
        done: finished cells.
        scored: encoders whose outcomes are stored.
        config: settings of the first cell.
        stopped: methods that were stopped on the way.
        launcher: flags of `accelerate launch`.
    """
    outcomes = {one.name: read_outcomes(outcome_path(settings.output, one.name)) for one in scored}
    names = list(next(iter(outcomes.values())))
    labels = config.evaluation.val is not None
    decides = PROBE if PROBE in names else names[0]
    of_arm = {one.arm: [other for other in scored if other.arm == one.arm] for one in scored}
    scores = {name: _arms(outcomes, of_arm, name) for name in names}
    arms = scores[decides]
    left_out = len(stopped) + len(plan.steps.keys() - words.keys())  # and methods of an earlier command
    comparisons = compare_arms(arms, left_out)
    top, equal = best(arms, comparisons)
    idle = not_better(comparisons, top, equal) if labels else []
    rows, trained = {}, [method for method in words if method not in stopped]
    for arm in of_arm:
        rows[arm] = _row(arms[arm]) | {"method": arm in trained, "trained": arm in trained or arm in settings.others}
        rows[arm]["scores"] = {name: _row(scores[name][arm]) for name in names if arm in scores[name]}
        cells = [cell for cell in done if cell.method == arm]
        rows[arm] |= _of_runs(settings, plan, cells, decides) if cells else {}
        rows[arm] |= _of_other(settings, arm) if arm in settings.others else {}
    halved = [HALVED.format(name, 100 * one.share, 100 * one.score) for name, one in stopped.items()]
    limits = [*halved, *([] if labels else [WITHOUT_LABELS]), *([ONE_SEED] if settings.seeds == 1 else [])]
    return {
        "score": decides,
        "data": str(config.evaluation.val or config.evaluation.train or config.data.shards),
        "scored_images": arms[top].outcomes.shape[1],
        "seeds": settings.seeds,
        "minutes": None if settings.steps else settings.minutes,
        "encoder": config.encoder.variant,
        "arms": rows,
        "corrected_for": math.comb(len(arms) + left_out, 2),
        "comparisons": [one._asdict() | {"p": _number(one.p), "different": one.different} for one in comparisons],
        "best": top,
        "not_different": equal,
        "verdict": verdict(decides, arms, comparisons, top, equal, {*words, *settings.others}, idle),
        "limits": limits,
        "stopped": {name: one._asdict() for name, one in stopped.items()},
        "without_labels": agreement(outcomes, decides) if labels else None,
        "command": command(top, words, plan, settings, launcher) if labels and not idle else None,
        "cost": _cost(settings, plan, done),
    }


def _arms(
    outcomes: Mapping[str, Mapping[str, np.ndarray]], of_arm: Mapping[str, Sequence[Scored]], score: str
) -> dict[str, Arm]:
    """Return the arms whose encoders all have a score."""
    found = dict[str, Arm]()
    for arm, encoders in of_arm.items():
        if all(score in outcomes[one.name] for one in encoders):
            rows = np.stack([outcomes[one.name][score] for one in encoders])
            found[arm] = Arm(rows, random=encoders[0].random, trained=arm != BEFORE)
    return found


def _of_runs(settings: CompareSettings, plan: Plan, cells: Sequence[Cell], decides: str) -> dict[str, Any]:
    """Return the curves of the deciding score, the steps and the images of a method."""
    metric = {PROBE: "linear_top1", VIEWS: "view_retrieval"}.get(decides, "knn_top1")
    runs = {cell.seed: read_run(settings.output / cell.name, cell.name) for cell in cells}
    curves = {seed: run.curve(metric) for seed, run in runs.items()}
    return {"curves": curves, "steps": plan.steps[cells[0].method], "images": max(map(_images, runs.values()))}


def _of_other(settings: CompareSettings, name: str) -> dict[str, Any]:
    """Return the mean steps and images of the trainings of another library."""
    found = [one for seed in range(settings.seeds) if (one := spent(settings.output / f"{name}-{seed}"))]
    return {
        key: round(float(np.mean([getattr(one, field) or 0 for one in found])))
        for key, field in (("steps", "step"), ("images", "images"))
    }


def agreement(outcomes: Mapping[str, Mapping[str, np.ndarray]], decides: str) -> dict[str, Any] | None:
    """Return the rank correlation (Spearman) of view retrieval with the deciding score over the trained encoders and
    those before training, or None if fewer than three have both scores."""
    pairs = [(own[VIEWS].mean(), own[decides].mean()) for own in outcomes.values() if VIEWS in own]
    if len(pairs) < 3:
        return None
    ranks = rankdata(np.array(pairs), axis=0)
    value = float(np.corrcoef(ranks.T)[0, 1]) if ranks.std(0).all() else math.nan
    return {"score": VIEWS, "encoders": len(pairs), "rank_correlation": _number(value)}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _row(arm: Arm) -> dict[str, Any]:
    """Return the accuracies of an arm (0 to 1), and twice their standard errors."""
    seeds, images = arm.of_seeds, arm.of_images
    return {
        "mean": arm.mean,
        "error": None if math.isnan(seeds) else 2 * math.sqrt(seeds + images),
        "error_of_seeds": None if math.isnan(seeds) else 2 * math.sqrt(seeds),
        "error_of_images": 2 * math.sqrt(images),
        "of_seeds": arm.outcomes.mean(1).tolist(),
    }


def _images(run: Any) -> int:
    return int(run.records[-1].get("images", 0)) if run.records else 0


def verdict(
    score: str,
    arms: Mapping[str, Arm],
    comparisons: Sequence[Comparison],
    top: str,
    equal: Sequence[str],
    methods: set[str],
    idle: Sequence[str],
) -> str:
    """Return one or two sentences that say which arm is best, or that there is no difference.

    `idle` is the result of `not_better`.
    """
    shown = f"{top} has the highest {score}, {100 * arms[top].mean:.1f} %"
    if any(math.isnan(one.p) for one in comparisons):
        text = f"{shown}, with one seed."
    elif equal:
        text = f"No difference: {shown}, but its lead over {_listed(equal)} can be chance."
    else:
        lead = min((one for one in comparisons if top in (one.first, one.second)), key=lambda one: abs(one.difference))
        second = lead.second if lead.first == top else lead.first
        text = f"{top} is best: its {score} is {100 * arms[top].mean:.1f} %, {100 * abs(lead.difference):.1f} ± "
        text += f"{100 * lead.error:.1f} points above {second}."
    if idle:
        text += f" No method is better than {_listed(idle)}: train longer, or on more images."
    elif top not in methods:
        text += f" No method is better than {top} as it is."
    return text


def not_better(comparisons: Sequence[Comparison], top: str, equal: Sequence[str]) -> list[str]:
    """Return the encoder before training and the raw pixels if the best arm is not better than they are. With one seed,
    return them only if they are the best arm, because no difference can be told from chance."""
    unknown = any(math.isnan(one.p) for one in comparisons)
    return [name for name in (BEFORE, RAW) if name == top or (name in equal and not unknown)]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def command(
    top: str, words: Mapping[str, Sequence[str]], plan: Plan, settings: CompareSettings, launcher: Sequence[str] = ()
) -> str | None:
    """Return the command that trains a method as the comparison did, or None if `top` is not trained.

    `launcher` holds flags of `accelerate launch`.
    """
    if top in settings.others:
        return shlex.join(other_command(top, 0, next(iter(words.values())), settings, Path("runs") / top))
    if top not in words:
        return None
    every = Cell(top, 0, plan.steps[top]).every(settings.points)
    own = ["--steps", str(plan.steps[top]), "--evaluate_every", str(every), "--output", f"runs/{top}"]
    return shlex.join(["tessera", *_of_user(launcher), "pretrain", *words[top], *own])


def _of_user(launcher: Sequence[str]) -> list[str]:
    """Return flags of `accelerate launch` without the port, which a SLURM job chooses."""
    kept, skip = list[str](), False
    for word in launcher:
        if word.partition("=")[0] != "--main_process_port" and not skip:
            kept.append(word)
        skip = word == "--main_process_port"
    return [] if kept == ["--num_processes", "1"] else kept


def _cost(settings: CompareSettings, plan: Plan, done: Sequence[Cell]) -> dict[str, Any]:
    """Return planned and true compute in seconds. All times of compare.json are here."""
    runs, arms, apart, processes, gpu = {}, dict[str, list[float]](), [], 1, plan.gpu
    planned = {cell.name: (cell.method, cell.steps, plan.planned.get(cell.method)) for cell in done}
    wanted = None if settings.steps else 60 * settings.minutes
    planned |= {f"{name}-{seed}": (name, None, wanted) for name, seed in other_cells(settings)}
    for name, (arm, steps, seconds) in planned.items():
        run = spent(settings.output / name)
        training = run.per_step * (steps or run.step) if run and run.per_step else None
        runs[name] = {"planned": seconds, "training": training, "total": run.total if run else None}
        processes, gpu = max(processes, run.processes if run else 1), gpu or bool(run and run.gpu)
        if training:
            arms.setdefault(arm, []).append(training)
        if seconds and training and abs(training / seconds - 1) > TOLERATED:
            apart.append((training / seconds - 1, name))
    problems = []
    if apart:
        (least, first), (most, last) = min(apart), max(apart)
        problems.append(
            f"The compute of {len(apart)} of {len(runs)} trainings differs from the plan by more than "
            f"{100 * TOLERATED:.0f} %: from {100 * least:+.0f} % ({first}) to {100 * most:+.0f} % ({last}). Other work "
            "on the machine changes the speed of its cores."
        )
    means = {arm: float(np.mean(seconds)) for arm, seconds in arms.items()}
    return {"unit": "GPU" if gpu else "CPU", "processes": processes, "runs": runs, "arms": means, "problems": problems}
