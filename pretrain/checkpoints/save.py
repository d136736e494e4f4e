"""Writing checkpoints: beside the old ones and renamed, so that a reader never meets half of one."""

import copy
import datetime
import errno
import importlib.metadata
import json
import logging
import os
import shutil
import threading
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

import encoders
from pretrain.checkpoints import manifest, rng
from pretrain.checkpoints.resume import Position, beside, whole
from pretrain.config import CheckpointConfig
from pretrain.engines import Engine
from pretrain.engines.local_state import Piece, write
from runtime.agreement import CheckpointError, gather, see, together

log = logging.getLogger(__name__)
SLOWEST = datetime.timedelta(hours=2)
"""how long processes wait for one that still writes; one that is gone the watchdog finds within a minute"""
GRACE = 30.0
"""seconds that a run which failed leaves to a checkpoint it was writing in the background"""

THREAD = "checkpoint"


@dataclass
class _Moment:
    """What a process writes of one moment."""

    final: Path
    pieces: dict[str, Piece]
    encoder: nn.Module | None
    """on the main process"""
    trainer: dict[str, Any]
    random: dict[str, Any]
    bytes: int
    """of all processes"""
    keep_all: bool

    def copy(self) -> "_Moment":
        """The same in the host's memory, for the rest of the run to go on."""
        pieces = {name: piece.copy() for name, piece in self.pieces.items()}
        encoder = None if self.encoder is None else _on_the_host(self.encoder)
        return _Moment(self.final, pieces, encoder, self.trainer, self.random, self.bytes, self.keep_all)


class Saver:
    """Writes the checkpoints of a run, one after the other; all methods are called on all processes together.

    As a context it ends when the last one is written; where the run fails, after `GRACE` seconds at the latest.
    """

    def __init__(
        self,
        folder: Path,
        accelerator: Accelerator,
        engine: Engine,
        settings: dict[str, Any],
        config: CheckpointConfig,
    ) -> None:
        """`folder`: OUTPUT/checkpoints, OUTPUT being there; `settings`: the run's, resolved.

        Raises:
            CheckpointError: the processes do not see the same OUTPUT.
        """
        self.folder, self.accelerator, self.engine, self.settings = folder, accelerator, engine, settings
        self.config = config
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # its own, so that the background does not meet the training in a collective, and with a time limit for disks
        several = dist.is_initialized()
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=SLOWEST)) if several else None
        if several:
            self._check_shared()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join(GRACE)
            if self._thread.is_alive() or self._error is not None:
                log.warning("the checkpoint that was being written is lost: %s", self._error or "it took too long")

    def save(self, position: Position, encoder: encoders.Encoder, *, now: bool = False, keep_all: bool = False) -> None:
        """Write a checkpoint of this moment, then remove those that need not stay. A step that has one keeps it.

        With `checkpoint.background` the files are written while the training goes on, but for `now`.

        Args:
            encoder: as the engine holds it.
            now: this is the last chance: what became of the checkpoint before it comes second.
            keep_all: remove none.

        Raises:
            CheckpointError: it, or the one before it, could not be written; earlier ones are whole, and `latest` points
                at the newest of them.
        """
        try:
            self.wait()
        except CheckpointError as error:
            if not now:
                raise
            log.warning("%s", error)
        final = self.folder / f"step-{position.step:08d}"
        if gather(final in whole(self.folder), self._group)[0]:  # others may not see it yet
            return
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        pieces = {name: piece.share(rank, processes) for name, piece in self.engine.pieces().items()}
        plain = self.engine.whole(encoder, everywhere=False)
        own = sum(p.data.nbytes for p in pieces.values())
        own += sum(t.nbytes for t in plain.state_dict().values()) if plain is not None else 0
        trainer = _trainer(self.accelerator, self.engine, position, self.settings)
        needed = sum(gather(own, self._group))
        moment = _Moment(final, pieces, plain, trainer, rng.get(), needed, keep_all)
        if now or not self.config.background:
            self._write(moment)
            return
        copied = together(moment.copy, self._group)
        # a daemon: the interpreter does not wait for it, which may wait for a process that is gone
        self._thread = threading.Thread(target=self._in_background, args=(copied,), name=THREAD, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is written.

        Raises:
            CheckpointError: it could not be.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _in_background(self, moment: _Moment) -> None:
        try:
            self._write(moment)
        except BaseException as error:  # `wait` raises it where somebody looks
            self._error = error

    def _write(self, moment: _Moment) -> None:
        main, part = self.accelerator.is_main_process, self.folder / f".{moment.final.name}.part"
        try:
            together(lambda: self._make(part, moment.bytes) if main else None, self._group)
            together(lambda: see(part), self._group)
            files = gather(together(lambda: self._write_own(part, moment), self._group), self._group)
            together(lambda: self._finish(part, moment.final, files) if main else None, self._group)
        except CheckpointError as error:
            if main:
                shutil.rmtree(part, ignore_errors=True)
            latest = gather([p.name for p in whole(self.folder)][-1:], self._group)[0]
            full = any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))
            raise CheckpointError(
                f"could not save {moment.final}: {error}. "
                + f"A checkpoint of this run needs {moment.bytes / 1e9:.2f} GB: free that much. " * full
                + (f"--resume continues from {latest[0]}, which is whole." if latest else "There is none before it.")
            ) from error
        if main and not moment.keep_all:
            retain(self.folder, self.config.keep, self.config.keep_every)

    def _make(self, part: Path, needed: int) -> None:
        """Make an empty folder on a disk with room for `needed` bytes."""
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        free = shutil.disk_usage(part).free
        if free < needed:
            raise CheckpointError(f"{os.strerror(errno.ENOSPC)}: {free / 1e9:.2f} GB are free")

    def _write_own(self, part: Path, moment: _Moment) -> dict[str, Any]:
        """Write this process's files, which the manifest will describe as returned."""
        main, rank = self.accelerator.is_main_process, self.accelerator.process_index
        write(moment.pieces, part, self._group)  # first: it is done together
        own = [part / f"random-{rank:05d}.pt"]
        torch.save(moment.random, own[0])
        if main:
            own += [part / name for name in ("encoder.safetensors", "encoder.json", "trainer.json")]
            encoders.save(cast(encoders.Encoder, moment.encoder), part / "encoder.safetensors")
            (part / "trainer.json").write_text(json.dumps(moment.trainer, indent=1))
        for path in own:
            _sync(path)
        return manifest.describe([*own, *part.glob(f"__{rank}_*"), *([part / ".metadata"] if main else [])])

    def _finish(self, part: Path, final: Path, files: list[dict[str, Any]]) -> None:
        """All processes have written: give it its name."""
        manifest.write(part, {name: what for of_one in files for name, what in of_one.items()})
        _sync(part / manifest.NAME)
        _sync(part)
        link = beside(self.folder / "latest", final.name)
        os.rename(part, final)
        os.replace(link, self.folder / "latest")
        _sync(self.folder)

    def _check_shared(self) -> None:
        """That what the main process makes in OUTPUT, all see."""
        main, output = self.accelerator.is_main_process, self.folder.parent
        made = gather(f".shared-{uuid.uuid4().hex}", self._group)[0]
        try:
            together(lambda: (output / made).touch() if main else None, self._group)
            together(lambda: see(output / made), self._group)
        finally:
            if main:
                (output / made).unlink(missing_ok=True)


