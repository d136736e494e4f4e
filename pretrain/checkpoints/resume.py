"""The layout of checkpoints in a run folder, and functions that resume a run from a checkpoint.

OUTPUT/checkpoints/
  step-00001000/
    __0_0.distcp ...     weights, buffers and AdamW's moments in torch's format (engines/local_state.py)
    .metadata
    random-00000.pt      random states, one file per process
    trainer.json         train state, settings, versions, loss scale
    encoder.safetensors  the trained encoder, for evaluation
    encoder.json         settings of the trained encoder
    manifest.json        sizes and checksums of the files above
  latest -> step-00001000
"""

import dataclasses
import errno
import inspect
import json
import logging
import os
import random
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from tessera import encoders
from tessera.data.sampler import batch_ranges
from tessera.encoders.formats import checkpoint as weight_files
from tessera.pretrain.checkpoints import manifest
from tessera.pretrain.engines import Engine
from tessera.pretrain.engines.local_state import read
from tessera.runtime.collectives import RankError, gather_objects, rank, run_on_all_ranks, wait_for_path, world_size
from tessera.runtime.files import read_bounded
from tessera.runtime.settings import flattened
from tessera.runtime.user_error import printable

log = logging.getLogger(__name__)
STEP = re.compile(r"step-(\d{8,})")
TRAINER_KEYS = {"position", "processes", "engine", "optimizer_steps", "loss_scale", "settings", "versions"}
"""Keys that trainer.json must have. The value of "position" is the `TrainState`."""
TRAINER_BYTES = 2**26
"""Largest size of trainer.json in bytes."""
LARGEST_COUNT = 2**53
"""Largest number of steps or images in trainer.json. JSON readers represent larger numbers inexactly."""
NOT_COMPARED = (
    "resume", "config", "output", "dry_run", "overwrite", "workers", "source.commands", "loader.crops", "shard_counts",
    "mixture", "samples", "gpu", "gpus", "shards", "images",
)  # fmt: skip
"""Settings that may change between a run and its continuation without a warning."""

DATA = ("data.shards", "evaluation.train", "evaluation.val", "evaluation.maps_train", "evaluation.maps_val")
"""Settings that hold SHARDS, of which relative and absolute paths are the same."""


class CheckpointError(RankError):
    """Raised when a checkpoint cannot be written, is damaged, or does not fit the run."""


@dataclass
class TrainState:
    """Progress of a run, and other state that a resumed run needs."""

    step: int = 0
    """Number of steps done, including skipped steps."""
    images: int = 0
    """Number of images seen, over all processes."""
    skipped_steps: int = 0
    """Number of steps whose loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    """Number of skipped steps since the last step that was not skipped. Steps that were skipped because of a float16
    overflow do not count."""
    corrupt_images: int = 0
    """Number of times that a corrupt image was replaced by another image, over all processes."""
    alarm: dict[str, Any] = field(default_factory=dict)
    """State of the collapse alarm."""
    scores: dict[str, Any] = field(default_factory=dict)
    """Accuracies so far (`monitoring.verdict.Scores`) of k-NN, or of the classifier if the method is supervised."""
    unscored: dict[str, Any] = field(default_factory=dict)
    """Metrics of the last step if the run was stopped before it evaluated this step, else empty. The resumed run
    evaluates the step, and then writes its metrics."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in OUTPUT/checkpoints, oldest first."""
    found = [p for p in folder.glob("step-*") if STEP.fullmatch(p.name) and (p / "trainer.json").exists()]
    return sorted(found, key=lambda p: int(p.name[5:]))


