"""Check the training on a GPU and measure its speed: `python benchmarks/device_check.py --output FOLDER`.

Each stage is a process of its own with a time limit, so that a failure or a hang costs only this stage. The stages with
most value come first:

- ceilings: versions, and the rates of matrix products, copies and launches;
- equality: colours, losses and gradients of every method with every encoder on the device beside the CPU; a step
  without waits; steps in fp16;
- step: the real step of DINO ViT-S/16 and MAE ViT-B/16: images/s, memory, share of the roofline;
- run: `pretrain/run.py` from JPEGs with its wait for the loader; a run that is killed and resumed; k-NN;
- processes: two processes that share the device over gloo, and DeepSpeed over NCCL;
- profile: the kernels that take most of the time of a step, and the idle share of the device;
- step_compiled: the step with `--compile true`, which needs a C compiler;
- pairs: speed and memory of every method, and of an encoder of each family.

Rows are appended to FOLDER/results.jsonl as they come. The table is written to FOLDER/results.md, and what the stages
print to FOLDER/log.txt. The exit code is 0 if every stage has run and passed. `--allow_cpu` rehearses the stages with
small shapes on a machine without a GPU.

A machine that has torch but neither this project nor access to a package index needs a folder of wheels, made
elsewhere for its version of Python. It holds tessera and the packages that images with torch commonly lack:

    python benchmarks/device_check.py --wheels wheels                # elsewhere; Linux on x86-64
    python3 -m pip install --no-index --no-deps --target /tmp/site wheels/*.whl
    PYTHONPATH=/tmp/site python3 benchmarks/device_check.py

If only tessera is missing and setuptools is there, `pip install --no-deps --no-build-isolation .` is enough.
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
    "ceilings": ("ceilings.ceilings", 25),
    "equality": ("equality.equality", 80),
    "step": ("steps.step", 90),
    "run": ("runs.run", 110),
    "processes": ("processes.processes", 75),
    "profile": ("steps.profiled", 30),
    "step_compiled": ("steps.step_compiled", 100),
    "pairs": ("steps.pairs", 60),
}
"""For each stage its function, as module and name in the folder device/, and its time in seconds. The sum is 570 s."""
WHEELS = {
    ("pydantic>=2.11",): [],  # a version of pydantic needs one exact version of pydantic-core
    ("webdataset>=1.0", "braceexpand>=0.1.7", "hjson"): ["--no-deps"],  # deepspeed needs hjson
}
"""Packages of the folder of wheels, and the options of pip with which they are downloaded."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


class DeviceCheck(Settings):
    """Check the training on a GPU and measure its speed. Each stage is a process of its own with a time limit."""

    output: Path = Path("runs/device_check")
    """folder for results.jsonl, results.md and log.txt; the rows of a new check are appended to results.jsonl"""
    stages: str | list[str] | None = None
    """names of the stages to run; default: all"""
    minutes: float = Field(default=9.5, gt=0)
    """time for all stages; a stage that is still running is then ended, and no further stage is started"""
    allow_cpu: bool = False
    """rehearse the stages without a GPU, with small shapes; the times then say nothing"""
    wheels: Path | None = None
    """only make this folder of wheels for a machine without a package index; it must be empty or missing"""
    python: str = "3.12"
    """version of Python of the wheels"""
    stage: str | None = None
    """for internal use: the stage that this process runs"""


def main(settings: DeviceCheck) -> int:
    """Run the stages and print the table. Return the exit code."""
    if settings.wheels is not None:
        make_wheels(settings.wheels, settings.python)
        return 0
    gpu = torch.cuda.is_available()
    if not gpu and not settings.allow_cpu:
        print(f"There is no GPU that torch can use ({reason()}). Nothing was checked. --allow_cpu rehearses the check.")
        return 1
    if settings.stage is not None:
        return run_one(settings.output, settings.stage)
    command = [sys.executable, __file__, "--output", str(settings.output), "--allow_cpu", "--stage"]
    stages = [Stage(name, [*command, name], STAGES[name][1]) for name in chosen(settings)]
    if not gpu:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads of small shapes take twice the CPU time of one
    machine = f"{torch.cuda.get_device_name() if gpu else 'rehearsal without a GPU'}, torch {torch.__version__}"
    title = f"# Device check\n\n`{shlex.join(['python', 'benchmarks/device_check.py', *sys.argv[1:]])}`: {machine}."
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the running stage is ended too
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
    return "the GPU answers only now; start again"


def chosen(settings: DeviceCheck) -> list[str]:
    """Return the names of the stages to run.

    Raises:
        SettingsError: there is no stage of a name.
    """
    given = [settings.stages] if isinstance(settings.stages, str) else settings.stages
    for name in given or []:
        if name not in STAGES:
            raise SettingsError(f"There is no stage {name}. Choose from: {', '.join(STAGES)}.")
    return given or list(STAGES)


def run_one(output: Path, name: str) -> int:
    """Run one stage in this process, and append its rows. Return 1 if a row says that it is not ok."""
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
        SettingsError: the folder is not empty. pip installs no two versions of a package.
    """
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(f"{folder} is not empty. Remove it, or choose another folder with --wheels.")
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    for packages, options in WHEELS.items():
        download = ["download", "--only-binary", ":all:", "--python-version", python, *platforms, *options]
        pip(*download, "--dest", str(folder), *packages)
    build = ["wheel", "--no-deps", "--wheel-dir", str(folder)]
    # without isolation, because deepspeed's setup imports torch, which an isolated build would download
    pip(*build, "--no-build-isolation", "deepspeed>=0.18.9")
    with tempfile.TemporaryDirectory() as scratch:  # setuptools packs what earlier builds have left in the folder
        ignored = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__")
        pip(*build, str(shutil.copytree(ROOT, Path(scratch) / "tessera", ignore=ignored)))
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path.name}")


def pip(*arguments: str) -> None:
    """Run pip, and end with its exit code if it fails."""
    ran = subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])
    if ran.returncode:
        raise SystemExit(f"pip failed: pip {' '.join(arguments)}")


if __name__ == "__main__":
    try:
        raise SystemExit(main(parse(DeviceCheck)))
    except SettingsError as error:
        raise SystemExit(f"device_check.py: {error}") from None
