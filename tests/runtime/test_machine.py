"""Launchers are recognised by their command lines, and glibc keeps freed memory for the next tensors."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.runtime import machine
from tests.launched import ROOT

# Prints the memory of the process, in MiB, before tensors of 64 MiB, after some of them, and after as many more. Each
# is freed before the next. The heap grows during the first ones, until small blocks between them have their places.
RESIDENT = """
import resource, sys
import torch
from tessera.runtime.machine import keep_freed_memory, return_freed_memory, trim_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

kept = keep_freed_memory() if sys.argv[1] != "default" else None
if sys.argv[1] == "return":
    return_freed_memory()
torch.ones(2**20)  # loads what torch needs
memory = [resident()]
for _ in range(2):
    for _ in range(int(sys.argv[2])):
        torch.ones(2**24)
    memory.append(resident())
trim_memory()
print(kept, *memory, resident())
"""


def test_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.file_system("/proc/self") == "proc"
    (tmp_path / "link").symlink_to("/home/ann lee/x")
    mounts = (
        "/dev/a / ext4 rw 0 0\nauto /home autofs rw 0 0\nserver:/a /home/ann\\040lee nfs4 rw 0 0\nb /home/ann xfs 0 0\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: mounts)
    asked = (
        "/data",
        "/home/bob",
        "/home/ann lee",
        "/home/ann lee/.cache",
        "/home/ann/x",
        "/home/annette",
        tmp_path / "link",
    )
    found = [machine.file_system(path) for path in asked]
    assert found == ["ext4", "autofs", "nfs4", "nfs4", "xfs", "autofs", "nfs4"]


def grown(mode: str, tensors: int) -> tuple[int, int, int]:
    """Return by how many MiB the process grows with `tensors`, with as many more, and after `trim_memory`."""
    chosen = ("MALLOC_", "GLIBC_TUNABLES")
    ran = subprocess.run(
        [sys.executable, "-c", RESIDENT, mode, str(tensors)],
        cwd=ROOT, capture_output=True, text=True, check=True,
        env={name: value for name, value in os.environ.items() if not name.startswith(chosen)},
    )  # fmt: skip
    kept, *resident = ran.stdout.split()
    assert kept == ("None" if mode == "default" else "True")
    before, first, second, trimmed = map(int, resident)
    return first - before, second - first, trimmed - before


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again() -> None:
    first, second, trimmed = grown("keep", 20)
    assert first >= 56  # MiB: at least one tensor's memory stays with the process
    assert second < 4  # and serves the next tensors
    assert trimmed < 8
    assert grown("default", 1)[0] < 4
    assert grown("return", 1)[0] < 4


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_ARENA_MAX", "2"), ("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")],
)
def test_the_users_settings_of_the_allocator_hold(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(values: object) -> bool:
        raise AssertionError("The settings of the allocator were changed.")

    monkeypatch.setattr(machine, "_keeps_freed_memory", False)
    monkeypatch.setattr(machine, "_mallopt", refused)
    monkeypatch.setenv(name, value)
    assert not machine.keep_freed_memory()


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "None"),
    ],
)
def test_segments_of_cuda_grow_by_default(given: dict[str, str], value: str) -> None:
    code = (
        "import os, tessera.pretrain.run, torch\n"
        "chosen = os.environ.get('PYTORCH_ALLOC_CONF')\n"
        "torch._C._accelerator_setAllocatorSettings(chosen or '')\n"  # fails if torch does not know the setting
        "print(chosen)"
    )
    kept = {name: text for name, text in os.environ.items() if not name.endswith("ALLOC_CONF")}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env=kept | given
    )
    assert ran.stdout.strip() == value


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python /venv/bin/accelerate launch pretrain/run.py", True),
        ("python3 -m accelerate.commands.launch pretrain/run.py", True),
        ("/venv/bin/python /venv/bin/accelerate-launch pretrain/run.py", True),
        ("python3 launch/accelerate_launch.py pretrain/run.py", True),
        ("python -u -m torch.distributed.run pretrain/run.py", True),
        ("/venv/bin/python /venv/bin/tessera --num_processes 2 pretrain", True),
        ("bash tessera-sweep.sh", False),
        ("python accelerate_sweep.py", False),
        ("bash -c", False),
    ],
)
def test_launchers_are_recognised_by_their_command_lines(command: str, expected: bool) -> None:
    assert machine.is_launcher(command.split()) is expected
    assert not machine.is_launcher(["bash", "-c", "accelerate launch pretrain/run.py"])


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("400000 100000", 4), ("150000 100000", 1), ("50000 100000", 1), ("max 100000", 16), ("", 16)],
)
def test_cores_are_bounded_by_the_quota_of_a_container(
    quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(machine, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert machine.cores() == expected
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert machine.cores() == expected


def test_the_size_of_kernel_caches_is_that_of_the_user_if_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "1")
    monkeypatch.delenv("LRU_CACHE_CAPACITY")
    machine.limit_kernel_caches()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
    assert os.environ["LRU_CACHE_CAPACITY"] == "256"
