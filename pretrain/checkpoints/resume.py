"""Checkpoints as they lie in a run's folder, and how a run goes on from one.

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

import json
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from pretrain.checkpoints import manifest, rng
from pretrain.engines import Engine
from pretrain.engines.local_state import read
from runtime.agreement import CheckpointError, gather, see, together

log = logging.getLogger(__name__)
STEP = re.compile(r"step-(\d{8,})")
TRAINER = {"position", "processes", "engine", "optimizer_steps", "loss_scale", "settings", "versions"}
"""what trainer.json holds"""


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


def restore(path: Path, accelerator: Accelerator, engine: Engine) -> Position:
    """Load a checkpoint into the method and the optimizer, and set the random states; on all processes together.

    Returns where the run was.

    Raises:
        CheckpointError: it belongs to another method or encoder, or its files are not those that were written.
    """
    path = path.resolve()  # never `latest`, which is to point at it
    known = trainer(path)
    verify(path)
    latest, main = path.parent / "latest", accelerator.is_main_process
    # a kill may have come between the rename and the link
    together(lambda: os.replace(beside(latest, path.name), latest) if main else None)
    pieces = engine.pieces()
    try:
        together(lambda: read(pieces, path))
    except CheckpointError as error:
        raise CheckpointError(f"{path} does not fit this run: {error}") from error
    engine.loaded(known["optimizer_steps"])
    if accelerator.scaler is not None and known["loss_scale"]:
        accelerator.scaler.load_state_dict(known["loss_scale"])
    if known["processes"] == accelerator.num_processes:
        states = path / f"random-{accelerator.process_index:05d}.pt"
        rng.put_back(torch.load(states, weights_only=True))
    else:
        log.info("%s was written by %d processes: random states start anew", path.name, known["processes"])
    return Position(**known["position"])


def verify(path: Path) -> None:
    """Compare a checkpoint's files with its manifest. On all processes together, which share the checksums.

    Raises:
        CheckpointError: names the files that are not what was written, and the checkpoint to go back to.
    """
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = {fault for of_one in gather(manifest.faults(path)) for fault in of_one}
    found = found or {fault for of_one in gather(manifest.altered(path, rank, processes)) for fault in of_one}
    if found:
        raise _damaged(path, sorted(found))


def trainer(path: Path) -> dict[str, Any]:
    """What a checkpoint says of its run (`trainer.json`); on all processes together.

    Raises:
        CheckpointError: it cannot be read, or is of another version of this program.
    """
    return together(lambda: _read_trainer(path))


def position(path: Path) -> Position:
    """Where the run was when it wrote a checkpoint; on all processes together."""
    return Position(**trainer(path)["position"])


def check_fits(path: Path, settings: dict[str, Any]) -> None:
    """Refuse to resume with another method or encoder; warn where the samples will come in another order.

    On all processes together.

    Raises:
        CheckpointError: names every setting that differs.
    """
    saved = trainer(path)["settings"]
    old, new = _flat(saved), _flat(settings)
    changed = [
        f"{name} {old.get(name)} -> {new.get(name)}"
        for name in sorted(old | new)
        if old.get(name) != new.get(name) and name not in ("resume", "config", "output", "dry_run", "workers")
    ]
    if changed:
        log.warning("changed since %s: %s", path.name, ", ".join(changed))
    if any(saved.get(name) != settings[name] for name in ("seed", "batch_size", "stream", "shards")):
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


def _read_trainer(path: Path) -> dict[str, Any]:
    file = path / "trainer.json"
    see(file)
    try:
        known = json.loads(file.read_text())
    except ValueError as error:
        raise _damaged(path, [f"{file.name} is no JSON ({error})"]) from error
    fits = isinstance(known, dict) and known.keys() >= TRAINER
    if not fits or not known["position"].keys() <= Position.__dataclass_fields__.keys():
        raise CheckpointError(
            f"{path} was written by another version of this program, and only that one can continue it; "
            f"a new run takes its encoder with --init_from {path}"
        )
    return known


def _damaged(path: Path, found: list[str]) -> CheckpointError:
    path = path.resolve()  # `latest`
    listed = whole(path.parent)
    before = [p for p in listed[: listed.index(path)] if not manifest.faults(p)] if path in listed else []
    return CheckpointError(
        f"{path} is damaged: {'; '.join(found)}. Move it away, and --resume continues from "
        + (f"{before[-1].name}." if before else "the beginning: there is no whole one before it.")
    )


def beside(link: Path, target: str) -> Path:
    """A link to `target` that has only to be renamed to `link`, which so is never missing."""
    new = link.with_name(f".{link.name}.part")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    return new
