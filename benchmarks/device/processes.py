"""Several processes: runs over NCCL and under DeepSpeed on one GPU, and two processes that share the device over gloo.

`python -m device.processes FILE` is one of these two processes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from device.settings import ROOT, DeviceCheck
from device.training import attempt, make_run, on_device, random_batch
from tessera.data.demo import demo_shards
from tessera.pretrain import loop
from tessera.pretrain.methods import METHODS
from tessera.runtime import preemption

STEPS = 3
IMAGES = 8
"""Number of images per process and step."""
LIMIT = 1e-3
"""Largest relative difference of a loss of two processes from that of one process."""
ENGINES = {
    "ddp": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
}
"""Environment variables with which `accelerate launch` chooses an engine."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
Row = dict[str, Any]


def processes(check: DeviceCheck) -> Iterator[Row]:
    """Yield whether runs under each launcher end well, and whether two processes get the losses of one."""
    launchers = {"torchrun, one process": [*TORCHRUN, "1"]}
    if not check.small:
        start = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--config_file"]
        files = ROOT / "configs" / "accelerate"
        launchers |= {name: [*start, str(files / f"{name}.yaml")] for name in ("zero2", "zero3")}
    for name, launcher in launchers.items():
        yield attempt({"launch": name}, lambda launcher=launcher: digits(launcher))
    expected = losses(processes=1)
    for engine in ["fsdp2"] if check.small else ENGINES:
        yield attempt({"two processes on one device": engine}, lambda engine=engine: shared(engine, expected))


def digits(launcher: list[str]) -> Row:
    """Train on the embedded digits for some steps under a launcher."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--method", "dino", "--encoder", "vit_micro", "--steps", "6", "--batch_size", "16", "--workers", "1"]
        flags += ["--record_every", "3", "--evaluation.pictures", "0", "--data", demo_shards()[0]]
        flags += ["--dino.global_size", "32", "--dino.local_size", "16", "--dino.local_crops", "2"]
        script = str(ROOT / "pretrain" / "run.py")
        subprocess.run([*launcher, script, *flags, "--output", f"{folder}/run"], check=True)
        last = json.loads(Path(folder, "run", "metrics.jsonl").read_text().splitlines()[-1])
    return {"loss": last["loss"], "s": time.perf_counter() - started}


def shared(engine: str, expected: list[float]) -> Row:
    """Train with two processes on one device over gloo, and compare the losses with those of one process."""
    paths = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "losses.json"
        command = [*TORCHRUN, "2", "-m", "device.processes", str(file)]
        subprocess.run(command, check=True, env=os.environ | ENGINES[engine] | {"PYTHONPATH": paths})
        found = json.loads(file.read_text())
    difference = max(abs(a - b) / abs(a) for a, b in zip(expected, found["losses"], strict=True))
    ok = difference <= LIMIT and found["engine"] == engine
    return {"engine": found["engine"], "loss": expected[0], "largest difference": difference, "ok": ok}


def losses(processes: int) -> list[float]:
    """Train for some steps, and return the losses of all steps.

    A single process has the batches of two processes, one after the other.
    """
    return trained(processes)[1]


def trained(processes: int) -> tuple[loop.Run, list[float]]:
    """Return a run after some steps, and its losses."""
    accumulate = 2 // processes
    own = METHODS["dino"].small_settings | {"batch_norm": False}  # batch norm sees one forward pass at a time
    plain = {"accumulate": accumulate, "encoder": {"drop_path": 0.0}, "steps": 10, "precision": "fp32"}
    run = make_run("dino", "vit_micro", 2 * IMAGES, own=own, **plain)
    transform, rank = run.method.transform(), run.accelerator.process_index
    batches = [random_batch(transform, IMAGES, seed) for seed in range(rank, rank + accumulate)]
    return run, [loop.training_step(run, [on_device(b) for b in batches]).loss for _ in range(STEPS)]


def main(file: Path) -> None:
    """Train as one of two processes. The first process writes the losses and the engine to `file`."""
    preemption.end_with_launcher()
    if torch.cuda.is_available():
        os.environ["LOCAL_RANK"] = "0"  # both processes use the first GPU, which NCCL refuses
    dist.init_process_group("gloo")
    run, found = trained(processes=2)
    if run.accelerator.is_main_process:
        file.write_text(json.dumps({"engine": run.engine.name, "losses": found}))
    run.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
