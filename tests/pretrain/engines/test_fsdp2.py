"""What FSDP2 sends in a step: which weights are gathered, when, and in which precision."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.augment import to_model_input
from data.batch import Batch
from data.collate import Collator, Sample
from pretrain.engines.fsdp2 import FSDP2
from pretrain.methods.base import Method
from runtime.processes import make_accelerator
from tests.pretrain import small

Event = tuple[str, int]
COLLECTIVES = {  # torch 2.15 has renamed them
    "gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce": ("reduce_scatter_single", "reduce_scatter_tensor"),
}


def log_collectives(events: list[Event]) -> None:
    """Append ("gather" or "reduce", bytes of the whole tensor) to `events` whenever FSDP2 sends something."""
    for kind, names in COLLECTIVES.items():
        name = next(name for name in names if hasattr(dist, name))
        setattr(dist, name, logged(kind, getattr(dist, name), events))


def logged(kind: str, collective: Any, events: list[Event]) -> Any:
    def log(*args: Any, **options: Any) -> Any:
        tensors = [each for each in (*args, *options.values()) if isinstance(each, Tensor)]
        events.append((kind, max(each.numel() * each.itemsize for each in tensors)))
        return collective(*args, **options)

    return log


def batch_for(method: Method, images: int) -> Batch:
    transform, rng = method.transform(), np.random.default_rng(0)
    noise = torch.from_numpy(rng.integers(0, 256, (3, 24, 24), dtype=np.uint8))
    samples = (Sample(str(i), noise, transform.draw((24, 24), rng), position=i, label=0) for i in range(images))
    return to_model_input(Collator(transform, images)(samples))


def padded(parameters: Iterable[Tensor]) -> int:
    """Number of values in parameters whose rows are padded to a multiple of two processes."""
    return sum(-(-len(p) // 2) * 2 * p[0].numel() for p in parameters)


def step(rank: int, precision: str, folder: str) -> None:
    """Take a step of MAE with a depth of 1 and a decoder of 2 blocks, and write what was sent and computed."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    accelerator = make_accelerator(mixed_precision=precision)
    method = small.method("mae", seed=0)
    blocks = [block for sequence in method.units() for block in sequence]
    inside = {p for block in blocks for p in block.parameters()}
    outside = [p for p in method.parameters() if p not in inside]
    found: dict[str, Any] = {
        "blocks": [padded(block.parameters()) for block in blocks],
        "rest": padded(outside),
        "trained rest": padded(p for p in outside if p.requires_grad),
    }
    events: list[Event] = []
    log_collectives(events)
    engine, dtypes = FSDP2(accelerator, method, small.OPTIM), set()
    for number, block in enumerate(blocks):
        block.register_forward_hook(lambda *_, number=number: events.append(("ran", number)))
        for part in block.modules():
            if isinstance(part, nn.Linear):
                part.register_forward_hook(lambda part, *_: dtypes.add(str(part.weight.dtype)))
    engine.forward_backward(batch_for(method, 4), 0, last=True)
    gradients = {str(p.grad.dtype) for p in method.parameters() if p.grad is not None}
    kept = gradients | {str(p.dtype) for p in method.parameters()}
    found |= {"events": events, "computed": sorted(dtypes), "kept": sorted(kept)}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.medium
@pytest.mark.parametrize(("precision", "width"), [("no", 4), ("bf16", 2)])
def test_blocks_are_gathered_in_the_precision_of_the_run(
    precision: str, width: int, tmp_path: Path, free_port: int
) -> None:
    small.on_processes(step, free_port, precision, str(tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())
    events, blocks = found["events"], found["blocks"]
    gathered = [size for kind, size in events if kind == "gather"]
    reduced = [size for kind, size in events if kind == "reduce"]
    assert sorted(gathered) == sorted(
        [4 * found["rest"], *(width * n for n in 2 * blocks)]
    )  # blocks forward and backward
    assert sorted(reduced) == sorted(4 * n for n in (found["trained rest"], *blocks))
    assert found["computed"] == [{2: "torch.bfloat16", 4: "torch.float32"}[width]]
    assert found["kept"] == ["torch.float32"]
    # the decoder's second block is gathered before its first block has run
    first = events.index(["ran", 1])
    assert sum(kind == "gather" for kind, _ in events[:first]) == 1 + 3
