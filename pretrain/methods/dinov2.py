"""DINOv2 (2304.07193): DINO on pooled features, iBOT (2111.07832) on hidden tokens, and KoLeo (1806.03198).

The student sees local crops, and global crops in which some tokens are hidden. The teacher, the moving average of the
student, sees the global crops without hidden tokens. The student is trained to match the teacher's output for other
crops of the same image, and for the hidden tokens of the same crop. KoLeo spreads the student's features evenly over
the sphere.

Shape letters: B images per process; G global crops, L local crops and S = G + L crops per image; T tokens of the global
crops, M of them hidden; D width of the encoder; K prototypes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from tessera import encoders
from tessera.data.batch import Batch, View
from tessera.data.collate import Transform
from tessera.data.colors import Share
from tessera.data.crops import Areas, MultiCrop, by_size, sides
from tessera.data.masking import MaskedMultiCrop
from tessera.encoders.base import Encoder, encode
from tessera.encoders.segments import copy_to_device
from tessera.encoders.unused import freeze_unused
from tessera.pretrain.methods.cross_entropy import crop_loss, token_loss
from tessera.pretrain.methods.heads import Head
from tessera.pretrain.methods.losses import koleo_loss, token_weights
from tessera.pretrain.methods.method import RunSize, full_precision
from tessera.pretrain.methods.teacher_student import (
    TeacherStudent,
    TeacherStudentConfig,
    output_signs,
    teacher_defaults,
)
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.runtime.collectives import all_reduce_sum, pass_weight
from tessera.runtime.settings import Derived, derived

SAME_FEATURES = -math.log(1e-3)
"""KoLeo loss of features whose nearest neighbours are 0.001 apart"""


class DINOv2Config(TeacherStudentConfig, frozen=True):
    """Settings of DINOv2. Missing values are derived from the number of images, the batch size and the length of the
    run."""

    global_scale: Areas = (0.32, 1.0)
    """smallest and largest area of a global crop before the resize, as a share of the image's area"""
    local_scale: Areas = Field(default_factory=by_size((0.15, 0.5), (0.05, 0.32)))
    """smallest and largest area of a local crop before the resize, as a share of the image's area; default: 0.05,0.32,
    or 0.15,0.5 if global_size is less than 128"""
    blur_global1: Share = 0.0
    """probability that the first global crop is blurred; 1 in the paper, but 0 in the official code"""
    blur_global2: Share = 0.9
    """probability that the second global crop is blurred; 0.1 in the paper, but 0.9 in the official code"""
    norm_last_layer: bool = False
    """fix the norm of every prototype vector at 1"""
    linear_last_layer: Derived[bool] = derived()
    """use prototypes without weight norm, as DINOv3 does; needs `norm_last_layer` false; default: false"""
    ibot_weight: float = Field(default=1.0, ge=0)
    """weight of the iBOT loss, the cross-entropy between teacher and student for hidden tokens"""
    koleo_weight: float = Field(default=0.1, ge=0)
    """weight of the KoLeo loss, which is summed over the two global crops"""
    mask_probability: Share = 0.5
    """share of the global crops in which tokens are hidden from the student"""
    mask_ratio: Areas = (0.1, 0.5)
    """smallest and largest share of hidden tokens in a masked global crop; tokens are hidden in blocks"""
    fill_masks: bool = False
    """hide single tokens in addition to blocks, until a mask has exactly the drawn share of hidden tokens, as in
    DINOv3"""
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

    For data sets of ImageNet's size, the result is the published recipe for ImageNet-1k, with warm-ups that scale with
    the length of the run. For smaller data sets, the values are derived as for DINO.
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
    defaults = teacher_defaults(size, horizon=125) | {
        "linear_last_layer": False,
        "freeze_steps": steps // 100,
        "teacher_temperature": 0.07 if long else 0.04,
        "teacher_temperature_steps": 3 * steps // 10,
    }
    defaults |= second_head(config, defaults)
    return config.filled(defaults), optim.filled(optim_defaults)


def second_head(config: DINOv2Config, first: dict[str, Any]) -> dict[str, int]:
    """Return the default sizes of the second head, which equal the sizes of the first head.

    Args:
        config: settings of the method. A size that is set here takes precedence.
        first: default sizes of the first head.
    """
    given = config.model_dump(include={"prototypes", "hidden_dim", "bottleneck_dim"}, exclude_none=True)
    return {f"ibot_{name}": (first | given)[name] for name in ("prototypes", "hidden_dim", "bottleneck_dim")}


