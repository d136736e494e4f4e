"""Real runs of pretrain/run.py: fed from JPEGs, killed and resumed, scored by k-NN, and learning on CIFAR-10."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from device.micro import jpeg
from device.settings import ROOT, DeviceCheck
from device.training import attempt
from tessera.data.tools.pack import write_samples
from tessera.data.workers import free_cores
from tessera.pretrain.methods import pretraining_methods

Row = dict[str, Any]
CLASSES = 10
DINO = ["--dino.prototypes", "65536", "--dino.hidden_dim", "2048", "--dino.bottleneck_dim", "256"]
DINO += ["--dino.batch_norm", "false"]
"""Settings of DINO on ImageNet, which a run on few images would not derive."""
SMALL = ["--dino.global_size", "32", "--dino.local_size", "16", "--dino.local_crops", "2", "--dino.prototypes", "64"]


def run(check: DeviceCheck) -> Iterator[Row]:
    """Yield the speed of runs from JPEGs, what becomes of a run that is killed and resumed, and the time of k-NN."""
    images = 64 if check.small else 2048
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = check.data or make_shards(folder / "shards", images, small=check.small)
        most = free_cores(1)
        for workers in (most,) if check.small else (most // 2, most):
            flags = [*recipe(check), "--workers", str(workers)]
            yield attempt(
                {"workers": workers}, lambda f=flags, o=folder / f"workers-{workers}": fed(check, shards, o, f)
            )
        trained, undisturbed = folder / "killed", folder / f"workers-{most}"
        yield attempt({"run": "killed and resumed"}, lambda: killed(check, shards, trained, undisturbed))
        yield attempt({"run": "k-NN accuracy"}, lambda: scored(shards, trained, images))


def recipe(check: DeviceCheck) -> list[str]:
    """Return the flags that all runs share."""
    small = ["--encoder", "vit_micro", "--batch_size", "16", *SMALL]
    flags = small if check.small else ["--encoder", "vit_small", "--batch_size", "512", *DINO]
    return ["--method", "dino", "--evaluation.pictures", "0", "--steps", str(steps(check)), *flags]


def steps(check: DeviceCheck) -> int:
    """Return the length of a run."""
    return 8 if check.small else 40


def make_shards(folder: Path, images: int, *, small: bool) -> str:
    """Write labelled shards of JPEGs, of which 64 differ, and return their pattern."""
    folder.mkdir()
    files = [jpeg(seed, (75, 100)) if small else jpeg(seed) for seed in range(64)]
    for shard in range(4):
        samples = (
            {"__key__": f"{n:06d}", "jpg": files[n % len(files)], "cls": str(n % CLASSES).encode()}
            for n in range(shard, images, 4)
        )
        write_samples(folder / f"train-{shard:06d}.tar", samples)
    return f"{folder}/train-{{000000..000003}}.tar"


def command(shards: str, output: Path, flags: list[str]) -> list[str]:
    """Return the command of a pretraining run."""
    script = str(ROOT / "pretrain" / "run.py")
    return [sys.executable, script, "--data", shards, "--output", str(output), *flags]


def records(output: Path) -> list[Row]:
    """Return the metrics of a run."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def fed(check: DeviceCheck, shards: str, output: Path, flags: list[str]) -> Row:
    """Run some steps from JPEGs, and return the speed and the wait for the loader in the second half."""
    started = time.perf_counter()
    every = steps(check) // 2
    subprocess.run(command(shards, output, [*flags, "--record_every", str(every)]), check=True)
    last = records(output)[-1]
    found = {"images/s": last["images_per_second"], "data_wait": last["data_wait"]}
    return found | {"GB on the GPU": last.get("peak_memory_gb"), "whole run, s": time.perf_counter() - started}


def killed(check: DeviceCheck, shards: str, output: Path, undisturbed: Path) -> Row:
    """Kill a run after its first checkpoint, resume it, and compare its last loss with that of an undisturbed run."""
    every = steps(check) // 4
    flags = [*recipe(check), "--record_every", "1", "--checkpoint_every", str(every)]
    process = subprocess.Popen(command(shards, output, flags))
    checkpoint = output / "checkpoints" / f"step-{every:08d}"
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    if process.wait() != -signal.SIGKILL:
        raise RuntimeError(f"The run ended with exit code {process.returncode} before it was killed.")
    started = time.perf_counter()
    subprocess.run(command(shards, output, [*flags, "--resume"]), check=True)
    seconds = time.perf_counter() - started
    found = [row["step"] for row in records(output) if row["step"]]
    loss, expected = records(output)[-1]["loss"], records(undisturbed)[-1]["loss"]
    difference = abs(loss - expected) / abs(expected)
    ok = found == list(range(1, steps(check) + 1)) and difference < 0.02
    return {"steps": len(found), "loss": loss, "difference": difference, "resumed run, s": seconds, "ok": ok}


def scored(shards: str, trained: Path, images: int) -> Row:
    """Score a trained run by k-NN, and return the time."""
    started = time.perf_counter()
    line = [sys.executable, str(ROOT / "evaluation" / "knn.py"), "--checkpoint", str(trained), "--k", "20"]
    line += ["--train", shards, "--val", shards, "--source.allow_overlap", "true"]
    subprocess.run(line, check=True)
    return {"images": images, "whole command, s": time.perf_counter() - started}


def cifar(check: DeviceCheck) -> Iterator[Row]:
    """Pretrain on CIFAR-10 with each method that has a preset, and yield its k-NN accuracies, which must rise."""
    from curves import curve  # imported here, because these need matplotlib
    from learning import LearningBenchmark, pretrain

    for method in pretraining_methods():
        preset = ROOT / "configs" / f"cifar10_{method}.yaml"
        if not preset.is_file():
            continue
        with tempfile.TemporaryDirectory() as folder:
            settings = LearningBenchmark(
                train=f"{check.cifar}/cifar10-train-*.tar.gz",
                val=f"{check.cifar}/cifar10-test-*.tar.gz",
                run=f"--config {preset} --evaluation.pictures 0",
                steps=20 if check.small else 2000,
                points=2,
                folder=Path(folder),
            )
            started = time.perf_counter()
            accuracies = curve(pretrain(settings, method, seed=0))
        for step, accuracy in accuracies.items():
            yield {"method": method, "step": step, "20-NN": accuracy}
        first, *_, last = accuracies.values()
        yield {"method": method, "whole run, s": time.perf_counter() - started, "ok": last > first}
