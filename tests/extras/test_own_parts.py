"""All that a user may bring, together in one run: training, resumption, two processes, engines, export, evaluation.

Two runs have all of it: a backbone, a method, a data set, a stage, an augmentation and a sink. docs/extending.md has
the table.
"""

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import webdataset as wds
from PIL import Image
from pyarrow import parquet
from torch import Tensor
from torchvision.transforms import v2

import tessera
from tessera import encoders
from tessera.encoders.registry import VARIANTS
from tessera.pretrain.methods import METHODS
from tessera.pretrain.monitoring.sinks import SINKS
from tests.launched import ROOT, records
from tests.pretrain.toy import MICRO, Losses

SIZE = 32
IMAGES = 64


def pixels(number: int) -> np.ndarray:
    """Image of one of four classes, which differ in brightness."""
    noise = np.random.default_rng(number).integers(0, 60, (SIZE, SIZE, 3), dtype=np.uint8)
    return noise + np.uint8(45 * (number % 4))


class Shades:
    """Map-style data set."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"picture": pixels(self.first + number), "target": number % 4}


def brighter(samples: Any) -> Any:
    """Stage of a pipeline, which drops some samples."""
    for sample in samples:
        if sample["__key__"] != "5":
            yield sample | {"picture": sample["picture"] // 2 + np.uint8(60)}


def opened(sample: dict[str, Any]) -> dict[str, Any]:
    """Stage of one sample."""
    return sample | {"jpg": np.array(Image.open(io.BytesIO(sample["jpg"])))[:, ::-1]}


def noisy(crop: Tensor, generator: torch.Generator) -> Tensor:
    """Augmentation behind the crops."""
    return crop // 2 + torch.randint(0, 60, crop.shape, generator=generator).to(torch.uint8)


def write_parquet(folder: Path) -> None:
    for name, first in (("train", 0), ("val", IMAGES)):
        rows = []
        for number in range(IMAGES):
            buffer = io.BytesIO()
            Image.fromarray(pixels(first + number)).save(buffer, "PNG")
            rows.append({"image": {"bytes": buffer.getvalue(), "path": None}, "label": number % 4})
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet", row_group_size=20)


def register() -> None:
    """Make the user's method, encoder and sink known, as a script does before its run."""
    from tessera_ijepa import IJEPA

    METHODS.register("own_ijepa", IJEPA)
    VARIANTS.register("own_conv", MICRO)
    SINKS.register("own_losses", Losses)


def settings(name: str, folder: Path) -> dict[str, Any]:
    """Return the arguments of `tessera.pretrain` for one of the runs."""
    shared = {
        "steps": 6, "batch_size": 16, "record_every": 1, "checkpoint_every": 3, "workers": 1,
        "metrics": {"sinks": ["jsonl", "own_losses"]}, "optim": {"lr": 1e-3},
    }  # fmt: skip
    if name == "objects":
        return shared | {
            "method": "dino",
            "encoder": "timm:test_resnet",
            "data": {"shards": Shades(), "image": "picture", "label": "target"},
            "stages": [brighter],
            "augment": noisy,
            "dino": {"global_size": 64, "local_size": 32, "hidden_dim": 32, "bottleneck_dim": 16, "prototypes": 64}
            | {"batch_norm": False},
            "evaluation": {"pictures": 0, "val": Shades(IMAGES), "linear_iterations": 0},
        }
    return shared | {
        "method": "own_ijepa",
        "encoder": "own_conv",
        "data": {"shards": str(folder / "train.parquet")},
        "stages": [wds.map(opened)],
        "augment": v2.Compose([v2.RandomResizedCrop(16, antialias=True), v2.RandomHorizontalFlip()]),
        "augment_replaces": True,
        "own_ijepa": {"size": 16, "predictor_dim": 16, "predictor_depth": 1},
        "evaluation": {"pictures": 0, "val": str(folder / "val.parquet"), "linear_iterations": 0},
    }


RUNS = ("objects", "files")
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples' / 'ijepa'}", "OMP_NUM_THREADS": "1"}


def main(folder: Path, output: Path, *how: str) -> None:
    """Train both runs. With the word `again`, then take away the newest checkpoint of each, and resume it."""
    register()
    for name in RUNS:
        run = output / name
        tessera.pretrain(**settings(name, folder), output=str(run))
        if "again" in how:
            shutil.copytree(run, output / "uninterrupted" / name)
            shutil.rmtree(run / "checkpoints" / "step-00000006")
            (run / "checkpoints" / "latest").unlink()
            tessera.pretrain(**settings(name, folder), output=str(run), resume=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of the Parquet files and of all runs. The user's parts are registered meanwhile."""
    folder = tmp_path_factory.mktemp("own")
    write_parquet(folder)
    register()
    yield folder
    for registry, name in ((METHODS, "own_ijepa"), (VARIANTS, "own_conv"), (SINKS, "own_losses")):
        registry.pop(name, None)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """Both runs on one process, resumed."""
    words = [sys.executable, __file__, str(folder), str(folder / "alone"), "again"]
    done = subprocess.run(words, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "alone"


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in records(run) if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_the_same(name: str, alone: Path) -> None:
    whole = alone / "uninterrupted" / name
    assert losses(alone / name) == losses(whole)
    assert len(losses(whole)) == 6
    written = [line.split() for line in (alone / name / "losses.txt").read_text().splitlines()]
    assert [float(loss) for step, loss in written if step != "0"] == losses(whole)
    first, second = (encoders.load(run).state_dict() for run in (whole, alone / name))
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero2", "fsdp2"])
def test_two_processes_equal_one(engine: str, alone: Path, folder: Path, fork: Callable) -> None:
    how = {"processes": 2, "engine": None if engine == "ddp" else engine}
    fork([str(folder), str(folder / engine)], script=Path(__file__), **how, **ENVIRONMENT).wait()
    for name in RUNS:
        assert losses(folder / engine / name) == pytest.approx(losses(alone / name), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_encoder_is_exported_and_evaluated(name: str, alone: Path, folder: Path) -> None:
    export, file = pytest.importorskip("tessera.extras.exports.command"), folder / f"{name}.safetensors"
    export.main([str(alone / name), str(file)])
    trained, exported = encoders.load(alone / name).eval(), encoders.load(file).eval()
    images = torch.rand(2, 3, 64, 64)
    assert torch.equal(trained(images).pooled, exported(images).pooled)
    given = settings(name, folder)
    names = {"image": "picture", "label": "target"} if name == "objects" else {}
    options: dict[str, Any] = {"stages": given["stages"], "image_size": 64, "workers": 0} | names
    train, val = given["data"]["shards"], given["evaluation"]["val"]
    probe = {"epochs": 50, "augment": False, "batch_norm": True}
    for evaluate, more in ((tessera.knn, {"k": [5]}), (tessera.linear_probe, probe)):
        found = evaluate(str(file), train, val, **options, **more)
        assert found["train_images"] == IMAGES - (name == "objects")
        assert found["top1"] > 0.9
