"""Check the training on a GPU and measure its speed: `python benchmarks/device_check.py --output FOLDER`.

Each stage runs in a process of its own with a time limit, so a failure or a hang does not affect the other stages. The
most important stages run first:

- start: the command of the README with ViT-S/16;
- ceilings: versions, and the highest rates of matrix products and copies, and the time of a kernel launch;
- equality: differences between device and CPU in colour changes, and in losses and gradients of every method with every
  encoder; a step in which the CPU does not wait for the device; steps in fp16;
- step: the training step of DINO ViT-S/16 and MAE ViT-B/16: images/s, memory, share of the roofline;
- run: speed of `pretrain/run.py` on JPEGs, and its wait for the loader; a run that is killed and resumed; k-NN;
- processes: two processes that share the device and communicate over gloo, and DeepSpeed over NCCL;
- profile: the kernels that take most of the time of a step, and the share of the time in which the device is idle;
- step_compiled: the step with `--compile true`, which needs a C compiler;
- pairs: speed and memory of every method with ViT-S/16, and of DINO and MAE with an encoder of each family;
- deterministic: a run with `--deterministic true` that is killed and resumed is bit-equal.

A stage appends each row of results to FOLDER/results.jsonl as soon as it is measured. The table of all rows is written
to FOLDER/results.md, and the output of the stages to FOLDER/log.txt. The exit code is 0 if every stage has run and
passed. `--allow_cpu` rehearses the stages with small shapes on a machine without a GPU.

If a machine has torch, but neither this project nor access to a package index, make a folder of wheels on another
machine, for the Python version of the first. The folder contains tessera and the packages that container images with
torch commonly lack:

    python benchmarks/device_check.py --wheels wheels                # on the other machine; Linux on x86-64
    python3 -m pip install --no-index --no-deps --target /tmp/site wheels/*.whl
    PYTHONPATH=/tmp/site python3 benchmarks/device_check.py

If only tessera is missing and setuptools is installed, `pip install --no-deps --no-build-isolation .` is enough.
"""

import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from device.runner import Stage, append, run_stages
from pydantic import Field

from tessera.runtime.settings import Settings, SettingsError, parse

ROOT = Path(__file__).parents[1]
STAGES = {
    "start": ("runs.start", 45),
    "ceilings": ("ceilings.ceilings", 25),
    "equality": ("equality.equality", 80),
    "step": ("steps.step", 80),
    "run": ("runs.run", 90),
    "processes": ("processes.processes", 65),
    "profile": ("steps.profiled", 25),
    "step_compiled": ("steps.step_compiled", 70),
    "pairs": ("steps.pairs", 45),
    "deterministic": ("runs.deterministic", 45),
}
"""Function of each stage, as MODULE.NAME in the folder device/, and time limit in seconds. The limits sum to 570 s."""
WHEELS = {
    ("pydantic>=2.11",): [],  # with dependencies, because each version needs one exact version of pydantic-core
    ("webdataset>=1.0", "braceexpand>=0.1.7", "hjson"): ["--no-deps"],  # deepspeed needs hjson
}
"""Packages to download into the folder of wheels, and options of `pip download` for them."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


class DeviceCheck(Settings):
    """Check the training on a GPU and measure its speed. Each stage is a process of its own with a time limit."""

    output: Path = Path("runs/device_check")
    """folder for results.jsonl, results.md and log.txt; the rows of a new check are appended to results.jsonl"""
    stages: str | list[str] | None = None
    """names of the stages to run; default: all"""
    minutes: float = Field(default=9.5, gt=0)
    """time for all stages in minutes; at its end, the running stage is stopped, and no further stage starts"""
    allow_cpu: bool = False
    """rehearse the stages with small shapes if there is no GPU; the measured times are then meaningless"""
    wheels: Path | None = None
    """folder, empty or missing, into which wheels for a machine without a package index are written; no stage is run"""
    python: str = "3.12"
    """Python version for which the wheels are made"""
    stage: str | None = None
    """for internal use: the stage that this process runs"""


def main(settings: DeviceCheck) -> int:
    """Run the stages and print the table. Return the exit code."""
    if settings.wheels is not None:
        make_wheels(settings.wheels, settings.python)
        return 0
    gpu = torch.cuda.is_available()
    if not gpu and not settings.allow_cpu:
        print(f"There is no GPU that torch can use ({reason()}). Nothing was checked. Rehearse with --allow_cpu.")
        return 1
    if settings.stage is not None:
        return run_one(settings.output, settings.stage)
    command = [sys.executable, __file__, "--output", str(settings.output), "--allow_cpu", "--stage"]
    stages = [Stage(name, [*command, name], STAGES[name][1]) for name in chosen(settings)]
    if not gpu:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # with small shapes, a second thread only adds CPU time
    machine = f"{torch.cuda.get_device_name() if gpu else 'rehearsal without a GPU'}, torch {torch.__version__}"
    title = f"# Device check\n\n`{shlex.join(['python', 'benchmarks/device_check.py', *sys.argv[1:]])}`: {machine}."
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # on SIGTERM, `run_stage` also ends the running stage
    passed = run_stages(stages, settings.output, settings.minutes, title)
    print(f"\n{(settings.output / 'results.md').read_text()}")
    return 0 if passed else 1


def reason() -> str:
    """Return why torch finds no GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.zeros(1, device="cuda")
        except (RuntimeError, AssertionError) as error:
            return str(error).splitlines()[0]
    return "the first attempt failed, but the second succeeded; start again"


