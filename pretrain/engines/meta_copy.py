"""Copies of modules on the meta device, where parameters take no memory."""

import copy
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def meta_parameters(module: nn.Module) -> dict[int, nn.Parameter]:
    """Return a map from the `id` of each parameter of `module` to a copy of the parameter on the meta device."""
    return {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }


def on_meta(module: M) -> M:
    """Return a copy of `module` on the meta device. Only parameters and buffers are moved, not other tensors."""
    empty: dict[int, object] = {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    return copy.deepcopy(module, empty | meta_parameters(module))


class MetaCopy:
    """A copy of a method on the meta device. Engines that shard weights use it to build modules with full weights.

    The copy must be made before the method is sharded.
    """

    def __init__(self, method: nn.Module) -> None:
        self._copy = copy.deepcopy(method, dict[int, object](meta_parameters(method)))
        self._names = {id(module): name for name, module in method.named_modules()}

    def fill(self, module: M, parameters: Iterable[Tensor], device: torch.device) -> M:
        """Return a copy of `module` with full parameters on `device`. `module` is the method or one of its modules.

        Args:
            parameters: full parameters of `module`, in the order of `module.parameters()`.
        """
        replica = copy.deepcopy(self._copy.get_submodule(self._names[id(module)]))
        with torch.no_grad():
            for (name, parameter), values in zip(list(replica.named_parameters()), parameters, strict=True):
                owner, _, last = name.rpartition(".")
                filled = nn.Parameter(values.detach().to(device, copy=True), requires_grad=parameter.requires_grad)
                setattr(replica.get_submodule(owner), last, filled)
            for (_, buffer), (_, own) in zip(replica.named_buffers(), module.named_buffers(), strict=True):
                buffer.copy_(own)
        return replica.to(device).train(module.training)  # pyright: ignore[reportReturnType]
