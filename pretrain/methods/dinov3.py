"""DINOv3 (2508.10104): DINOv2 with Sinkhorn-Knopp centring, constant schedules, and Gram anchoring.

In a long run, the patch tokens of DINOv2 lose their local detail. In the last part of a run, Gram anchoring keeps the
similarities between the student's tokens of a crop near those of the Gram teacher. The Gram teacher is a frozen copy of
the teacher at an earlier step, and is replaced by a newer copy a few times.

Shape letters: as in `pretrain.methods.dinov2`; P tokens of a global crop.
"""

import copy
import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from torch import Tensor

from tessera import encoders
from tessera.data.batch import Batch, View
from tessera.data.collate import Transform
from tessera.data.crops import MixedCrops, ResizedView
from tessera.encoders.base import Encoder
from tessera.pretrain.methods.dinov2 import DINOv2, DINOv2Config, second_head
from tessera.pretrain.methods.losses import Centering, gram_loss
from tessera.pretrain.methods.method import Method, RunSize, full_precision
from tessera.pretrain.methods.teacher_student import TERMS, default_momentum, teacher_defaults
from tessera.pretrain.optim import ema
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.pretrain.optim.schedules import cosine, linear
from tessera.runtime.settings import Derived, derived


class CropSizes(NamedTuple):
    """Sides in pixels of the crops of a step. The fields have the names of the settings."""

    global_size: int
    local_size: int
    gram_size: int

    @classmethod
    def parse(cls, text: str) -> "CropSizes":
        """Parse sizes that are written as `global/local/gram`, or as `global/local` if gram equals global."""
        sides = [int(side) for side in text.split("/")]
        return cls(sides[0], sides[1], sides[-1] if len(sides) > 2 else sides[0])


def sorted_sizes(given: dict[str, float] | None) -> dict[str, float] | None:
    """Return combinations of crop sizes and their probabilities, smallest sizes first."""
    return given and dict(sorted(given.items(), key=lambda item: CropSizes.parse(item[0])))


Combination = Annotated[str, Field(pattern=r"^[1-9]\d*/[1-9]\d*(/[1-9]\d*)?$")]
"""Sizes that are written as `global/local/gram`, or as `global/local`."""
Sizes = Annotated[dict[Combination, Annotated[float, Field(gt=0)]], Field(min_length=1)]


class DINOv3Config(DINOv2Config, frozen=True):
    """Settings of DINOv3. Missing values are derived from the number of images, the batch size and the length of the
    run."""

    momentum: Derived[float] = derived(ge=0, le=1)
    """momentum of the teacher's moving average at the start of the run"""
    momentum_end: Derived[float] = derived(ge=0, le=1)
    """momentum at the end of the run; in between, the momentum follows a cosine; default: `momentum`"""
    centering: Centering = "sinkhorn"
    """centring of the teacher's output: mean (subtract a running mean, as in DINO) or sinkhorn (Sinkhorn-Knopp, as in
    SwAV, 2006.09882)"""
    separate_head: bool = True
    """use a second head for the iBOT loss; otherwise both losses share one head"""
    linear_last_layer: Derived[bool] = derived()
    """use prototypes without weight norm; default: true for 100,000 or more images"""
    fill_masks: bool = True
    """hide single tokens in addition to blocks, until a mask has exactly the drawn share of hidden tokens"""
    gram_weight: float = Field(default=2.0, ge=0)
    """weight of the Gram loss after its warm-up; 0: no Gram loss and no Gram teacher"""
    gram_start: Derived[int] = derived(ge=0)
    """step at which the Gram teacher becomes a copy of the teacher and the Gram loss starts; 0: the Gram teacher is the
    teacher of the run in `init_from`; default: after five sixths of the run"""
    gram_warmup_steps: Derived[int] = derived(ge=0)
    """number of steps after gram_start over which the weights of the Gram loss and of local crops change linearly"""
    gram_refresh_steps: Derived[int] = derived(ge=1)
    """number of steps after which a new copy of the teacher replaces the Gram teacher"""
    gram_refreshes: int = Field(default=3, ge=0)
    """number of times that the Gram teacher is replaced after gram_start"""
    gram_size: Derived[int] = derived(ge=1)
    """side in pixels of the crops for the Gram teacher, whose tokens are resized to the student's grid; default:
    global_size; the Gram teacher then sees the student's global crops without masks"""
    sizes: Annotated[Sizes | None, AfterValidator(sorted_sizes)] = None
    """combinations of global_size, local_size and gram_size, one of which is drawn for each step: a mapping from
    global/local/gram (or global/local) to a relative probability, such as {512/112/768: 0.3, 768/160/1152: 0.7}; the
    three settings then default to the combination with the largest global crops; default: the same sizes at every
    step"""
    local_weight: float = Field(default=0.5, ge=0)
    """factor of local crops in the DINO loss after the warm-up of the Gram loss; the factor is 1 before gram_start"""


