"""The layout of checkpoints in a run folder, and functions that resume a run from a checkpoint.

OUTPUT/checkpoints/
  step-00001000/
    __0_0.distcp ...     weights, buffers and AdamW's moments in torch's format (engines/writing.py), at most 64 files
    .metadata
    random-00000.pt ...  random states of 8 or more processes each, named after the first of them, at most 64 files
    trainer.json         train state, settings, versions, loss scale
    encoder.safetensors  the trained encoder, for evaluation
    encoder.json         settings of the trained encoder
    manifest.json        sizes and checksums of the files above
  latest -> step-00001000
"""

import errno
import logging
import os
import random
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from tessera.encoders import weight_files
from tessera.pretrain.checkpoints import manifest, trainer_json
from tessera.pretrain.checkpoints.trainer_json import Trainer
from tessera.pretrain.engines import Engine
from tessera.pretrain.engines.writing import read_once
from tessera.runtime.collectives import (
    RankError,
    broadcast_object,
    first_rank,
    gather_on_main,
    rank,
    run_on_all_ranks,
    wait_for_path,
    world_size,
)
from tessera.runtime.user_error import printable

log = logging.getLogger(__name__)
STEP = re.compile(r"step-(\d{8,})")


class CheckpointError(RankError):
    """Raised when a checkpoint cannot be written, is damaged, or does not fit the run."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. A run opens the checkpoint that it continues once, with `open_checkpoint`."""

    path: Path
    trainer: Trainer

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self.trainer.position.step

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run that wrote the checkpoint."""
        return self.trainer.settings


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in OUTPUT/checkpoints, oldest first."""
    found = [p for p in folder.glob("step-*") if STEP.fullmatch(p.name) and (p / "trainer.json").exists()]
    return sorted(found, key=lambda p: int(p.name[5:]))


def restore(checkpoint: Checkpoint, accelerator: Accelerator, engine: Engine, *, point: bool = True) -> None:
    """Load a checkpoint into the engine's method and optimizer and into the random generators. Collective.

    Args:
        point: True to point the link `latest` to the checkpoint.

    Raises:
        CheckpointError: the tensors of the checkpoint differ from those of the run, or its files are damaged.
    """
    trainer = checkpoint.trainer
    path = checkpoint.path.resolve()  # resolve the link, because `latest` may change while the checkpoint is read
    verify(path)
    # The run may have been killed after it wrote this checkpoint, but before it pointed `latest` to the checkpoint.
    if point:
        run_on_all_ranks(lambda: point_latest(path.parent, path.name) if accelerator.is_main_process else None)
    state = engine.local_state()
    try:
        read_once(state, path)
    except RankError as error:
        raise CheckpointError(f"{path} does not fit this run: {error}") from error
    engine.after_load(trainer.optimizer_steps)
    if accelerator.scaler is not None and trainer.loss_scale:
        accelerator.scaler.load_state_dict(trainer.loss_scale)
    if trainer.processes == accelerator.num_processes:
        states = _random_file(path, accelerator.process_index)
        try:
            found = weight_files.read(states)
            set_random_states(found if "python" in found else found[accelerator.process_index])
        except Exception as error:  # torch raises many kinds of errors for a damaged file, and executes no code
            raise _damaged(path, [f"{states.name} contains no random states ({type(error).__name__})"]) from error
    else:
        log.info(
            "%s was written by %d processes, but this run has %d. Samples, crops, masks and drop path stay the same. "
            "Other random numbers of the model, such as dropout, start anew, so losses may differ slightly from those "
            "of %d processes.",
            path.name,
            trainer.processes,
            accelerator.num_processes,
            trainer.processes,
        )


def _random_file(path: Path, process: int) -> Path:
    """Return the file with the random states of a process. Older versions wrote one file for each process."""
    numbers = [int(name) for file in path.glob("random-*.pt") if (name := file.stem.partition("-")[2]).isdecimal()]
    return path / f"random-{max((number for number in numbers if number <= process), default=0):05d}.pt"


