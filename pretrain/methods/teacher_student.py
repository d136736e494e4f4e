"""Base of methods in which a student learns from a teacher, the moving average of the student (DINO, 2104.14294).

Shape letters: N rows of this process (images or tokens); B images; G global crops and S crops of an image; T tokens; D
width of the encoder; K prototypes.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tessera.data.batch import View
from tessera.data.crops import MultiCropConfig
from tessera.encoders.base import Encoder
from tessera.encoders.weight_files import load_weights
from tessera.pretrain.methods.heads import FactoredLogits
from tessera.pretrain.methods.losses import Centering, teacher_distribution
from tessera.pretrain.methods.method import Method, RunSize, full_precision
from tessera.pretrain.monitoring.collapse import column_variance, effective_rank
from tessera.pretrain.optim import ema
from tessera.pretrain.optim.schedules import cosine, linear
from tessera.runtime.collectives import all_reduce_sum, is_absent
from tessera.runtime.settings import Derived, derived

TERMS = ("dino_loss", "ibot_loss", "koleo_loss")
"""names of the metrics that report the terms of the loss, each multiplied by its weight"""


class TeacherStudentConfig(MultiCropConfig, frozen=True):
    """Settings that DINO, DINOv2 and DINOv3 share."""

    prototypes: Derived[int] = derived(ge=2)
    """number of prototypes (K), the outputs of the head; default for fewer than 100,000 images: as many as one forward
    pass of all processes has images, rounded to a power of two"""
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
    """momentum of the teacher's moving average at the start of the run; the momentum rises to 1 along a cosine; default
    for fewer than 100,000 images and without `init_from`: 0.9"""
    centering: Derived[Centering] = derived()
    """centring of the teacher's output: mean (subtract a running mean, as in DINO) or sinkhorn (Sinkhorn-Knopp, as in
    SwAV, 2006.09882); default: mean, or sinkhorn for fewer than 100,000 images"""
    center_momentum: float = Field(default=0.9, ge=0, le=1)
    """momentum of the running mean of the teacher's output; used if `centering` is mean"""


def teacher_defaults(size: RunSize, horizon: float) -> dict[str, Any]:
    """Return the default sizes of a head, and how the teacher follows the student.

    On a small data set, the published settings learn little (benchmarks/results/small_data.md). There, Sinkhorn-Knopp
    (of SwAV, 2006.09882) spreads the two global crops of each image over half as many prototypes, and the teacher is an
    average of the student over about 10 steps at first, and over many towards the end of the run.

    Args:
        horizon: largest averaging window of the teacher in steps; see `default_momentum`.
    """
    images = size.batch_size // size.accumulate  # of a forward pass of all processes
    slow = size.large or size.pretrained
    return {
        "prototypes": 2 ** round(math.log2(min(size.images / 8, 65536) if size.large else max(images, 2))),
        "centering": "mean" if size.large else "sinkhorn",
        "momentum": default_momentum(size.steps, horizon) if slow else 0.9,
        "hidden_dim": 2048 if size.large else 512,
        "bottleneck_dim": 256 if size.large else 128,
        "batch_norm": not size.large,
    }


def default_momentum(steps: int, horizon: float) -> float:
    """Return the EMA momentum for an averaging window of `steps / 6` steps, at least 10 and at most `horizon`."""
    return round(1 - 1 / min(max(steps / 6, 10), horizon), 6)