class DINOv2(TeacherStudent):
    """The DINOv2 method: student and teacher have one or two heads, and the student's global crops have masks."""

    Config = DINOv2Config
    resolve = staticmethod(resolve)
    continues = ("dinov2", "dinov3")
    section = "dinov2"
    config: DINOv2Config

    def __init__(self, encoder: Encoder, config: DINOv2Config, steps: int) -> None:
        """Build the student, and the teacher as a copy of the student. `steps` is the length of the run.

        Raises:
            ValueError: the encoder has no mask token, a global crop has only one token, or two settings contradict
                each other; see `check`.
        """
        self.check(encoder, config)
        freeze_unused(encoder, sides(config), tokens=True, masked=True, packed=True)
        c = config
        kinds: dict[str, Any] = {
            "layers": c.head_layers,
            "batch_norm": c.batch_norm,
            "fixed_length": c.norm_last_layer,
            "linear": c.linear_last_layer,
        }
        head = Head(encoder.dim, c.prototypes, c.hidden_dim, c.bottleneck_dim, **kinds)
        student: dict[str, nn.Module] = {"encoder": encoder, "head": head}
        if c.separate_head:
            second = (c.ibot_prototypes, c.ibot_hidden_dim, c.ibot_bottleneck_dim)
            student["ibot_head"] = Head(encoder.dim, *second, **kinds)
        super().__init__(student, config, steps)
        self.ibot_center: Tensor
        self._add_center("ibot_", config.ibot_prototypes)

    @staticmethod
    def check(encoder: Encoder, config: Any) -> None:
        """Raise `ValueError` if the encoder does not support the settings, or two settings contradict each other."""
        name = type(encoder).__name__
        rows, columns = encoder.grid(config.global_size, config.global_size)
        if getattr(encoder, "mask_token", None) is None:
            raise ValueError(f"{name} has no mask token to replace hidden tokens. Set encoder.mask_token to true.")
        if rows * columns < 2:
            raise ValueError(
                f"A global crop of {config.global_size} pixels is only one token of {name}, so a mask would hide the "
                f"whole crop. Set global_size to at least {2 * encoder.stride}."
            )
        if config.linear_last_layer and config.norm_last_layer:
            raise ValueError("norm_last_layer needs prototypes with weight norm. Set linear_last_layer to false.")
        second = (config.ibot_prototypes, config.ibot_hidden_dim, config.ibot_bottleneck_dim)
        if not config.separate_head and second != (config.prototypes, config.hidden_dim, config.bottleneck_dim):
            raise ValueError(
                "ibot_prototypes, ibot_hidden_dim and ibot_bottleneck_dim describe a second head. Set separate_head to "
                "true, or remove these settings."
            )

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
        with torch.no_grad():
            seen = self.teacher["encoder"](view.images)
            hidden_seen = seen.tokens.index_select(0, mask.hidden_indices)  # (M, D)
            wanted = self._token_head(self.teacher)(hidden_seen, factored=True)  # (M, K)
        target, metrics = self.crop_targets(seen.pooled, view, step)  # (G, B, K)
        self._add_to_center("ibot_", step, wanted)
        pooled, tokens = encode(self.student["encoder"], [one.images for one in views], mask)
        logits = self.student["head"](pooled, factored=True).unflatten(sum(one.crops for one in views))  # (S, B, K)
        hidden = tokens.index_select(0, mask.hidden_indices)
        token_logits = self._token_head(self.student)(hidden, factored=True)  # (M, K)
        hidden_loss, entropies, best = token_loss(
            token_logits,
            wanted,
            weights,
            self.ibot_center,
            student_temperature=c.student_temperature,
            teacher_temperature=self.temperature(step),
            centering=c.centering,
        )
        terms = {
            "dino_loss": crop_loss(logits, target, c.student_temperature, local_weight),
            "ibot_loss": c.ibot_weight * hidden_loss,
        }
        with full_precision(pooled):
            if c.koleo_weight > 0:
                features = pooled.float().split(logits.rows.shape[1])[: view.crops]  # G times (B, D)
                terms["koleo_loss"] = c.koleo_weight * torch.stack([koleo_loss(crop) for crop in features]).sum()
            masked = weights.sum()  # share of the crops that have hidden tokens
            # Use the weights of the loss, over all processes, because the processes have different numbers of hidden
            # tokens. The metric then does not depend on the number of processes.
            own = pass_weight() * torch.stack([(entropies * weights).sum(), masked]).detach()
            weighted, whole = all_reduce_sum(own)
            entropy = weighted / whole.clamp(min=1e-6)
        # Keep the indices instead of the distributions, which would occupy memory until the next step.
        self._last = (seen.pooled.float(), {"": target.flatten(0, 1).argmax(-1), "ibot_": best})
        metrics |= {name: term.detach() for name, term in terms.items()}
        metrics |= {"ibot_teacher_entropy": entropy, "masked_crops": masked}
        return terms, metrics, tokens[: len(mask.hidden)]

    @staticmethod
    def _token_head(half: nn.ModuleDict) -> nn.Module:
        """Return the head that `half`, the student or the teacher, applies to hidden tokens."""
        return half["ibot_head" if "ibot_head" in half else "head"]

    def collapse_signs(self, record: Mapping[str, float]) -> dict[str, str]:
        c, signs = self.config, super().collapse_signs(record)
        share = c.ibot_weight * record["masked_crops"]
        if share > 0:
            loss, entropy = record["ibot_loss"] / share, record["ibot_teacher_entropy"]
            signs |= output_signs(self.section, "ibot", loss, entropy, math.log(c.ibot_prototypes))
        if c.koleo_weight > 0 and (koleo := record["koleo_loss"] / (2 * c.koleo_weight)) > SAME_FEATURES:
            signs["equal features"] = (
                f"KoLeo is {koleo:.2f}: the distance between the features of an image and of its nearest neighbour is "
                f"{math.exp(-koleo):.1e}. All images have nearly equal features. Try a lower optim.lr, a longer "
                f"optim.warmup_steps, or a higher {self.section}.koleo_weight."
            )
        return signs
