"""A method in one's own loop trains as a run of the same settings, and the evaluation of the tutorial is a command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.neighbors import NearestCentroid
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import tessera
from tests.installed import write_metadata
from tests.launched import ROOT
from tests.pretrain.small import few_digits
from tests.ranks import on_processes

LR = 1e-3
SETTINGS: dict[str, Any] = {
    "method": "dino",
    "steps": 5,
    "batch_size": 16,
    "workers": 0,
    "record_every": 1,
    # without the biases of keys, whose gradient is nothing but rounding
    "encoder": {"variant": "vit_micro", "depth": 1, "dim": 24, "heads": 2, "qkv_bias": False},
    "dino": {"hidden_dim": 32, "bottleneck_dim": 16, "prototypes": 64, "freeze_steps": 0, "batch_norm": False},
    "optim": {"lr": LR, "lr_scaling": "none", "min_lr": LR, "warmup_steps": 0, "weight_decay": 0, "clip": 0}
    | {"weight_decay_end": 0},
    "evaluation": {"pictures": 0, "linear_iterations": 0, "train": few_digits()[0], "val": few_digits()[1]},
}
TUTORIAL = (ROOT / "docs" / "extending.md").read_text()


def own_loop(wrap: type | None = None) -> tuple[list[Tensor], Any]:
    """Train with plain PyTorch. Return the losses and the method."""
    method = tessera.methods.build(**SETTINGS)
    module = method if wrap is None else wrap(method)
    trained = [p for p in method.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0, betas=(0.9, 0.999))
    losses = []
    for step, batch in enumerate(tessera.training_batches(**SETTINGS)):
        loss, _ = module(batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        method.after_step(step)
        losses.append(loss.detach())
    return losses, method


@pytest.mark.medium
def test_a_loop_of_ones_own_equals_the_run(tmp_path: Path) -> None:
    run = tessera.pretrain(output=str(tmp_path / "run"), **SETTINGS)
    losses, method = own_loop()
    assert [line["loss"] for line in run.metrics if "loss" in line] == pytest.approx(
        [float(x) for x in losses], rel=1e-5
    )
    wanted = run.encoder.state_dict()
    for name, tensor in method.trained_encoder().state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5)
    start = tessera.methods.build(**SETTINGS).trained_encoder().state_dict()
    assert any(not torch.equal(start[name], tensor) for name, tensor in wanted.items())


def _own_loop_of_a_process(rank: int, folder: Path) -> None:
    losses, method = own_loop(DistributedDataParallel)
    torch.save((losses, method.state_dict()), folder / f"{rank}.pt")


@pytest.mark.slow
def test_a_loop_of_ones_own_on_two_processes(free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    losses, method = own_loop()
    on_processes(_own_loop_of_a_process, free_port, tmp_path)
    (first, state), (second, same) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for one, a, b in zip(losses, first, second, strict=True):
        torch.testing.assert_close((a + b) / 2, one, rtol=1e-5, atol=1e-5)
    for name, tensor in method.state_dict().items():
        assert torch.equal(state[name], same[name])
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-4)


def install_evaluation(folder: Path) -> dict[str, str]:
    """Install the evaluation of the tutorial in `folder`. Return the environment in which it is found."""
    (module,) = (block for block in re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL) if "make_command" in block)
    (folder / "my_package").mkdir(parents=True)
    (folder / "my_package/class_means.py").write_text(module)
    write_metadata(folder, "my-package", {"tessera.evaluations": {"class_means": "my_package.class_means"}})
    return os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"}


@pytest.mark.slow
def test_the_evaluation_of_the_tutorial_is_a_command(tmp_path: Path) -> None:
    environment = install_evaluation(tmp_path / "installed")
    train, val = few_digits()

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        started = [sys.executable, "-m", "tessera", *words]
        return subprocess.run(started, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    run = tmp_path / "run"
    tessera.pretrain("mae", encoder="vit_micro", steps=2, batch_size=16, output=str(run), evaluation={"pictures": 0})
    given = ["--checkpoint", str(run), "--train", train, "--val", val, "--workers", "0"]
    (run / "evaluation").mkdir(exist_ok=True)
    results = []
    for number, words in enumerate((["class_means"], ["--num_processes", "2", "class_means"])):
        file = run / "evaluation" / f"{number}.json"
        done = command(*words, *given, "--output", str(file))
        assert done.returncode == 0, done.stderr
        results.append(json.loads(file.read_text()))
    result, two = results
    assert (two["top1"], two["settings"]["processes"]) == (pytest.approx(result["top1"], abs=0.021), 2)  # one image
    parts = []
    for data in (train, val):
        parts.append(tessera.embed(tessera.load(run), data, workers=0))
    bank, queries = parts
    oracle = NearestCentroid().fit(bank.features, bank.labels)
    assert result["top1"] == pytest.approx(oracle.score(queries.features, queries.labels), abs=1e-6)
    report = tmp_path / "report.html"
    assert command("report", str(run), "--output", str(report)).returncode == 0
    assert "class means" in report.read_text()


@pytest.mark.slow
def test_the_program_of_ones_own_loop_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "own_loop.py"), "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0.1 < float(done.stdout.splitlines()[-1]) < 1
    assert (tmp_path / "encoder.safetensors").exists()


def test_bad_settings_are_an_error() -> None:
    with pytest.raises(ValueError, match="unknown method 'dinosaur'"):
        tessera.methods.build("dinosaur")
    with pytest.raises(ValueError, match=r"unknown setting 'dino.prototype'"):
        tessera.methods.build("dino", dino={"prototype": 3})
