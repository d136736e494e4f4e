"""Write checkpoints.

A checkpoint is written to a temporary folder, which is renamed when the checkpoint is complete. Every folder with a
name such as step-00001000 is therefore a complete checkpoint.
"""

import copy
import datetime
import errno
import importlib.metadata
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from rich.filesize import decimal
from torch import nn

from tessera import encoders
from tessera.pretrain.checkpoints import manifest, trainer_json
from tessera.pretrain.checkpoints.resume import CheckpointError, list_checkpoints, point_latest, random_states
from tessera.pretrain.checkpoints.trainer_json import Trainer, TrainState
from tessera.pretrain.config import CheckpointConfig
from tessera.pretrain.engines import Engine
from tessera.pretrain.engines.local_state import LocalTensor
from tessera.pretrain.engines.writing import MAX_WRITERS, MIN_WRITERS, share, write
from tessera.runtime.collectives import (
    RankError,
    broadcast_object,
    gather_on_main,
    rank,
    run_on_all_ranks,
    wait_for_path,
    world_size,
)
from tessera.runtime.files import fsync

log = logging.getLogger(__name__)
T = TypeVar("T")
E = TypeVar("E", bound=nn.Module)
WRITE_TIMEOUT = datetime.timedelta(hours=2)
"""Longest time that processes wait for a process that writes slowly. A lost process is detected earlier, because the
watchdog finds it within a minute."""
BACKGROUND_TIMEOUT = 30.0
"""Seconds that a failed run waits for a checkpoint that is being written in the background."""
THREAD = "checkpoint"
"""Name of the thread that writes checkpoints in the background."""


@dataclass(frozen=True)
class _Snapshot:
    """The data that this process writes into one checkpoint."""

    folder: Path
    """The checkpoint's final folder."""
    state: dict[str, LocalTensor]
    encoder: encoders.Encoder | None
    """The trained encoder with full parameters; None except on the main process."""
    trainer: Trainer
    random: dict[str, Any]
    """Random states of this process."""
    bytes: int
    """Size of the checkpoint in bytes, summed over all processes."""
    keep_old: bool
    """True to keep all older checkpoints, even those that the settings would remove."""

    def to_host(self, trained: encoders.Encoder) -> "_Snapshot":
        """Return a copy of the snapshot in host memory, so that later training steps do not change the data.

        Args:
            trained: the encoder that later steps change. `self.encoder` is copied only if it is this encoder, because
                otherwise it is already a copy.
        """
        state = {name: tensor.to_host() for name, tensor in self.state.items()}
        return replace(self, state=state, encoder=_host_copy(trained) if self.encoder is trained else self.encoder)


