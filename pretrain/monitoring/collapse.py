"""Detect feature collapse: the effective rank of the features, and an alarm."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from tessera.runtime.collectives import all_reduce_sum, world_size
from tessera.runtime.settings import Section
from tessera.runtime.user_error import UserError

EQUAL = 1e-5
"""Features count as equal if their differences from the mean are smaller than this fraction of their norm."""


class HealthConfig(Section):
    """Settings of the collapse alarm."""

    on_collapse: Literal["warn", "stop"] = "warn"
    """action when the run looks collapsed: warn (print a warning) or stop (stop the run)"""
    patience: int = Field(default=5, ge=1)
    """number of consecutive records of metrics that must look collapsed before the alarm"""
    grace: float = Field(default=0.1, ge=0, le=1)
    """fraction of the run, counted from its start, during which the alarm is off"""
    min_rank: float = Field(default=0.1, ge=0, le=1)
    """the run looks collapsed if the features' effective rank is below this fraction of the largest rank so far"""


class CollapseError(UserError, RuntimeError):
    """Raised when the run looks collapsed and `health.on_collapse` is `stop`."""


@torch.no_grad()
def effective_rank(features: Tensor) -> float:
    """Return the effective rank of the features of all processes (RankMe, 2210.02885).

    The singular values of the centred features are normalised to sum to 1. The effective rank is the exponential of
    their entropy. It is at most the smaller of D and the number of rows. It is 0 if all rows are equal up to rounding
    errors, and NaN if a feature is not finite. All processes get the same value, so a collapse stops all of them at the
    same step.

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
    # Check for equal features first: float32 rounding errors point in all directions, so equal features would appear to
    # have a high rank.
    if gram.trace() <= EQUAL**2 * max((gram.trace() + rows * mean.square().sum()).item(), 1e-60):
        return 0.0
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    share = values / values.sum()
    return math.exp(-torch.special.xlogy(share, share).sum().item())


@torch.no_grad()
def column_sums(x: Tensor) -> Tensor:
    """Return the sums that `variance_of` needs of the rows x (N, D) of this process: (2 * D + 1,) float64.

    They are the sum and the sum of squares of each column, and N. They are computed from float32 means and variances,
    which need no copy of x in float64.
    """
    variance, mean = torch.var_mean(x.detach(), 0, correction=0) if len(x) else x.new_zeros(2, x.shape[1])
    variance, mean = variance.double(), mean.double()
    return torch.cat([mean * len(x), (variance + mean.square()) * len(x), mean.new_full((1,), len(x))])


def variance_of(sums: Tensor, correction: int = 1) -> Tensor:
    """Return the variance of each column over the rows of all processes: (2 * D + 1,) -> (D,) float32. Collective."""
    sums = all_reduce_sum(sums)
    rows = sums[-1]
    mean, square = (sums[:-1] / rows).chunk(2)
    return ((square - mean.square()).clamp(min=0) * rows / (rows - correction).clamp(min=1)).float()


@torch.no_grad()
def column_variance(x: Tensor, correction: int = 1) -> Tensor:
    """Return the variance of each column over the rows of all processes: (N, D) -> (D,). N may differ. Collective."""
    if world_size() == 1 or x.is_meta:
        return x.detach().var(0, correction=correction)
    return variance_of(column_sums(x), correction)


class CollapseAlarm:
    """Alarm that warns about a collapsed run, once for each kind of collapse.

    A kind is a name such as `rank` or `uniform`. After the grace period, a warning is due when `health.patience`
    records in a row show the same kind.
    """

    def __init__(
        self, config: HealthConfig, steps: int, rank_hint: str = "", memory: dict[str, Any] | None = None
    ) -> None:
        """Create the alarm of a run.

        Args:
            config: settings of the alarm.
            steps: length of the run in optimizer steps.
            rank_hint: advice in the warning about a fallen rank, such as settings to change.
            memory: state of the alarm, empty for a new run. The alarm updates the dictionary in place, so that a
                checkpoint can store the state.
        """
        self.config, self.steps, self.rank_hint = config, steps, rank_hint
        self.memory = {} if memory is None else memory
        self.memory.setdefault("in_a_row", {})
        self.memory.setdefault("largest_rank", 0.0)
        self.memory.setdefault("rung", [])

    def check(self, record: Mapping[str, float], method_signs: Mapping[str, str]) -> dict[str, str]:
        """Return the new warnings for one record of metrics, as a dict from kind of collapse to message.

        Args:
            record: metrics of one training step.
            method_signs: signs that the method found in `record` (`Method.collapse_signs`).

        Raises:
            CollapseError: a warning is due and `health.on_collapse` is `stop`.
        """
        signs = self.signs(record, method_signs)
        in_a_row = self.memory["in_a_row"] = {kind: self.memory["in_a_row"].get(kind, 0) + 1 for kind in signs}
        if record["step"] < self.config.grace * self.steps:
            return {}
        due = {
            kind: f"collapse ({kind}) at step {record['step']:.0f}: {sign}"
            for kind, sign in signs.items()
            if in_a_row[kind] >= self.config.patience and kind not in self.memory["rung"]
        }
        if due and self.config.on_collapse == "stop":  # a resumed run that still looks collapsed stops again
            raise CollapseError("; ".join(due.values()))
        self.memory["rung"] += due
        return due

    def signs(self, record: Mapping[str, float], method_signs: Mapping[str, str]) -> dict[str, str]:
        """Return all signs of collapse in one record: those of the method, a fallen rank of the features, and features
        that are the same for all images.

        The keys are kinds of collapse, and the values are messages.
        """
        signs, rank = dict(method_signs), record.get("feature_rank", math.nan)
        largest = self.memory["largest_rank"] = max(self.memory["largest_rank"], rank)  # a NaN leaves it unchanged
        if rank == 0:
            signs["identical"] = (
                "all images have the same features. Look at pictures/crops.png: all images may be black or equal. "
                f"{self.rank_hint}".rstrip()
            )
        elif rank < self.config.min_rank * largest:
            signs["rank"] = f"the features' effective rank fell from {largest:.1f} to {rank:.1f}. {self.rank_hint}"
        return signs
