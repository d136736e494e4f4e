"""Detection of collapse: the effective rank of the features, and an alarm."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from runtime.collectives import all_reduce_sum
from runtime.errors import UserError
from runtime.settings import Section


class HealthConfig(Section):
    """The collapse alarm."""

    on_collapse: Literal["warn", "stop"] = "warn"
    """action of the alarm: print a warning, or stop the run"""
    patience: int = Field(default=5, ge=1)
    """number of records in a row that must look collapsed"""
    grace: float = Field(default=0.1, ge=0, le=1)
    """share of the run at the start during which the alarm is off"""
    min_rank: float = Field(default=0.1, ge=0, le=1)
    """alarm when the features' effective rank falls below this share of the largest seen"""


class CollapseError(UserError, RuntimeError):
    """Raised when the run looks collapsed and `health.on_collapse` is `stop`."""


@torch.no_grad()
def effective_rank(features: Tensor) -> float:
    """Return the effective rank of the features of all processes (RankMe, 2210.02885).

    This is the exponential of the entropy of the singular values of the centred features. It lies between 0 (all rows
    are equal) and the smaller of the number of rows and D, and is NaN if a feature is not finite. All processes get the
    same number, so that they stop together.

    Args:
        features: (N, D); N may differ between processes.
    """
    rows = all_reduce_sum(features.new_full((), len(features), dtype=torch.float64))
    mean = all_reduce_sum(features.sum(0, dtype=torch.float64)) / rows  # (D,)
    centred = features.double() - mean
    # (D, D); its eigenvalues are the squared singular values of the centred features
    gram = all_reduce_sum(centred.T @ centred)
    if not gram.isfinite().all():
        return math.nan
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    if values.sum() < 1e-6 * max((gram.trace() + rows * mean.square().sum()).sqrt().item(), 1e-30):
        return 0.0
    share = values / values.sum()
    return math.exp(-torch.special.xlogy(share, share).sum().item())


class CollapseAlarm:
    """Warn about a collapsed run, once per kind of collapse.

    A kind is a name such as `rank` or `uniform`. After the grace period, a warning is due when `health.patience`
    records in a row show the same kind.
    """

    def __init__(
        self, config: HealthConfig, steps: int, rank_hint: str = "", memory: dict[str, Any] | None = None
    ) -> None:
        """
        Args:
            config: thresholds.
            steps: length of the run.
            rank_hint: advice of the method when the rank of the features falls.
            memory: state of the alarm, empty for a new run. The alarm updates the dictionary in place, so that a
                checkpoint can store the state.
        """
        self.config, self.steps, self.rank_hint = config, steps, rank_hint
        self.memory = {} if memory is None else memory
        self.memory.setdefault("in_a_row", {})
        self.memory.setdefault("largest_rank", 0.0)
        self.memory.setdefault("rung", [])

    def check(self, record: Mapping[str, float], method_signs: Mapping[str, str]) -> dict[str, str]:
        """Return the warnings that are due now: kind -> message.

        Args:
            record: metrics of one step.
            method_signs: signs that the method found in `record` (`Method.collapse_signs`).

        Raises:
            CollapseError: a warning is due and `health.on_collapse` is `stop`.
        """
        signs = {**method_signs, **self._rank_sign(record.get("feature_rank"))}
        in_a_row = self.memory["in_a_row"] = {kind: self.memory["in_a_row"].get(kind, 0) + 1 for kind in signs}
        if record["step"] < self.config.grace * self.steps:
            return {}
        due = {
            kind: f"collapse ({kind}) at step {record['step']:.0f}: {sign}"
            for kind, sign in signs.items()
            if in_a_row[kind] >= self.config.patience and kind not in self.memory["rung"]
        }
        self.memory["rung"] += due
        if due and self.config.on_collapse == "stop":
            raise CollapseError("; ".join(due.values()))
        return due

    def _rank_sign(self, rank: float | None) -> dict[str, str]:
        if rank is None:
            return {}
        largest = self.memory["largest_rank"] = max(self.memory["largest_rank"], rank)
        if rank >= self.config.min_rank * largest:
            return {}
        return {"rank": f"the features' effective rank fell from {largest:.1f} to {rank:.1f}. {self.rank_hint}"}
