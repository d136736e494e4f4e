"""Methods by name, and methods as loss modules for a training loop of your own (docs/extending.md)."""

from typing import Any

import torch

from tessera.interface import run_settings
from tessera.pretrain import job
from tessera.pretrain.build import build_method
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.method import Method
from tessera.pretrain.resolve import make_accelerator
from tessera.runtime.isolation import isolated

__all__ = ["METHODS", "build"]


@isolated()
def build(method: str | None = None, data: Any = None, **settings: Any) -> Method:
    """Return the method of a run as a module, on the device of this process, with the initial weights of the run.

    `loss, metrics = module(batch, step)` takes the batches of `tessera.training_batches` with the same arguments. After
    each step of the optimizer, call `module.after_step(step)`, which moves the teacher of a method that has one. Train
    the parameters whose `requires_grad` is true. `module.trained_encoder()` is the result.

    The weights depend on the setting `seed`. Torch's generator keeps its state. Arguments and errors are the same as
    for `tessera.pretrain`. Settings of the optimizer, of checkpoints and of the evaluation have no effect.
    """
    with run_settings(method, data, settings) as given:
        accelerator, _ = make_accelerator(given)
        config = job.prepare(given, accelerator).config
    torch.manual_seed(config.seed)
    return build_method(config, fresh=True).to(accelerator.device)
