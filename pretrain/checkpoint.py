"""Checkpoints: written beside the old ones and renamed, so that a reader never meets half of one.

OUTPUT/checkpoints/
  step-00001000/
    __0_0.distcp ...     method and optimizer, by torch.distributed.checkpoint: what each process holds (pieces.py)
    .metadata
    random-00000.pt      random states of each process
    trainer.json         step, images, settings, versions, loss scale
    encoder.safetensors  the trained encoder, for evaluation     encoder.json
    manifest.json        sizes and checksums of all of these
  latest -> step-00001000
"""

import copy
import errno
import importlib.metadata
import json
import logging
import os
import random
import re
import shutil
import threading
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.checkpoint.api import CheckpointException

import encoders
from pretrain import manifest
from pretrain.config import CheckpointConfig
from pretrain.engines import Engine
from pretrain.pieces import Piece, read, write

log = logging.getLogger(__name__)
# one process needs no process group
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
STEP = re.compile(r"step-(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or does not fit. The message is meant for the user."""


@dataclass
class Position:
    """How far a run is, and what it remembers on the way."""

    step: int = 0
    """optimizer steps done, skipped ones included"""
    images: int = 0
    """images seen over all processes"""
    skipped_steps: int = 0
    """steps whose loss or gradient was not finite"""
    skipped_in_a_row: int = 0
    """those of them since the last good step"""
    corrupt_images: int = 0
    """images that were replaced, over all processes"""
    alarm: dict[str, Any] = field(default_factory=dict)
    """the memory of the collapse alarm"""
    unscored: dict[str, Any] = field(default_factory=dict)
    """the record of this step, where its evaluation and its line in metrics.jsonl were left to the resumed run"""


def whole(folder: Path) -> list[Path]:
    """The whole checkpoints in OUTPUT/checkpoints, oldest first."""
    found = [p for p in folder.glob("step-*") if STEP.fullmatch(p.name) and (p / "trainer.json").exists()]
    return sorted(found, key=lambda p: int(p.name[5:]))


class Saver:
    """Writes the checkpoints of a run, one after the other; all methods are called on all processes together."""

    def __init__(
        self,
        folder: Path,
        accelerator: Accelerator,
        engine: Engine,
        settings: dict[str, Any],
        config: CheckpointConfig,
    ) -> None:
        """`folder`: OUTPUT/checkpoints; `settings`: the run's, resolved."""
        self.folder, self.accelerator, self.engine, self.settings = folder, accelerator, engine, settings
        self.config = config
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        # the background must not meet the training in a collective
        several = config.background and dist.is_initialized()
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if several else None

    def save(self, position: Position, encoder: encoders.Encoder, *, now: bool = False, keep_all: bool = False) -> None:
        """Write a checkpoint of this moment, then remove those that need not stay. A step that has one keeps it.

        With `checkpoint.background` the files are written while the training goes on, but for `now`.

        Args:
            encoder: as the engine holds it.
            keep_all: remove none.

        Raises:
            CheckpointError: it, or the one before it, could not be written; earlier ones are whole, and `latest` points
                at the newest of them.
        """
        self.wait()
        final = self.folder / f"step-{position.step:08d}"
        if final.exists():
            return
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        pieces = {name: piece.share(rank, processes) for name, piece in self.engine.pieces().items()}
        whole = self.engine.whole(encoder, everywhere=False)
        state = _trainer(self.accelerator, self.engine, position, self.settings)
        own = sum(p.data.nbytes for p in pieces.values())
        own += sum(t.nbytes for t in whole.state_dict().values()) if whole is not None else 0
        needed = sum(_gather(own))
        if self.config.background and not now:
            pieces = {name: piece.copy() for name, piece in pieces.items()}
            whole = copy.deepcopy(whole)
            arguments = (final, pieces, whole, state, _random_states(), needed, keep_all)
            self._thread = threading.Thread(target=self._in_background, args=arguments, name="checkpoint")
            self._thread.start()
        else:
            self._write(final, pieces, whole, state, _random_states(), needed, keep_all)

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

    def _in_background(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except CheckpointError as error:
            self._error = error

    def _write(
        self,
        final: Path,
        pieces: dict[str, Piece],
        encoder: torch.nn.Module | None,
        state: dict[str, Any],
        random_states: dict[str, Any],
        needed: int,
        keep_all: bool,
    ) -> None:
        main, rank = self.accelerator.is_main_process, self.accelerator.process_index
        part = self.folder / f".{final.name}.part"
        problems = _gather(self._make(part, needed) if main else "", self._group)
        if not any(problems) and not part.is_dir():
            problems = [f"process {rank} does not see {part}: --output must be on a disk that all nodes share"]
        problems, files = _gather("".join(problems[:1]), self._group), {}
        if not any(problems):
            problem = ""
            try:
                write(pieces, part, self._group)
                torch.save(random_states, part / f"random-{rank:05d}.pt")
                if main:
                    encoders.save(cast(encoders.Encoder, encoder), part / "encoder.safetensors")
                    (part / "trainer.json").write_text(json.dumps(state, indent=1))
                own = {*part.glob(f"__{rank}_*"), part / f"random-{rank:05d}.pt"}
                others = [".metadata", "encoder.safetensors", "encoder.json", "trainer.json"]
                files = manifest.describe(own | {part / name for name in others if main})
            except (Exception, CheckpointException) as error:  # the latter, around what the disk says, is no Exception
                problem = f"{type(error).__name__}: {_first_line(error)}"
            problems = _gather(problem, self._group)
        described = _gather(files, self._group)
        if not any(problems):
            problems = _gather(self._finish(part, final, described) if main else "", self._group)
        if any(problems):
            if main:
                shutil.rmtree(part, ignore_errors=True)
            latest = [p.name for p in whole(self.folder)][-1:]
            raise CheckpointError(
                f"could not save {final}: {next(filter(None, problems))}. A checkpoint of this run needs "
                f"{needed / 1e9:.2f} GB; free that much and continue with --resume from "
                + (f"{latest[0]}, which is whole." if latest else "the beginning.")
            )
        if main and not keep_all:
            retain(self.folder, self.config.keep, self.config.keep_every)

    def _make(self, part: Path, needed: int) -> str:
        """Make an empty folder; returns what prevents it."""
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            free = shutil.disk_usage(part).free
            return f"the disk of {self.folder} has {free / 1e9:.2f} GB free" if free < needed else ""
        except OSError as error:
            return _first_line(error)

    def _finish(self, part: Path, final: Path, files: list[dict[str, Any]]) -> str:
        """All processes have written: give it its name; returns what prevents it."""
        try:
            manifest.write(part, {name: what for of_one in files for name, what in of_one.items()})
            _sync(part)  # the files of all processes
            os.rename(part, final)
            _link(self.folder / "latest", final.name)
            _sync(self.folder, files=False)
        except OSError as error:
            return _first_line(error)
        return ""


def retain(folder: Path, keep: int, keep_every: int | None) -> None:
    """Remove what a kill left half written, and old checkpoints. What cannot be removed stays, with a warning.

    Those stay that are among the `keep` newest or at a multiple of `keep_every` steps.
    """
    try:
        for part in folder.glob(".step-*.part"):
            shutil.rmtree(part)
        for old in whole(folder)[:-keep]:
            if not (keep_every and int(old.name[5:]) % keep_every == 0):
                # renamed first: a kill in the middle must not leave half a checkpoint under a whole one's name
                gone = folder / f".{old.name}.part"
                os.rename(old, gone)
                shutil.rmtree(gone)
    except OSError as error:
        log.warning("could not remove an old checkpoint: %s", error)


def restore(path: Path, accelerator: Accelerator, engine: Engine) -> Position:
    """Load a checkpoint into the method and the optimizer, and set the random states; on all processes together.

    Returns where the run was.

    Raises:
        CheckpointError: it belongs to another method or encoder, or its files are not those that were written.
    """
    trainer = json.loads((path / "trainer.json").read_text())
    faults = _gather(manifest.faults(path, accelerator.process_index, accelerator.num_processes))
    if any(faults):
        found = sorted({fault for of_one in faults for fault in of_one})
        before = [p.name for p in whole(path.parent) if p.name < path.name][-1:]
        raise CheckpointError(
            f"{path} is damaged: {'; '.join(found)}. Move it away, and --resume continues from "
            + (f"{before[0]}." if before else "the beginning.")
        )
    if accelerator.is_main_process:  # a kill may have come between the rename and the link
        _link(path.parent / "latest", path.name)
    try:
        read(engine.pieces(), path)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{path} does not fit this run: {_first_line(error)}") from error
    engine.loaded(trainer["optimizer_steps"])
    if accelerator.scaler is not None and trainer["loss_scale"]:
        accelerator.scaler.load_state_dict(trainer["loss_scale"])
    states = path / f"random-{accelerator.process_index:05d}.pt"
    if trainer["processes"] == accelerator.num_processes and states.exists():
        _set_random_states(torch.load(states, weights_only=True))
    else:
        log.info("%s was written by %d processes: random states start anew", path.name, trainer["processes"])
    return position(path)


def position(path: Path) -> Position:
    """Where the run was when it wrote a checkpoint."""
    return Position(**json.loads((path / "trainer.json").read_text())["position"])


def check_fits(path: Path, settings: dict[str, Any]) -> None:
    """Refuse to resume with another method or encoder; warn where the samples will come in another order.

    Raises:
        CheckpointError: names every setting that differs.
    """
    saved = json.loads((path / "trainer.json").read_text())["settings"]
    old, new = _flat(saved), _flat(settings)
    changed = [
        f"{name} {old.get(name)} -> {new.get(name)}"
        for name in sorted(old | new)
        if old.get(name) != new.get(name) and name not in ("resume", "config", "output", "dry_run", "workers")
    ]
    if changed:
        log.warning("changed since %s: %s", path.name, ", ".join(changed))
    if any(saved[name] != settings[name] for name in ("seed", "batch_size", "stream", "shards")):
        log.warning("the samples go on in another order than before")
    differ = []
    for section in ("method", "encoder"):
        old, new = saved[section], settings[section]
        if not isinstance(new, dict):
            old, new = {"name": old}, {"name": new}
        differ += [
            f"{section}.{k} is {old.get(k)} there and {new.get(k)} here" for k in old | new if old.get(k) != new.get(k)
        ]
    if differ:
        raise CheckpointError(
            f"{path} is a checkpoint of another run: {'; '.join(differ)}. Resume with the run's own settings "
            "(leave these flags out) or start anew in another --output."
        )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names."""
    flat = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _gather(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each process has, on all of them."""
    if not dist.is_initialized():
        return [own]
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def _trainer(accelerator: Accelerator, engine: Engine, position: Position, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "position": copy.deepcopy(asdict(position)),
        "processes": accelerator.num_processes,
        "engine": engine.name,
        "optimizer_steps": engine.optimizer_steps,
        "loss_scale": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
        "settings": settings,
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "torchvision", "accelerate", "numpy")
        },
    }


def _random_states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _set_random_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _first_line(error: BaseException) -> str:
    """What went wrong first; a full disk is said in plain words."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, CheckpointException):
        return _first_line(next(iter(error.failures.values()))[0])
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _link(link: Path, target: str) -> None:
    """Point `link` at `target` in one move: it is never missing."""
    new = link.with_name(".latest.part")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    os.replace(new, link)


def _sync(folder: Path, *, files: bool = True) -> None:
    """Have the disk hold a folder's files and names before anything points at them."""
    for path in ([p for p in folder.iterdir() if p.is_file()] if files else []) + [folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
