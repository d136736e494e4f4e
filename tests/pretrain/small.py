"""A method of a few thousand numbers with its engine and its Saver, for tests of checkpoints."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState

import encoders
from pretrain.checkpoints.save import Saver
from pretrain.config import CheckpointConfig
from pretrain.engines.ddp import DDP
from pretrain.methods.base import Method
from pretrain.methods.dino import DINO
from pretrain.methods.mae import MAE
from pretrain.optim.adamw import OptimConfig
from runtime.settings import Section

STEPS = 10
SECTIONS: dict[str, Section] = {
    "dino": DINO.resolve(DINO.Config(prototypes=32, hidden_dim=24, bottleneck_dim=12), OptimConfig(), 1000, 4, 10)[0],
    "mae": MAE.resolve(MAE.Config(decoder_dim=16, decoder_heads=2), OptimConfig(), 1000, 4, 10)[0],
}
ENCODER = {"variant": "vit_micro", "depth": 1, "dim": 24, "heads": 2}


def settings(name: str = "dino") -> dict[str, Any]:
    """What a checkpoint holds of the settings."""
    own = {"method": name, "encoder": ENCODER, name: SECTIONS[name].model_dump(mode="json"), "steps": STEPS}
    return own | {"seed": 0, "batch_size": 4, "stream": {}, "shards": "abc"}


def method(name: str, seed: int) -> Method:
    torch.manual_seed(seed)
    encoder = encoders.build(**ENCODER)
    return DINO(encoder, SECTIONS["dino"], STEPS) if name == "dino" else MAE(encoder, SECTIONS["mae"], STEPS)  # pyright: ignore


def make(seed: int = 0, name: str = "dino") -> tuple[Accelerator, DDP]:
    """An engine after one step along random gradients."""
    PartialState(cpu=True)
    accelerator = Accelerator()
    engine = DDP(accelerator, method(name, seed), (0.9, 0.999))
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-3
    walk(engine)
    return accelerator, engine


def walk(engine: DDP) -> None:
    """A step along random gradients; the centre moves too."""
    for p in engine.method.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    for buffer in engine.method.buffers():
        buffer += 1
    engine.step()


def saver(folder: Path, accelerator: Accelerator, engine: DDP, name: str = "dino", **config: Any) -> Saver:
    """`folder`: OUTPUT."""
    return Saver(folder / "checkpoints", accelerator, engine, settings(name), CheckpointConfig(**config))


def tensors(engine: DDP) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds of it, by name."""
    return {name: piece.data.clone() for name, piece in engine.pieces().items()}


def on_processes(target: Callable[..., None], port: int, *arguments: Any, count: int = 2, limit: float = 90) -> None:
    """Run `target(rank, *arguments)` on processes that know of each other. One that fails or hangs fails the test."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=_run, args=(target, rank, count, port, arguments)) for rank in range(count)]
    for process in started:
        process.start()
    for process in started:
        process.join(limit)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert codes == [0] * count, codes


def _run(target: Callable[..., None], rank: int, count: int, port: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    target(rank, *arguments)
