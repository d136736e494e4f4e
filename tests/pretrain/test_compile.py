"""`--compile true`: which parts of a method are compiled, and to how many graphs."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel

from tessera import encoders
from tessera.encoders.compiling import compile_blocks
from tessera.pretrain.methods.method import Method
from tests.ranks import on_processes


class _Squares(Method):
    """Method whose loss is the sum of the squared features."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoders.build("vit_micro", depth=2, dim=512, heads=2)

    def forward(self, batch: torch.Tensor, step: int) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.encoder(batch).pooled.square().sum()


def _one_graph_a_block(rank: int) -> None:
    del rank
    method, counter = _Squares(), CompileCounter()
    compile_blocks(method.encoder, fixed_sizes=True, backend=counter)
    # Buckets of one megabyte, smaller than a block, which torch would split at their bounds.
    wrapped = DistributedDataParallel(method, bucket_cap_mb=1)
    wrapped(torch.randn(2, 3, 16, 16), 0).backward()
    assert counter.frame_count == 1, counter.frame_count  # both blocks share the graph


@pytest.mark.slow
def test_ddp_splits_no_compiled_block(free_port: int) -> None:
    on_processes(_one_graph_a_block, free_port, count=1, group=True)
