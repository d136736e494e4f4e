"""DINO (2104.14294): a student is trained to match the output of a teacher on other crops of the same image.

The teacher is the moving average of the student, and its output is centred and sharpened.

Shape letters: B images per process; G global crops, L local crops and S = G + L crops per image; D width of the
encoder; K prototypes.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from tessera import encoders
from tessera.data.batch import Batch, View
from tessera.data.crops import MultiCrop, MultiCropConfig
from tessera.encoders.base import Encoder
from tessera.pretrain.methods.base import Method, RunSize, freeze, full_precision, unused_norms
from tessera.pretrain.methods.cross_entropy import crop_loss
from tessera.pretrain.methods.teacher_student import (
    Centering,
    Head,
    HeadShape,
    PendingCenter,
    encode,
    output_advice,
    output_signs,
    teacher_distribution,
)
from tessera.pretrain.monitoring.collapse import effective_rank
from tessera.pretrain.optim import ema
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.pretrain.optim.schedules import cosine, linear
from tessera.runtime.collectives import all_reduce_sum
from tessera.runtime.settings import Derived, derived


class DINOConfig(MultiCropConfig, frozen=True):
    """Settings of DINO. Missing values are derived from the number of images, the batch size and the length of the
    run."""

    prototypes: Derived[int] = derived(ge=2)
    """number of prototypes, which is the number of outputs of the head (K)"""
    hidden_dim: Derived[int] = derived(ge=1)
    """width of the head's hidden layers; default: 2048, or 512 for fewer than 100,000 images"""
    bottleneck_dim: Derived[int] = derived(ge=1)
    """width of the head's bottleneck, the last layer before the prototypes; default: 256, or 128 for fewer than 100,000
    images"""
    head_layers: int = Field(default=3, ge=1)
    """number of linear layers of the head before the prototypes"""
    batch_norm: Derived[bool] = derived()
    """use batch norm in the head, with statistics over one forward pass of all processes; default: true for fewer than
    100,000 images"""
    norm_last_layer: bool = True
    """fix the norm of every prototype vector at 1"""
    freeze_steps: Derived[int] = derived(ge=0)
    """number of steps at the start of the run during which the prototypes are not trained"""
    student_temperature: float = Field(default=0.1, gt=0)
    """softmax temperature of the student"""
    teacher_temperature: Derived[float] = derived(gt=0)
    """softmax temperature of the teacher after the warm-up of the temperature"""
    teacher_temperature_start: float = Field(default=0.04, gt=0)
    """softmax temperature of the teacher at the start of the run"""
    teacher_temperature_steps: Derived[int] = derived(ge=0)
    """number of steps of the linear warm-up of the teacher's temperature"""
    momentum: Derived[float] = derived(ge=0, le=1)
    """momentum of the teacher's moving average at the start of the run; the momentum rises to 1 along a cosine"""
    centering: Centering = "mean"
    """centring of the teacher's output: mean (subtract a running mean, as in DINO) or sinkhorn (Sinkhorn-Knopp, as in
    SwAV, 2006.09882)"""
    center_momentum: float = Field(default=0.9, ge=0, le=1)
    """momentum of the running mean of the teacher's output; used if `centering` is mean"""


