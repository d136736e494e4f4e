"""The interface of all methods."""

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from data.batch import Batch
from data.collate import Transform
from encoders.base import Encoder
from pretrain.optim.adamw import OptimConfig, ResolvedOptim, flat_blocks
from runtime.settings import Section

ResolvedT = TypeVar("ResolvedT", bound=Section)


class Method(nn.Module):
    """A pretraining method: one module with the encoder, the heads and, if there is one, the teacher.

    `METHODS[name](encoder, config, steps)` builds a method from resolved settings. The engine distributes the module as
    a whole.
    """

    Config: ClassVar[type[Section]]
    """Settings of the method."""
    image_size: int
    """side of the images in pixels for the k-NN evaluation during training"""
    drop: bool = False
    """True if the encoder drops hidden tokens, False if it replaces them by a mask token"""
    small_settings: ClassVar[dict[str, Any]] = {}
    """settings for images of 16 pixels and the smallest encoders, used by tests and benchmarks"""
    rank_hint: str = "Try a lower optim.lr, or a longer optim.warmup_steps."
    """advice of the collapse alarm when the rank of the features falls"""
    has_panels: bool = False
    """True if the method has pictures of its predictions (`panels`). Full weights are gathered on the main process to
    make these pictures."""

    @staticmethod
    def resolve(
        config: Any, optim: OptimConfig, images: int, batch_size: int, steps: int
    ) -> tuple[Section, ResolvedOptim]:
        """Return the settings of the method and of the optimizer, with values for all settings that were not given.

        A method may give a default to any setting of the optimizer; see `fill`.

        Args:
            config: `Config`, as the user gives it.
            images: Images of the data set.
            batch_size: Images of one optimizer step.
            steps: Number of steps of the run.
        """
        raise NotImplementedError

    @staticmethod
    def encoder_defaults(config: Any, family: type[Encoder]) -> dict[str, Any]:
        """Return default encoder settings, which the user may override. `config` is resolved."""
        del config, family
        return {}

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of this process's images, a float32 scalar, and scalar metrics. The method must not wait for
        the device."""
        raise NotImplementedError

    def transform(self) -> Transform:
        """Return the transform that draws crops, colours and masks of a sample in the loader."""
        raise NotImplementedError

    def after_step(self, step: int) -> None:
        """Update a teacher or a centre after the optimizer step. Not called after a skipped step. Collective."""

    def trained_encoder(self) -> Encoder:
        """Return the encoder to export and to evaluate."""
        raise NotImplementedError

    def trained_parts(self) -> list[nn.Module]:
        """Return the trained modules, which are also the units of gradient clipping by module."""
        raise NotImplementedError

    def units(self) -> list[nn.Module]:
        """Return the blocks of all encoders. An engine that shards weights gathers one block at a time."""
        return [block for part in self.modules() if isinstance(part, Encoder) for block in flat_blocks(part)]

    def frozen(self) -> dict[str, int]:
        """Return prefixes of parameter names -> number of steps at the start of the run with learning rate 0."""
        return {}

    def lr_factors(self) -> dict[str, float]:
        """Return prefixes of parameter names -> factor on the learning rate."""
        return {}

    def collapse_signs(self, record: Mapping[str, float]) -> dict[str, str]:
        """Return the signs of collapse in the metrics of one step: kind -> message that names settings to change.

        The collapse alarm adds the rank of the features, which every method reports as `feature_rank`.
        """
        return {}

    def health(self) -> dict[str, Any]:
        """Return diagnostics that are too expensive to compute at every step. Collective; equal on all processes."""
        return {}

    def panels(self, batch: Batch, images: int) -> dict[str, list[list[Tensor]]]:
        """Return pictures of the method's predictions for the first `images` of a batch.

        The keys are names of pictures. A value has one row per image, and a row is a list of normalised pictures (C, H,
        W).
        """
        return {}


def freeze(encoder: Encoder, unused: tuple[str, ...]) -> None:
    """Freeze the submodules and parameters of an encoder whose names are in `unused`.

    A trainable parameter without gradient would make DDP fail.
    """
    for name, parameter in encoder.named_parameters():
        if name.partition(".")[0] in unused:
            parameter.requires_grad_(False)


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast on the device of `x`. The meta device, used by `dry_forward`, does not support
    autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def supported(family: type[Encoder], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `settings` that the encoder's constructor accepts."""
    known = inspect.signature(family).parameters
    return {name: value for name, value in settings.items() if name in known}


def fill(config: Section, resolved: type[ResolvedT], defaults: Mapping[str, Any]) -> ResolvedT:
    """Return `config` as the type `resolved`, with `defaults` for the settings that were not given or are None."""
    given = {name: getattr(config, name) for name in config.model_fields_set}
    return resolved(**{**defaults, **{name: value for name, value in given.items() if value is not None}})
