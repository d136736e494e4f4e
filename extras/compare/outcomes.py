"""Outcomes of encoders: which of the scored images each of them gets right. Each encoder is scored once.

The outcomes of an encoder are stored in OUTPUT/outcomes/NAME.json, as a text of the digits 0 and 1 for each score.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from accelerate import Accelerator

from tessera.evaluation.features import PIXELS
from tessera.extras.compare.cells import CompareError, outcome_path, untrained
from tessera.extras.compare.compute import are_others
from tessera.extras.compare.correct import Outcomes, correct, views_found
from tessera.extras.compare.plan import BEFORE, RAW, Cell, CompareSettings, identity
from tessera.pretrain.command_line import load
from tessera.pretrain.config import RunConfig
from tessera.runtime.files import atomic_write


class Scored(NamedTuple):
    """An encoder to score."""

    arm: str
    """Name of the method, or of the encoder beside the methods."""
    name: str
    """Name of the file with the outcomes, unique in the comparison."""
    checkpoint: str
    random: bool = True
    """False if there is no randomness of training in it, or none that is known."""
    own_size: bool = False
    """True if images have the size that the encoder asks for, False for the size of the runs."""


def score(settings: CompareSettings, done: list[Cell], accelerator: Accelerator) -> tuple[list[Scored], RunConfig]:
    """Score all encoders that are not scored yet. Return them, and the settings of the first cell.

    Raises:
        ShardError: the shards cannot be read.
        EvaluationError: an encoder cannot be used.
        CompareError: encoders were scored on different images.
    """
    configs = {cell.name: load(["--resume", str(settings.output / cell.name)]) for cell in done}
    first = configs[done[0].name]
    found = [Scored(cell.method, cell.name, str(settings.output / cell.name)) for cell in done]
    for name in settings.others:
        found += [
            Scored(name, f"{name}-{seed}", str(settings.output / f"{name}-{seed}")) for seed in range(settings.seeds)
        ]
    starts = [cell for cell in done if cell.method == done[0].method]
    random = first.init_from is None  # otherwise, all seeds start from the same encoder
    for cell in starts if random else starts[:1]:
        path = settings.output / "before" / f"seed-{cell.seed}.safetensors"
        found.append(Scored(BEFORE, f"before-{cell.seed}", str(path), random=random))
        if not path.exists():
            untrained(configs[cell.name], path)
    if first.evaluation.val is not None:
        found.append(Scored(RAW, "pixels", PIXELS, random=False))
    for name in settings.beside:
        found.append(Scored(name, f"beside-{identity(name)}", name, random=False, own_size=True))
    for one in found:
        path = outcome_path(settings.output, one.name)
        if not path.exists():
            print(f"scoring {one.name}", flush=True)
            write_outcomes(path, one, configs.get(one.name, first), accelerator)
    check_same_images(outcome_path(settings.output, one.name) for one in found)
    return found, first


def write_outcomes(path: Path, one: Scored, config: RunConfig, accelerator: Accelerator) -> None:
    """Score an encoder, and write its outcomes."""
    own, outcomes = config.evaluation, dict[str, Outcomes]()
    if own.val is not None:
        train = own.train or (list(config.data.shards) if isinstance(config.data.shards, dict) else config.data.shards)
        names = ("--data" if own.train is None else "--evaluation.train", "--evaluation.val")
        outcomes = correct(one.checkpoint, (train, own.val, names), config, accelerator, own_size=one.own_size)
    if own.view_images and one.checkpoint != PIXELS:
        data = own.train or config.data.shards
        outcomes |= views_found(one.checkpoint, data, config, accelerator, own_size=one.own_size)
    store_outcomes(path, one.checkpoint, outcomes)


def store_outcomes(path: Path, checkpoint: str, outcomes: Mapping[str, Outcomes]) -> None:
    """Write the outcomes of an encoder, which `read_outcomes` reads."""
    texts = {name: "".join("1" if value else "0" for value in one.right.tolist()) for name, one in outcomes.items()}
    images = {name: one.images for name, one in outcomes.items()}
    entries = {"checkpoint": checkpoint, "outcomes": texts, "images": images}
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as part:
        part.write_text(json.dumps(entries, indent=1) + "\n")


def check_same_images(paths: Iterable[Path]) -> None:
    """Check that encoders were scored on the same images, of which their outcomes have a hash.

    Raises:
        CompareError: the images have changed.
    """
    counts, hashes = dict[str, tuple[Path, int]](), dict[str, tuple[Path, list[str]]]()
    for path in paths:
        stored = json.loads(path.read_text())
        for name, text in stored["outcomes"].items():
            other, count = counts.setdefault(name, (path, len(text)))
            differ, images = count != len(text), stored.get("images", {}).get(name)
            if images is not None and not differ:
                other, before = hashes.setdefault(name, (path, images))
                differ = are_others(images, before)
            if differ:
                raise CompareError(
                    f"{path} and {other} hold scores on different images, because the images have changed. Restore "
                    f"them, or delete {path.parent}: then all encoders are scored again."
                )


def read_outcomes(path: Path) -> dict[str, np.ndarray]:
    """Return the outcomes of an encoder by the name of the score: 1 for each image that it gets right, (n,) float64."""
    texts = json.loads(path.read_text())["outcomes"]
    return {name: np.array([float(letter) for letter in text]) for name, text in texts.items()}
