"""AdamW's state, which torch makes at the first step; here it is there from the start: a checkpoint can fill it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def fill_moments(state: dict[Any, Any], parameters: Iterable[Tensor]) -> None:
    """Zeros, as AdamW itself begins."""
    for parameter in parameters:
        zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
        state[parameter] = {"step": torch.tensor(0.0)} | zeros


def optimizer_steps(state: dict[Any, Any]) -> int:
    """How often AdamW has stepped; all parameters step together."""
    return int(next(iter(state.values()))["step"]) if state else 0


def set_optimizer_steps(state: dict[Any, Any], steps: int) -> None:
    for of_one in state.values():
        of_one["step"] = torch.tensor(float(steps))
