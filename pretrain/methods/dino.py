"""DINO (2104.14294): a student is trained to match the output of a teacher on other crops of the same image.

The teacher is the moving average of the student, and its output is centred and sharpened.

Shape letters: B images per process; G global crops, L local crops and S = G + L crops per image; D width of the
encoder; K prototypes.
"""

from typing import Any

import torch
from torch import Tensor

from tessera import encoders
from tessera.data.batch import Batch
from tessera.data.crops import MultiCrop, sides
from tessera.encoders.base import Encoder, encode, pooled_features
from tessera.encoders.unused import freeze_unused
from tessera.pretrain.methods.cross_entropy import crop_loss
from tessera.pretrain.methods.heads import Head
from tessera.pretrain.methods.method import RunSize
from tessera.pretrain.methods.teacher_student import (
    TeacherStudent,
    TeacherStudentConfig,
    teacher_defaults,
)
from tessera.pretrain.optim.adamw import OptimConfig


class DINOConfig(TeacherStudentConfig, frozen=True):
    """Settings of DINO. Missing values are derived from the number of images, the batch size and the length of the
    run."""


def resolve(config: DINOConfig, optim: OptimConfig, size: RunSize) -> tuple[DINOConfig, OptimConfig]:
    """Return the settings of DINO and of the optimizer, with derived values for settings that are not given.

    For data sets of ImageNet's size, the result is the published recipe. For a shorter run, the momentum is lower, and
    the warm-ups and the freezing of the prototypes are shorter. For a smaller data set, see `teacher_defaults`.
    """
    epoch, steps = size.epoch, size.steps
    long = size.large and steps >= 200 * epoch
    optim_defaults = {
        "lr": 5e-4 if size.large else size.small_lr(4e-3),
        "min_lr": 1e-6,
        "warmup_steps": min(10 * epoch, steps // 10),
        "weight_decay": 0.04,
        "weight_decay_end": 0.4 if size.large else 0.04,
        "betas": (0.9, 0.999),
        "clip": 3.0,
    }
    defaults = teacher_defaults(size, horizon=250) | {
        "freeze_steps": min(epoch, steps // 20),
        "teacher_temperature": 0.07 if long else 0.04,
        "teacher_temperature_steps": min(30 * epoch, steps // 3),
    }
    return config.filled(defaults), optim.filled(optim_defaults)


class DINO(TeacherStudent):
    """The DINO method: the student sees all crops, and the teacher the global ones."""

    Config = DINOConfig
    resolve = staticmethod(resolve)
    section = "dino"

    def __init__(self, encoder: Encoder, config: DINOConfig, steps: int) -> None:
        """Build the student, and the teacher as a copy of the student. `steps` is the length of the run."""
        freeze_unused(encoder, sides(config), packed=True)
        c = config
        kinds: dict[str, Any] = {"layers": c.head_layers, "batch_norm": c.batch_norm, "fixed_length": c.norm_last_layer}
        head = Head(encoder.dim, c.prototypes, c.hidden_dim, c.bottleneck_dim, **kinds)
        super().__init__({"encoder": encoder, "head": head}, config, steps)

    @staticmethod
    def encoder_defaults(config: DINOConfig, variant: str, size: RunSize) -> dict[str, Any]:
        published: dict[str, Any] = {"drop_path": 0.1}
        small = {"drop_path": 0.0, "init": "xavier", "position_init": "sincos"}
        return encoders.supported(variant, {"image_size": config.global_size} | (published if size.large else small))

    def transform(self) -> MultiCrop:
        return MultiCrop(self.config)

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of B images with global crops (G * B, C, H, W) and local crops (L * B, C, h, w)."""
        view = batch.views[0]
        with torch.no_grad():
            seen = pooled_features(self.teacher["encoder"], view.images)  # (G * B, D)
        target, metrics = self.crop_targets(seen, view, step)  # (G, B, K)
        pooled, _ = encode(self.student["encoder"], [one.images for one in batch.views], pooled_only=True)  # (S * B, D)
        logits = self.student["head"](pooled, factored=True)  # (S * B, K)
        crops = logits.unflatten(sum(one.crops for one in batch.views))  # (S, B, K)
        cross_entropy = crop_loss(crops, target, self.config.student_temperature)
        # Keep the indices instead of `target`, which would occupy memory until the next step.
        self._last = (seen.float(), {"": target.flatten(0, 1).argmax(-1)})
        metrics["teacher_student_kl"] = cross_entropy.detach() - metrics["teacher_entropy"]
        return cross_entropy, metrics
