"""Continue the pretraining of an encoder on your images, and measure whether this pays.

    tessera adapt --init_from WEIGHTS --data SHARDS --evaluation.val SHARDS [--forget_train SHARDS --forget_val SHARDS]

    --init_from WEIGHTS     run folder, checkpoint, exported encoder, or `timm:NAME` for a pretrained model of timm
    --data SHARDS           images to train on; without --evaluation.train, they need labels
    --evaluation.val SHARDS labelled images that are scored
    --forget_train SHARDS, --forget_val SHARDS
                            other labelled images, on which to measure what the encoder forgets

All other flags are those of `tessera pretrain`; here, --method is lejepa by default. Set the size of the crops, such as
--lejepa.global_size 64, to that of the encoder. The given encoder and the new one are scored by k-NN and by a linear
probe, as during a run, on images of this size. Both classify the same images, so the error of a gain is that of paired
differences: twice the standard error of the mean over images of (correct after) - (correct before). It does not include
the randomness of training.
"""

# isort: off
from tessera.pretrain import run  # sets environment variables that torch reads when it is loaded
# isort: on

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import model_validator
from torch import Tensor

from tessera.data.shards import open_shards
from tessera.evaluation.features import resolve_checkpoint
from tessera.evaluation.results import Evaluation, data_name, write_result
from tessera.evaluation.splits import check_training_images, open_labelled_splits
from tessera.extras.compare.correct import Splits, correct
from tessera.pretrain.command_line import load
from tessera.pretrain.config import RunConfig
from tessera.pretrain.job import prepare, pretrain
from tessera.pretrain.resolve import make_accelerator
from tessera.runtime.processes import AGAIN
from tessera.runtime.settings import Settings, SettingsError, flags, peek, validate
from tessera.runtime.watchdog import watched

METHOD = "lejepa"
"""Default of `--method`. In short runs, k-NN gained more with it than with DINO (benchmarks/results/small_data.md)."""