def random_states() -> dict[str, Any]:
    """Return the random states of Python, NumPy, torch and the CUDA device, as types that `torch.load` accepts with
    `weights_only`."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Set the random generators to states that `random_states` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def verify(path: Path) -> None:
    """Compare the files of a checkpoint with its manifest. Collective; each process checks a share of the files.

    Raises:
        CheckpointError: a file is damaged. The message names the damaged files and the newest intact checkpoint before
            this one.
    """
    own = manifest.wrong_sizes(path)
    if first_rank(bool(own)) is None:
        own = manifest.wrong_checksums(path, rank(), world_size())
    if first_rank(bool(own)) is not None:
        found = gather_on_main(own)
        raise _damaged(path, broadcast_object(sorted({fault for of_rank in found or [] for fault in of_rank})))


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the trainer.json of a checkpoint. Collective.

    Raises:
        CheckpointError: the file is missing on a node, is damaged, or was written by another version of this program.
    """
    return run_on_all_ranks(lambda: _open(path))


def _open(path: Path) -> Checkpoint:
    file = path / trainer_json.NAME
    try:
        wait_for_path(file)
        return Checkpoint(path, trainer_json.read(file))
    except RankError as error:
        raise CheckpointError(str(error)) from None
    except trainer_json.OtherVersionError:
        raise CheckpointError(
            f"{path} was written by another version of this program, and only that version can continue it. "
            f"To start a new run from its encoder, use --init_from {shlex.quote(str(path))}."
        ) from None
    except OSError as error:
        raise _damaged(path, [f"{file.name} cannot be read ({error.strerror})"]) from error
    except ValueError as error:
        raise _damaged(path, [f"{file.name} {error}"]) from error


def _damaged(path: Path, faults: list[str]) -> CheckpointError:
    path = path.resolve()  # `path` may be the link `latest`
    listed = list_checkpoints(path.parent)
    earlier = listed[: listed.index(path)] if path in listed else []
    start = "the beginning, because no earlier checkpoint is complete"
    for one in reversed(earlier):
        # Only rank 0 compares checksums, because it prints the message.
        if not (manifest.wrong_sizes(one) or (rank() == 0 and manifest.wrong_checksums(one))):
            start = one.name
            break
    return CheckpointError(
        f"{path} is damaged: {'; '.join(map(printable, faults))}. Move this folder away. "
        f"Then --resume continues from {start}."
    )


def point_latest(checkpoints: Path, name: str) -> None:
    """Point the link `latest` to the checkpoint `name`, atomically.

    If the disk does not support symlinks, only log a warning. Readers then use the checkpoint with the highest step.
    """
    latest, new = checkpoints / "latest", checkpoints / ".latest.part"
    if new.is_dir() and not new.is_symlink():
        shutil.rmtree(new)
    new.unlink(missing_ok=True)
    try:
        new.symlink_to(name)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        log.warning("%s cannot be created, because the disk does not support symlinks (%s)", latest, error.strerror)
        return
    adopt_latest(checkpoints)
    os.replace(new, latest)


def adopt_latest(checkpoints: Path) -> None:
    """Give the folder `latest` the name of its step, or remove it if there is a checkpoint of this step.

    `latest` is a folder instead of a link if a run was copied by a program that follows links.

    Raises:
        CheckpointError: the folder is not a checkpoint.
    """
    latest = checkpoints / "latest"
    if latest.is_symlink() or not latest.is_dir():
        return
    step = checkpoints / f"step-{_open(latest).step:08d}"
    if step.exists():
        latest.rename(checkpoints / ".copy.part")  # first renamed, so that a kill leaves no partial folder
        shutil.rmtree(checkpoints / ".copy.part")
    else:
        latest.rename(step)
        log.info("%s is a folder, not a link. It was renamed to %s.", latest, step.name)
