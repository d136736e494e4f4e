"""Write checkpoints.

A checkpoint is written to a temporary folder, which is renamed when the checkpoint is complete. Every folder with a
name such as step-00001000 is therefore a complete checkpoint.
"""

import datetime
import errno
import importlib.metadata
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from rich.filesize import decimal

from tessera import encoders
from tessera.pretrain.checkpoints import manifest, trainer_json
from tessera.pretrain.checkpoints.resume import CheckpointError, list_checkpoints, point_latest, random_states
from tessera.pretrain.checkpoints.trainer_json import Trainer, TrainState
from tessera.pretrain.config import CheckpointConfig
from tessera.pretrain.engines import Engine
from tessera.pretrain.engines.local_state import LocalTensor, write
from tessera.runtime.collectives import RankError, gather_objects, run_on_all_ranks, wait_for_path
from tessera.runtime.files import fsync

log = logging.getLogger(__name__)
T = TypeVar("T")
WRITE_TIMEOUT = datetime.timedelta(hours=2)
"""Longest time that processes wait for a process that writes slowly. A lost process is detected earlier, because the
watchdog finds it within a minute."""


class Saver:
    """Writer of the checkpoints of a run. All methods are collective."""

    def __init__(
        self,
        folder: Path,
        accelerator: Accelerator,
        engine: Engine,
        settings: dict[str, Any],
        config: CheckpointConfig,
    ) -> None:
        """Check that all processes see the same OUTPUT folder.

        Args:
            folder: OUTPUT/checkpoints. OUTPUT must exist.
            settings: resolved settings of the run. Each checkpoint stores them.

        Raises:
            CheckpointError: the processes do not see the same OUTPUT.
        """
        self.folder, self.accelerator, self.engine, self.settings = folder, accelerator, engine, settings
        self.config = config
        # a separate process group, whose collectives may wait for a slow disk
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)  # pyright: ignore[reportAttributeAccessIssue]
            self._check_shared_disk()

    def save(self, train_state: TrainState, encoder: encoders.Encoder, *, keep_old: bool = False) -> None:
        """Write a checkpoint, and then remove old checkpoints. Do nothing if the step already has a checkpoint.

        Args:
            encoder: the trained encoder, with parameters that the engine may have sharded.
            keep_old: True to keep all older checkpoints.

        Raises:
            CheckpointError: this checkpoint could not be written. Earlier checkpoints are intact, and `latest` points
                to the newest intact checkpoint.
        """
        folder = self.folder / f"step-{train_state.step:08d}"
        # Rank 0 decides if the checkpoint exists, because other nodes may see the new folder late.
        if gather_objects(folder in list_checkpoints(self.folder), self._group)[0]:
            return
        state = {name: tensor.write_share() for name, tensor in self.engine.local_state().items()}
        full = self.engine.gather_on_main(encoder)
        own = sum(tensor.data.nbytes for tensor in state.values())
        own += sum(tensor.nbytes for tensor in full.state_dict().values()) if full is not None else 0
        needed = sum(gather_objects(own, self._group))
        main, part = self.accelerator.is_main_process, self.folder / f".{folder.name}.part"
        try:
            self._on_main(lambda: _make_empty(part, needed))
            self._on_all_ranks(lambda: wait_for_path(part))
            own_files = self._on_all_ranks(lambda: self._write_files(part, state, full, train_state))
            files = gather_objects(own_files, self._group)
            self._on_main(lambda: self._publish(part, folder, files))
        except CheckpointError as error:
            if main:
                shutil.rmtree(part, ignore_errors=True)
            intact = gather_objects([p.name for p in list_checkpoints(self.folder)][-1:], self._group)[0]
            message = f"could not save {folder}: {str(error).rstrip('.')}. "
            if any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):
                message += f"A checkpoint of this run needs {decimal(needed)}. Free this amount of space. "
            message += f"--resume continues from {intact[0]}." if intact else "There is no earlier checkpoint."
            raise CheckpointError(message) from error
        if main and not keep_old:
            remove_old(self.folder, self.config.keep, self.config.keep_every)

    def _on_all_ranks(self, function: Callable[[], T]) -> T:
        try:
            return run_on_all_ranks(function, self._group)
        except RankError as error:
            raise CheckpointError(str(error)) from error

    def _on_main(self, function: Callable[[], None]) -> None:
        self._on_all_ranks(function if self.accelerator.is_main_process else lambda: None)

    def _write_files(
        self, part: Path, state: dict[str, LocalTensor], encoder: encoders.Encoder | None, train_state: TrainState
    ) -> manifest.Files:
        """Write this process's files and return their sizes and checksums. `encoder` is None except on rank 0."""
        rank = self.accelerator.process_index
        write(state, part, self._group)
        own = [part / f"random-{rank:05d}.pt"]
        torch.save(random_states(), own[0])
        if encoder is not None:
            own += [part / name for name in ("encoder.safetensors", "encoder.json", "trainer.json")]
            encoders.save(encoder, part / "encoder.safetensors", step=train_state.step)
            trainer = _trainer(self.accelerator, self.engine, train_state, self.settings)
            (part / trainer_json.NAME).write_text(trainer.to_json())
        for path in own:
            fsync(path)
        stored = [*part.glob(f"__{rank}_*"), *([part / ".metadata"] if encoder is not None else [])]
        return manifest.describe([*own, *stored])

    def _publish(self, part: Path, folder: Path, files: list[manifest.Files]) -> None:
        """Write the manifest, rename the checkpoint to its final name, and point `latest` to it."""
        manifest.write(part, {name: described for of_rank in files for name, described in of_rank.items()})
        fsync(part / manifest.NAME)
        fsync(part)
        os.rename(part, folder)
        point_latest(self.folder, folder.name)
        fsync(self.folder)

    def _check_shared_disk(self) -> None:
        """Raise `CheckpointError` if a process does not see a file that the main process creates in OUTPUT."""
        main, output = self.accelerator.is_main_process, self.folder.parent
        probe = output / gather_objects(f".shared-{uuid.uuid4().hex}", self._group)[0]
        try:
            self._on_main(probe.touch)
            self._on_all_ranks(lambda: wait_for_path(probe))
        finally:
            if main:
                probe.unlink(missing_ok=True)