def abandoned() -> bool:
    """Whether a run that is over left a checkpoint half written in the background: its thread may hang for ever."""
    return any(thread.name == THREAD for thread in threading.enumerate())


def retain(folder: Path, keep: int, keep_every: int | None) -> None:
    """Remove what a kill left half written, and old checkpoints. What cannot be removed stays, with a warning.

    Those stay that are among the `keep` newest or at a multiple of `keep_every` steps.
    """
    old = [p for p in whole(folder)[:-keep] if not (keep_every and int(p.name[5:]) % keep_every == 0)]
    for path in [*folder.glob(".*.part"), *old]:
        try:
            if path in old:
                # renamed first: a kill in the middle must not leave half a checkpoint under a whole one's name
                path = path.rename(folder / f".{path.name}.part")
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)
        except OSError as error:
            log.warning("could not remove %s: %s", path, error.strerror)


def _trainer(accelerator: Accelerator, engine: Engine, position: Position, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "position": asdict(position),  # a copy, whatever lies in it
        "processes": accelerator.num_processes,
        "engine": engine.name,
        "optimizer_steps": engine.optimizer_steps,
        "loss_scale": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
        "settings": settings,
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "torchvision", "accelerate", "numpy")
        },
    }


def _on_the_host(module: nn.Module) -> nn.Module:
    """A copy in the host's memory, wherever the original lies."""
    tensors = [*module.parameters(), *module.buffers()]
    copies = {id(t): t.detach().to("cpu", copy=True) for t in tensors}
    copies |= {id(t): nn.Parameter(copies[id(t)], requires_grad=False) for t in tensors if isinstance(t, nn.Parameter)}
    return copy.deepcopy(module, copies)  # pyright: ignore[reportArgumentType]


def _sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder, before anything points at it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
