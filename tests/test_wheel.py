"""The built wheel: its files, a user's own packages of the same names beside it, and every command as users type it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from tessera.__main__ import COMMANDS, installed_commands
from tessera.data.demo import demo_shards
from tessera.data.shards.open import expand
from tests.launched import ROOT
from tests.pretrain.small import few_digits

FOLDERS = ["data", "configs", "launch", "runtime", "encoders", "evaluation", "pretrain"]
Typed = Callable[[str], tuple[int, str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "project"  # setuptools leaves files in the folder that it builds, and packs those of earlier builds
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "build", "runs", "*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, copy]
    subprocess.run(command, check=True, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path) -> Path:
    """Return the interpreter of a fresh environment with the wheel, and with the other packages of this environment."""
    folder = wheel.parent / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    purelib = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    # The path file of the editable installation is not read there, so that only the wheel provides `tessera`.
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(purelib.strip()) / "dependencies.pth").write_text("\n".join(packages))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel]
    subprocess.run(install, check=True, cwd=folder)
    return python


@pytest.mark.slow
def test_the_wheel_contains_only_tessera(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"tessera"}
    held = {name.removeprefix("tessera/") for name in names}
    patterns = [*(f"{folder}/**/*.py" for folder in (*FOLDERS, "extras")), "configs/**/*.yaml", "launch/*.sbatch"]
    for pattern in (*patterns, "extras/**/*.html"):
        assert {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)} <= held


@pytest.mark.slow
def test_a_users_packages_of_the_same_names_are_imported_beside_the_wheels(python: Path, tmp_path: Path) -> None:
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWN = True\n")
    (tmp_path / "train.py").write_text(
        "\n".join(f"import {name}, tessera.{name}\nassert {name}.OWN" for name in FOLDERS)
        + "\nimport tessera, tessera.data.batch\n"
        + "assert not any(hasattr(getattr(tessera, name), 'OWN') for name in "
        + f"{FOLDERS!r})\n"
        + "run = tessera.pretrain(method='mae', encoder='vit_micro', steps=2, workers=1, output='run', "
        + "evaluation={'pictures': 0, 'view_images': 0})\n"
        + "assert len(tessera.load('run').grid(16, 16)) == 2\n"
        + "print(tessera.__file__)\n"
    )
    for words in (["train.py"], ["-m", "tessera", "--num_processes", "1", "pretrain", "--resume", "run"]):
        done = subprocess.run([python, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stderr)
        if words == ["train.py"]:
            assert Path(done.stdout.split()[-1]).is_relative_to(python.parents[1])


class Row(NamedTuple):
    """A command line, and what comes of it."""

    words: str
    says: str = ""
    """pattern that the output of the command contains"""
    files: tuple[str, ...] = ()
    """patterns of files that the command writes"""
    figures: Mapping[str, tuple[float, float]] = MappingProxyType({})
    """entries of the first file, a JSON result, and their smallest and largest accepted values"""
    code: int = 0


AT = "runs/mae/evaluation"
SCORED = "--checkpoint runs/mae --train digits/train --val digits/val"
SCENES = "--checkpoint runs/mae --train scenes/train --val scenes/val"
FEW = "--checkpoint runs/mae --train few/train --val few/val"
DEPTHS = SCENES.replace("scenes", "depths")
IMAGES = {"val_images": (360, 360)}
TOP1 = IMAGES | {"top1": (0.5, 1.0)}
ROWS = [
    Row(f"knn {SCORED} --k 5", "top-1", (f"{AT}/knn-*.json",), TOP1),
    Row("check_shards digits/train --output all.json", "a run accepts all", ("all.json",), {"images": (1437, 1437)}),
    Row("export runs/mae vit.safetensors --to timm", "create_model", ("vit.safetensors",)),
    Row("report runs --output report.html --csv runs.csv", files=("report.html", "runs.csv")),
    Row("", "(?s)commands:.*Runs here: 1"),
    Row("--help", "(?s)commands:.*completion"),
    Row("pretrain --resume runs/none", "runs/none", code=2),
    Row("pretrain --resume runs/mae --steps 3", "next: ", ("runs/mae/checkpoints/step-00000003/trainer.json",)),
    Row(f"--num_processes 2 knn {SCORED} --k 5 --output two.json", "top-1", ("two.json",), TOP1),
    Row(f"linear_probe {SCORED} --no-augment --batch_norm --epochs 2", "", (f"{AT}/linear*.json",), TOP1),
    Row(f"attentive_probe {SCORED} --epochs 1", "", (f"{AT}/attentive*.json",), IMAGES),
    Row(f"few_shot {FEW}", "", (f"{AT}/few*.json",), {"val_images": (50, 50)}),
    Row(f"retrieval {FEW}", "", (f"{AT}/retrieval-*.json",), {"mean_average_precision": (0.1, 1.0)}),
    Row(f"corruptions {FEW}", "", (f"{AT}/corruptions-*.json",), {"top1": (0.1, 1.0)}),
    Row(f"ood {FEW} --ood scenes/val", "", (f"{AT}/ood-*.json",), {"auroc": (0.0, 1.0)}),
    Row("view_retrieval --checkpoint runs/mae --data few/val", "", (f"{AT}/view*.json",)),
    Row("correspondence --checkpoint runs/mae --data few/val", "", (f"{AT}/corr*.json",)),
    Row(f"segmentation {SCENES} --epochs 1 --batch_size 8", "", (f"{AT}/seg*.json",), {"mean_iou": (0.2, 1.0)}),
    Row(f"patch_knn {SCENES}", "", (f"{AT}/patch*.json",), {"mean_iou": (0.2, 1.0)}),
    Row(f"depth {DEPTHS} --epochs 1 --batch_size 8 --depth_scale 1", "", (f"{AT}/depth-*.json",)),
    Row(f"finetune {FEW} --steps 2", "", ("runs/mae/finetune/encoder.safetensors",)),
    Row(
        "adapt --init_from runs/mae --size 32 --data few/train --evaluation.val few/val --steps 2 --seeds 1 "
        "--points 1 --batch_size 16 --workers 0 --evaluation.pictures 0 --output runs/adapted",
        "one seed shows nothing", ("runs/adapted/adapt.json", "runs/adapted/lejepa-0/adapt.json"), {"seeds": (1, 1)},
    ),
    Row(
        "compare --methods mae,lejepa --steps 2 --seeds 1 --points 1 --encoder vit_micro --size 32 --batch_size 16 "
        "--workers 0 --evaluation.pictures 0 --data few/train --evaluation.val few/val --output runs/both",
        "with one seed", ("runs/both/compare.html", "runs/both/compare.json"),
    ),
    Row(
        "explore pixels --image_size 16 --data few/train --val few/val --output found --workers 0", "near-copies",
        ("found/index.html", "found/findings.parquet"),
    ),
    Row("embed --checkpoint runs/mae --data few/val --output features.npz", "", ("features.npz",)),
    Row("summary vit_micro vit_small --set depth=4", r"vit_small \| +224 x 224 \| +7,"),
    Row("runs runs", "mae"),
    Row("conformance", "(?s)dino_loss.*mae_loss"),
    Row(
        "check_resume --kill_at 3 --train 'tessera pretrain --method mae --encoder vit_micro --batch_size 8 --workers 1"
        " --evaluation.pictures 0 --evaluation.linear_iterations 0 --output {folder} --steps 5 --record_every 1"
        " --checkpoint_every 2' --resume 'tessera pretrain --resume {folder}'",
        "loss",
    ),
    Row("make_shards images/scenes/train made --name made", "20 ", ("made/made-000000.tar",)),
    Row("preview digits/val --output images.png", "32 ", ("images.png",)),
    Row("slurm submit --config runs/mae/config.yaml --output runs/two --nodes 2 --gpus 8 --dry_run", "sbatch"),
    Row("completion", "complete -o default -F _tessera tessera"),
]  # fmt: skip


def write_maps(folder: Path, depth: bool) -> None:
    """Write 20 images of random squares, with a map of two classes, or of depths from 1 to 2, for each."""
    folder.mkdir(parents=True)
    for number in range(20):
        seed = [int.from_bytes(folder.name.encode()[:1]), number]
        pixels = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
        bright = pixels.mean(2) / 255  # (H, W)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        if depth:
            np.save(folder / f"{number}.depth.npy", 1 + bright.astype(np.float32))
        else:
            Image.fromarray((bright > 0.5).astype(np.uint8)).save(folder / f"{number}.seg.png")


SERVER = """
import json, multiprocessing, os, sys
import tessera.pretrain.job
from tessera.__main__ import main

