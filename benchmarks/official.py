"""Compare a training step of DINO or MAE on this machine's CPU with a step of the official code, on the same images.

    git clone https://github.com/facebookresearch/dino
    python benchmarks/official.py --method dino --code dino [--encoder small] [--images 8] [--rounds 3]
    git clone https://github.com/facebookresearch/mae
    pip install timm
    python benchmarks/official.py --method mae --code mae [--encoder base] [--images 8] [--rounds 3]

DINO trains ViT-S/16 with 2 global crops of 224 pixels, 8 local crops of 96 pixels and 65,536 prototypes. Its step
consists of the forward passes of teacher and student, loss, backward pass, clipping, AdamW and the update of the
teacher. MAE trains ViT-B/16 on crops of 224 pixels and hides 75 % of the patches. Its step consists of the forward
pass, loss, backward pass and AdamW. The official step calls the official functions in float32, in the order of the
official `train_one_epoch`. The step of this project runs through the training loop, in float32 and in bf16. Loading and
cropping are not measured. Each kind of step has a process of its own, and the processes take turns.

The official MAE imports its blocks from timm 0.3.2. The benchmark replaces them by the blocks of the installed timm,
whose attention is one call of `scaled_dot_product_attention`.
"""

import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from tables import machine, table
from torch import Tensor, nn
from training import loader_batch, make_config, make_run

from tessera.data.augment import to_model_input
from tessera.pretrain.step import finish_step, start_step
from tessera.runtime.settings import Settings, parse

PROTOTYPES, GLOBAL, LOCAL, CROPS = 65_536, 224, 96, (2, 8)


class OfficialBenchmark(Settings):
    """Compare a training step with a step of the official code."""

    method: Literal["dino", "mae"] = "dino"
    """method: dino or mae"""
    code: Path
    """folder with a clone of github.com/facebookresearch/dino or github.com/facebookresearch/mae"""
    encoder: str | None = None
    """encoder; for DINO: tiny, small (default) or base; for MAE: base (default) or large"""
    images: int = Field(default=8, ge=2)
    """number of images per step"""
    rounds: int = Field(default=3, ge=1)
    """number of timed steps of each process, after one step that is not timed"""
    threads: int = Field(default_factory=lambda: len(os.sched_getaffinity(0)), ge=1)
    """number of threads; default: one per available core"""


def main(settings: OfficialBenchmark) -> None:
    context = multiprocessing.get_context("spawn")
    kinds = ("official, float32", "float32", "bf16", "bf16, tokens between blocks in bf16")
    pipes: dict[str, Connection] = {}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind in kinds:
        pipes[kind], other = context.Pipe()
        context.Process(target=work, args=(other, kind, settings), daemon=True).start()
        other.close()  # otherwise, `recv` would wait for ever if the process fails
        pipes[kind].recv()
    for number in range(settings.rounds + 1):
        for kind in kinds:
            pipes[kind].send(number)
            times[kind].append(pipes[kind].recv())
            print(f"round {number}, {kind}: {times[kind][-1]:.2f} s", file=sys.stderr)
    for pipe in pipes.values():
        pipe.send(None)
    medians = {kind: statistics.median(taken[1:]) for kind, taken in times.items()}
    rows = []
    for kind, median in medians.items():
        least, rate, ratio = min(times[kind][1:]), settings.images / median, medians[kinds[0]] / median
        rows.append([kind, *(f"{value:.2f}" for value in (median, least, rate, ratio))])
    headings = ["step", "s, median", "s, least", "images/s", "times as fast as the official step"]
    print(f"{machine()}\n\n{table(headings, rows)}")


def work(pipe: Connection, kind: str, settings: OfficialBenchmark) -> None:
    """Prepare a step. Then run and time one step for each number received through `pipe`, until None is received."""
    torch.set_num_threads(settings.threads)
    official = {"dino": official_dino, "mae": official_mae}[settings.method]
    step = official(settings) if kind.startswith("official") else ours(settings, kind)
    torch.set_num_threads(settings.threads)  # again, because a run of this project chooses its own number
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        start = time.perf_counter()
        step(number)
        pipe.send(time.perf_counter() - start)