def remove_old(folder: Path, keep: int, keep_every: int | None) -> None:
    """Remove old checkpoints, and incomplete checkpoints of killed runs. If a removal fails, only log the failure.

    Args:
        keep: number of newest checkpoints to keep.
        keep_every: a checkpoint is also kept if its step is a multiple of this number.
    """
    old = [p for p in list_checkpoints(folder)[:-keep] if not (keep_every and int(p.name[5:]) % keep_every == 0)]
    for path in [*folder.glob(".*.part"), *old]:
        try:
            if path in old:
                # Rename first, so that a kill during the removal leaves no partial checkpoint with a valid name.
                path = path.rename(folder / f".{path.name}.part")
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)
        except OSError as error:
            log.warning("could not remove %s: %s", path, error.strerror)


def _make_empty(folder: Path, needed: int) -> None:
    """Create an empty folder. Raise `CheckpointError` if its disk has fewer than `needed` free bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)  # without its parents: a run folder that was deleted is not made again
    folder.mkdir()
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(f"{os.strerror(errno.ENOSPC)}: {folder.parent} has {decimal(free)} free")


def _trainer(accelerator: Accelerator, engine: Engine, train_state: TrainState, settings: dict[str, Any]) -> Trainer:
    """Return the content of trainer.json."""
    return Trainer(
        position=train_state,
        processes=accelerator.num_processes,
        engine=engine.name,
        optimizer_steps=engine.optimizer_steps,
        loss_scale=accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
        settings=settings,
        versions={name: importlib.metadata.version(name) for name in ("torch", "torchvision", "accelerate", "numpy")},
    )