class TeacherStudent(Method):
    """A student and a teacher, each an encoder with one head or two, and the centres of the teacher's outputs.

    After each step, the parameters and running statistics of the teacher move towards those of the student (`ema`). The
    teacher is always in eval mode.

    A subclass may add a second head, `ibot_head`, and a second output of the teacher. The names of the centre and of
    the metrics of this output start with `ibot_`.
    """

    section: ClassVar[str]
    """name of the method, which is the prefix of its settings"""
    config: Any
    """settings of the method"""
    fixed_sizes = True
    reach_in_warmup: ClassVar[bool] = True
    """True if the teacher's temperature reaches its final value in the last step of its warm-up, False if in the step
    after the warm-up"""
    small_settings: ClassVar[dict[str, Any]] = {
        "global_size": 16,
        "local_size": 12,
        "local_crops": 2,
        "hidden_dim": 32,
        "bottleneck_dim": 16,
        "prototypes": 64,
        "centering": "mean",
        "momentum": 0.9,
    }

    def __init__(self, student: Mapping[str, nn.Module], config: TeacherStudentConfig, steps: int) -> None:
        """Build the teacher as a copy of the student.

        Args:
            student: modules of the student: `encoder`, `head`, and `ibot_head` if there is a second head.
            config: resolved settings.
            steps: length of the run.
        """
        super().__init__()
        self.config, self.steps, self.image_size = config, steps, config.global_size
        self.rank_hint = f"Try a lower optim.lr, a longer optim.warmup_steps, or a higher {self.section}.momentum."
        self.student = nn.ModuleDict(student)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()
        self.center: Tensor
        self._pending: dict[str, PendingCenter] = {}
        self._add_center("", config.prototypes)
        # for health(): the teacher's pooled features in the last forward pass, and a dict from the prefix of an output
        # to the index of the most probable prototype of each row
        self._last: tuple[Tensor, dict[str, Tensor]] | None = None

    def _add_center(self, output: str, prototypes: int) -> None:
        """Add the centre of an output of the teacher. `output` is the prefix of the output's buffer and metrics."""
        self.register_buffer(f"{output}center", torch.zeros(prototypes))
        self._pending[output] = PendingCenter()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.teacher.eval()  # so that the teacher does not use drop path
        return self

    def _add_to_center(self, output: str, step: int, logits: Tensor | FactoredLogits) -> None:
        """Add logits (N, K) of the teacher to the next mean of an output, if `centering` subtracts a running mean."""
        if self.config.centering == "mean":
            self._pending[output].add(step, logits)

    @torch.no_grad()
    def crop_targets(self, pooled: Tensor, view: View, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the teacher's distributions of the global crops (G, B, K), and metrics.

        The metric `teacher_spread` is the standard deviation of the logits over the rows of all processes, averaged
        over the prototypes and divided by the temperature.

        Args:
            pooled: the teacher's pooled features of the global crops, (G * B, D).
            view: the global crops.
            step: number of optimizer steps before this one.
        """
        logits = self.teacher["head"](pooled).float()  # (G * B, K)
        temperature = self.temperature(step)
        with full_precision(logits):
            target = teacher_distribution(logits, self.center, temperature, self.config.centering)
        self._add_to_center("", step, logits)
        metrics = {
            "teacher_entropy": -torch.special.xlogy(target, target).sum(-1).mean(),
            "teacher_spread": column_variance(logits - self.center).sqrt().mean() / temperature,
        }
        return target.unflatten(0, (view.crops, -1)), metrics

    def temperature(self, step: int) -> float:
        """Return the softmax temperature of the teacher at a step."""
        c = self.config
        rise = (c.teacher_temperature_steps, c.teacher_temperature_start, c.teacher_temperature)
        return linear(step, *rise, reach_in_warmup=self.reach_in_warmup)

    def momentum(self, step: int) -> float:
        """Return the momentum of the teacher's moving average at a step."""
        return cosine(step, self.steps, self.config.momentum, 1.0)

    @torch.no_grad()
    def after_step(self, step: int, updated: float | Tensor = 1.0) -> None:
        """Move the teacher towards the student, and each centre towards the mean of this step's teacher logits.

        With `centering` sinkhorn, which does not use the centres, they do not move, as in the official code.
        """
        for output, pending in self._pending.items() if self.config.centering == "mean" else ():
            pending.move(getattr(self, f"{output}center"), self.config.center_momentum, updated)
        ema.update(self.teacher, self.student, self.momentum(step), updated)

    def start_from(self, other: Method) -> None:
        for name in ("student", "teacher"):
            own, theirs = getattr(self, name), getattr(other, name)
            load_weights(own["encoder"], theirs["encoder"].state_dict(), "ours")
            for part in set(own) - {"encoder"}:
                # if the other method has no second head, copy its only head
                own[part].load_state_dict(theirs[part if part in theirs else "head"].state_dict())
        for output in self._pending:
            getattr(self, f"{output}center").copy_(getattr(other, f"{output}center"))

    def trained_encoder(self) -> Encoder:
        return self.teacher["encoder"]  # pyright: ignore[reportReturnType]

    def trained_parts(self) -> list[nn.Module]:
        return list(self.student.values())

    def frozen(self) -> dict[str, int]:
        heads = [name for name in self.student if name != "encoder"]
        return {f"student.{head}.last_layer.": self.config.freeze_steps for head in heads}

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        if self._last is None:
            return {}
        pooled, assigned = self._last
        found: dict[str, float] = {}
        for output, best in assigned.items():
            prototypes = len(getattr(self, f"{output}center"))
            counts = all_reduce_sum(torch.bincount(best, minlength=prototypes).float())
            found[f"{output}prototypes_used"] = int((counts > 0).sum())
        if self.config.centering == "mean":
            found["center_norm"] = self.center.norm().item()
        return found | {"feature_rank": effective_rank(pooled)}

    def advice(self, record: Mapping[str, float]) -> list[str]:
        c, found = self.config, []
        if record["teacher_spread"] < 1:
            norm = "" if c.batch_norm else f"{self.section}.batch_norm, "
            own = {"init": "encoder.init xavier, ", "position_init": "encoder.position_init sincos, "}
            norm += "".join(text for name, text in own.items() if name in self.trained_encoder().settings)
            found.append(
                f"The teacher's logits hardly differ between images: teacher_spread is {record['teacher_spread']:.2f}, "
                f"but should be above 1. Try {norm}or a higher optim.lr."
            )
        if record["prototypes_used"] < c.prototypes / 16:
            sinkhorn = f", or {self.section}.centering sinkhorn" if c.centering == "mean" else ""
            found.append(
                f"The images of the batch use only {record['prototypes_used']:.0f} of {c.prototypes} prototypes. Try "
                f"fewer {self.section}.prototypes{sinkhorn}."
            )
        if terms := ", ".join(f"{term} {record[term]:.3f}" for term in TERMS if term in record):
            found.append(f"The terms of the loss are {terms}.")
        return [*found, *super().advice(record)]

    def collapse_signs(self, record: Mapping[str, float]) -> dict[str, str]:
        # Local crops count less in DINOv3, so the loss of a uniform output is only `dino_share` times ln K.
        loss = record["dino_loss" if "dino_loss" in record else "loss"] / record.get("dino_share", 1.0)
        return output_signs(self.section, "dino", loss, record["teacher_entropy"], math.log(self.config.prototypes))


class PendingCenter:
    """Sums of the teacher's logits over the forward passes of one step, to update the centre with their mean."""

    def __init__(self) -> None:
        # the step, and a vector (K + 1,): the sum of the logits over the rows, and the number of rows
        self._sums: tuple[int, Tensor] | None = None

    def add(self, step: int, logits: Tensor | FactoredLogits) -> None:
        """Add the logits (N, K) of a forward pass. If an earlier step was skipped, discard its sums first."""
        rows = logits if isinstance(logits, Tensor) else logits.rows
        rows = rows[:0] if is_absent() else rows
        sums = rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32))
        if not isinstance(logits, Tensor):  # the sum of the logits is the product of the summed rows
            with full_precision(rows):
                sums = F.linear(sums, logits.weight.to(sums.dtype))
        sums = torch.cat([sums, sums.new_full((1,), len(rows))])  # (K + 1,)
        self._sums = (step, self._sums[1] + sums if self._sums and self._sums[0] == step else sums)

    def move(self, center: Tensor, momentum: float, updated: float | Tensor = 1.0) -> None:
        """Move `center` (K,) towards the mean of the step's logits over the rows of all processes. Collective.

        If there are no rows, or if `updated` is 0, the centre does not change.
        """
        assert self._sums is not None, "after_step needs a forward pass of the same step"
        sums = all_reduce_sum(self._sums[1])  # (K + 1,)
        used = (sums[-1] > 0) & (torch.as_tensor(updated, device=sums.device) == 1)
        center.lerp_(torch.where(used, sums[:-1] / sums[-1], center), 1 - momentum)
        self._sums = None