def restore(path: Path, accelerator: Accelerator, engine: Engine, *, point: bool = True) -> TrainState:
    """Load a checkpoint into the engine's method and optimizer and into the random generators. Collective.

    Return the train state of the checkpoint.

    Args:
        point: True to point the link `latest` to the checkpoint.

    Raises:
        CheckpointError: the tensors of the checkpoint differ from those of the run, or its files are damaged.
    """
    path = path.resolve()  # resolve the link, because `latest` may change while the checkpoint is read
    trainer = read_trainer(path)
    verify(path)
    # The run may have been killed after it wrote this checkpoint, but before it pointed `latest` to the checkpoint.
    if point:
        run_on_all_ranks(lambda: point_latest(path.parent, path.name) if accelerator.is_main_process else None)
    state = engine.local_state()
    try:
        run_on_all_ranks(lambda: read(state, path))
    except RankError as error:
        raise CheckpointError(f"{path} does not fit this run: {error}") from error
    engine.after_load(trainer["optimizer_steps"])
    if accelerator.scaler is not None and trainer["loss_scale"]:
        accelerator.scaler.load_state_dict(trainer["loss_scale"])
    if trainer["processes"] == accelerator.num_processes:
        states = path / f"random-{accelerator.process_index:05d}.pt"
        try:
            set_random_states(weight_files.read(states))
        except Exception as error:  # torch raises many kinds of errors for a damaged file, and executes no code
            raise _damaged(path, [f"{states.name} contains no random states ({type(error).__name__})"]) from error
    else:
        log.info(
            "%s was written by %d processes, but this run has %d. Samples, crops, masks and drop path stay the same. "
            "Other random numbers of the model, such as dropout, start anew, so losses may differ slightly from those "
            "of %d processes.",
            path.name,
            trainer["processes"],
            accelerator.num_processes,
            trainer["processes"],
        )
    return TrainState(**trainer["position"])


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
    faults = {fault for of_rank in gather_objects(manifest.wrong_sizes(path)) for fault in of_rank}
    if not faults:
        own = manifest.wrong_checksums(path, rank(), world_size())
        faults = {fault for of_rank in gather_objects(own) for fault in of_rank}
    if faults:
        raise _damaged(path, sorted(faults))


