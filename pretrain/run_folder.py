"""Create, lock and search the folder of a run, and delete an old run."""

import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tessera import encoders
from tessera.pretrain.checkpoints import resume
from tessera.pretrain.config import RunConfig
from tessera.runtime.collectives import broadcast_object, rank, run_on_all_ranks
from tessera.runtime.lock import check_free, locked
from tessera.runtime.settings import SettingsError
from tessera.runtime.user_error import printable

PARTS = (
    "config.yaml",
    "machine.jsonl",
    "metrics.jsonl",
    "metrics.csv",
    "skipped.jsonl",
    "tracking.json",
    "tensorboard",
    "pictures",
    "profile",
    "checkpoints",
    "evaluation",
    "export",
    "encoder.safetensors",
    "encoder.json",
)
"""Files and folders that a run and its evaluations write."""

log = logging.getLogger(__name__)


@contextmanager
def claimed(config: RunConfig, main: bool) -> Iterator[Path]:
    """Create and lock the folder of a run, and yield its path. The lock keeps other runs out. Collective.

    The main process creates and locks the folder. If the folder is new and still empty at the end, it is removed. With
    `--dry_run`, the same faults are refused, but nothing is created or locked.

    Args:
        main: True on the main process.

    Raises:
        SettingsError: `--resume` is given without `--output`.
        LockedError: another run writes into the folder.
        RankError: the folder cannot be created or written to.
    """
    if config.resume and not config.output:
        raise SettingsError("--resume needs --output FOLDER, the folder of the run to continue")
    if config.dry_run:
        output = Path(broadcast_object(config.output or new_folder(config)))
        run_on_all_ranks(lambda: _check_folder(output, config) if main else None)
        yield output
        return
    with ExitStack() as stack:
        own = [run_on_all_ranks(lambda: stack.enter_context(_locked_folder(config)) if main else None)]
        yield Path(broadcast_object(str(own[0])))


@contextmanager
def _locked_folder(config: RunConfig) -> Iterator[Path]:
    output = Path(config.output or new_folder(config))
    made = [folder for folder in (output, *output.parents) if not os.path.exists(folder)]
    make_folder(output, exist_ok=config.output is not None)
    try:
        with locked(output):
            yield output
    finally:
        with contextlib.suppress(OSError):  # rmdir fails if the folder is not empty
            for folder in made:
                folder.rmdir()


def _check_folder(output: Path, config: RunConfig) -> None:
    """Raise the errors of `_locked_folder` without creating or locking the folder."""
    shown = printable(str(output))
    for folder in (output, *output.parents):
        try:
            is_folder = folder.is_dir() if os.stat(folder) else False
        except FileNotFoundError:
            if not folder.is_symlink():
                continue
            is_folder = False
        except OSError as error:
            raise SettingsError(f"Cannot create {shown}: {error.strerror}. Choose another --output.") from error
        if not is_folder:
            raise SettingsError(f"Cannot create {shown}: {os.strerror(errno.EEXIST)}. Choose another --output.")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise SettingsError(f"{printable(str(folder))} cannot be written to. Choose another --output.")
        break
    if output.is_dir():
        check_free(output)


def new_folder(config: RunConfig) -> str:
    """Return the path of a folder under runs/ that does not exist yet."""
    name = str(Path("runs") / f"{config.method}-{config.encoder.variant}-{time.strftime('%Y%m%d-%H%M%S')}")
    number = 1
    while Path(name if number == 1 else f"{name}-{number}").exists():
        number += 1
    return name if number == 1 else f"{name}-{number}"


def newest_checkpoint(config: RunConfig, output: Path) -> Path | None:
    """Return the newest complete checkpoint of the run to continue, or None if the run starts from the beginning.

    Raises:
        SettingsError: the folder holds a run, but neither `--resume` nor `--overwrite` is given; both are given; or
            `--resume` finds no run to continue.
        CheckpointError: `latest` is a folder that is not a checkpoint.
    """
    shown = printable(str(output))
    checkpoints = output / "checkpoints"
    if config.resume and not config.dry_run:
        run_on_all_ranks(lambda: resume.adopt_latest(checkpoints) if rank() == 0 else None)
    found = broadcast_object(resume.list_checkpoints(checkpoints))  # all processes use rank 0's list
    holds_run = any((output / part).exists() for part in ("config.yaml", "metrics.jsonl", "checkpoints"))
    if config.overwrite and config.resume:
        raise SettingsError("--overwrite deletes the run that --resume would continue. Give only one of them.")
    if holds_run and not config.resume and not config.overwrite:
        raise SettingsError(
            f"{shown} holds a run. Continue it with --resume, delete it with --overwrite, or choose another --output."
        )
    if config.resume and not holds_run and config.data.shards is None and config.config is None:
        raise SettingsError(f"{shown} holds no run to continue. To start a run there, also give --data or --config.")
    if config.resume and not found:
        log.info("%s has no checkpoint yet. The run starts from the beginning.", output)
    return found[-1] if found and config.resume else None


def make_folder(output: Path, *, exist_ok: bool = True) -> None:
    """Create the run folder.

    Raises:
        SettingsError: the folder cannot be created or written to.
    """
    shown = printable(str(output))
    try:
        output.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        raise SettingsError(f"Cannot create {shown}: {error.strerror}. Choose another --output.") from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise SettingsError(f"{shown} cannot be written to. Choose another --output.")


def delete_run(output: Path) -> None:
    """Delete the files of a run from a folder. Keep all other files."""
    others = [
        f"encoder-{variant}{ending}" for variant in encoders.VARIANTS.names() for ending in (".safetensors", ".json")
    ]
    for name in (*PARTS, *others):
        path = output / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
