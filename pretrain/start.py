"""The start of a run from the weights of another run."""

import logging
from collections.abc import Sequence
from pathlib import Path

from pretrain.checkpoints.resume import read_trainer
from pretrain.export import find, load_run
from pretrain.methods.base import Method

log = logging.getLogger(__name__)


def gives_heads(init_from: str, methods: Sequence[str]) -> bool:
    """Return True if a run that starts from `init_from` takes its heads, too: it is a run of one of `methods`."""
    try:
        return read_trainer(find(Path(init_from)))["settings"]["method"] in methods
    except ValueError:  # a weight file, a name, or a folder without a checkpoint
        return False


def start_from_run(method: Method, folder: Path) -> None:
    """Fill a method with all weights of the run in `folder`, if it is a run of a method that the method continues.

    Raises:
        ValueError: the weights do not fit.
    """
    other = load_run(folder, method.continues) if folder.is_dir() else None
    if other is None:
        return
    try:
        method.start_from(other)
    except RuntimeError as error:
        raise ValueError(
            f"The heads of the run {folder} do not fit the settings ({error}). Set the settings of the heads as in "
            f"{folder / 'config.yaml'}, or start from its encoder alone: --init_from {folder / 'encoder.safetensors'}."
        ) from error
    log.info("student, teacher and heads start from %s", folder)
