"""The start of a run from the weights of another run."""

import logging
from collections.abc import Sequence
from pathlib import Path

from tessera.pretrain.checkpoints.resume import read_trainer
from tessera.pretrain.export import find_on_main
from tessera.pretrain.methods.base import Method
from tessera.runtime.settings import SettingsError

log = logging.getLogger(__name__)


def gives_heads(init_from: str, methods: Sequence[str]) -> bool:
    """Return True if a run that starts from `init_from` takes its heads, too: it is a run of one of `methods`.
    Collective."""
    checkpoint = find_on_main(Path(init_from))  # None for a weight file, a name, or a folder without a checkpoint
    return checkpoint is not None and read_trainer(checkpoint)["settings"]["method"] in methods


def take_weights(method: Method, other: Method, folder: Path) -> None:
    """Fill `method` with all weights of `other`, the method of the run in `folder`.

    Raises:
        SettingsError: the weights do not fit.
    """
    try:
        method.start_from(other)
    except ValueError as error:
        raise SettingsError(f"init_from: {error}") from error
    except RuntimeError as error:
        raise SettingsError(
            f"The heads of the run {folder} do not fit the settings ({error}). Set the settings of the heads as in "
            f"{folder / 'config.yaml'}, or start from its encoder alone: --init_from {folder / 'encoder.safetensors'}."
        ) from error
    log.info("student, teacher and heads start from %s", folder)