def chosen(settings: DeviceCheck) -> list[str]:
    """Return the names of the stages to run.

    Raises:
        SettingsError: a name is not that of a stage.
    """
    given = [settings.stages] if isinstance(settings.stages, str) else settings.stages
    for name in given or []:
        if name not in STAGES:
            raise SettingsError(f"There is no stage {name}. Choose from: {', '.join(STAGES)}.")
    return given or list(STAGES)


def run_one(output: Path, name: str) -> int:
    """Run one stage in this process, and append its rows. Return the exit code: 1 if `ok` is False in a row, else 0."""
    module, function = STAGES[name][0].split(".")
    code = 0
    for row in getattr(importlib.import_module(f"device.{module}"), function)(not torch.cuda.is_available()):
        append(output, {"stage": name} | row)
        if not row.get("ok", True):
            print(f"not ok: {row}", file=sys.stderr, flush=True)
            code = 1
    return code


def make_wheels(folder: Path, python: str) -> None:
    """Download and build wheels for Linux on x86-64, and print their sizes.

    Raises:
        SettingsError: the folder is not empty. pip cannot install a folder with two versions of a package.
    """
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(f"{folder} is not empty. Remove it, or choose another folder with --wheels.")
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    for packages, options in WHEELS.items():
        download = ["download", "--only-binary", ":all:", "--python-version", python, *platforms, *options]
        pip(*download, "--dest", str(folder), *packages)
    build = ["wheel", "--no-deps", "--wheel-dir", str(folder)]
    # build without isolation, because deepspeed's setup imports torch, and an isolated build would download torch
    pip(*build, "--no-build-isolation", "deepspeed>=0.18.9")
    with tempfile.TemporaryDirectory() as scratch:  # build a copy, without the files that earlier builds have left
        ignored = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__")
        pip(*build, str(shutil.copytree(ROOT, Path(scratch) / "tessera", ignore=ignored)))
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path.name}")


def pip(*arguments: str) -> None:
    """Run pip. If it fails, exit with a message and the exit code 1."""
    ran = subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])
    if ran.returncode:
        raise SystemExit(f"This pip command failed: pip {' '.join(arguments)}")


if __name__ == "__main__":
    try:
        raise SystemExit(main(parse(DeviceCheck)))
    except SettingsError as error:
        raise SystemExit(f"device_check.py: {error}") from None
