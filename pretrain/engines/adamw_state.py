"""AdamW's state, which torch makes at the first step; here it is there from the start: a checkpoint can fill it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.engines.local_state import Piece

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


def pieces(method: nn.Module, state: dict[Any, Any], piece: Callable[[Tensor], Piece]) -> dict[str, Piece]:
    """Weights, buffers and moments by name, where the moments lie as the weights do; `piece` says what this process
    holds of one."""
    found = {f"method.{name}": piece(tensor) for name, tensor in method.state_dict(keep_vars=True).items()}
    for name, parameter in method.named_parameters():
        if parameter.requires_grad:
            found |= {f"{moment}.{name}": piece(state[parameter][moment]) for moment in MOMENTS}
    return found
