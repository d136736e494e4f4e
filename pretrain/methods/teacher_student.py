"""Parts of methods in which a student learns from a teacher, the moving average of the student (DINO, 2104.14294).

Shape letters: N rows of this process (images or tokens); B images; S crops of an image; T tokens; D width of the
encoder; K prototypes.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.encoders.base import Encoder
from tessera.encoders.images import Images, Mask, can_pack, pack
from tessera.pretrain.methods.base import full_precision
from tessera.runtime.collectives import all_reduce_max, all_reduce_sum

Centering = Literal["mean", "sinkhorn"]


@dataclass(frozen=True)
class HeadShape:
    """Sizes and kinds of the layers of a head."""

    prototypes: int
    """Number of outputs (K)."""
    hidden_dim: int
    """Width of the hidden layers."""
    bottleneck_dim: int
    """Width of the last layer before the prototypes."""
    layers: int = 3
    """Number of linear layers before the prototypes."""
    batch_norm: bool = False
    """True for batch norm after each linear layer except the last."""
    fixed_length: bool = True
    """True to fix the norm of every prototype vector at 1."""
    linear: bool = False
    """True for prototypes without weight norm, as in DINOv3; `fixed_length` is then not used."""


class Prototypes(nn.Module):
    """Weight-normed linear layer without bias: (N, D) -> (N, K).

    For an input of norm 1, each output is the cosine between the input and a learned direction, times a learned length.
    The parameters are named `weight_g` (K, 1) and `weight_v` (K, D) as in DINO's checkpoints.
    """

    def __init__(self, dim: int, prototypes: int, *, fixed_length: bool) -> None:
        super().__init__()
        self.weight_v = nn.Parameter(nn.Linear(dim, prototypes, bias=False).weight.detach().clone())
        self.weight_g = nn.Parameter(torch.ones(prototypes, 1), requires_grad=not fixed_length)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_g * F.normalize(self.weight_v, dim=1))


class BatchNorm(nn.Module):
    """Batch norm over the rows of all processes.

    This module always uses the statistics of the batch and keeps no running statistics, because heads are not used for
    inference. Processes may have different numbers of rows. Unlike `torch.nn.SyncBatchNorm`, this module also runs on
    the CPU.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        with full_precision(x):
            x32 = x.float()
            # Without any row, the mean must not be 0 / 0, or the gradient of the weight would not be finite.
            rows = all_reduce_sum(x32.new_full((), len(x))).clamp(min=1)
            # Subtract the mean before squaring, because mean(x^2) - mean(x)^2 would cancel most digits of float32.
            centred = x32 - all_reduce_sum(x32.sum(0)) / rows
            variance = all_reduce_sum(centred.square().sum(0)) / rows  # (D,)
            return (centred * (self.weight * torch.rsqrt(variance + self.eps)) + self.bias).to(x.dtype)


class Head(nn.Module):
    """Projection head: MLP with GELU, L2 normalisation, prototypes. (N, D) -> (N, K)."""

    def __init__(self, dim: int, shape: HeadShape) -> None:
        super().__init__()
        widths = [dim] + [shape.hidden_dim] * (shape.layers - 1) + [shape.bottleneck_dim]
        layers: list[nn.Module] = []
        for i, (width_in, width_out) in enumerate(itertools.pairwise(widths)):
            linear = nn.Linear(width_in, width_out)
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            layers.append(linear)
            if i < shape.layers - 1:
                layers += [BatchNorm(width_out)] * shape.batch_norm + [nn.GELU()]
        self.mlp = nn.Sequential(*layers)
        if shape.linear:
            self.last_layer = nn.Linear(shape.bottleneck_dim, shape.prototypes, bias=False)
            nn.init.trunc_normal_(self.last_layer.weight, std=0.02)
        else:
            self.last_layer = Prototypes(shape.bottleneck_dim, shape.prototypes, fixed_length=shape.fixed_length)

    def forward(self, x: Tensor) -> Tensor:
        # The epsilon is larger in float16, in which 1e-12 is 0.
        x = self.mlp(x)
        return self.last_layer(F.normalize(x, dim=-1, eps=1e-6 if x.dtype == torch.float16 else 1e-12))


def encode(encoder: nn.Module, views: Sequence[Images], mask: Mask | None = None) -> tuple[Tensor, Tensor]:
    """Return the pooled features of all views, (S * B, D), and token features whose first rows are those of the first
    view, (T, D).

    An encoder that takes packed images gets all views in one call, if its patches divide their sides. `mask` hides
    tokens of the first view.
    """
    if isinstance(encoder, Encoder) and encoder.takes_packed and can_pack(views, encoder.stride):
        packed = pack(views, encoder.stride)
        features = encoder(packed, None if mask is None else mask.extended(packed.grids))
        return features.pooled, features.tokens
    first = encoder(views[0]) if mask is None else encoder(views[0], mask)
    return torch.cat([first.pooled, *(encoder(view).pooled for view in views[1:])]), first.tokens