def output_signs(section: str, term: str, loss: float, entropy: float, most: float) -> dict[str, str]:
    """Return the signs of collapse in the teacher's output for one term of the loss, as in `Method.collapse_signs`.

    Args:
        loss: cross-entropy per crop or per hidden token, in nats.
        entropy: entropy of the teacher's distributions, in nats.
        most: entropy of the uniform distribution over the prototypes, ln K, in nats.
    """
    what, prototypes = ("image", "prototypes") if term == "dino" else ("hidden token", "ibot_prototypes")
    if entropy > 0.995 * most and loss > 0.98 * most:
        return {
            f"{term} uniform": f"{term} cross-entropy {loss:.3f} and teacher entropy {entropy:.3f} are near ln K = "
            f"{most:.3f}: the teacher's output is uniform for every {what}. Try {section}.batch_norm, encoder.init "
            f"xavier, fewer {section}.{prototypes}, a lower {section}.teacher_temperature_start, or larger crops."
        }
    if entropy < 0.01 * most and loss < 0.02 * most:
        return {
            f"{term} one prototype": f"{term} teacher entropy {entropy:.4f} and cross-entropy {loss:.4f} are near 0: "
            f"the teacher assigns every {what} to one prototype. Try {section}.centering sinkhorn, a lower "
            f"{section}.center_momentum, a higher {section}.teacher_temperature, or a lower optim.lr."
        }
    return {}