def read_trainer(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's trainer.json. Collective.

    Raises:
        CheckpointError: the file is missing on a node, is damaged, or was written by another version of this program.
    """
    return run_on_all_ranks(lambda: _read_trainer(path))


def read_train_state(path: Path) -> TrainState:
    """Return the train state of a checkpoint. Collective. Raise the same errors as `read_trainer`."""
    return TrainState(**read_trainer(path)["position"])


def _absolute(shards: str | list[str] | None) -> list[str]:
    """Return the paths of SHARDS as absolute paths."""
    return [os.path.abspath(one) for one in ([shards] if isinstance(shards, str) else shards or [])]


def check_fits(path: Path, settings: dict[str, Any]) -> None:
    """Check that a checkpoint has the method and encoder of the run, and warn about other changed settings. Collective.

    A checkpoint may lack an encoder setting that was introduced after the checkpoint was written. The check then uses
    the default of the encoder variant.

    Args:
        settings: resolved settings of the run to resume.

    Raises:
        CheckpointError: the method or an encoder setting differs. The message names all settings that differ.
    """
    saved = read_trainer(path)["settings"]
    saved["encoder"] = _encoder_defaults(saved["encoder"].get("variant")) | saved["encoder"]
    settings = settings | {"encoder": _encoder_defaults(settings["encoder"].get("variant")) | settings["encoder"]}
    old, new = flattened(saved), flattened(settings)
    same = {"data.shards"} if all(saved.get(name) == settings.get(name) for name in ("shards", "samples")) else set()
    same |= {name for name in DATA if _absolute(old.get(name)) == _absolute(new.get(name))}
    changed = [
        f"{name} {old.get(name)} -> {new.get(name)}"
        for name in sorted(old | new)
        if old.get(name) != new.get(name) and name not in NOT_COMPARED and name not in same
    ]
    if changed:
        log.warning("settings changed since %s: %s", path.name, ", ".join(changed))
    ordering = ("seed", "batch_size", "shards")
    differing = sorted(name for name in old | new if old.get(name) != new.get(name))
    if names := [name for name in differing if name in ordering or name.startswith("stream.")]:
        reasons = [_of_data(old, new) if one == "shards" else f"{one} is {new[one]}" for one in names]
        cures = [
            f"resume with --{name} {old[name]}" for name in names if name != "shards" and old.get(name) is not None
        ]
        cures += ["restore the data, or list the old shards first and new ones after them"] if "shards" in names else []
        log.warning(
            "the order of the samples changes, because %s, but %s was written with other data or settings. The "
            "run goes on with all images, but some may be used twice and others not at all in the present pass over "
            "the data.%s",
            *(" and ".join(reasons), path.name, f" To keep the order, {' and '.join(cures)}." if cures else ""),
        )
    differ = [
        f"{name} is {old.get(name)} in the checkpoint and {new.get(name)} in this run"
        for name in old | new
        if (name == "method" or name.startswith("encoder.")) and old.get(name) != new.get(name)
    ]
    if differ:
        raise CheckpointError(
            f"{path} is a checkpoint of another run: {'; '.join(differ)}. Resume with the run's own settings "
            "(remove the flags that change them), or start a new run in another --output."
        )


def _of_data(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return the difference between the data of a checkpoint and those of the run."""
    before, now = old.get("images"), new.get("images")
    if not isinstance(before, int) or not isinstance(now, int) or before == now:
        return "the shards have other names or sizes"
    noun = "image" if abs(before - now) == 1 else "images"
    change = f"{before - now:,} fewer" if now < before else f"{now - before:,} more"
    return f"the data have {change} {noun} ({before:,} before, {now:,} now)"


def _encoder_defaults(variant: object) -> dict[str, Any]:
    """Return the default settings of an encoder variant as JSON values. Return an empty dict for an unknown variant."""
    if not isinstance(variant, str) or variant not in encoders.VARIANTS:
        return {}
    parameters = inspect.signature(encoders.family(variant)).parameters
    settings = {name: encoders.VARIANTS[variant].get(name, parameter.default) for name, parameter in parameters.items()}
    return json.loads(json.dumps({k: v for k, v in settings.items() if v is not inspect.Parameter.empty}))


def _read_trainer(path: Path) -> dict[str, Any]:
    file = path / "trainer.json"
    try:
        wait_for_path(file)
        trainer = json.loads(read_bounded(file, TRAINER_BYTES))
    except RankError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise _damaged(path, [f"{file.name} cannot be read ({error.strerror})"]) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, [f"{file.name} is not valid JSON ({error})"]) from error
    fits = isinstance(trainer, dict) and trainer.keys() >= TRAINER_KEYS and isinstance(trainer["position"], dict)
    if not fits or not {"step"} <= trainer["position"].keys() <= TrainState.__dataclass_fields__.keys():
        raise CheckpointError(
            f"{path} was written by another version of this program, and only that version can continue it. "
            f"To start a new run from its encoder, use --init_from {shlex.quote(str(path))}."
        )
    if fault := _wrong_value(trainer):
        raise _damaged(path, [f"{file.name} has an invalid value of {fault}"])
    return trainer


def _wrong_value(trainer: dict[str, Any]) -> str | None:
    """Return the name of an entry of trainer.json that has an invalid value, or None if all values are valid."""
    counts = {"processes": trainer["processes"], "optimizer_steps": trainer["optimizer_steps"]}
    for one in dataclasses.fields(TrainState):
        value = trainer["position"].get(one.name, 0 if one.type is int else {})
        if one.type is int:
            counts[one.name] = value
        elif not isinstance(value, dict):
            return one.name
    for name, value in counts.items():
        if not isinstance(value, int) or not 0 <= value <= LARGEST_COUNT:
            return name
    alarm, scores = (trainer["position"].get(name, {}) for name in ("alarm", "scores"))
    rung = alarm.get("rung", [])
    valid = {
        "alarm.in_a_row": _all_numbers(alarm.get("in_a_row", {})),
        "alarm.largest_rank": _is_number(alarm.get("largest_rank", 0)),
        "alarm.rung": isinstance(rung, list) and all(isinstance(kind, str) for kind in rung),
        "scores.history": _is_history(scores.get("history", [])),
        "scores.linear": _is_history(scores.get("linear", [])),
        "scores.newest": _all_numbers(scores.get("newest", {})),
        "scores.last": _all_numbers(scores.get("last", {})),
        "scores.pixels": _is_number(scores.get("pixels", 0)),
        "unscored": _all_numbers(trainer["position"].get("unscored", {})),
    }
    for name, is_valid in valid.items():
        if not is_valid:
            return name
    settings = trainer["settings"]
    if not isinstance(settings, dict):
        return "settings"
    if not isinstance(settings.get("method"), str):
        return "settings.method"
    if not isinstance(settings.get("encoder"), dict):
        return "settings.encoder"
    return _wrong_order(settings)


