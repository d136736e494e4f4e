"""Several pretraining runs in one process, one after the other, some with batches that give no finite gradient.

python poisoned_runs.py FILE.json

FILE.json holds a list of {"arguments": a command line, "poison": {step: [process, pass of the step, what]}}. "what" is
the first thing that is not finite: "loss", "gradient" or "image". With "kill", SIGKILL ends the process. With
{"in_chunks": true}, several processes compute the losses of a run in chunks of rows, and one process computes them in
one.
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor

from tessera.data.batch import Batch
from tessera.encoders.images import PackedImages
from tessera.pretrain import job
from tessera.pretrain.methods import METHODS, cross_entropy
from tessera.pretrain.methods.method import Method
from tessera.pretrain.run import main

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
poison: dict[str, tuple[int, int, str]] = {}
passes: Counter[int] = Counter()


class Infinite(torch.autograd.Function):
    """Identity with a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0] * torch.inf


def poisonous(method: type[Method]) -> None:
    """Replace the method's forward pass by one that applies `poison`."""
    healthy = method.forward

    def forward(self: Method, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        if batch.positions is None:  # a check before the run
            return healthy(self, batch, step)
        passes[step] += 1
        process, which, what = poison.get(str(step), (0, 0, ""))
        if (process % PROCESSES, which) != (RANK, passes[step]):
            return healthy(self, batch, step)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "image":
            images = batch.views[0].images
            (images.patches if isinstance(images, PackedImages) else images).view(-1)[7] = torch.nan
        loss, metrics = healthy(self, batch, step)
        loss = {"image": loss, "loss": loss * torch.nan, "gradient": Infinite.apply(loss)}[what]
        return loss, metrics  # pyright: ignore[reportReturnType]

    method.forward = forward


for method in METHODS.working().values():
    poisonous(method)
job.count_work = lambda *_: None  # a third of such a run; tests/pretrain/test_flop.py tests what it counts
for run in json.loads(Path(sys.argv[1]).read_text()):
    AcceleratorState._reset_state(True)  # each run begins with the launcher's settings
    GradientState._reset_state()
    poison = run.get("poison", {})
    passes.clear()
    cross_entropy.CHUNK_BYTES = 2**10 if run.get("in_chunks") and PROCESSES > 1 else 2**28
    code = main(run["arguments"])
    if code:
        sys.exit(code)
