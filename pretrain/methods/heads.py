"""Heads of methods: the projection head of DINO (2104.14294), and batch norm over all processes.

Shape letters: N rows of this process (images or tokens); D width of the encoder; K prototypes.
"""

import itertools
from typing import Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.pretrain.methods.batch_norm import centered
from tessera.pretrain.methods.method import full_precision


class FactoredLogits(NamedTuple):
    """Logits (..., K) as two factors, which occupy much less memory: logits = rows @ weight.T."""

    rows: Tensor
    """Inputs of the last layer: (..., d)."""
    weight: Tensor
    """Weight of the last layer: (K, d)."""

    def unflatten(self, crops: int) -> "FactoredLogits":
        """Split the rows of several crops: (S * B, K) -> (S, B, K)."""
        return FactoredLogits(self.rows.unflatten(0, (crops, -1)), self.weight)

    def product(self) -> Tensor:
        """Return the logits: (..., K)."""
        return F.linear(self.rows, self.weight)


class Prototypes(nn.Module):
    """Weight-normed linear layer without bias: (N, D) -> (N, K). If the input is None, return the weight (K, D).

    For an input of norm 1, each output is the cosine between the input and a learned direction, times a learned length.
    The parameters are named `weight_g` (K, 1) and `weight_v` (K, D) as in DINO's checkpoints.
    """

    def __init__(self, dim: int, prototypes: int, *, fixed_length: bool) -> None:
        super().__init__()
        self.weight_v = nn.Parameter(nn.Linear(dim, prototypes, bias=False).weight.detach().clone())
        self.weight_g = nn.Parameter(torch.ones(prototypes, 1), requires_grad=not fixed_length)

    def forward(self, x: Tensor | None) -> Tensor:
        weight = self.weight_g * F.normalize(self.weight_v, dim=1)
        return weight if x is None else F.linear(x, weight)


class LinearPrototypes(nn.Linear):
    """Linear layer without bias: (N, D) -> (N, K). If the input is None, return a copy of the weight (K, D).

    An engine that shards weights may free them after the forward pass of the layer. The copy stays valid.
    """

    def forward(self, input: Tensor | None) -> Tensor:
        return self.weight.clone() if input is None else super().forward(input)


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
            centred, _, variance, _ = centered(x32)  # (N, D), (D,)
            return (centred * (self.weight * torch.rsqrt(variance + self.eps)) + self.bias).to(x.dtype)


class Head(nn.Module):
    """Projection head: MLP with GELU, L2 normalisation, prototypes. (N, D) -> (N, K).

    Args:
        dim: width of the encoder (D).
        prototypes: number of outputs (K).
        hidden_dim: width of the hidden layers.
        bottleneck_dim: width of the last layer before the prototypes.
        layers: number of linear layers before the prototypes.
        batch_norm: add batch norm after each linear layer except the last.
        fixed_length: fix the norm of every prototype vector at 1.
        linear: use prototypes without weight norm, as in DINOv3. `fixed_length` is then ignored.
    """

    def __init__(
        self,
        dim: int,
        prototypes: int,
        hidden_dim: int,
        bottleneck_dim: int,
        *,
        layers: int = 3,
        batch_norm: bool = False,
        fixed_length: bool = True,
        linear: bool = False,
    ) -> None:
        super().__init__()
        mlp: list[nn.Module] = []
        for width_in, width_out in itertools.pairwise([dim] + [hidden_dim] * (layers - 1) + [bottleneck_dim]):
            if mlp:
                mlp += [BatchNorm(width_in)] * batch_norm + [nn.GELU()]
            layer = nn.Linear(width_in, width_out)
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
            mlp.append(layer)
        self.mlp = nn.Sequential(*mlp)
        if linear:
            self.last_layer = LinearPrototypes(bottleneck_dim, prototypes, bias=False)
            nn.init.trunc_normal_(self.last_layer.weight, std=0.02)
        else:
            self.last_layer = Prototypes(bottleneck_dim, prototypes, fixed_length=fixed_length)

    @overload
    def forward(self, x: Tensor, *, factored: Literal[True]) -> FactoredLogits: ...
    @overload
    def forward(self, x: Tensor, *, factored: Literal[False] = False) -> Tensor: ...
    def forward(self, x: Tensor, *, factored: bool = False) -> Tensor | FactoredLogits:
        # in float16, the default epsilon of 1e-12 is rounded to 0
        x = self.mlp(x)
        x = F.normalize(x, dim=-1, eps=1e-6 if x.dtype == torch.float16 else 1e-12)
        return FactoredLogits(x, self.last_layer(None)) if factored else self.last_layer(x)
