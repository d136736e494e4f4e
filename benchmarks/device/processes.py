"""Train with two processes that share the device and communicate over gloo, and train under DeepSpeed over NCCL.

`python benchmarks/device/processes.py FILE` runs one of the two processes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from device.runner import Row, attempt
from device.runs import ROOT, SMALL, records
from training import loader_batch, make_config, make_run, training_step

from tessera.data.demo import demo_shards
from tessera.pretrain.methods import METHODS
from tessera.pretrain.training_run import TrainingRun
from tessera.runtime import preemption

STEPS = 3
IMAGES = 8
"""Number of images per process and step."""
LIMIT = 1e-3
"""Largest allowed relative difference between the losses of two processes and of one process."""
ENGINES = {
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
    "ddp": {},
}
"""Environment variables with which `accelerate launch` chooses an engine."""


def processes(small: bool) -> Iterator[Row]:
    """Yield rows that compare the losses of two processes and of one process, and rows with losses under DeepSpeed."""
    expected = trained(processes=1)[1]
    for engine in ["fsdp2"] if small else ENGINES:
        yield attempt({"two processes on one device": engine}, lambda engine=engine: shared(engine, expected))
    for name in ["zero2"] if small else ["zero2", "zero3"]:
        yield attempt({"launch": name}, lambda name=name: {"loss": digits(name)})


def digits(engine: str) -> float:
    """Train on the embedded digits for 6 steps under an engine, with one process. Return the last loss."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / "configs" / "accelerate" / f"{engine}.yaml")]
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--method", "dino", *SMALL, "--data", demo_shards()[0], "--steps", "6", "--workers", "1"]
        flags += ["--evaluation.pictures", "0", "--output", f"{folder}/run"]
        subprocess.run([*command, str(ROOT / "pretrain" / "run.py"), *flags], check=True)
        return records(Path(folder, "run"))[-1]["loss"]


def shared(engine: str, expected: list[float]) -> Row:
    """Train with two processes on one device over gloo, and compare the losses with those of one process."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    paths = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "losses.json"
        environment = os.environ | ENGINES[engine] | {"PYTHONPATH": paths}
        done = subprocess.run([*torchrun, __file__, str(file)], env=environment, capture_output=True, text=True)
        print(done.stdout, done.stderr, sep="")
        if done.returncode:  # the first error of a process says why; torchrun repeats its exit status below
            reasons = [line for line in done.stderr.splitlines() if re.match(r"\S*(Error|Exception|Interrupt)\b", line)]
            raise RuntimeError(f"exit status {done.returncode}: {' / '.join(reasons[:2]) or done.stderr[-500:]}")
        found = json.loads(file.read_text())
    difference = max(abs(a - b) / abs(a) for a, b in zip(expected, found["losses"], strict=True))
    ok = difference <= LIMIT and found["engine"] == engine
    return {"engine": found["engine"], "loss": expected[0], "largest difference": difference, "ok": ok}


def trained(processes: int) -> tuple[TrainingRun, list[float]]:
    """Train for `STEPS` steps. Return the run and the loss of each step.

    A single process accumulates gradients over the batches of both processes.
    """
    accumulate = 2 // processes
    # no batch norm, because its statistics would be those of one batch on one process, but of both on two processes
    own = METHODS["dino"].small_settings | {"batch_norm": False}
    plain = {"accumulate": accumulate, "steps": 10, "precision": "fp32"}
    run = make_run(make_config("dino", "vit_micro", 2 * IMAGES, own=own, encoder={"drop_path": 0.0}, **plain))
    transform, rank = run.method.transform(), run.accelerator.process_index
    batches = [loader_batch(transform, IMAGES, size=(32, 40), seed=seed) for seed in range(rank, rank + accumulate)]
    return run, [training_step(run, *batches).loss for _ in range(STEPS)]


def main(file: Path) -> None:
    """Train as one of two processes. The main process writes the losses and the name of the engine to `file`."""
    preemption.end_with_launcher()
    if torch.cuda.is_available():
        os.environ["LOCAL_RANK"] = "0"  # both processes use the first GPU, and NCCL forbids this
    dist.init_process_group("gloo")
    run, found = trained(processes=2)
    if run.accelerator.is_main_process:
        file.write_text(json.dumps({"engine": run.engine.name, "losses": found}))
    run.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
