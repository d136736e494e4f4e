"""Build the method of another run or checkpoint, and fill it with its weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tessera import encoders
from tessera.encoders.checks import MOST_BLOCKS
from tessera.pretrain.checkpoints.resume import CheckpointError, list_checkpoints, open_checkpoint, verify
from tessera.pretrain.config import AUTO, RECOMPUTE
from tessera.pretrain.engines.local_state import read, unsharded
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.method import Method
from tessera.runtime.collectives import RankError, broadcast_object, patient_group, run_on_all_ranks
from tessera.runtime.settings import validate
from tessera.runtime.user_error import printable

LARGEST_SIZE = 2**24
"""Largest integer that a method setting in a checkpoint may have, such as the number of prototypes."""
LARGEST_STEPS = 2**53
"""Upper bound of the length of a run in a checkpoint, in steps."""


def find(path: Path) -> Path:
    """Return `path` if it is a checkpoint. Return the newest checkpoint if `path` is a run folder.

    Raises:
        ValueError: `path` is neither a checkpoint nor a run folder with a checkpoint.
    """
    path = path.expanduser()
    if path.is_file():
        raise ValueError(f"{path} is a file. Give the run folder, or a checkpoint in it.")
    if (path / "trainer.json").is_file():
        return path.resolve()
    found = list_checkpoints(path / "checkpoints")
    if not found:
        raise ValueError(
            f"{path} contains no checkpoint: neither trainer.json nor checkpoints/step-... is in it. Give a run folder "
            "or a checkpoint."
        )
    return found[-1].resolve()


def find_on_main(path: Path) -> Path | None:
    """Return on all processes the checkpoint that `find` returns on the main process, or None if there is none.

    Collective. The processes do not search on their own, because a new file on a shared disk may not be visible to all
    of them yet.
    """
    try:
        found = find(path)
    except ValueError:
        found = None
    return broadcast_object(found)


def load_run(path: Path, methods: Sequence[str], *, weights: bool = True) -> Method | None:
    """Return the method of a run folder or a checkpoint, with its weights. Collective.

    Return None if the method of the run is not in `methods`, or the folder has no checkpoint.

    Args:
        weights: False to return a method on the meta device. The process still takes part in the collective.

    Raises:
        CheckpointError: the checkpoint is damaged, or was written by another version of this program.
    """
    checkpoint = find_on_main(path)
    if checkpoint is None:
        return None
    settings = open_checkpoint(checkpoint).settings
    if settings["method"] not in methods:
        return None
    verify(checkpoint)
    method = on_meta(settings, checkpoint)
    with patient_group() as group:  # processes with `weights=False` wait here until the others have read the weights
        fill(method if weights else nn.Module(), "method.", checkpoint, group)
    return method


def build(described: dict[str, Any]) -> Method:
    """Build a newly initialised method.

    Args:
        described: settings in a checkpoint, or the contents of the .json file of an exported method.

    Raises:
        ValueError: `described` does not describe a method.
    """
    try:
        chosen, given, steps = METHODS[described["method"]], described[described["method"]], described["steps"]
        if not isinstance(steps, int) or not 0 < steps < LARGEST_STEPS:
            raise ValueError(f"steps must be a positive number, not {printable(repr(steps)[:100])}")
        for name, value in given.items():
            limit = MOST_BLOCKS if name.endswith(("depth", "layers")) else LARGEST_SIZE
            if isinstance(value, int) and value > limit:
                raise ValueError(f"{printable(name)} is larger than {limit}")
        # a run, not an encoder, chooses what `auto` means
        encoder = {n: v for n, v in described["encoder"].items() if (n, v) != (RECOMPUTE, AUTO)}
        return chosen(encoders.build(**encoder), validate(chosen.Config, given), steps)
    except (ArithmeticError, AttributeError, KeyError, RecursionError, RuntimeError, TypeError) as error:
        reason = printable(str(error)[:200])
        raise ValueError(f"the settings do not describe a method ({type(error).__name__}: {reason})") from error


def on_meta(described: dict[str, Any], checkpoint: Path) -> Method:
    """Build the method of a checkpoint on the meta device from `described`, the settings in the checkpoint.

    Raises:
        CheckpointError: the settings do not describe a method.
    """
    try:
        with torch.device("meta"):
            return build(described)
    except ValueError as error:
        raise CheckpointError(f"the settings in {checkpoint / 'trainer.json'} cannot be used: {error}") from error


def fill(module: nn.Module, prefix: str, checkpoint: Path, group: dist.ProcessGroup | None = None) -> None:
    """Load weights into `module`, which is on the meta device. Collective in `group`.

    Args:
        prefix: prefix of the names under which `checkpoint` stores the tensors of `module`.
    """
    state = {name: torch.empty_like(tensor, device="cpu") for name, tensor in module.state_dict().items()}
    wanted = {prefix + name: unsharded(tensor) for name, tensor in state.items()}
    try:
        run_on_all_ranks(lambda: read(wanted, checkpoint, strict=False), group)
    except RankError as error:
        raise CheckpointError(f"the weights in {checkpoint} do not fit its settings: {error}") from error
    module.load_state_dict(state, assign=True)