def _wrong_order(settings: dict[str, Any]) -> str | None:
    """Return the name of an invalid setting of the sample order that a resumed run reads, or None."""
    try:
        batch_ranges(settings.get("skip_batches"))
    except (TypeError, ValueError):
        return "settings.skip_batches"
    stream = settings.get("stream", {})
    growth = stream.get("growth") or [] if isinstance(stream, dict) else None
    if not isinstance(growth, list) or not all(_is_counts(row) and len(row) == 3 for row in growth):
        return "settings.stream"
    mixture = settings.get("mixture", [])
    if not isinstance(mixture, list) or not all(
        isinstance(row, list) and row and _is_counts(row[:1]) for row in mixture
    ):
        return "settings.mixture"
    return None if _is_counts(settings.get("shard_counts", [])) else "settings.shard_counts"


def _is_counts(values: Any) -> bool:
    """Return True for a list of integers that a number of steps or images may have."""
    return isinstance(values, list) and all(type(one) is int and 0 <= one <= LARGEST_COUNT for one in values)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= LARGEST_COUNT)


def _all_numbers(values: object) -> bool:
    """Return True for a dict whose values are numbers."""
    return isinstance(values, dict) and all(map(_is_number, values.values()))


def _is_history(rows: object) -> bool:
    """Return True for a list of steps and accuracies."""
    return isinstance(rows, list) and all(isinstance(r, list) and len(r) == 2 and all(map(_is_number, r)) for r in rows)


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

    If the disk does not support symlinks, only log a warning. Readers then use the checkpoint with the highest step. If
    the run was copied without links, `latest` is a folder. This folder is removed if it is a copy of a checkpoint.

    Raises:
        CheckpointError: `latest` is a folder, but not a copy of a checkpoint.
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
    if latest.is_dir() and not latest.is_symlink():
        adopt_latest(checkpoints)
        if latest.is_dir():  # a copy of a checkpoint that exists
            latest.rename(checkpoints / ".copy.part")  # first renamed, so that a kill leaves no partial folder
            shutil.rmtree(checkpoints / ".copy.part")
    os.replace(new, latest)


def adopt_latest(checkpoints: Path, *, rename: bool = True) -> Path | None:
    """Rename the folder `latest` to the name of its step, unless a checkpoint with that name already exists.

    `latest` is a folder instead of a link if a run was copied by a program that follows links. If `latest` is a link,
    do nothing. Return the new path, or None if nothing is to be renamed.

    Args:
        rename: False to change nothing, and only check and return.

    Raises:
        CheckpointError: `latest` is a folder without a checkpoint, or its checkpoint differs from the checkpoint that
            already has this name.
    """
    latest = checkpoints / "latest"
    if latest.is_symlink() or not latest.is_dir():
        return None
    if not (latest / "trainer.json").exists():
        raise CheckpointError(f"{latest} is a folder without a checkpoint. Move it away.")
    step = checkpoints / f"step-{_read_trainer(latest)['position'].get('step', 0):08d}"
    if not step.exists():
        if rename:
            latest.rename(step)
            log.info("%s is a folder, not a link. It was renamed to %s.", latest, step.name)
        return step
    if (step / manifest.NAME).read_bytes() != (latest / manifest.NAME).read_bytes():
        raise CheckpointError(
            f"{latest} is a folder, not a link, and its checkpoint differs from {step.name} although both have the "
            "same step. Move one of the two folders away."
        )
    return None
