import os
import platform
import subprocess
import sys

import pytest

from tests.launched import ROOT

# Counts the pages that the system had to provide for ten tensors of 64 MiB, each freed before the next.
FAULTS = """
import resource, sys
import torch
from runtime.allocator import keep_freed_memory, return_freed_memory
kept = keep_freed_memory() if sys.argv[1] != "default" else None
if sys.argv[1] == "return":
    return_freed_memory()
for _ in range(8):  # the heap grows for the first tensors
    torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**24)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str, **variables: str) -> tuple[str, int]:
    """Return what `keep_freed_memory` returned, and the number of page faults of ten tensors of 64 MiB."""
    glibc = ("MALLOC_", "GLIBC_TUNABLES")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(glibc)} | variables
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS, mode],
        cwd=ROOT, capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    kept, count = ran.stdout.split()
    return kept, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again() -> None:
    kept, count = faults("keep")
    assert kept == "True"
    _, default = faults("default")
    assert default > 200  # ten tensors of 64 MiB are 163,840 pages of 4 KiB, or 320 of 2 MiB
    assert count < default / 20
    _, returned = faults("return")
    assert returned > default / 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_the_users_settings_of_the_allocator_hold() -> None:
    assert faults("keep", MALLOC_ARENA_MAX="2")[0] == "False"
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
    assert faults("keep", GLIBC_TUNABLES="glibc.malloc.arena_max=2")[0] == "False"
