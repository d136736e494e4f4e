"""Small runs: their command lines, and a method of a few thousand parameters with its engine and its Saver."""

import atexit
import functools
import inspect
import shutil
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState

from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.data.batch import Batch, View
from tessera.data.collate import Collator, Sample
from tessera.data.demo import demo_shards
from tessera.encoders.images import Mask
from tessera.pretrain.checkpoints.save import Saver
from tessera.pretrain.command_line import PRESETS
from tessera.pretrain.config import CheckpointConfig
from tessera.pretrain.engines.ddp import DDP
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.method import Method, RunSize
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.runtime.settings import Section, read_yaml
from tests.launched import records
from tests.ranks import on_processes  # noqa: F401, tests of other folders import it from here
from tests.teachers import small_settings

MICRO = [name for name in encoders.VARIANTS if name.endswith("_micro")]
"""Smallest variant of each family."""
STEPS = 10
_resolved = {
    name: method.resolve(method.Config(**small_settings(method)), OptimConfig(), RunSize(1000, 4, STEPS))
    for name, method in METHODS.working().items()
}
SECTIONS: dict[str, Section] = {name: config for name, (config, _) in _resolved.items()}
OPTIM = _resolved["dino"][1]
ENCODER = {"variant": "vit_micro", "depth": 1, "dim": 24, "heads": 2, "mask_token": True}


def presets(pattern: str = "*") -> list[Path]:
    """Return the presets of all methods that are installed."""
    files = sorted(PRESETS.glob(f"{pattern}.yaml"))
    return [file for file in files if read_yaml(file).get("method", "dino") in METHODS]


def flags(method: str) -> dict[str, str]:
    """Return the small settings of a method as flags of the command."""
    return {f"--{method}.{name}": str(value).lower() for name, value in small_settings(METHODS[method]).items()}


def scored_shards() -> tuple[str, str]:
    """One shard of the training digits and one of those held out. To score all would take most of the time of a run."""
    train, val = (f"{shards.partition('{')[0]}000000.tar" for shards in demo_shards())
    return train, val


@functools.cache
def few_digits() -> tuple[str, str]:
    """Return one shard of 100 of the training digits and one of 50 of those held out. To score more would take most of
    the time of a small run."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    paths = []
    for shard, size in zip(scored_shards(), (100, 50), strict=True):
        paths.append(str(folder / Path(shard).name))
        with tarfile.open(shard) as tar, tarfile.open(paths[-1], "w") as part:
            members = tar.getmembers()
            keys = dict.fromkeys(member.name.partition(".")[0] for member in members)
            kept = set(list(keys)[:size])
            for member in members:
                if member.name.partition(".")[0] in kept:
                    part.addfile(member, tar.extractfile(member))
    train, val = paths
    return train, val


def arguments(method: str, variant: str, output: Path, *more: str) -> list[str]:
    """Return the command line of six steps on the embedded digits, which are saved after three steps and scored."""
    chosen = {"--method": method, "--encoder": variant, "--output": str(output)} | flags(method)
    chosen |= {"--steps": "6", "--batch_size": "16", "--record_every": "1"}
    chosen |= {"--checkpoint_every": "3", "--workers": "1"}
    chosen["--optim.lr"] = "1e-3"  # at the preset's own, rounding grows tenfold a step
    train, val = few_digits()
    chosen |= {"--evaluation.train": train, "--evaluation.val": val, "--evaluation.linear_iterations": "0"}
    if "drop_path" in inspect.signature(encoders.family(variant)).parameters:
        chosen["--encoder.drop_path"] = "0"
    return [*(word for pair in chosen.items() for word in pair), *more]


def without_scores(arguments: list[str]) -> list[str]:
    """Return the command line of a run with the same settings, but without evaluations, pictures and presets."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    kept = [word for pair in pairs if not pair[0].startswith("--evaluation.") for word in pair]
    unscored = ["--evaluation.view_images", "0", "--evaluation.pictures", "0"]
    return [*kept, "--data", demo_shards()[0], *unscored]


def losses(output: Path) -> dict[int, float]:
    """Return the loss of each step of a run."""
    found = [(record["step"], record["loss"]) for record in records(output) if "loss" in record]
    assert len(dict(found)) == len(found), "a step stands twice"
    return dict(found)


def settings(name: str = "dino") -> dict[str, Any]:
    """Return the settings that a checkpoint stores."""
    own = {"method": name, "encoder": ENCODER, name: SECTIONS[name].model_dump(mode="json"), "steps": STEPS}
    return own | {"seed": 0, "batch_size": 4, "stream": {}, "shards": "abc", "images": 43}


def method(name: str, seed: int) -> Method:
    torch.manual_seed(seed)
    return METHODS[name](encoders.build(**ENCODER), SECTIONS[name], STEPS)  # pyright: ignore[reportArgumentType]


def batch_for(method: Method, images: int) -> Batch:
    """Return noise through the method's own transform, with the labels 0, 1, 0, ..."""
    transform, rng = method.transform(), np.random.default_rng(0)
    noise = torch.from_numpy(rng.integers(0, 256, (images, 3, 24, 24), dtype=np.uint8))
    drawn = [transform.draw((24, 24), rng) for _ in range(images)]
    samples = (Sample(str(i), noise[i], drawn[i], position=i, label=i % 2) for i in range(images))
    return to_model_input(Collator(transform, images)(samples))


def part_of(batch: Batch, images: slice) -> Batch:
    """Return a batch of some images with all their crops and masks."""

    def rows(tensor: torch.Tensor, crops: int) -> torch.Tensor:
        return tensor.unflatten(0, (crops, -1))[:, images].flatten(0, 1)

    views = []
    for view in batch.views:
        assert isinstance(view.images, torch.Tensor)
        own = rows(view.images, view.crops)
        hidden = [rows(mask.hidden.view(len(view.images), -1), view.crops) for mask in view.masks]
        grids = [torch.tensor([[1, one.shape[1]]]).expand(len(one), 2) for one in hidden]
        masks = tuple(Mask.from_hidden(one.flatten(), grid) for one, grid in zip(hidden, grids, strict=True))
        views.append(View(own, view.crops, masks))
    labels, positions = (None if one is None else one[images] for one in (batch.labels, batch.positions))
    return replace(batch, views=views, keys=batch.keys[images], labels=labels, positions=positions)


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
    engine.step(torch.tensor(1.0))


def saver(folder: Path, accelerator: Accelerator, engine: DDP, name: str = "dino", **config: Any) -> Saver:
    """Return the saver of the run folder `folder`."""
    folder.mkdir(exist_ok=True)
    return Saver(folder / "checkpoints", accelerator, engine, settings(name), CheckpointConfig(**config))


def tensors(engine: DDP) -> dict[str, torch.Tensor]:
    """Return copies of all tensors that a checkpoint holds, by name."""
    return {name: tensor.data.clone() for name, tensor in engine.local_state().items()}
