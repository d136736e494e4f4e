"""DINOv2 (2304.07193): DINO on pooled features, iBOT (2111.07832) on hidden tokens, and KoLeo (1806.03198).

The student sees global crops of which some tokens are hidden, and local crops. The teacher, the moving average of the
student, sees whole global crops. The student is trained to match the teacher's output for other crops of the same
image, and for the hidden tokens of the same crop. KoLeo spreads the student's features evenly over the sphere.

Shape letters: B images per process; G global crops, L local crops and S = G + L crops per image; T tokens of the global
crops, M of them hidden; D width of the encoder; K prototypes.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from tessera import encoders
from tessera.data.augment import Share
from tessera.data.batch import Batch, View
from tessera.data.collate import Transform
from tessera.data.crops import Areas, MultiCrop
from tessera.data.masking import MaskedMultiCrop
from tessera.encoders.base import Encoder
from tessera.encoders.formats.checkpoint import load_weights
from tessera.encoders.images import Mask
from tessera.encoders.segments import copy_to_device
from tessera.pretrain.methods.base import Method, RunSize, freeze, full_precision, unused_norms
from tessera.pretrain.methods.cross_entropy import Sharpening, crop_loss, token_loss
from tessera.pretrain.methods.dino import DINOConfig
from tessera.pretrain.methods.losses import koleo_loss, token_weights
from tessera.pretrain.methods.teacher_student import (
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

SAME_FEATURES = -math.log(1e-3)
"""KoLeo of features whose nearest neighbours have a distance of 0.001"""
TERMS = ("dino_loss", "ibot_loss", "koleo_loss")
"""metrics that hold the terms of the loss, each as it is optimised"""


class DINOv2Config(DINOConfig, frozen=True):
    """Settings of DINOv2. Missing values are derived from the number of images, the batch size and the length of the
    run."""

    global_scale: Areas = (0.32, 1.0)
    """smallest and largest area of a global crop before the resize, as a share of the image's area"""
    local_scale: Areas = (0.05, 0.32)
    """smallest and largest area of a local crop before the resize, as a share of the image's area"""
    blur_global1: Share = 0.0
    """probability that the first global crop is blurred; the paper means 1, but the official code inverts it"""
    blur_global2: Share = 0.9
    """probability that the second global crop is blurred; the paper means 0.1, but the official code inverts it"""
    norm_last_layer: bool = False
    """fix the norm of every prototype vector at 1"""
    linear_last_layer: Derived[bool] = derived()
    """use prototypes without weight norm, as DINOv3 does; needs `norm_last_layer` false; default: false"""
    ibot_weight: float = Field(default=1.0, ge=0)
    """weight of the iBOT loss, the cross-entropy between teacher and student for hidden tokens"""
    koleo_weight: float = Field(default=0.1, ge=0)
    """weight of the KoLeo loss of each of the two global crops"""
    mask_probability: Share = 0.5
    """share of the global crops of which the student sees only a part of the tokens"""
    mask_ratio: Areas = (0.1, 0.5)
    """smallest and largest share of hidden tokens in a masked global crop; tokens are hidden in blocks"""
    fill_masks: bool = False
    """hide single tokens at random until a mask has exactly the drawn share of hidden tokens, as in DINOv3"""
    separate_head: bool = False
    """use a second head for the iBOT loss; otherwise both losses share one head"""
    ibot_prototypes: Derived[int] = derived(ge=2)
    """number of prototypes of the second head; default: `prototypes`"""
    ibot_hidden_dim: Derived[int] = derived(ge=1)
    """width of the hidden layers of the second head; default: `hidden_dim`"""
    ibot_bottleneck_dim: Derived[int] = derived(ge=1)
    """width of the bottleneck of the second head; default: `bottleneck_dim`"""


def resolve(config: DINOv2Config, optim: OptimConfig, size: RunSize) -> tuple[DINOv2Config, OptimConfig]:
    """Return the settings of DINOv2 and of the optimizer, with derived values for settings that are not given.

    For data sets of ImageNet's size, the result is the published recipe for ImageNet-1k, with warm-ups as shares of the
    run. For smaller data sets, the values are derived as those of DINO.
    """
    steps = size.steps
    long = size.large and steps >= 200 * size.epoch
    optim_defaults = {
        "lr": 4e-3,
        "lr_scaling": "sqrt",
        "min_lr": 1e-6,
        "warmup_steps": steps // 10,
        "layer_decay": 0.9,
        "patch_embed_lr_factor": 0.2,
        "weight_decay": 0.04,
        "weight_decay_end": 0.4 if size.large else 0.04,
        "betas": (0.9, 0.999),
        "clip": 3.0,
        "clip_by": "module",
    }
    defaults = {
        "prototypes": 2 ** round(math.log2(min(max(size.images / 8, 256), 65536))),
        "hidden_dim": 2048 if size.large else 512,
        "bottleneck_dim": 256 if size.large else 128,
        "batch_norm": not size.large,
        "linear_last_layer": False,
        "freeze_steps": steps // 100,
        "teacher_temperature": 0.07 if long else 0.04,
        "teacher_temperature_steps": 3 * steps // 10,
        "momentum": round(1 - 1 / min(max(steps / 6, 10), 125), 6),
    }
    defaults |= second_head(config, defaults)
    return config.filled(defaults), optim.filled(optim_defaults)


