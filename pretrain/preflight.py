"""What a run will do and need, before it starts (`--dry_run`)."""

import copy
import math
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import encoders
from data.augment import to_model_input
from data.collate import collate
from data.shards import plan
from pretrain.config import RunConfig, to_yaml
from pretrain.methods.base import Method


def rehearse(method: Method, encoder: encoders.Encoder) -> None:
    """Show the encoder crops of a square, a wide and a tall image, on a device where nothing is computed.

    Raises:
        ValueError: it does not take them.
    """
    transform = method.transform()
    pictures = [torch.zeros(3, *size, dtype=torch.uint8) for size in ((64, 64), (32, 256), (256, 32))]
    batch = to_model_input(collate(transform, pictures, [np.random.default_rng(0) for _ in pictures])).to("meta")
    with torch.device("meta"):
        phantom = encoders.build(**encoder.settings).train()
    with torch.random.fork_rng(devices=[]):
        for view in batch.views:
            for mask in view.masks or (None,):
                phantom(view.images, mask, drop=method.drop)


def state_bytes(method: Method) -> int:
    """Bytes of weights, gradients and AdamW's two moments, all float32."""
    everything = [*method.parameters(), *method.buffers()]
    trained = [p for p in method.parameters() if p.requires_grad]
    return sum(t.nbytes for t in everything) + 3 * sum(t.nbytes for t in trained)


def activation_bytes(method: Method, config: RunConfig, images: int) -> int:
    """Bytes that a forward pass of `images` keeps for the backward pass: from real passes of two and of four."""
    method = copy.deepcopy(method)  # a pass leaves its traces
    two, four = (_kept_bytes(method, config, n) for n in (2, 4))
    return two + (four - two) * (images - 2) // 2


def _kept_bytes(method: Method, config: RunConfig, images: int) -> int:
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # a freed address would be given out twice

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    pictures = [torch.zeros(3, 64, 64, dtype=torch.uint8)] * images
    batch = to_model_input(collate(method.transform(), pictures, [np.random.default_rng(0) for _ in pictures]))
    weights = {t.untyped_storage().data_ptr() for t in [*method.parameters(), *method.buffers()]}
    with (
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=config.precision != "fp32"),
    ):
        method(batch, 0)
    return sum(size for address, size in kept.items() if address not in weights)


def report(config: RunConfig, method: Method, shards: Any, images: int, processes: int, workers: int) -> None:
    """Print the resolved settings and a table of what the run will do and need."""
    assert config.steps is not None
    each = config.batch_size // processes // config.accumulate
    activations = activation_bytes(method, config, each)
    planned = plan(shards, world_size=processes, workers=workers)
    count = sum(source["shards"] for source in planned)
    size = sum(source["bytes"] for source in planned)
    shares = ", ".join(f"{source['shards_per_worker']:.1f}" for source in planned)
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad)
    table = Table("what", "how much", title="this run")
    rows = {
        "trained parameters": f"{trained:,}",
        "optimizer steps": f"{config.steps:,} of {config.batch_size} images",
        "images": f"{images:,} in {count:,} shards, {size / 1e9:.2f} GB",
        "epochs": f"{config.steps * config.batch_size / images:.1f}",
        "processes x loader workers": f"{processes} x {workers}",
        "shards per worker": f"{shares} (any number works)",
        "images a process holds at once": f"{each}",
        "memory a process: weights, gradients, optimizer": f"{state_bytes(method) / 1e9:.2f} GB",
        "memory a process: activations (estimate)": f"{activations / 1e9:.2f} GB",
        "checkpoint": f"{(state_bytes(method) - 4 * trained) / 1e9:.2f} GB",
        "checkpoints": f"{math.ceil(config.steps / config.checkpoint_every)}, the newest {config.checkpoint.keep} stay",
    }
    for what, much in rows.items():
        table.add_row(what, much)
    print(to_yaml(config))
    Console().print(table)
