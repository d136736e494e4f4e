"""Check the training on a GPU and measure its speed: `python benchmarks/device_check.py --output FOLDER`.

Each stage is a process of its own with a time limit, so that a failure or a hang costs only this stage:

- ceilings: versions, missing packages, and the rates of matrix products, copies and launches;
- equality: crops, colours, losses and gradients on the device beside the CPU; a step without waits; steps in fp16;
- step, step_compiled: the real step of DINO ViT-S/16 and MAE ViT-B/16: images/s, memory, share of the roofline;
- profile: the kernels that take most of the time of a step, and the idle share of the device;
- micro: attention kernels, crops, colours, decoding, the copy of a batch, and the update of the weights;
- run: `pretrain/run.py` from JPEGs with its wait for the loader; a run that is killed and resumed; k-NN;
- processes: NCCL, DeepSpeed, and two processes that share the device over gloo;
- pairings: every method with every encoder in bf16 on the device beside float32 on the CPU;
- cifar: learning on CIFAR-10, with --cifar FOLDER;
- pairs: speed and memory of every method with an encoder of each family.

Rows are appended to FOLDER/results.jsonl as they come. The table is written to FOLDER/results.md, and what the stages
print to FOLDER/log.txt. The exit code is 1 if a stage fails or if there is no GPU. `--allow_cpu` rehearses the stages
with small shapes on a machine without a GPU.
"""

import importlib
import os
import shlex
import signal
import sys
import warnings

import torch
from device.runner import Stage, append, run_stages
from device.settings import DeviceCheck

from tessera.runtime.settings import SettingsError, parse

STAGES = {
    "ceilings": ("ceilings.ceilings", 60),
    "equality": ("equality.equality", 120),
    "step": ("steps.step", 150),
    "step_compiled": ("steps.step_compiled", 180),
    "profile": ("steps.profiled", 60),
    "micro": ("micro.micro", 90),
    "run": ("runs.run", 240),
    "processes": ("processes.processes", 120),
    "pairings": ("pairings.pairings", 120),
    "cifar": ("runs.cifar", 240),
    "pairs": ("pairings.pairs", 180),
}
"""For each stage its function, as module and name in the folder device/, and its time limit in seconds."""
REHEARSAL = 180
"""Time limit of a stage in seconds without a GPU."""


def main(settings: DeviceCheck) -> int:
    """Run the stages and print the table. Return the exit code."""
    gpu = torch.cuda.is_available()
    if not gpu and not settings.allow_cpu:
        print(f"There is no GPU that torch can use ({reason()}). Nothing was checked. --allow_cpu rehearses the check.")
        return 1
    if settings.stage is not None:
        return run_one(settings, settings.stage)
    stages = [Stage(name, command(settings, name), STAGES[name][1] if gpu else REHEARSAL) for name in chosen(settings)]
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
    return [name for name in given or STAGES if name != "cifar" or settings.cifar is not None]


def command(settings: DeviceCheck, name: str) -> list[str]:
    """Return the command that runs one stage."""
    flags = ["--stage", name, "--output", str(settings.output)]
    flags += ["--allow_cpu"] if settings.allow_cpu else []
    flags += ["--data", settings.data] if settings.data else []
    flags += ["--cifar", str(settings.cifar)] if settings.cifar else []
    return [sys.executable, __file__, *flags]


def run_one(settings: DeviceCheck, name: str) -> int:
    """Run one stage in this process, and append its rows. Return 1 if a row says that it is not ok."""
    module, function = STAGES[name][0].split(".")
    code = 0
    for row in getattr(importlib.import_module(f"device.{module}"), function)(settings):
        append(settings.output, {"stage": name} | row)
        if not row.get("ok", True):
            print(f"not ok: {row}", file=sys.stderr, flush=True)
            code = 1
    return code


if __name__ == "__main__":
    try:
        raise SystemExit(main(parse(DeviceCheck)))
    except SettingsError as error:
        raise SystemExit(f"device_check.py: {error}") from None