def crops(images: int, sides: list[int]) -> list[Tensor]:
    """Return one tensor of noise (images, 3, side, side) for each side in `sides`."""
    torch.manual_seed(0)
    return [torch.randn(images, 3, side, side) for side in sides]


def official_dino(settings: OfficialBenchmark) -> Callable[[int], None]:
    """Return a step of the official DINO, with its defaults for a ViT."""
    sys.path.insert(0, str(settings.code.resolve()))
    import main_dino  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist
    import utils  # pyright: ignore[reportMissingImports]
    import vision_transformer  # pyright: ignore[reportMissingImports]

    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)

    def network(**options: Any) -> nn.Module:
        encoder = getattr(vision_transformer, f"vit_{settings.encoder or 'small'}")(patch_size=16, **options)
        return utils.MultiCropWrapper(encoder, main_dino.DINOHead(encoder.embed_dim, PROTOTYPES))

    student, teacher = network(drop_path_rate=0.1), network()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    loss_function = main_dino.DINOLoss(PROTOTYPES, sum(CROPS), 0.04, 0.04, 0, 100)
    optimizer = torch.optim.AdamW(utils.get_params_groups(student), lr=1e-4)
    images = crops(settings.images, [GLOBAL] * CROPS[0] + [LOCAL] * CROPS[1])

    def step(number: int) -> None:
        loss = loss_function(student(images), teacher(images[: CROPS[0]]), 1)
        assert math.isfinite(loss.item())
        optimizer.zero_grad()
        loss.backward()
        utils.clip_gradients(student, 3.0)
        utils.cancel_gradients_last_layer(1, student, 1)
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(student.parameters(), teacher.parameters(), strict=True):
                theirs.data.mul_(0.996).add_(0.004 * ours.detach().data)

    return step


def official_mae(settings: OfficialBenchmark) -> Callable[[int], None]:
    """Return a step of the official MAE, with the settings of its recipe."""
    import timm.models.vision_transformer as blocks  # pyright: ignore[reportMissingImports]

    def block(*args: Any, qk_scale: None, **options: Any) -> nn.Module:
        return original(*args, **options)  # the installed timm has no argument `qk_scale`

    original, blocks.Block = blocks.Block, block
    np.float = float  # pyright: ignore[reportAttributeAccessIssue] # NumPy has removed this name
    sys.path.insert(0, str(settings.code.resolve()))
    import models_mae  # pyright: ignore[reportMissingImports]

    model = getattr(models_mae, f"mae_vit_{settings.encoder or 'base'}_patch16")(norm_pix_loss=True)
    decayed = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.ndim <= 1 and p.requires_grad]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.05}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95))
    (images,) = crops(settings.images, [GLOBAL])

    def step(number: int) -> None:
        loss, _, _ = model(images, mask_ratio=0.75)
        assert math.isfinite(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(settings: OfficialBenchmark, kind: str) -> Callable[[int], None]:
    """Return a step of this project's training loop."""
    variant, method, encoder = "base", {}, {}
    if settings.method == "dino":
        variant, encoder = "small", {"drop_path": 0.1}
        method = {"global_size": GLOBAL, "local_size": LOCAL, "local_crops": CROPS[1], "prototypes": PROTOTYPES}
    if "between" in kind:
        encoder["bf16_residuals"] = True
    config = make_config(
        settings.method, f"vit_{settings.encoder or variant}", settings.images, own=method, encoder=encoder,
        steps=1000, precision="bf16" if "bf16" in kind else "fp32",
    )  # fmt: skip
    run = make_run(config)
    batch = to_model_input(loader_batch(run.method.transform(), settings.images))
    return lambda _: finish_step(run, start_step(run, run.state.step, [batch])) and None


if __name__ == "__main__":
    main(parse(OfficialBenchmark, sys.argv[1:]))
