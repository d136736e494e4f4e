"""The interface of all methods."""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from data.batch import Batch
from data.collate import Transform
from encoders.base import Encoder


class Method(nn.Module):
    """One module that holds everything a method trains or averages, wrapped whole by the engine.

    A method's class also has its settings, `Config`; `resolve(config, optim, images, batch_size, steps)`, what of them
    and of the optimizer's follows from the data and the length of the run; and `encoder_defaults(config, family)`, the
    encoder settings that hold for it unless the user gives others.
    """

    image_size: int
    """side in pixels of the images on which the encoder is scored while it trains"""
    drop: bool = False
    """whether hidden tokens are left out of the encoder"""
    small_settings: ClassVar[dict[str, Any]] = {}
    """settings for images of 16 pixels and the smallest encoders, used by tests and benchmarks"""
    rank_hint: str = "Try a lower optim.lr, or a longer optim.warmup_steps."
    """advice of the collapse alarm when the rank of the features falls"""
    has_panels: bool = False
    """whether there are pictures of what it does (`panels`), which take the whole method on one process"""

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss () float32 of this process's images, and metrics () that cost no wait for the device."""
        raise NotImplementedError

    def transform(self) -> Transform:
        """What happens to a sample in the loader."""
        raise NotImplementedError

    def after_step(self, step: int) -> None:
        """Called on every process after the optimizer moved; not called when the step was skipped."""

    def trained_encoder(self) -> Encoder:
        """The encoder to export and to evaluate."""
        raise NotImplementedError

    def trained_parts(self) -> list[nn.Module]:
        """The modules that the optimizer moves, each once: the units of clipping by module."""
        raise NotImplementedError

    def units(self) -> list[nn.Module]:
        """The repeated parts, teacher's and student's: an engine that shards weights gathers them one at a time."""
        blocks = [block for part in self.modules() if isinstance(part, Encoder) for block in part.blocks]
        stages = (block if isinstance(block, nn.ModuleList) else [block] for block in blocks)  # Twins lists stages
        return [block for stage in stages for block in stage]

    def frozen(self) -> dict[str, int]:
        """Prefixes of parameter names, and for how many steps they keep learning rate 0."""
        return {}

    def collapse_signs(self, record: Mapping[str, float]) -> dict[str, str]:
        """Return the signs of collapse in the metrics of one step: kind -> message that names settings to change.

        The collapse alarm adds the rank of the features, which every method reports as `feature_rank`.
        """
        return {}

    def health(self) -> dict[str, Any]:
        """Numbers about the last forward that are too dear for every step. Called on all processes together, on
        which it is the same."""
        return {}

    def panels(self, batch: Batch, images: int) -> dict[str, list[list[Tensor]]]:
        """Pictures of what the method does to the first `images` of a batch: name -> one row an image, of normalised
        pictures (C, H, W)."""
        return {}


def freeze(encoder: Encoder, unused: tuple[str, ...]) -> None:
    """Parts of an encoder that a method does not train: a trained parameter without gradient would stop DDP."""
    for name, parameter in encoder.named_parameters():
        if name.partition(".")[0] in unused:
            parameter.requires_grad_(False)


def supported(family: type[Encoder], settings: dict[str, Any]) -> dict[str, Any]:
    """Return those of `settings` that the constructor of the encoder has."""
    known = inspect.signature(family).parameters
    return {name: value for name, value in settings.items() if name in known}


def fill(config: Any, defaults: dict[str, Any]) -> Any:
    """The settings with values for those that the user left open."""
    return config.model_copy(update={name: value for name, value in defaults.items() if getattr(config, name) is None})
