"""Checkpoints: written beside the old ones and renamed, so that a reader never meets half of one.

OUTPUT/checkpoints/
  step-00001000/
    __0_0.distcp ...     method and optimizer, by torch.distributed.checkpoint
    .metadata
    random-00000.pt      random states of each process
    trainer.json         step, images, settings, versions, loss scale
    encoder.safetensors  the trained encoder, for evaluation     encoder.json
  latest -> step-00001000
"""

import errno
import importlib.metadata
import json
import logging
import os
import random
import re
import shutil
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import encoders

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


def whole(folder: Path) -> list[Path]:
    """The whole checkpoints in OUTPUT/checkpoints, oldest first."""
    found = [p for p in folder.glob("step-*") if STEP.fullmatch(p.name) and (p / "trainer.json").exists()]
    return sorted(found, key=lambda p: int(p.name[5:]))


def save(
    folder: Path,
    accelerator: Accelerator,
    wrapped: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    encoder: encoders.Encoder,
    position: Position,
    settings: dict[str, Any],
) -> Path:
    """Write a checkpoint into OUTPUT/checkpoints; called on all processes together. A step that has one keeps it.

    Raises:
        CheckpointError: it could not be written; earlier ones are whole, and `latest` points at the newest of them.
    """
    final = folder / f"step-{position.step:08d}"
    part = folder / f".{final.name}.part"
    if final.exists():
        return final
    model_state, optimizer_state = get_state_dict(wrapped, optimizer)
    needed = sum(t.numel() * t.element_size() for t in _tensors([model_state, optimizer_state]))
    problem = ""
    try:
        if accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            free = shutil.disk_usage(folder).free
            if free < needed:
                problem = f"the disk of {folder} has {free / 1e9:.2f} GB free"
    except OSError as error:
        problem = _first_line(error)
    problems = gather_object([problem])  # all must know before the first collective of the save
    if not any(problems):
        try:
            state = {"method": model_state, "optimizer": optimizer_state}
            state_dict_saver.save(state, checkpoint_id=part, no_dist=not dist.is_initialized())
            torch.save(_random_states(), part / f"random-{accelerator.process_index:05d}.pt")
            if accelerator.is_main_process:
                encoders.save(encoder, part / "encoder.safetensors")
                (part / "trainer.json").write_text(json.dumps(_trainer(accelerator, position, settings), indent=1))
        except (Exception, CheckpointException) as error:  # the latter, around what the disk says, is no Exception
            problem = f"{type(error).__name__}: {_first_line(error)}"
        problems = gather_object([problem])
    if any(problems):
        if accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)
        latest = [p.name for p in whole(folder)][-1:]
        raise CheckpointError(
            f"could not save {final}: {next(filter(None, problems))}. A checkpoint of this run needs "
            f"{needed / 1e9:.2f} GB; free that much and continue with --resume from "
            + (f"{latest[0]}, which is whole." if latest else "the beginning.")
        )
    if accelerator.is_main_process:
        _sync(part)  # the files of all processes
        os.rename(part, final)
        _link(folder / "latest", final.name)
        _sync(folder, files=False)
    accelerator.wait_for_everyone()
    return final


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


def restore(
    path: Path, accelerator: Accelerator, wrapped: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Position:
    """Load a checkpoint into the method and the optimizer, and set the random states; on all processes together.

    Returns where the run was.

    Raises:
        CheckpointError: it belongs to another method or encoder.
    """
    trainer = json.loads((path / "trainer.json").read_text())
    if accelerator.is_main_process:  # a kill may have come between the rename and the link
        _link(path.parent / "latest", path.name)
    model_state, optimizer_state = get_state_dict(wrapped, optimizer)
    try:
        state = {"method": model_state, "optimizer": optimizer_state}
        state_dict_loader.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{path} does not fit this run or is damaged: {_first_line(error)}") from error
    # what the checkpoint's groups say of themselves gives way to this run's settings
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    set_state_dict(wrapped, optimizer, model_state_dict=state["method"], optim_state_dict=state["optimizer"])
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
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


def _trainer(accelerator: Accelerator, position: Position, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "position": asdict(position),
        "processes": accelerator.num_processes,
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


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [tensor for value in values for tensor in _tensors(value)]


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