def resolve(config: DINOConfig, optim: OptimConfig, size: RunSize) -> tuple[DINOConfig, OptimConfig]:
    """Return the settings of DINO and of the optimizer, with derived values for settings that are not given.

    For data sets of ImageNet's size, the result is the published recipe. For a smaller data set, the number of
    prototypes decreases with the number of images. For a shorter run, the momentum is lower, and the warm-ups and the
    freezing of the prototypes are shorter. With the published constants, the loss would stay at ln K on small data.
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
    defaults = {
        "prototypes": 2 ** round(math.log2(min(max(size.images / 8, 256), 65536))),
        "hidden_dim": 2048 if size.large else 512,
        "bottleneck_dim": 256 if size.large else 128,
        "batch_norm": not size.large,
        "freeze_steps": min(epoch, steps // 20),
        "teacher_temperature": 0.07 if long else 0.04,
        "teacher_temperature_steps": min(30 * epoch, steps // 3),
        "momentum": round(1 - 1 / min(max(steps / 6, 10), 250), 6),
    }
    return config.filled(defaults), optim.filled(optim_defaults)


class DINO(Method):
    """The DINO method: a student and a teacher, each an encoder with a head, and the centre of the teacher's output."""

    Config = DINOConfig
    resolve = staticmethod(resolve)
    small_settings: ClassVar[dict[str, Any]] = {
        "global_size": 16,
        "local_size": 12,
        "local_crops": 2,
        "hidden_dim": 32,
        "bottleneck_dim": 16,
        "prototypes": 64,
    }
    rank_hint = "Try a lower optim.lr, a longer optim.warmup_steps, or a higher dino.momentum."

    def __init__(self, encoder: Encoder, config: DINOConfig, steps: int) -> None:
        """Build the student, and copy the student to make the teacher. `steps` is the length of the run."""
        super().__init__()
        self.config = config
        self.steps = steps
        self.image_size = config.global_size
        packed = config.global_size % encoder.stride == config.local_size % encoder.stride == 0
        norms = unused_norms(encoder, tokens=False, packed=packed)
        freeze(encoder, (*norms, "mask_token", "pre_logits", "head", "head_dist"))
        widths = (config.prototypes, config.hidden_dim, config.bottleneck_dim)
        shape = HeadShape(*widths, config.head_layers, config.batch_norm, config.norm_last_layer)
        self.student = nn.ModuleDict({"encoder": encoder, "head": Head(encoder.dim, shape)})
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.center: Tensor
        self.register_buffer("center", torch.zeros(self.config.prototypes))
        self._pending = PendingCenter()
        # the teacher's pooled features in the last forward pass, and each row's most probable prototype; for health()
        self._last: tuple[Tensor, Tensor] | None = None
        self.train()

    @staticmethod
    def encoder_defaults(config: DINOConfig, variant: str, size: RunSize) -> dict[str, Any]:
        published: dict[str, Any] = {"drop_path": 0.1}
        small = {"drop_path": 0.0, "init": "xavier", "position_init": "sincos"}
        return encoders.supported(variant, {"image_size": config.global_size} | (published if size.large else small))

    def transform(self) -> MultiCrop:
        return MultiCrop(self.config)

    def train(self, mode: bool = True) -> "DINO":
        super().train(mode)
        self.teacher.eval()  # eval mode, because the teacher must not use drop path
        return self

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of B images with global crops (G * B, C, H, W) and local crops (L * B, C, h, w)."""
        target, spread = self._targets(batch.views[0], step)  # (G, B, K)
        pooled, _ = encode(self.student["encoder"], [view.images for view in batch.views])  # (S * B, D)
        logits = self.student["head"](pooled)  # (S * B, K)
        with full_precision(logits):
            crops = logits.unflatten(0, (sum(view.crops for view in batch.views), -1))  # (S, B, K)
            loss = crop_loss(crops, target, self.config.student_temperature)
        entropy = -torch.special.xlogy(target, target).sum(-1).mean()
        metrics = {"teacher_entropy": entropy, "teacher_student_kl": loss.detach() - entropy, "teacher_spread": spread}
        return loss, metrics

    @torch.no_grad()
    def _targets(self, view: View, step: int) -> tuple[Tensor, Tensor]:
        """Return the teacher's distributions (G, B, K) for global crops (G * B, C, H, W), and the spread of its logits.

        The spread is a scalar: the standard deviation of the logits over the rows, averaged over the prototypes and
        divided by the temperature.
        """
        pooled = self.teacher["encoder"](view.images).pooled  # (G * B, D)
        logits = self.teacher["head"](pooled).float()  # (G * B, K)
        temperature = self.temperature(step)
        with full_precision(logits):
            target = teacher_distribution(logits, self.center, temperature, self.config.centering)
        self._pending.add(step, logits)
        # Keep the indices instead of `target`, which would occupy memory until the next step.
        self._last = (pooled.float(), target.argmax(-1))
        spread = (logits - self.center).std(0).mean() / temperature
        return target.unflatten(0, (view.crops, -1)), spread

    def temperature(self, step: int) -> float:
        """Return the softmax temperature of the teacher at a step."""
        c = self.config
        return linear(step, c.teacher_temperature_steps, c.teacher_temperature_start, c.teacher_temperature)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Move the teacher towards the student, and the centre towards the mean of this step's teacher logits."""
        self._pending.move(self.center, self.config.center_momentum)
        momentum = cosine(step, self.steps, self.config.momentum, 1.0)
        ema.update(self.teacher.parameters(), self.student.parameters(), momentum)

    def trained_encoder(self) -> Encoder:
        return self.teacher["encoder"]  # pyright: ignore[reportReturnType]

    def trained_parts(self) -> list[nn.Module]:
        return list(self.student.values())

    def frozen(self) -> dict[str, int]:
        return {"student.head.last_layer.": self.config.freeze_steps}

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        if self._last is None:
            return {}
        pooled, best = self._last  # (G * B, D), (G * B,)
        used = all_reduce_sum(torch.bincount(best, minlength=self.config.prototypes).float())
        return {
            "prototypes_used": int((used > 0).sum()),
            "center_norm": self.center.norm().item(),
            "feature_rank": effective_rank(pooled),
        }

    def advice(self, record: Mapping[str, float]) -> list[str]:
        c = self.config
        found = output_advice("dino", record, c.prototypes, batch_norm=c.batch_norm, centering=c.centering)
        return [*found, f"The rank of the features is {record['feature_rank']:.1f}.", *super().advice(record)]

    def collapse_signs(self, record: Mapping[str, float]) -> dict[str, str]:
        most = math.log(self.config.prototypes)
        return output_signs("dino", "dino", record["loss"], record["teacher_entropy"], most)
