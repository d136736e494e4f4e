"""Fine-tune an encoder with labels, with the recipe of MAE (2111.06377).

    tessera finetune --checkpoint RUN --train SHARDS --val SHARDS [settings of tessera pretrain]

    --checkpoint PATH   run folder, checkpoint in a run folder, exported encoder, `timm:NAME` for a pretrained model of
                        timm, or published weight file; a published weight file also needs --encoder VARIANT
    --train SHARDS      labelled SHARDS to train on
    --val SHARDS        labelled SHARDS that are scored after each epoch
    --output FOLDER     folder of this run; default: RUN/finetune, or RUN/finetune-step-00001000 for a checkpoint

This command is `tessera pretrain --method finetune`, and passes on all other flags. Fine-tuning therefore uses the
engines, sample order, checkpoints and resume of pretraining. `--finetune.NAME VALUE` sets a setting of the method,
such as `--finetune.mixup 0`. `--help finetune` lists these settings, and `--help all` lists all settings.
"""

# isort: off
from tessera.pretrain import run  # sets environment variables that torch reads when it is loaded
# isort: on

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from tessera.runtime.settings import SettingsError, read_yaml

TIME_LIMIT = "24:00:00"
SCRIPT = "pretrain.sbatch"
"""Time limit and script of a SLURM job (`tessera slurm`): a run of its own."""
FLAGS = {"--checkpoint": "--init_from", "--train": "--data", "--val": "--evaluation.val"}
"""Flags of this command, and the flags of `tessera pretrain` with the same meaning."""


def command(argv: Sequence[str]) -> list[str]:
    """Translate the flags of this command into flags of `tessera pretrain`.

    Raises:
        SettingsError: a flag is missing.
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
            raise SettingsError(f"{name} is missing. Give --checkpoint PATH, --train SHARDS and --val SHARDS.")
    if "--output" not in given and not _output_of_file(argv):
        if "--checkpoint" not in given:
            raise SettingsError("--output is missing. Give --output FOLDER or --checkpoint PATH.")
        flags += ["--output", str(default_output(Path(_value(argv, "--checkpoint"))))]
    return flags


def _output_of_file(argv: Sequence[str]) -> str | None:
    """Return the run folder that the settings file of `--config` names, if there is one. Presets name none."""
    file = _value(argv, "--config") if any(word.partition("=")[0] == "--config" for word in argv) else ""
    return read_yaml(file).get("output") if file and Path(file).is_file() else None


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
        raise SettingsError(f"{name} has no value. Give {name} PATH.")
    return values[-1]


def finetune(argv: list[str]) -> None:
    """Train with the flags of this command."""
    words = command(argv)
    if {"--help", "-h"} & {*words}:
        print(__doc__)
    run.train(words)


def main() -> None:
    run.main(command=finetune)


if __name__ == "__main__":
    main()