class Forgetting(Settings):
    """Images on which to measure what the encoder forgets."""

    forget_train: str | list[str] | None = None
    """labelled SHARDS of the k-NN bank, on which the linear probe is fitted too"""
    forget_val: str | list[str] | None = None
    """labelled SHARDS that are scored"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.forget_train is None) != (self.forget_val is None):
            raise ValueError("--forget_train and --forget_val belong together. Give both, or remove both.")
        return self


class Change(NamedTuple):
    """Accuracy (0 to 1) of the given encoder and of the new one on the same images."""

    before: float
    after: float
    error: float
    """Twice the standard error of `gain`."""

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def text(self) -> str:
        """Size of the change in percentage points, with its error."""
        return f"{100 * abs(self.gain):.1f} ± {100 * self.error:.1f} points"


def adapt(argv: list[str]) -> None:
    """Score an encoder, continue its pretraining, score the result, write the scores and print advice.

    Raises:
        UserError: a setting is missing or wrong, the encoder cannot be used, or the shards cannot be read.
    """
    if {"--help", "-h"} & {*argv}:
        print(__doc__)
    given, other = load_settings(argv)
    accelerator, _ = make_accelerator(given)
    with watched(AGAIN):
        config, shards, sources, *_ = prepare(given, accelerator)
        if config.init_from is None or config.evaluation.val is None:
            missing = "--init_from WEIGHTS" if config.init_from is None else "--evaluation.val SHARDS"
            raise SettingsError(f"{missing} is missing. It names what is scored before and after the training.")
        bank = config.evaluation.train or (list(shards) if isinstance(shards, dict) else shards)
        flag = "--data" if config.evaluation.train is None else "--evaluation.train"
        sets: list[Splits] = [(bank, config.evaluation.val, (flag, "--evaluation.val"))]
        if other.forget_val is not None:
            sets.append((other.forget_train, other.forget_val, ("--forget_train", "--forget_val")))
            open_labelled_splits(*sets[-1][:2], config.access, accelerator, sets[-1][2])
        if given.dry_run:
            pretrain(given)
            return
        for _, val, (own, scored) in sets:
            if own != "--data":  # otherwise, `correct` compares --data
                opened = open_shards(val, source=config.labelled_access, progress=accelerator.is_main_process)
                check_training_images(sources.lists, opened, scored)
        before = [correct(config.init_from, one, config, accelerator) for one in sets]
    output = pretrain(given)
    with watched(AGAIN):
        after = [correct(output, one, config, accelerator) for one in sets]
    if accelerator.is_main_process:
        changes = [{name: change(old[name], new[name]) for name in old} for old, new in zip(before, after, strict=True)]
        report(config, output, changes, other)


def load_settings(argv: Sequence[str]) -> tuple[RunConfig, Forgetting]:
    """Return the settings of the run and those of this command.

    Raises:
        SettingsError: a setting is unknown or invalid.
    """
    own, rest = list[str](), list[str]()
    words = rest
    for word in argv:
        if word.startswith("--"):
            words = own if word.startswith("--forget") else rest
        words.append(word)
    other = validate(Forgetting, flags(Forgetting, own, Path(sys.argv[0]).name))
    if all(peek(rest, name) is None for name in ("method", "config")) and "--resume" not in rest:
        rest = ["--method", METHOD, *rest]
    return load(rest), other


def change(before: Tensor, after: Tensor) -> Change:
    """Compare which images (M,) are classified correctly before and after the training."""
    error = 2 * float((after - before).std()) / math.sqrt(len(before))
    return Change(float(before.mean()), float(after.mean()), error)


def advice(own: Mapping[str, Change], other: Mapping[str, Change], other_name: str = "") -> tuple[bool, str]:
    """Return True if the new encoder is to be used, and a sentence that says why or why not.

    It is to be used if each score of the user's images gains more than its error, and loses less on other images.
    """
    for name, one in own.items():
        if one.gain < -one.error:
            return False, f"Keep the given encoder: the new one loses {one.text} of {name}."
        if not one.gain > one.error:
            sign = "gain" if one.gain >= 0 else "loss"
            return False, f"Keep the given encoder: a {sign} of {one.text} of {name} can be chance."
        if name in other and -other[name].gain > one.gain:
            lost = f"loses {other[name].text} on {other_name}"
            return False, f"Keep the given encoder: the new one gains {one.text} of {name}, but {lost}."
    return True, f"Use the new encoder: it gains {' and '.join(f'{one.text} of {name}' for name, one in own.items())}."


def report(config: RunConfig, output: Path, changes: Sequence[Mapping[str, Change]], other: Forgetting) -> None:
    """Write the result, and print a table and the advice. `changes` are those on the user's and on other images."""
    assert config.evaluation.val is not None
    own, forgotten = changes[0], changes[1] if len(changes) > 1 else {}
    name = data_name(other.forget_val) if other.forget_val else ""
    use, sentence = advice(own, forgotten, name)
    scored = open_shards(config.evaluation.val, source=config.labelled_access)
    result = {
        "protocol": "further pretraining",
        "top1": own[f"{config.evaluation.k}-NN"].after,
        "use": use,
        "advice": sentence,
        "scores": {score: one._asdict() | {"gain": one.gain} for score, one in own.items()},
        "forgetting": {score: one._asdict() | {"gain": one.gain} for score, one in forgotten.items()},
        "val_images": scored.images,
        "checkpoint": str(output),
        "settings": config.model_dump(mode="json") | other.model_dump(mode="json"),
    }
    rows = [
        [score, one.before, one.after, f"{'+' if one.gain >= 0 else '-'}{one.text}"]
        for score, one in (*own.items(), *((f"{score}, {name}", one) for score, one in forgotten.items()))
    ]
    evaluation = Evaluation("adapt", resolve_checkpoint(output), config.evaluation.val, None, scored.content())
    write_result(evaluation, result, ["", "before", "after", "gain"], rows)
    print(sentence)


def main() -> None:
    run.main(command=adapt)


if __name__ == "__main__":
    main()
