"""A method of a few thousand parameters with its engine and its Saver, for tests of checkpoints."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState

from tessera import encoders
from tessera.pretrain.checkpoints.save import Saver
from tessera.pretrain.config import CheckpointConfig
from tessera.pretrain.engines.ddp import DDP
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.base import Method, RunSize
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.runtime.settings import Section
from tests.ranks import on_processes  # noqa: F401, tests of other folders import it from here
from tests.teachers import small_settings

STEPS = 10
_resolved = {
    name: method.resolve(method.Config(**small_settings(method)), OptimConfig(), RunSize(1000, 4, STEPS))
    for name, method in METHODS.items()
}
SECTIONS: dict[str, Section] = {name: config for name, (config, _) in _resolved.items()}
OPTIM = _resolved["dino"][1]
ENCODER = {"variant": "vit_micro", "depth": 1, "dim": 24, "heads": 2, "mask_token": True}


def settings(name: str = "dino") -> dict[str, Any]:
    """Return the settings that a checkpoint stores."""
    own = {"method": name, "encoder": ENCODER, name: SECTIONS[name].model_dump(mode="json"), "steps": STEPS}
    return own | {"seed": 0, "batch_size": 4, "stream": {}, "shards": "abc"}


def method(name: str, seed: int) -> Method:
    torch.manual_seed(seed)
    return METHODS[name](encoders.build(**ENCODER), SECTIONS[name], STEPS)  # pyright: ignore[reportArgumentType]


def make(seed: int = 0, name: str = "dino") -> tuple[Accelerator, DDP]:
    """Return an engine after one step along random gradients."""
    PartialState(cpu=True)
    accelerator = Accelerator()
    engine = DDP(accelerator, method(name, seed), OPTIM)
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-3
    walk(engine)
    return accelerator, engine


def walk(engine: DDP) -> None:
    """Make a step along random gradients, and change the buffers."""
    for p in engine.method.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    for buffer in engine.method.buffers():
        buffer += 1
    engine.step()


def saver(folder: Path, accelerator: Accelerator, engine: DDP, name: str = "dino", **config: Any) -> Saver:
    """Return the saver of the run folder `folder`."""
    return Saver(folder / "checkpoints", accelerator, engine, settings(name), CheckpointConfig(**config))


def tensors(engine: DDP) -> dict[str, torch.Tensor]:
    """Return copies of all tensors that a checkpoint holds, by name."""
    return {name: tensor.data.clone() for name, tensor in engine.local_state().items()}