class Saver:
    """Writer of the checkpoints of a run. It writes at most one checkpoint at a time. All methods are collective.

    A saver is a context manager. On exit, it waits until the last checkpoint is written. If an exception ends the
    `with` block, it waits at most `BACKGROUND_TIMEOUT` seconds.
    """

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
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # a separate process group, so that collectives of the background thread and of the training do not mix
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)  # pyright: ignore[reportAttributeAccessIssue]
            self._check_shared_disk()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join(BACKGROUND_TIMEOUT)
            if self._thread.is_alive() or self._error is not None:
                log.warning("a checkpoint was not completed: %s", self._error or "writing took too long")

    def save(
        self, train_state: TrainState, encoder: encoders.Encoder, *, exiting: bool = False, keep_old: bool = False
    ) -> None:
        """Write a checkpoint, and then remove old checkpoints. Do nothing if the step already has a checkpoint.

        Args:
            encoder: the trained encoder, with parameters that the engine may have sharded.
            exiting: True if the run is exiting. The checkpoint is then written synchronously, even if
                `checkpoint.background` is true, and a failure of an earlier background save is only logged.
            keep_old: True to keep all older checkpoints.

        Raises:
            CheckpointError: this checkpoint could not be written, or the previous background save failed. Earlier
                checkpoints are intact, and `latest` points to the newest intact checkpoint.
        """
        try:
            self.wait()
        except CheckpointError as error:
            if not exiting:
                raise
            log.warning("%s", error)
        folder = self.folder / f"step-{train_state.step:08d}"
        # Rank 0 decides if the checkpoint exists, because other nodes may see the new folder late.
        if broadcast_object(self.accelerator.is_main_process and folder in list_checkpoints(self.folder), self._group):
            return
        snapshot = self._snapshot(folder, train_state, encoder, keep_old)
        if exiting or not self.config.background:
            self._write(snapshot)
            return
        copied = self._on_all_ranks(lambda: snapshot.to_host(encoder))
        # A daemon thread does not keep the interpreter alive while the thread waits for a lost process.
        self._thread = threading.Thread(target=self._in_background, args=(copied,), name=THREAD, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written in the background is complete.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _on_all_ranks(self, function: Callable[[], T]) -> T:
        try:
            return run_on_all_ranks(function, self._group)
        except RankError as error:
            raise CheckpointError(str(error)) from error

    def _on_main(self, function: Callable[[], None]) -> None:
        self._on_all_ranks(function if self.accelerator.is_main_process else lambda: None)

    def _snapshot(self, folder: Path, train_state: TrainState, encoder: encoders.Encoder, keep_old: bool) -> _Snapshot:
        state = share(self.engine.local_state(), self.accelerator.process_index, self.accelerator.num_processes)
        full = self.engine.gather_on_main(encoder)
        total = sum(tensor.numel * tensor.data.element_size() for tensor in state.values())
        own = sum(tensor.nbytes for tensor in full.state_dict().values()) if full is not None else 0
        total += broadcast_object(own, self._group)
        trainer = _trainer(self.accelerator, self.engine, train_state, self.settings)
        return _Snapshot(folder, state, full, trainer, random_states(), total, keep_old)

    def _in_background(self, snapshot: _Snapshot) -> None:
        try:
            device = self.accelerator.device
            if device.type == "cuda" and device.index is not None:  # a new thread uses the first GPU by default
                torch.cuda.set_device(device)
            self._write(snapshot)
        except BaseException as error:  # `wait` raises the error on the main thread
            self._error = error

    def _write(self, snapshot: _Snapshot) -> None:
        main, part = self.accelerator.is_main_process, self.folder / f".{snapshot.folder.name}.part"
        try:
            self._on_main(lambda: _make_empty(part, snapshot.bytes))
            self._on_all_ranks(lambda: wait_for_path(part))
            self._on_all_ranks(lambda: write(snapshot.state, part, self._group))
            random = _gather_random_states(snapshot.random, self._group)
            files = gather_on_main(self._on_all_ranks(lambda: self._write_files(part, snapshot, random)), self._group)
            self._on_main(lambda: self._publish(part, snapshot.folder, files or []))
        except CheckpointError as error:
            if main:
                shutil.rmtree(part, ignore_errors=True)
            found = [p.name for p in list_checkpoints(self.folder)][-1:] if main else []
            intact = broadcast_object(found, self._group)
            message = f"could not save {snapshot.folder}: {str(error).rstrip('.')}. "
            if any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):
                message += f"A checkpoint of this run needs {decimal(snapshot.bytes)}. Free this amount of space. "
            message += f"--resume continues from {intact[0]}." if intact else "There is no earlier checkpoint."
            raise CheckpointError(message) from error
        if main and not snapshot.keep_old:
            remove_old(self.folder, self.config.keep, self.config.keep_every)

    def _write_files(self, part: Path, snapshot: _Snapshot, random: dict[int, Any]) -> manifest.Files:
        """Write this process's other files. Return the sizes and checksums of all its files.

        Args:
            random: result of `_gather_random_states`.
        """
        own = list[Path]()
        if random:
            own = [part / f"random-{rank():05d}.pt"]
            torch.save(random, own[0])
        if snapshot.encoder is not None:
            own += [part / name for name in ("encoder.safetensors", "encoder.json", "trainer.json")]
            step = snapshot.trainer.position.step
            encoders.save(snapshot.encoder, part / "encoder.safetensors", step=step)
            (part / trainer_json.NAME).write_text(snapshot.trainer.to_json())
        for path in own:
            fsync(path)
        stored = [*part.glob(f"__{rank()}_*"), *([part / ".metadata"] if snapshot.encoder is not None else [])]
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
        probe = output / broadcast_object(f".shared-{uuid.uuid4().hex}", self._group)
        try:
            self._on_main(probe.touch)
            self._on_all_ranks(lambda: wait_for_path(probe))
        finally:
            if main:
                probe.unlink(missing_ok=True)


def _gather_random_states(own: dict[str, Any], group: dist.ProcessGroup | None) -> dict[int, Any]:
    """Return the random states of a block of processes, by rank, on the first of them, and {} on the others.

    Collective. A block has eight processes or more, so that there is at most one file on each node of eight GPUs. There
    are at most 64 blocks.
    """
    processes, own_rank = world_size(), rank()
    block = max(MIN_WRITERS, -(-processes // MAX_WRITERS))
    first = own_rank - own_rank % block
    if own_rank != first:
        dist.send_object_list([own], dst=first, group=group)
        return {}
    found: dict[int, Any] = {first: own}
    for other in range(first + 1, min(first + block, processes)):
        received: list[Any] = [None]
        dist.recv_object_list(received, src=other, group=group)
        found[other] = received[0]
    return found


def has_unfinished_save() -> bool:
    """Return True if a checkpoint is still being written in the background.

    If a process was lost, the write may never end.
    """
    return any(thread.name == THREAD for thread in threading.enumerate())


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
    """Return the content of trainer.json. The train state is copied, because later training steps change it."""
    return Trainer(
        position=copy.deepcopy(train_state),
        processes=accelerator.num_processes,
        engine=engine.name,
        optimizer_steps=engine.optimizer_steps,
        loss_scale=accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
        settings=settings,
        versions={name: importlib.metadata.version(name) for name in ("torch", "torchvision", "accelerate", "numpy")},
    )


def _host_copy(module: E) -> E:
    """Return a copy of `module` in host memory."""
    tensors = [*module.parameters(), *module.buffers()]
    copies: dict[int, Any] = {id(t): t.detach().to("cpu", copy=True) for t in tensors}
    copies |= {id(t): nn.Parameter(copies[id(t)], requires_grad=False) for t in tensors if isinstance(t, nn.Parameter)}
    return copy.deepcopy(module, copies)
