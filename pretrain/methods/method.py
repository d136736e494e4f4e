"""The interface of all pretraining methods."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tessera.data.batch import Batch
from tessera.data.collate import Transform
from tessera.encoders.base import Encoder
from tessera.encoders.images import Images
from tessera.pretrain.optim.adamw import OptimConfig, flat_blocks
from tessera.runtime.settings import Section

LARGE = 100_000
"""Smallest number of training images for which the published recipes apply."""


@dataclass(frozen=True)
class RunSize:
    """Size of a run, from which settings without a value are derived."""

    images: int
    """Number of training images."""
    batch_size: int
    """Number of images per optimizer step."""
    steps: int
    """Number of optimizer steps."""
    classes: int | None = None
    """Number of classes of the training images; None if the method uses no labels."""
    accumulate: int = 1
    """Number of forward passes per optimizer step."""
    pretrained: bool = False
    """True if the encoder starts from given weights (`init_from`)."""

    @property
    def epoch(self) -> int:
        """Number of steps per epoch, at least 1."""
        return max(self.images // self.batch_size, 1)

    @property
    def large(self) -> bool:
        """True if there are enough images for the published recipes, which were tuned on ImageNet."""
        return self.images >= LARGE

    def small_lr(self, base: float) -> float:
        """Return the `optim.lr` that gives the peak learning rate `base` * sqrt(batch size / 1024).

        `optim.lr` is the learning rate for a batch of 256 images. `optim.lr_scaling` must be linear.
        """
        return float(f"{base * math.sqrt(self.batch_size / 1024) * 256 / self.batch_size:.3g}")


class Method(nn.Module):
    """A pretraining method as one module, which holds the encoder, the heads and, for some methods, a teacher.

    `METHODS[name](encoder, config, steps)` builds a method from an encoder, resolved settings of class `Config` and the
    number of optimizer steps. The engine distributes the whole module over processes. Each process calls `forward` with
    its own images, and the gradients are averaged over processes. Processes may have different numbers of images: the
    loss and the metrics, which are means over the images of the process, are weighted by them. A mean over all
    processes is `runtime.collectives.average`.

    A method implements `Config`, `image_size`, `resolve`, `transform`, `forward`, `trained_encoder` and
    `trained_parts`. All other attributes and functions have defaults. `examples/ijepa` is an example.

    Every trainable parameter must get a gradient at each step. The constructor therefore freezes the parameters of the
    encoder that the method does not use, with `encoders.unused.freeze_unused`.

    Every tensor of a method must be a parameter or a buffer, so that engines can move it and checkpoints can store it.
    `forward` may change only running statistics, the buffers of modules whose attribute `track_running_stats` is true,
    such as torch's batch norm, whose batch statistics include all processes (`pretrain.methods.batch_norm`). The
    training loop averages running statistics over processes after a step, and restores them after a skipped step. A
    method changes other buffers in `after_step`.
    """

    Config: ClassVar[type[Section]]
    """class of the method's settings, which become the flags `--NAME.setting`"""
    image_size: int
    """side in pixels of the images that the evaluation during training encodes"""
    fixed_sizes: bool = False
    """true if the encoder gets batches of few different shapes; `--compile` then makes a graph for each shape"""

    @staticmethod
    def resolve(config: Any, optim: OptimConfig, size: RunSize) -> tuple[Section, OptimConfig]:
        """Return the settings of the method and of the optimizer, with all missing values filled in.

        A method may set the default of any optimizer setting; see `Section.filled`.

        Args:
            config: The method's settings as the user gave them, of type `Config`.
            optim: The optimizer's settings as the user gave them.
            size: Size of the data set, of the batch and of the run.
        """
        raise NotImplementedError

    def transform(self) -> Transform:
        """Return the transform with which the loader draws the crops, colours and masks of each sample."""
        raise NotImplementedError

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of this process's images as a float32 scalar, and scalar metrics by name.

        An implementation must not wait for the device. Under gradient accumulation, a step has several forward passes.

        Args:
            batch: Normalised images, with one view for each entry of `transform().views`. A view with n crops of B
                images is packed, or a tensor (n * B, C, H, W) in which crop i of image j has index i * B + j.
            step: Number of optimizer steps before this one.
        """
        raise NotImplementedError

    def trained_encoder(self) -> Encoder:
        """Return the encoder that is evaluated and exported."""
        raise NotImplementedError

    def trained_parts(self) -> list[nn.Module]:
        """Return the modules that the optimizer trains. If `optim.clip_by` is "module", the gradient of
        each of these modules is clipped separately."""
        raise NotImplementedError

    # Defaults of settings, and hooks of a run.

    small_settings: ClassVar[dict[str, Any]] = {}
    """settings for images of 16 pixels and the smallest encoders, used by tests and benchmarks"""
    continues: ClassVar[tuple[str, ...]] = ()
    """names of methods whose runs can initialise all weights of this method (`start_from`), not only the encoder"""
    together: int = 1
    """number of neighbouring images of a batch that stay on one process, because they are mixed"""
    needs_start: bool = False
    """True if the settings require an earlier run to start from (`init_from`)"""

    @staticmethod
    def encoder_defaults(config: Any, variant: str, size: RunSize) -> dict[str, Any]:
        """Return the method's defaults for the settings of an encoder variant. Settings that the user gives override
        these defaults.

        `config` holds the method's resolved settings. Use `encoders.supported` to drop the settings that the variant
        does not support.
        """
        del config, variant, size
        return {}

    def start_from(self, other: "Method") -> None:
        """Copy the weights of all parts from `other`, a method named in `continues`.

        Raises:
            ValueError: the weights of the encoder do not fit.
            RuntimeError: the weights of a head do not fit.
        """
        raise NotImplementedError

    def before_step(self, step: int) -> None:
        """Make the changes that are due before the forward passes of a step, such as those of a schedule. Collective.

        A second call for the same step must change nothing: a run that is stopped may repeat a step.
        """

    def after_step(self, step: int, updated: float | Tensor = 1.0) -> None:
        """Update weights that the optimizer does not train, such as a teacher's, after an optimizer step. Collective.

        Do not wait for the device.

        Args:
            step: Number of optimizer steps before this one.
            updated: 1, or 0 if the step was skipped, because its loss or gradient was not finite: then nothing may
                change. In a run, a float32 scalar on the device, also if an engine keeps weights on the CPU.
                `ema.update` takes it as an argument; for other updates, use `torch.where`.
        """

    def frozen(self) -> dict[str, int]:
        """Return the parameters that are frozen at the start of the run. The keys are prefixes of parameter names, and
        the values are numbers of steps with learning rate 0."""
        return {}

    def other_encoders(self) -> dict[str, Encoder]:
        """Return additional encoders, by name. A run trains and exports them, but evaluates only `trained_encoder`."""
        return {}

    def units(self) -> list[list[nn.Module]]:
        """Return the blocks of each encoder, in the order in which they run.

        An engine that shards weights gathers one block at a time and prefetches the next one.
        """
        return [flat_blocks(part) for part in self.modules() if isinstance(part, Encoder)]

    # Training with labels.

    needs_all_channels: ClassVar[bool] = False
    """True if images cannot have fewer channels (`data.fewer_channels`), for example because pixels are predicted."""
    supervised: ClassVar[bool] = False
    """True if the method trains a classifier with labels. `Config` then has the setting `classes`, and the accuracy of
    `logits` is evaluated in place of the k-NN accuracy."""
    classes: int | None = None
    """number of classes of the labels in training batches; None if the method uses no labels"""

    def logits(self, images: Images) -> Tensor:
        """Return the class scores of normalised images: (B, C, H, W) -> (B, classes)."""
        raise NotImplementedError

    # Observation of a run.

    rank_hint: str = "Try a lower optim.lr, or a longer optim.warmup_steps."
    """advice that the collapse alarm prints when the rank of the features falls"""
    has_panels: bool = False
    """True if `panels` returns pictures of the method's predictions. The full weights are then gathered on the main
    process before each call."""

    def health(self) -> dict[str, Any]:
        """Return metrics that are too expensive for every step. Collective; all processes get equal values.

        The collapse alarm and the advice read the effective rank of the features from the metric `feature_rank`.
        """
        return {}

    def collapse_signs(self, record: Mapping[str, float]) -> dict[str, str]:
        """Return the signs of collapse in the metrics of one step, as a dict from kind of collapse to message.

        The message names settings to change. Do not check the rank of the features, because the alarm checks it.
        """
        return {}

    def advice(self, record: Mapping[str, float]) -> list[str]:
        """Return possible reasons why the run does not learn, judged by the metrics of one step.

        Each reason comes with settings to try. The reasons are printed when the k-NN accuracy does not rise.
        """
        rank = [f"The rank of the features is {record['feature_rank']:.1f}."] if "feature_rank" in record else []
        return [*rank, "Try more steps, or another optim.lr."]

    def panels(self, batch: Batch, images: int) -> dict[str, list[list[Tensor]]]:
        """Return pictures of the method's predictions for the first `images` images of a batch, by name.

        Each value has one row per image, and a row is a list of normalised pictures (C, H, W).
        """
        return {}


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context that disables autocast on the device of `x`.

    On the meta device, the context does nothing, because that device does not support autocast.
    """
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
