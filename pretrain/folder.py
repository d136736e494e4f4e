"""The folder of a run: find its newest checkpoint, create it, and delete an old run."""

import logging
import os
import shutil
import time
from pathlib import Path

from pretrain.checkpoints import resume
from pretrain.config import ResolvedRun
from runtime.collectives import broadcast_object
from runtime.settings import SettingsError

PARTS = (
    "config.yaml",
    "machine.jsonl",
    "metrics.jsonl",
    "metrics.csv",
    "skipped.jsonl",
    "tracking.json",
    "tensorboard",
    "pictures",
    "checkpoints",
    "evaluation",
    "encoder.safetensors",
    "encoder.json",
)
"""Files and folders that a run and its evaluations write."""

log = logging.getLogger(__name__)


def run_folder(config: ResolvedRun) -> tuple[Path, Path | None]:
    """Return the run folder, and its newest complete checkpoint or None. Write nothing.

    Raises:
        SettingsError: the folder holds a run and `--resume` is not given, or `--resume` finds no run to continue.
    """
    if config.resume and not config.output:
        raise SettingsError("--resume needs --output FOLDER, the folder of the run to continue")
    name = f"{config.method}-{config.encoder.variant}-{time.strftime('%Y%m%d-%H%M%S')}"
    output = Path(broadcast_object(config.output or str(Path("runs") / name)))
    found = broadcast_object(resume.list_checkpoints(output / "checkpoints"))  # all processes use what rank 0 sees
    holds_run = any((output / part).exists() for part in ("config.yaml", "metrics.jsonl", "checkpoints"))
    if config.overwrite and config.resume:
        raise SettingsError("--overwrite deletes the run that --resume would continue. Give only one of them")
    if holds_run and not config.resume and not config.overwrite:
        raise SettingsError(
            f"{output} holds another run. Continue that run with --resume, delete it with --overwrite, or choose "
            "another --output"
        )
    if config.resume and not holds_run and config.data.shards is None and config.config is None:
        raise SettingsError(f"{output} holds no run to continue. To start a run there, also give --data or --config")
    if config.resume and not found:
        log.info("%s has no checkpoint yet. The run starts from the beginning", output)
    return output, found[-1] if found and config.resume else None


def make_folder(output: Path) -> None:
    """Create the run folder.

    Raises:
        SettingsError: the folder cannot be created or written to.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"cannot create {output}: {error.strerror}. Choose another --output") from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise SettingsError(f"{output} cannot be written to. Choose another --output")


def delete_run(output: Path) -> None:
    """Delete the run in a folder. Other files in the folder stay."""
    for name in PARTS:
        path = output / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
