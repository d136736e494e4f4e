"""The accelerator of a command, and the number of threads with which torch computes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from tessera.evaluation.command import evaluate
from tessera.evaluation.embed import EmbedSettings, run
from tessera.evaluation.features import EvaluationError
from tessera.pretrain import resolve
from tessera.pretrain.command_line import load
from tessera.pretrain.run import main
from tessera.runtime import machine
from tessera.runtime.isolation import isolated
from tessera.runtime.processes import LaunchError, exit_on_user_error, make_accelerator, set_threads
from tessera.runtime.settings import validate
from tests.launched import ROOT


def test_one_process_without_a_gpu_runs_on_the_cpu():
    made = make_accelerator()
    assert made.num_processes == 1
    assert made.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_launch_without_a_process_group_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="--multi_gpu --num_processes 2"):
        make_accelerator()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_variable_of_the_launcher_that_is_no_number_is_named(name: str, monkeypatch, capsys):
    monkeypatch.setenv(name, "x")
    with pytest.raises(SystemExit), exit_on_user_error():
        raise AssertionError("not reached")
    assert f"environment variable {name} is 'x'. It must be a number" in capsys.readouterr().err
    assert main(["--steps", "1"]) == 2
    assert f"environment variable {name} is 'x'" in capsys.readouterr().err


def test_runs_of_a_process_may_differ_in_precision():
    for precision in ("no", "bf16", "no"):
        assert make_accelerator(mixed_precision=precision).mixed_precision == precision


class SeenError(Exception):
    """Ends an evaluation after it has set up the device."""


def evaluates() -> None:
    def prepare(*_: object) -> NoReturn:
        raise SeenError

    with pytest.raises(SeenError):
        evaluate("knn", SimpleNamespace(output=None), prepare, prepare)


def embeds() -> None:
    with pytest.raises(EvaluationError):
        run(validate(EmbedSettings, {"checkpoint": "absent", "data": "absent", "output": "absent.npz"}))


@pytest.mark.parametrize("command", [evaluates, embeds, lambda: resolve.make_accelerator(load([]))])
def test_training_and_evaluations_set_up_the_device_alike(command: Callable[[], object], monkeypatch) -> None:
    monkeypatch.setattr(machine, "_keeps_freed_memory", False)
    with isolated():
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
            os.environ.pop(name, None)
        command()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        if not torch.cuda.is_available():
            assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(machine.CACHED_KERNELS)
            assert machine._keeps_freed_memory


CORES = machine.cores()
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]  # sets OMP_NUM_THREADS=1 if the user sets nothing
OTHER = ["bash", "-c", 'OMP_NUM_THREADS=1 "$0" "$1"; exit', sys.executable]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc, which only Linux has")
@pytest.mark.parametrize(
    ("launcher", "chosen", "threads"),
    [
        (LAUNCH, {}, CORES - 1 if CORES > 2 else CORES),
        (LAUNCH, {"OMP_NUM_THREADS": "1"}, 1),
        ([*LAUNCH, "--num_cpu_threads_per_process", "1"], {}, 1),
        (OTHER, {}, 1),
    ],
)
def test_accelerate_launch_computes_on_all_cores(
    tmp_path: Path, launcher: list[str], chosen: dict[str, str], threads: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text("from tessera.runtime.processes import make_accelerator\nmake_accelerator()\n"
                      "import torch\nprint('threads', torch.get_num_threads())")  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | chosen
    ran = subprocess.run([*launcher, script], cwd=ROOT, capture_output=True, text=True, env=environment, check=True)
    assert f"threads {threads}\n" in ran.stdout


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 15),  # one core is left to the loader workers
        ({"LOCAL_WORLD_SIZE": "8"}, 2),
        ({"LOCAL_WORLD_SIZE": "32"}, 1),
        ({"SLURM_CPUS_ON_NODE": "4"}, 3),
        ({"OMP_NUM_THREADS": "5"}, None),  # the user's choice
    ],
)
def test_threads_are_the_cores_of_the_process(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int | None
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(machine, "CPU_QUOTA", Path("no file"))
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    set_threads(1)
    assert chosen == ([] if expected is None else [expected])