def second_head(config: DINOv2Config, first: dict[str, Any]) -> dict[str, int]:
    """Return the default sizes of the second head: those of the first, given in `config` or derived in `first`."""
    given = config.model_dump(include={"prototypes", "hidden_dim", "bottleneck_dim"}, exclude_none=True)
    return {f"ibot_{name}": (first | given)[name] for name in ("prototypes", "hidden_dim", "bottleneck_dim")}


class Targets(NamedTuple):
    """Outputs of the teacher, and metrics of the global crops."""

    pooled: Tensor
    """Pooled features of the global crops: (G * B, D) float32."""
    crops: Tensor
    """Distributions of the global crops: (G, B, K)."""
    token_logits: Tensor
    """Logits of the hidden tokens, in the precision of the forward pass: (M, K)."""
    metrics: dict[str, Tensor]
    """Scalars by name."""


class DINOv2(Method):
    """The DINOv2 method: a student and a teacher, each an encoder with one or two heads, and centres of the teacher's
    outputs."""

    Config = DINOv2Config
    resolve = staticmethod(resolve)
    continues = ("dinov2", "dinov3")
    section: ClassVar[str] = "dinov2"
    """name of the method in messages"""
    small_settings: ClassVar[dict[str, Any]] = {
        "global_size": 16,
        "local_size": 12,
        "local_crops": 2,
        "hidden_dim": 32,
        "bottleneck_dim": 16,
        "prototypes": 64,
    }
    rank_hint = "Try a lower optim.lr, a longer optim.warmup_steps, or a higher dinov2.momentum."

    def __init__(self, encoder: Encoder, config: DINOv2Config, steps: int) -> None:
        """Build the student, and copy the student to make the teacher. `steps` is the length of the run.

        Raises:
            ValueError: the encoder has no mask token, or global crops have only one token, or a setting of the second
                head is given without a second head.
        """
        super().__init__()
        self.config = config
        self.steps = steps
        self.image_size = config.global_size
        self.grid = encoder.grid(config.global_size, config.global_size)
        _check(encoder, config, self.grid)
        packed = config.global_size % encoder.stride == config.local_size % encoder.stride == 0
        freeze(encoder, (*unused_norms(encoder, packed=packed), "pre_logits", "head", "head_dist"))
        c, second = config, (config.ibot_prototypes, config.ibot_hidden_dim, config.ibot_bottleneck_dim)
        kinds = (c.head_layers, c.batch_norm, c.norm_last_layer, c.linear_last_layer)
        first = HeadShape(c.prototypes, c.hidden_dim, c.bottleneck_dim, *kinds)
        student: dict[str, nn.Module] = {"encoder": encoder, "head": Head(encoder.dim, first)}
        if config.separate_head:
            student["ibot_head"] = Head(encoder.dim, HeadShape(*second, *kinds))
        self.student = nn.ModuleDict(student)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.center: Tensor
        self.ibot_center: Tensor
        self.register_buffer("center", torch.zeros(config.prototypes))
        self.register_buffer("ibot_center", torch.zeros(config.ibot_prototypes))
        self._pending, self._ibot_pending = PendingCenter(), PendingCenter()
        # the teacher's pooled features in the last forward pass, and the most probable prototypes of crops and of
        # hidden tokens; for health()
        self._last: tuple[Tensor, Tensor, Tensor] | None = None
        self.train()

    @staticmethod
    def encoder_defaults(config: DINOv2Config, variant: str, size: RunSize) -> dict[str, Any]:
        published: dict[str, Any] = {"drop_path": 0.3, "layer_scale": 1e-5, "token_init": "dinov2"}
        small = {"drop_path": 0.0, "init": "xavier", "position_init": "sincos"}
        both = {"image_size": config.global_size, "mask_token": True}
        return encoders.supported(variant, both | (published if size.large else small))

    def transform(self) -> Transform:
        return self.crops(self.config)

    def crops(self, c: DINOv2Config) -> Transform:
        """Return the transform for the crop sizes and masks of `c`."""
        grid = self.trained_encoder().grid(c.global_size, c.global_size)
        return MaskedMultiCrop(MultiCrop(c), grid, c.mask_probability, c.mask_ratio, fill=c.fill_masks)

    def train(self, mode: bool = True) -> "DINOv2":
        super().train(mode)
        self.teacher.eval()  # eval mode, because the teacher must not use drop path
        return self

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of B images with global crops (G * B, C, H, W), a mask of the global crops, and local
        crops (L * B, C, h, w).

        The loss is the sum of the metrics `dino_loss`, `ibot_loss` and `koleo_loss`.
        """
        terms, metrics, _ = self._terms(batch.views, step)
        return torch.stack(list(terms.values())).sum(), metrics

    def _terms(
        self, views: Sequence[View], step: int, local_weight: float = 1.0
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Return the weighted terms of the loss by name, the metrics, and the student's token features of the global
        crops (T, D).

        Args:
            views: global crops with their mask, and local crops.
            local_weight: weight of the pairs of a global and a local crop in the DINO loss.
        """
        c, view = self.config, views[0]
        (mask,) = view.masks
        weights = copy_to_device(token_weights(mask), mask.hidden.device)  # (M,)
        targets = self._targets(view, mask, step)
        pooled, tokens = encode(self.student["encoder"], [one.images for one in views], mask)
        logits = self.student["head"](pooled).unflatten(0, (sum(one.crops for one in views), -1))  # (S, B, K)
        token_logits = self._token_head(self.student)(tokens.index_select(0, mask.hidden_indices))  # (M, K)
        sharpening = Sharpening(c.student_temperature, self.temperature(step), self.ibot_center, c.centering)
        with full_precision(logits):
            hidden = token_loss(token_logits, targets.token_logits, weights, sharpening)
            terms = {
                "dino_loss": crop_loss(logits, targets.crops, c.student_temperature, local_weight),
                "ibot_loss": c.ibot_weight * hidden.loss,
            }
            if c.koleo_weight > 0:
                features = pooled.float().split(logits.shape[1])[: view.crops]  # G times (B, D)
                terms["koleo_loss"] = c.koleo_weight * torch.stack([koleo_loss(crop) for crop in features]).sum()
            masked = weights.sum()  # share of the crops that have hidden tokens
            # weighted as the loss, so that the metric does not depend on the number of processes
            entropy = (hidden.entropies * weights).sum() / masked.clamp(min=1e-6)
        # Keep the indices instead of the distributions, which would occupy memory until the next step.
        self._last = (targets.pooled, targets.crops.flatten(0, 1).argmax(-1), hidden.best)
        metrics = {name: term.detach() for name, term in terms.items()} | targets.metrics
        metrics |= {"ibot_teacher_entropy": entropy, "masked_crops": masked}
        return terms, metrics, tokens[: len(mask.hidden)]

    @staticmethod
    def _token_head(half: nn.ModuleDict) -> nn.Module:
        """Return the head for hidden tokens of the student or the teacher."""
        return half["ibot_head" if "ibot_head" in half else "head"]

    @torch.no_grad()
    def _targets(self, view: View, mask: Mask, step: int) -> Targets:
        """Return the teacher's outputs for global crops (G * B, C, H, W) and for their hidden tokens."""
        features = self.teacher["encoder"](view.images)
        logits = self.teacher["head"](features.pooled).float()  # (G * B, K)
        hidden = features.tokens.index_select(0, mask.hidden_indices)  # (M, D)
        token_logits = self._token_head(self.teacher)(hidden)  # (M, K)
        temperature = self.temperature(step)
        with full_precision(logits):
            crops = teacher_distribution(logits, self.center, temperature, self.config.centering)
        self._pending.add(step, logits)
        self._ibot_pending.add(step, token_logits)
        metrics = {
            "teacher_entropy": -torch.special.xlogy(crops, crops).sum(-1).mean(),
            "teacher_spread": (logits - self.center).std(0).mean() / temperature,
        }
        return Targets(features.pooled.float(), crops.unflatten(0, (view.crops, -1)), token_logits, metrics)

    def temperature(self, step: int) -> float:
        """Return the softmax temperature of the teacher at a step."""
        c = self.config
        return linear(step, c.teacher_temperature_steps, c.teacher_temperature_start, c.teacher_temperature)

    def momentum(self, step: int) -> float:
        """Return the momentum of the teacher's moving average at a step."""
        return cosine(step, self.steps, self.config.momentum, 1.0)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Move the teacher towards the student, and the centres towards the means of this step's teacher logits."""
        self._pending.move(self.center, self.config.center_momentum)
        self._ibot_pending.move(self.ibot_center, self.config.center_momentum)
        ema.update(self.teacher.parameters(), self.student.parameters(), self.momentum(step))

    def start_from(self, other: Method) -> None:
        for name in ("student", "teacher"):
            own, theirs = getattr(self, name), getattr(other, name)
            load_weights(own["encoder"], theirs["encoder"].state_dict(), "ours")
            for part in set(own) - {"encoder"}:
                # a second head without a model starts as a copy of the shared head
                own[part].load_state_dict(theirs[part if part in theirs else "head"].state_dict())
        self.center.copy_(other.center)  # pyright: ignore[reportArgumentType]
        self.ibot_center.copy_(other.ibot_center)  # pyright: ignore[reportArgumentType]

    def trained_encoder(self) -> Encoder:
        return self.teacher["encoder"]  # pyright: ignore[reportReturnType]

    def trained_parts(self) -> list[nn.Module]:
        return list(self.student.values())

    def frozen(self) -> dict[str, int]:
        steps = self.config.freeze_steps
        return {"student.head.last_layer.": steps, "student.ibot_head.last_layer.": steps}

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        if self._last is None:
            return {}
        pooled, *best = self._last
        sizes = (self.config.prototypes, self.config.ibot_prototypes)
        counts = [torch.bincount(one, minlength=size) for one, size in zip(best, sizes, strict=True)]
        used, ibot_used = (int((all_reduce_sum(count.float()) > 0).sum()) for count in counts)
        return {
            "prototypes_used": used,
            "ibot_prototypes_used": ibot_used,
            "center_norm": self.center.norm().item(),
            "feature_rank": effective_rank(pooled),
        }

    def advice(self, record: Mapping[str, float]) -> list[str]:
        c = self.config
        found = output_advice(self.section, record, c.prototypes, batch_norm=c.batch_norm, centering=c.centering)
        terms = ", ".join(f"{term} {record[term]:.3f}" for term in TERMS if term in record)
        found.append(f"The terms of the loss are {terms}. The rank of the features is {record['feature_rank']:.1f}.")
        return [*found, *super().advice(record)]

    def collapse_signs(self, record: Mapping[str, float]) -> dict[str, str]:
        c = self.config
        loss = record["dino_loss"] / record.get("dino_share", 1.0)  # of ln K, where local crops count less in DINOv3
        signs = output_signs(self.section, "dino", loss, record["teacher_entropy"], math.log(c.prototypes))
        share = c.ibot_weight * record["masked_crops"]
        if share > 0:
            loss, entropy = record["ibot_loss"] / share, record["ibot_teacher_entropy"]
            signs |= output_signs(self.section, "ibot", loss, entropy, math.log(c.ibot_prototypes))
        if c.koleo_weight > 0 and (koleo := record["koleo_loss"] / (2 * c.koleo_weight)) > SAME_FEATURES:
            signs["equal features"] = (
                f"KoLeo is {koleo:.2f}: the distance between the features of an image and those of the nearest image "
                f"is {math.exp(-koleo):.1e}, so that all images have nearly equal features. Try a lower optim.lr, a "
                f"longer optim.warmup_steps, or a higher {self.section}.koleo_weight."
            )
        return signs


def _check(encoder: Encoder, config: DINOv2Config, grid: tuple[int, int]) -> None:
    """Raise `ValueError` if the encoder does not support the settings, or two settings contradict each other."""
    name = type(encoder).__name__
    if getattr(encoder, "mask_token", None) is None:
        raise ValueError(f"{name} has no mask token, which replaces hidden tokens. Set encoder.mask_token to true.")
    if grid[0] * grid[1] < 2:
        raise ValueError(
            f"A global crop of {config.global_size} pixels is one token of {name}, so that hiding it would leave "
            f"nothing visible. Set global_size to at least {2 * encoder.stride}."
        )
    if config.linear_last_layer and config.norm_last_layer:
        raise ValueError("norm_last_layer needs prototypes with weight norm. Set linear_last_layer to false.")
    second = (config.ibot_prototypes, config.ibot_hidden_dim, config.ibot_bottleneck_dim)
    if not config.separate_head and second != (config.prototypes, config.hidden_dim, config.bottleneck_dim):
        raise ValueError(
            "ibot_prototypes, ibot_hidden_dim and ibot_bottleneck_dim describe a second head. Set separate_head to "
            "true, or remove them."
        )
