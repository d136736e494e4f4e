"""A comparison as the command leaves it, without any training."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tessera.extras.compare.cells import outcome_path
from tessera.extras.compare.compute import FILE
from tessera.extras.compare.outcomes import Scored
from tessera.extras.compare.plan import BEFORE, RAW, CompareSettings, Plan, cells
from tessera.extras.compare.results import results
from tessera.pretrain.command_line import load
from tessera.runtime.settings import validate
from tests.extras.report.made import make_run

IMAGES = 400
STEPS = 40


def made(
    folder: Path,
    shares: dict[str, float],
    *,
    labels: bool = True,
    seeds: int = 3,
    slow: float = 1.0,
    earlier: tuple[str, ...] = (),
) -> Any:
    """Return the result of a comparison of methods, given the share of images that each of them gets right.

    Args:
        slow: true compute of a training, as a multiple of the planned one.
        earlier: methods that an earlier command compared.
    """
    settings = validate(CompareSettings, {"methods": list(shares), "seeds": seeds, "minutes": 1, "output": str(folder)})
    words = {method: ["--method", method, "--data", "my photos/*.tar"] for method in shares}
    if labels:
        words = {method: [*own, "--evaluation.val", "val.tar"] for method, own in words.items()}
    plan = Plan(dict.fromkeys((*shares, *earlier), STEPS), dict.fromkeys(shares, 60.0), gpu=False)
    done, metric = cells(settings, plan), "linear_top1" if labels else "view_retrieval"
    names = ("20-NN", "linear probe") if labels else ("view retrieval",)
    rng = np.random.default_rng(0)
    scored = [Scored(cell.method, cell.name, str(folder / cell.name)) for cell in done]
    scored += [Scored(BEFORE, f"before-{seed}", "x") for seed in range(seeds)]
    scored += [Scored(RAW, "pixels", "pixels", random=False)] if labels else []
    difficulty = rng.random(IMAGES)
    for one in scored:
        share = shares.get(one.arm, 0.3) + rng.normal(0, 0.01)
        right = difficulty + rng.normal(0, 0.05, IMAGES) < share
        path = outcome_path(settings.output, one.name)
        path.parent.mkdir(exist_ok=True, parents=True)
        text = "".join("1" if value else "0" for value in right)
        path.write_text(json.dumps({"outcomes": dict.fromkeys(names, text)}))
    for cell in done:
        own = [{"step": step, "images": 8 * step, metric: shares[cell.method] * step / STEPS} for step in (0, 20, 40)]
        make_run(folder / cell.name, own, method=cell.method)
        times = [(step, 5 + step * 1.5 * slow + (100 if step > 20 else 0)) for step in (5, 10, 15, 20, 25)]
        lines = [
            {"step": s, "start": 1.0, "evaluated": s == 25, "cpu": cpu, "wall": 0.0, "gpu": False} for s, cpu in times
        ]
        (folder / cell.name / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return results(settings, words, plan, done, scored, load(next(iter(words.values()))))
