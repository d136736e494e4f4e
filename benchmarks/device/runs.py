"""Run pretrain/run.py on JPEGs, kill and resume runs, and score a run by k-NN."""

import io
import json
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from device.runner import Row, attempt
from PIL import Image
from training import IMAGE

ROOT = Path(__file__).parents[2]
CLASSES = 10
RECIPE = ["--encoder", "vit_small", "--batch_size", "512", "--dino.prototypes", "65536", "--dino.hidden_dim", "2048"]
RECIPE += ["--dino.bottleneck_dim", "256", "--dino.batch_norm", "false"]
"""DINO's settings for ImageNet. They are given as flags, because a run on few images derives other values."""
SMALL = ["--encoder", "vit_micro", "--batch_size", "16", "--dino.global_size", "32", "--dino.local_size", "16"]
SMALL += ["--dino.local_crops", "2", "--dino.prototypes", "64"]


def start(small: bool) -> Iterator[Row]:
    """Yield a row for the command of the README with an encoder of its advice for a GPU."""
    with tempfile.TemporaryDirectory() as name:
        shards = make_shards(Path(name) / "shards", 64 if small else 1024, (75, 100) if small else IMAGE)
        steps, advice = (4, SMALL) if small else (20, ["--encoder", "vit_small", "--batch_size", "512"])
        yield attempt({"run": "README"}, lambda: fed(command(shards, steps, advice), Path(name) / "run", steps))


def run(small: bool) -> Iterator[Row]:
    """Yield rows for the speed of a run on JPEGs, for a run that is killed and resumed, and for the time of k-NN."""
    images, steps = (64, 8) if small else (2048, 40)
    with tempfile.TemporaryDirectory() as name:
        folder, output = Path(name), Path(name) / "fed"
        shards = make_shards(folder / "shards", images, (75, 100) if small else IMAGE)
        line = command(shards, steps, ["--evaluation.pictures", "0", *(SMALL if small else RECIPE)])
        yield attempt({"run": "from JPEGs"}, lambda: fed(line, output, steps))
        yield attempt({"run": "killed and resumed"}, lambda: killed(line, folder / "killed", output, steps, 0.02))
        yield attempt({"run": "k-NN accuracy"}, lambda: scored(shards, output, images))


def deterministic(small: bool) -> Iterator[Row]:
    """Yield a row for a run with `--deterministic true` that is killed and resumed, and must be bit-equal."""
    images, steps = (64, 4) if small else (1024, 16)
    with tempfile.TemporaryDirectory() as name:
        folder, output = Path(name), Path(name) / "undisturbed"
        shards = make_shards(folder / "shards", images, (75, 100) if small else IMAGE)
        line = command(shards, steps, [*(SMALL if small else RECIPE), "--deterministic", "true"])
        yield attempt({"run": "deterministic"}, lambda: fed(line, output, steps))
        yield attempt({"run": "deterministic, killed"}, lambda: killed(line, folder / "killed", output, steps, 0.0))


def command(shards: str, steps: int, settings: list[str]) -> list[str]:
    """Return the command of a DINO run."""
    script = ROOT / "pretrain" / "run.py"
    return [sys.executable, str(script), "--method", "dino", "--data", shards, "--steps", str(steps), *settings]


def make_shards(folder: Path, images: int, size: tuple[int, int]) -> str:
    """Write labelled shards of JPEGs of `size` (H, W), with 64 distinct images. Return the pattern of the shards."""
    folder.mkdir()
    files = [jpeg(seed, size) for seed in range(64)]
    for shard in range(4):
        with tarfile.open(folder / f"train-{shard:06d}.tar", "w") as archive:
            for number in range(shard, images, 4):
                parts = {"jpg": files[number % len(files)], "cls": str(number % CLASSES).encode()}
                for ending, content in parts.items():
                    member = tarfile.TarInfo(f"{number:06d}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return f"{folder}/train-{{000000..000003}}.tar"


def jpeg(seed: int, size: tuple[int, int]) -> bytes:
    """Return a JPEG of smooth noise and fine grain, about as large and as slow to decode as a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (size[0] // 25, size[1] // 25, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((size[1], size[0]), Image.Resampling.BICUBIC), dtype=np.float32)
    grain = rng.normal(0, 12, (*size, 1))
    with io.BytesIO() as file:
        Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        return file.getvalue()


def records(output: Path) -> list[Row]:
    """Return the records in the metrics.jsonl of a run."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def fed(command: list[str], output: Path, steps: int) -> Row:
    """Run `steps` steps on JPEGs. Return the speed, and the wait for the loader in the second half of the steps."""
    started = time.perf_counter()
    subprocess.run([*command, "--output", str(output), "--record_every", str(steps // 2)], check=True)
    last = records(output)[-1]
    found = {"images/s": last["images_per_second"], "data_wait": last["data_wait"]}
    return found | {"GB on the GPU": last.get("peak_memory_gb"), "whole run, s": time.perf_counter() - started}


def killed(command: list[str], output: Path, undisturbed: Path, steps: int, tolerance: float) -> Row:
    """Kill a run after its first checkpoint, resume it, and compare its last loss with that of an undisturbed run.

    The relative difference may be `tolerance`.
    """
    every = steps // 4
    command = [*command, "--output", str(output), "--record_every", "1", "--checkpoint_every", str(every)]
    process = subprocess.Popen(command)
    checkpoint = output / "checkpoints" / f"step-{every:08d}"
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    if process.wait() != -signal.SIGKILL:
        raise RuntimeError(f"The run ended with exit code {process.returncode} before it was killed.")
    started = time.perf_counter()
    subprocess.run([*command, "--resume"], check=True)
    seconds = time.perf_counter() - started
    found = [row["step"] for row in records(output) if row["step"]]
    loss, expected = records(output)[-1]["loss"], records(undisturbed)[-1]["loss"]
    difference = abs(loss - expected) / abs(expected)
    ok = found == list(range(1, steps + 1)) and difference <= tolerance
    return {"steps": len(found), "loss": loss, "difference": difference, "resumed run, s": seconds, "ok": ok}


def scored(shards: str, trained: Path, images: int) -> Row:
    """Score a trained run by k-NN. Return the time of the command in seconds."""
    started = time.perf_counter()
    line = [sys.executable, str(ROOT / "evaluation" / "knn.py"), "--checkpoint", str(trained), "--k", "20"]
    line += ["--train", shards, "--val", shards, "--source.allow_overlap", "true"]
    subprocess.run(line, check=True)
    return {"images": images, "whole command, s": time.perf_counter() - started}
