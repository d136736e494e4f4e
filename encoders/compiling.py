"""Compilation of the blocks of an encoder with torch's compiler."""

from collections.abc import Callable
from typing import Any

from tessera.encoders.base import Encoder


def compile_blocks(encoder: Encoder, *, fixed_sizes: bool, backend: str | Callable[..., Any] = "inductor") -> None:
    """Apply `torch.compile` to each block of an encoder.

    Args:
        fixed_sizes: True if batches have few different shapes, such as those of two crop sizes. Each shape then has a
            graph of its own. Otherwise, torch makes a graph for any number of tokens when the number changes. That is
            also so with `skip_dropped`, which changes the number of images from step to step.
        backend: backend of `torch.compile`.
    """
    import torch._dynamo.config  # imported here, because the import takes seconds

    # All stages and crop sizes need compiled variants of their own, which count towards one limit. Beyond this limit,
    # torch runs a block without compilation.
    torch._dynamo.config.recompile_limit = 64
    # DDP would split the graph of each block, to send gradients early. A block is small, so that nothing is gained.
    torch._dynamo.config.optimize_ddp = False
    dynamic = False if fixed_sizes and not getattr(encoder, "skip_dropped", False) else None
    for block in encoder.blocks:
        block.compile(dynamic=dynamic, backend=backend)
