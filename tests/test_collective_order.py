"""Two processes that swap two collectives, which gloo does not see. This file is also the script that they run."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tessera.runtime.collectives import all_reduce_max


@pytest.mark.slow
def test_swapped_collectives_are_found(fork: Callable) -> None:
    with pytest.raises(AssertionError, match=r"0 of group 0:\n(gloo:all_reduce .*collective_order.py:\d+ in .*\n?){2}"):
        fork([], 2, Path(__file__)).wait()


def _loss() -> None:
    all_reduce_max(torch.zeros(1))


def _norm() -> None:
    all_reduce_max(torch.ones(1))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for call in (_loss, _norm) if os.environ["RANK"] == "0" else (_norm, _loss):
        call()
    dist.destroy_process_group()