def teacher_distribution(logits: Tensor, center: Tensor, temperature: float, centering: Centering) -> Tensor:
    """Return the centred and sharpened distributions of a teacher with the given float32 logits: (N, K) -> (N, K)."""
    if centering == "sinkhorn":
        return sinkhorn(logits, temperature)
    return F.softmax((logits - center) / temperature, dim=-1)


@torch.no_grad()
def sinkhorn(logits: Tensor, temperature: float, iterations: int = 3) -> Tensor:
    """Return Sinkhorn-Knopp assignments over the rows of all processes (SwAV, 2006.09882): (N, K) -> (N, K).

    Each row of the result is a distribution over the prototypes. Summed over all rows, all prototypes have about the
    same weight.

    Args:
        logits: (N, K) float32; N may differ between processes, and may be 0.
    """
    scaled = logits / temperature
    own_peak = scaled.max() if len(scaled) else scaled.new_full((), -torch.inf)
    peak = all_reduce_max(own_peak)  # subtract the maximum, so that exp does not overflow
    assignment = (scaled - peak).exp()  # (N, K)
    rows = all_reduce_sum(scaled.new_full((), len(logits)))
    for _ in range(iterations):
        assignment = assignment / all_reduce_sum(assignment.sum(0)).clamp(min=1e-30) / logits.shape[1]
        assignment = assignment / assignment.sum(1, keepdim=True).clamp(min=1e-30) / rows
    return assignment * rows


class PendingCenter:
    """Sums of the teacher's logits over the forward passes of one step, of which the centre needs the mean."""

    def __init__(self) -> None:
        # the step, and a vector (K + 1,): the sum of the logits over the rows, and the number of rows
        self._sums: tuple[int, Tensor] | None = None

    def add(self, step: int, logits: Tensor) -> None:
        """Add the logits (N, K) of a forward pass. Sums of an earlier step are discarded: that step was skipped."""
        sums = logits.sum(0, dtype=torch.promote_types(logits.dtype, torch.float32))  # (K,)
        sums = torch.cat([sums, sums.new_full((1,), len(logits))])  # (K + 1,)
        self._sums = (step, self._sums[1] + sums if self._sums and self._sums[0] == step else sums)

    def move(self, center: Tensor, momentum: float) -> None:
        """Move `center` (K,) towards the mean of the step's logits over the rows of all processes. Collective.

        Without any row, the centre stays where it is.

        Raises:
            RuntimeError: no logits were added in this step.
        """
        if self._sums is None:
            raise RuntimeError("after_step was called without a forward pass of the same step.")
        sums = all_reduce_sum(self._sums[1])  # (K + 1,)
        center.lerp_(torch.where(sums[-1] > 0, sums[:-1] / sums[-1], center), 1 - momentum)
        self._sums = None


def output_advice(
    section: str, record: Mapping[str, float], prototypes: int, *, batch_norm: bool, centering: Centering
) -> list[str]:
    """Return what the metrics `teacher_spread` and `prototypes_used` of a run that does not learn show, and settings to
    try.

    Args:
        section: name of the method, which starts the names of its settings.
        record: metrics of a step.
        prototypes: number of prototypes (K).
        batch_norm: True if the head has batch norm.
        centering: centring of the teacher's output.
    """
    found = []
    if record["teacher_spread"] < 1:
        settings = "encoder.init xavier, encoder.position_init sincos, or a higher optim.lr"
        found.append(
            f"The teacher's logits hardly differ between images: teacher_spread is {record['teacher_spread']:.2f}, "
            f"and should be above 1. Try {settings if batch_norm else f'{section}.batch_norm, {settings}'}."
        )
    if record["prototypes_used"] < prototypes / 16:
        sinkhorn = f", or {section}.centering sinkhorn" if centering == "mean" else ""
        found.append(
            f"The images of the batch fall on {record['prototypes_used']:.0f} of {prototypes} prototypes. Try fewer "
            f"{section}.prototypes{sinkhorn}."
        )
    return found


def output_signs(section: str, term: str, loss: float, entropy: float, most: float) -> dict[str, str]:
    """Return the signs of collapse in the teacher's output for one term of the loss: kind of collapse -> message.

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