def resolve(config: DINOv3Config, optim: OptimConfig, size: RunSize) -> tuple[DINOv3Config, OptimConfig]:
    """Return the settings of DINOv3 and of the optimizer, with derived values for settings that are not given.

    For data sets of ImageNet's size, the schedules are those of the published ViT-7B, scaled to the length of the run,
    and the heads are those of the recipe for ImageNet-1k. For smaller data sets, the values are derived as for DINOv2.
    """
    steps = size.steps
    start = 5 * steps // 6 if config.gram_start is None else config.gram_start
    optim_defaults = {
        "lr": 2e-4 if size.large else 4e-3,
        "lr_scaling": "sqrt",
        "min_lr": 0.0,
        "warmup_steps": steps // 10,
        "reach_lr_in_warmup": False,
        "layer_decay": 0.98 if size.large else 0.9,
        "patch_embed_lr_factor": 0.2,
        "weight_decay": 0.04,
        "weight_decay_end": 0.04,
        "betas": (0.9, 0.99),
        "clip": 30.0 if size.large else 3.0,
        "clip_by": "module",
    }
    continued = config.gram_start == 0  # the run continues an earlier run, whose teacher is the Gram teacher
    defaults = teacher_defaults(size, horizon=500 / 3)
    del defaults["centering"]  # always Sinkhorn-Knopp, as published
    # Sinkhorn spreads the rows of a forward pass of all processes evenly over the prototypes, so the number of rows
    # limits the number of prototypes. Published: 262,144 prototypes for 8,192 rows.
    most = 2 ** round(math.log2(32 * 2 * size.batch_size // size.accumulate))
    momentum = default_momentum(steps, 500 / 3)
    defaults |= {
        "prototypes": min(defaults["prototypes"], most),
        "linear_last_layer": size.large and not config.norm_last_layer,
        "freeze_steps": 0 if continued else steps // 100,
        "teacher_temperature": 0.07 if size.large else 0.04,
        "teacher_temperature_steps": 0 if continued else steps // 10,
        "momentum": momentum,
        "momentum_end": momentum if config.momentum is None else config.momentum,
        "gram_start": start,
        "gram_warmup_steps": max(steps - start, 0) // 200,
        "gram_refresh_steps": max((steps - start) // 20, 1),
        "gram_size": config.global_size,
    }
    filled = optim.filled(optim_defaults)
    if optim.min_lr is None:  # a constant learning rate after the warm-up
        filled = filled.model_copy(update={"min_lr": filled.scaled_lr(size.batch_size)})
    if config.sizes:
        defaults |= max(map(CropSizes.parse, config.sizes))._asdict()
    return config.filled(defaults | second_head(config, defaults)), filled


def combinations(config: DINOv3Config) -> dict[str, DINOv3Config]:
    """Return a copy of the settings for each combination of crop sizes, by its key in `sizes`."""
    return {text: config.model_copy(update=CropSizes.parse(text)._asdict()) for text in config.sizes or ()}


class DINOv3(DINOv2):
    """The DINOv3 method: DINOv2 with a Gram teacher, which is an encoder without heads."""

    Config = DINOv3Config
    resolve = staticmethod(resolve)
    section = "dinov3"
    reach_in_warmup = False
    config: DINOv3Config  # pyright: ignore[reportIncompatibleVariableOverride] - safe, because it is never set again

    def __init__(self, encoder: Encoder, config: DINOv3Config, steps: int) -> None:
        """Build student, teacher and Gram teacher. `steps` is the length of the run.

        Raises:
            ValueError: see `DINOv2`; the crops of the Gram teacher are smaller than those of the student; or `sizes`
                does not fit the encoder or other settings.
        """
        self.check_sizes(encoder, config)
        super().__init__(encoder, config, steps)
        self.needs_start = config.gram_weight > 0 and config.gram_start == 0
        self.gram_teacher = copy.deepcopy(self.teacher["encoder"]) if config.gram_weight > 0 else None

    @staticmethod
    def check(encoder: Encoder, config: Any) -> None:
        DINOv2.check(encoder, config)
        if config.gram_size < config.global_size:
            raise ValueError(
                f"gram_size {config.gram_size} is less than global_size {config.global_size}. Raise gram_size."
            )

    @classmethod
    def check_sizes(cls, encoder: Encoder, config: DINOv3Config) -> None:
        """Raise `ValueError` if the encoder or other settings do not allow the crop sizes of `sizes`."""
        for text, one in combinations(config).items():
            try:
                if any(side % encoder.stride for side in CropSizes.parse(text)):
                    raise ValueError(f"A side is not a multiple of {encoder.stride} pixels, the side of a token.")
                cls.check(encoder, one)
            except ValueError as error:
                raise ValueError(f"sizes {text}: {error}") from error
        own = CropSizes(config.global_size, config.local_size, config.gram_size)
        if config.sizes and own not in map(CropSizes.parse, config.sizes):
            raise ValueError(
                f"global_size {own.global_size}, local_size {own.local_size} and gram_size {own.gram_size} are not a "
                f"combination in sizes ({', '.join(config.sizes)}). Remove the three settings, or set them to one of "
                "these combinations."
            )

    @staticmethod
    def encoder_defaults(config: DINOv2Config, variant: str, size: RunSize) -> dict[str, Any]:
        defaults = DINOv2.encoder_defaults(config, variant, size)
        published = {"drop_path": 0.4, "rope_rescale": 2.0} if size.large else {}
        return defaults | encoders.supported(variant, published)

    def transform(self) -> Transform:
        c = self.config
        if c.sizes is None:
            return self.crops_with_gram(c)
        return MixedCrops([self.crops_with_gram(one) for one in combinations(c).values()], list(c.sizes.values()))

    def crops_with_gram(self, c: DINOv3Config) -> Transform:
        """Return the transform for the crop sizes and masks of `c`.

        If `c.gram_size` is larger than the global crops, the transform adds a view for the Gram teacher.
        """
        crops = self.crops(c)
        larger = self.gram_teacher is not None and c.gram_size > c.global_size
        return ResizedView(crops, c.gram_size) if larger else crops

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.gram_teacher is not None:
            self.gram_teacher.eval()
        return self

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of a batch as in DINOv2.

        If the Gram teacher sees larger crops, the batch has one more view: the global crops without colour changes,
        (G * B, C, gram_size, gram_size). The crop sizes may change from step to step. The loss is the sum of the
        metrics `dino_loss`, `ibot_loss`, `koleo_loss` and `gram_loss`.
        """
        c, views = self.config, batch.views
        if c.gram_weight == 0:
            return super().forward(batch, step)
        larger = len(views) > 1 + (c.local_crops > 0)
        weight = self.gram_weight(step)
        local_weight = 1 + (c.local_weight - 1) * weight / c.gram_weight
        terms, metrics, tokens = self._terms(views[:-1] if larger else views, step, local_weight)
        terms["gram_loss"] = tokens.new_zeros((), dtype=torch.float32)
        if weight > 0:
            terms["gram_loss"] = weight * self._gram_loss(tokens, views[0], views[-1] if larger else views[0])
        metrics["gram_loss"] = terms["gram_loss"].detach()
        # DINO term of a uniform output, as a fraction of ln K
        others, local = views[0].crops - 1, sum(view.crops for view in (views[1:-1] if larger else views[1:]))
        metrics["dino_share"] = tokens.new_full((), (others + local_weight * local) / max(others + local, 1))
        return torch.stack(list(terms.values())).sum(), metrics

    def gram_weight(self, step: int) -> float:
        """Return the weight of the Gram loss at a step: 0 before `gram_start`, then a linear rise to the setting."""
        c, since = self.config, step - self.config.gram_start
        return linear(since, c.gram_warmup_steps, 0.0, c.gram_weight, reach_in_warmup=False) if since >= 0 else 0.0

    def _gram_loss(self, tokens: Tensor, view: View, seen: View) -> Tensor:
        """Return the Gram loss of the student's tokens (T, D) of the global crops in `view`. `seen` holds the same
        crops as input of the Gram teacher."""
        assert self.gram_teacher is not None
        assert isinstance(view.images, Tensor)
        assert isinstance(seen.images, Tensor)
        with torch.no_grad():
            anchor = self.gram_teacher(seen.images).tokens  # on the Gram teacher's grid
        grid, gram_grid = (self.trained_encoder().grid(*one.shape[-2:]) for one in (view.images, seen.images))
        with full_precision(tokens):
            crops = tokens.float().unflatten(0, (-1, math.prod(grid)))  # (G * B, P, D)
            anchors = resized(anchor.float().unflatten(0, (len(crops), -1)), gram_grid, grid)
            return gram_loss(crops, anchors)

    def momentum(self, step: int) -> float:
        return cosine(step, self.steps, self.config.momentum, self.config.momentum_end)

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Replace the Gram teacher on schedule. The schedule also counts skipped steps."""
        if self.gram_teacher is not None and self.replaces_gram_teacher(step):
            ema.copy(self.gram_teacher, self.teacher["encoder"])

    def replaces_gram_teacher(self, step: int) -> bool:
        """Return True if a copy of the teacher replaces the Gram teacher before step `step`, counted from 0."""
        since = step - self.config.gram_start
        if since == 0:
            return True
        number, rest = divmod(since, self.config.gram_refresh_steps)
        return rest == 0 and 0 < number <= self.config.gram_refreshes

    def start_from(self, other: Method) -> None:
        super().start_from(other)
        if self.gram_teacher is not None:
            self.gram_teacher.load_state_dict(self.teacher["encoder"].state_dict())

    def advice(self, record: Mapping[str, float]) -> list[str]:
        found = super().advice(record)
        if record.get("gram_loss", 0) > sum(record[term] for term in TERMS if term in record):
            found.insert(0, "The Gram loss is larger than all other terms. Try a lower dinov3.gram_weight.")
        return found


def resized(tokens: Tensor, grid: tuple[int, int], to: tuple[int, int]) -> Tensor:
    """Resize maps of tokens with bicubic interpolation: (N, h * w, D) -> (N, H * W, D).

    Args:
        grid: rows and columns of tokens (h, w).
        to: rows and columns of the resized maps (H, W).
    """
    if grid == to:
        return tokens
    maps = tokens.mT.unflatten(2, grid)  # (N, D, h, w)
    return F.interpolate(maps, size=to, mode="bicubic", align_corners=False).flatten(2).mT