def typed(words):
    printed = os.open("printed.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.argv = words
    main()

for line in sys.stdin:
    process = multiprocessing.get_context("fork").Process(target=typed, args=[json.loads(line)])
    process.start()
    process.join(240)
    process.kill()
    process.join()
    print(process.exitcode, flush=True)
"""
"""Runs each command of its input in a forked process: to import torch takes longer than most of the commands."""


@pytest.fixture(scope="module")
def typed(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Typed]]:
    """A folder with shards of digits, shards with maps and a run, and a function that types a command there."""
    folder = tmp_path_factory.mktemp("typed")
    for pattern, name in zip(demo_shards(), ("train", "val"), strict=True):
        (folder / "digits" / name).mkdir(parents=True)
        for path in expand(pattern):
            shutil.copy(path, folder / "digits" / name)
    for path, name in zip(few_digits(), ("train", "val"), strict=True):
        (folder / "few" / name).mkdir(parents=True)
        shutil.copy(path, folder / "few" / name)
    maps = [f"{kind}/{part}" for kind in ("scenes", "depths") for part in ("train", "val")]
    for name in maps:
        write_maps(folder / "images" / name, depth=name.startswith("depths"))
    environment = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([python, "-c", SERVER], cwd=folder, env=environment, **pipes)
    assert server.stdin
    assert server.stdout

    def run(words: str) -> tuple[int, str]:
        print(json.dumps(["tessera", *shlex.split(words)]), file=server.stdin, flush=True)
        return int(server.stdout.readline()), (folder / "printed.txt").read_text()

    first = [
        "pretrain --method mae --encoder vit_micro --steps 2 --batch_size 16 --workers 1 --checkpoint_every 2 "
        "--evaluation.pictures 0 --output runs/mae",
        *(f"make_shards images/{name} {name} --name {name.replace('/', '-')}" for name in maps),
    ]
    for words in first:
        code, printed = run(words)
        assert code == 0, printed
    yield folder, run
    server.stdin.close()
    server.wait()


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.words[:40])
def test_a_command_works_as_it_is_typed(row: Row, typed: tuple[Path, Typed]) -> None:
    folder, run = typed
    code, printed = run(row.words)
    assert (code, "Traceback" in printed) == (row.code, False), printed
    assert re.search(row.says, printed), printed
    written = [(pattern, sorted(folder.glob(pattern))) for pattern in row.files]
    assert [pattern for pattern, found in written if not found or not found[0].stat().st_size] == []
    result = json.loads(written[0][1][0].read_text()) if row.figures else {}
    for name, (least, most) in row.figures.items():
        assert least <= result[name] <= most, (name, result[name])


def test_the_table_has_every_command() -> None:
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "README.md").read_text().partition("## Commands")[2], re.MULTILINE)
    commands = {*COMMANDS, *installed_commands()}
    assert {name for cell in table for name in re.findall(r"`(\w+)`", cell)} == commands
    assert {word for row in ROWS for word in row.words.split()[:3] if word in commands} == commands
