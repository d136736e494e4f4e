"""Signs that a run learns nothing: the rank of its features, and an alarm with a hint."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from runtime.collectives import all_reduce_sum, world_size
from runtime.errors import UserError
from runtime.settings import Section


class HealthConfig(Section):
    """When the collapse alarm rings, and what it does then."""

    on_collapse: Literal["warn", "stop"] = "warn"
    """what the alarm does"""
    patience: int = Field(default=5, ge=1)
    """records in a row that must look collapsed"""
    grace: float = Field(default=0.1, ge=0, le=1)
    """share of the run at the start during which the alarm is off"""
    min_rank: float = Field(default=0.1, ge=0, le=1)
    """alarm when the features' effective rank falls below this share of the largest seen"""


class CollapseError(UserError, RuntimeError):
    """The run looks collapsed and `health.on_collapse` is `stop`."""


@torch.no_grad()
def effective_rank(features: Tensor) -> float:
    """Exponential of the entropy of the singular values (RankMe, 2210.02885) of the centred features of all processes.

    Each gives as many rows, (N, D), and all get the same number: a process that alone stopped the run would leave the
    others waiting. Between 0 (all rows alike) and the least of rows and D; nan where a feature is not finite.
    """
    rows = len(features) * world_size()
    mean = all_reduce_sum(features.sum(0, dtype=torch.float64)) / rows  # (D,)
    centred = features.double() - mean
    gram = all_reduce_sum(centred.T @ centred)  # (D, D): its eigenvalues are the squares
    if not gram.isfinite().all():
        return math.nan
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    if values.sum() < 1e-6 * max((gram.trace() + rows * mean.square().sum()).sqrt().item(), 1e-30):
        return 0.0
    share = values / values.sum()
    return math.exp(-torch.special.xlogy(share, share).sum().item())


class CollapseAlarm:
    """Looks at the records of a run; rings once for each kind of collapse."""

    def __init__(self, config: HealthConfig, steps: int, memory: dict[str, Any] | None = None) -> None:
        """`memory`: what an alarm knew when the run was stopped. It is kept up to date, so that it can be saved."""
        self.config, self.steps = config, steps
        self.memory = {} if memory is None else memory
        self.memory.setdefault("in_a_row", {})
        self.memory.setdefault("largest_rank", 0.0)
        self.memory.setdefault("rung", [])

    def signs(self, record: Mapping[str, float], max_entropy: float | None) -> dict[str, str]:
        """What looks collapsed in `record`, and what to do about it. `max_entropy`: ln K of the method, in nats."""
        found = {}
        entropy, loss, rank = record.get("teacher_entropy"), record.get("loss"), record.get("feature_rank")
        if max_entropy and entropy is not None and loss is not None:
            if entropy > 0.995 * max_entropy and loss > 0.98 * max_entropy:
                found["uniform"] = (
                    f"loss {loss:.3f} and teacher entropy {entropy:.3f} are near ln K = {max_entropy:.3f}: the "
                    "teacher says the same of every image. Try dino.batch_norm, encoder.init xavier, fewer "
                    "dino.prototypes, a lower dino.teacher_temperature_start, or larger crops."
                )
            elif entropy < 0.01 * max_entropy and loss < 0.02 * max_entropy:
                found["one prototype"] = (
                    f"teacher entropy {entropy:.4f} and loss {loss:.4f} are near 0: one prototype takes every image. "
                    "Try a lower dino.center_momentum, a higher dino.teacher_temperature, or a lower optim.lr."
                )
        if rank is not None:
            largest = self.memory["largest_rank"] = max(self.memory["largest_rank"], rank)
            if rank < self.config.min_rank * largest:
                found["rank"] = (
                    f"the features' effective rank fell from {largest:.1f} to {rank:.1f}. "
                    "Try a lower optim.lr, a longer optim.warmup_steps, or a higher dino.momentum."
                )
        return found

    def look(self, record: Mapping[str, float], max_entropy: float | None) -> dict[str, str]:
        """Kinds of collapse that ring now, each with a message that says what to try.

        Raises:
            CollapseError: `health.on_collapse` is `stop`.
        """
        signs = self.signs(record, max_entropy)
        in_a_row = self.memory["in_a_row"] = {kind: self.memory["in_a_row"].get(kind, 0) + 1 for kind in signs}
        if record["step"] < self.config.grace * self.steps:
            return {}
        ringing = {
            kind: f"collapse ({kind}) at step {record['step']:.0f}: {sign}"
            for kind, sign in signs.items()
            if in_a_row[kind] >= self.config.patience and kind not in self.memory["rung"]
        }
        self.memory["rung"] += ringing
        if ringing and self.config.on_collapse == "stop":
            raise CollapseError("; ".join(ringing.values()))
        return ringing
