"""The accelerator of a command, and the number of threads with which torch computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tessera.runtime.processes import LaunchError, make_accelerator, set_threads
from tests.launched import ROOT


def test_one_process_without_a_gpu_runs_on_the_cpu():
    made = make_accelerator()
    assert made.num_processes == 1
    assert made.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_launch_without_a_process_group_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="--multi_gpu --num_processes 2"):
        make_accelerator()


def test_runs_of_a_process_may_differ_in_precision():
    for precision in ("no", "bf16", "no"):
        assert make_accelerator(mixed_precision=precision).mixed_precision == precision


REPORT = "from tessera.runtime.processes import _launcher_set_threads; print(_launcher_set_threads())"
# a launcher that sets the variable for its child, as `accelerate launch` and `torchrun` do
LAUNCHER = f"""
import os, subprocess, sys
environment = {{**os.environ, "OMP_NUM_THREADS": "1"}}
subprocess.run([sys.executable, "-c", {REPORT!r}], env=environment, check=True)
"""


def started(tmp_path: Path, name: str, flags: tuple[str, ...] = (), **variables: str) -> str:
    """Return what a child of a launcher prints. The file of the launcher has the given name."""
    script = tmp_path / f"{name}.py"
    script.write_text(LAUNCHER)
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | variables
    ran = subprocess.run(
        [sys.executable, script, *flags],
        cwd=ROOT, capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    return ran.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc, which only Linux has")
def test_the_number_of_threads_of_a_launcher_is_recognised(tmp_path: Path) -> None:
    assert started(tmp_path, "accelerate_launch") == "True"
    assert started(tmp_path, "accelerate_launch", OMP_NUM_THREADS="1") == "False"
    assert started(tmp_path, "accelerate_launch", ("--num_cpu_threads_per_process", "1")) == "False"
    assert started(tmp_path, "other") == "False"  # not a launcher


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc, which only Linux has")
def test_accelerate_launch_computes_on_all_cores(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from tessera.runtime.processes import make_accelerator\nmake_accelerator()\n"
                      "import torch\nprint('threads', torch.get_num_threads())")  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    ran = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", script],
        cwd=ROOT, capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    assert f"threads {cores - 1 if cores > 2 else cores}\n" in ran.stdout


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
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    set_threads(1)
    assert chosen == ([] if expected is None else [expected])
