"""The built wheel, used beside a user's own code whose folders have the names of this project's folders."""

import json
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.launched import ROOT

FOLDERS = ["data", "configs", "launch", "runtime", "encoders", "evaluation", "pretrain"]


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
    (Path(purelib.strip()) / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel]
    subprocess.run(install, check=True, cwd=folder)
    return python


@pytest.mark.slow
def test_the_wheel_contains_only_tessera(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"tessera"}
    for path in (*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("launch/*.sbatch"), *ROOT.glob("*/reporting/page.html")):
        assert f"tessera/{path.relative_to(ROOT)}" in names


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
        + "run = tessera.pretrain(method='mae', steps=2, workers=1, output='run', evaluation={'pictures': 0})\n"
        + "assert len(tessera.load('run').grid(16, 16)) == 2\n"
        + "print(tessera.__file__)\n"
    )
    done = subprocess.run([python, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.split()[-1]).is_relative_to(python.parents[1])
    for words in (
        ["-m", "tessera", "pretrain", "--method", "dino", "--steps", "1", "--output", "command"],
        ["-m", "tessera", "--num_processes", "1", "pretrain", "--resume", "command"],
        ["-m", "tessera.data.make_shards", "--help"],
        ["-m", "tessera", "slurm", "--help"],
        ["-m", "tessera", "preview", "--method", "mae", "--output", "sheet.png"],
    ):
        done = subprocess.run([python, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stderr)
    assert json.loads((tmp_path / "command" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1
