"""Fine-tuning of an encoder with labels, with the recipe of MAE (2111.06377).

    accelerate launch evaluation/finetune.py --checkpoint RUN --train SHARDS --val SHARDS [settings of pretrain/run.py]

    --checkpoint PATH   run folder, checkpoint in a run folder, exported encoder, `timm:NAME` for a pretrained model of
                        timm, or published weight file; a published weight file also needs --encoder VARIANT
    --train SHARDS      labelled SHARDS to train on
    --val SHARDS        labelled SHARDS that are scored after each epoch
    --output FOLDER     folder of this run; default: RUN/finetune, or RUN/finetune-step-00001000 for a checkpoint

This command starts pretrain/run.py with `--method finetune`, and passes on all other flags. Fine-tuning therefore uses
the engines, sample order, checkpoints and resume of pretraining. `--finetune.NAME VALUE` sets a setting of the method,
such as `--finetune.mixup 0`. `--help finetune` lists these settings, and `--help all` lists all settings.
"""

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

RUN = Path(__file__).resolve().parent.parent / "pretrain" / "run.py"
FLAGS = {"--checkpoint": "--init_from", "--train": "--data", "--val": "--evaluation.val"}
"""Flags of this command, and the flags of pretrain/run.py with the same meaning."""


def command(argv: Sequence[str]) -> list[str]:
    """Translate the flags of this command into flags of pretrain/run.py.

    Raises:
        ValueError: a flag is missing.
    """
    given = [word.partition("=")[0] for word in argv]
    flags = ["--method", "finetune"]
    for word in argv:
        name, equals, value = word.partition("=")
        flags.append(f"{FLAGS.get(name, name)}{equals}{value}")
    if {"--help", "-h"} & {*given}:
        return flags
    for name in FLAGS:
        if name not in given and not {"--resume", "--config"} & {*given}:
            raise ValueError(f"{name} is missing. Give --checkpoint PATH, --train SHARDS and --val SHARDS.")
    if "--output" not in given:
        if "--checkpoint" not in given:
            raise ValueError("--output is missing. Give --output FOLDER or --checkpoint PATH.")
        flags += ["--output", str(default_output(Path(_value(argv, "--checkpoint"))))]
    return flags


def default_output(checkpoint: Path) -> Path:
    """Return the default run folder for fine-tuning a checkpoint.

    | `checkpoint` | folder |
    |---|---|
    | run folder, or its encoder.safetensors | RUN/finetune |
    | checkpoint of a run, or its encoder.safetensors | RUN/finetune-step-00001000 |
    | any other weight file | path of the file with the ending -finetune instead of its suffix |
    | timm:NAME | NAME-finetune |
    """
    if str(checkpoint).startswith("timm:"):  # without `published.is_name`, whose import would delay the start
        return Path(f"{str(checkpoint).removeprefix('timm:')}-finetune")
    path = checkpoint.expanduser().resolve()  # `latest` is a symbolic link to the folder of a step
    if path.is_file() and path.name != "encoder.safetensors":
        return path.with_name(f"{path.stem}-finetune")
    folder = path.parent if path.is_file() else path
    if folder.parent.name == "checkpoints":
        return folder.parent.parent / f"finetune-{folder.name}"
    return folder / "finetune"


def _value(argv: Sequence[str], name: str) -> str:
    """Return the last value of a flag, given as `--name value` or as `--name=value`."""
    values = [word.partition("=")[2] for word in argv if word.startswith(f"{name}=")]
    values += [value for word, value in pairwise(argv) if word == name]
    if not values:
        raise ValueError(f"{name} has no value. Give {name} PATH.")
    return values[-1]


def main() -> None:
    """Replace this process by pretrain/run.py."""
    try:
        flags = command(sys.argv[1:])
    except ValueError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    if {"--help", "-h"} & {*flags}:
        print(__doc__)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(RUN), *flags])  # `execv` keeps the process id and environment


if __name__ == "__main__":
    main()
