"""The teacher's average over a thousand steps under the launcher's engine, beside the formula in float64."""

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from tessera.data.demo import demo_shards
from tessera.pretrain.build import build_method
from tessera.pretrain.command_line import load
from tessera.pretrain.engines import Engine
from tessera.pretrain.optim import ema
from tessera.pretrain.resolve import make_accelerator, resolve

MOMENTUM = 0.9999
SMALL = "--method dino --encoder vit_micro --encoder.depth 1 --encoder.dim 24 --encoder.heads 2 --dino.hidden_dim 24"
HEAD = "--dino.prototypes 32 --dino.bottleneck_dim 16"


def run(folder: Path) -> None:
    """Write FOLDER/PROCESS.pt: three state dictionaries of the teacher, at the start, at the end, and in float64."""
    config = resolve(load(["--data", demo_shards()[0], "--precision", "fp32", *SMALL.split(), *HEAD.split()]), 1000)
    accelerator, engine_class = make_accelerator(config)
    torch.manual_seed(0)
    method = build_method(config, fresh=True)
    engine = engine_class(accelerator, method, config.optim)
    teacher, student = (cast(nn.Module, getattr(method, name)) for name in ("teacher", "student"))
    start = full_weights(engine, teacher)
    exact = {name: tensor.double() for name, tensor in start.items()}
    local = {name: tensor for name, tensor in engine.local_state().items() if name.startswith("method.student.")}
    generator = torch.Generator().manual_seed(1)  # equal on all processes
    for _ in range(1000):
        for name, tensor in exact.items():
            moved = start[name] + 1 + torch.randn(tensor.shape, generator=generator)
            own = local[f"method.student.{name}"]
            own.data.copy_(moved.view(-1)[own.offset : own.offset + len(own.data)])
            tensor.mul_(MOMENTUM).add_(moved.double(), alpha=1 - MOMENTUM)
        ema.update(teacher, student, MOMENTUM)
    folder.mkdir(exist_ok=True)
    torch.save((start, full_weights(engine, teacher), exact), folder / f"{accelerator.process_index}.pt")


def full_weights(engine: Engine, module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the module's gathered weights."""
    return {name: p.detach().clone() for name, p in engine.gather_full_parameters(module).named_parameters()}
