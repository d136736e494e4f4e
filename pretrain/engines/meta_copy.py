"""The method without its weights, to put gathered ones in where an engine shards them."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Skeleton:
    """A copy of a method, made before it is sharded, whose parameters take no memory."""

    def __init__(self, method: nn.Module) -> None:
        empty = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in method.parameters()
        }
        self.copied = copy.deepcopy(method, empty)  # pyright: ignore[reportArgumentType]
        self.names = {id(module): name for name, module in method.named_modules()}

    def fill(
        self, module: nn.Module, gathered: Iterable[Tensor], device: torch.device, *, keep: bool
    ) -> nn.Module | None:
        """A plain copy of a part of the method; `gathered` gives its parameters one after the other, whole.

        Gathering takes all processes; those that do not `keep` the result get None.
        """
        if not keep:
            for _ in gathered:
                pass
            return None
        replica = copy.deepcopy(self.copied.get_submodule(self.names[id(module)]))
        with torch.no_grad():
            for (name, parameter), values in zip(list(replica.named_parameters()), gathered, strict=True):
                owner, _, last = name.rpartition(".")
                filled = nn.Parameter(values.detach().to(device, copy=True), requires_grad=parameter.requires_grad)
                setattr(replica.get_submodule(owner), last, filled)
            for (_, buffer), (_, own) in zip(replica.named_buffers(), module.named_buffers(), strict=True):
                buffer.copy_(own)
        return replica.to(device).train(module.training)
