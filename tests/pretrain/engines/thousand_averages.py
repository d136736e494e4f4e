"""The teacher's average over a thousand steps under the launcher's engine, beside the formula in float64.

python thousand_averages.py FOLDER: writes FOLDER/PROCESS.pt, three state dictionaries of the teacher: as it started, as
the engine has it at the end, as float64 says.
"""

import sys
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from data.demo import demo_shards
from pretrain.config import load, resolve
from pretrain.job import build_method, processes
from pretrain.optim import ema

MOMENTUM = 0.9999
SMALL = "--method dino --encoder vit_micro --encoder.depth 1 --encoder.dim 24 --encoder.heads 2 --dino.hidden_dim 24"
HEAD = "--dino.prototypes 32 --dino.bottleneck_dim 16"

config = resolve(load(["--data", demo_shards()[0], "--precision", "fp32", *SMALL.split(), *HEAD.split()]), 1000)
accelerator, engine_class = processes(config)
torch.manual_seed(0)
method = build_method(config, fresh=True)
engine = engine_class(accelerator, method, (0.9, 0.999))
teacher, student = (cast(nn.Module, getattr(method, name)) for name in ("teacher", "student"))


def whole() -> dict[str, Tensor]:
    """The teacher's weights, gathered."""
    gathered = engine.gather_full_parameters(teacher)
    return {name: p.detach().clone() for name, p in gathered.named_parameters()}


start = whole()
exact = {name: tensor.double() for name, tensor in start.items()}
local = {name: tensor for name, tensor in engine.local_state().items() if name.startswith("method.student.")}
generator = torch.Generator().manual_seed(1)  # the same on all processes
for _ in range(1000):
    for name, tensor in exact.items():
        moved = start[name] + 1 + torch.randn(tensor.shape, generator=generator)
        piece = local[f"method.student.{name}"]
        piece.data.copy_(moved.view(-1)[piece.offset : piece.offset + len(piece.data)])
        tensor.mul_(MOMENTUM).add_(moved.double(), alpha=1 - MOMENTUM)
    ema.update(teacher.parameters(), student.parameters(), MOMENTUM)
torch.save((start, whole(), exact), Path(sys.argv[1]) / f"{accelerator.process_index}.pt")
