"""Report software versions, and measure the highest rates of matrix products, copies and kernel launches."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.cuda.nccl
from device.runner import Row, attempt
from training import device, wait

from tessera.runtime.machine import processor, versions


def ceilings(small: bool) -> Iterator[Row]:
    """Yield one row per version and one per ceiling, a highest measured rate. `small` selects small shapes."""
    for name, version in (versions() | machine()).items():
        yield {"what": name, "is": version}
    side, copied = (256, 2**20) if small else (8192, 2**32)
    for kind in (torch.bfloat16, torch.float32):
        name = str(kind).removeprefix("torch.")
        yield attempt({"ceiling": f"{name} product of {side} x {side}, TFLOP/s"}, lambda kind=kind: product(side, kind))
    yield attempt({"ceiling": f"copy of {copied / 2**20:.0f} MiB, GB/s read and written"}, lambda: copies(copied))
    yield attempt({"ceiling": "host to device, pinned, GB/s"}, lambda: to_device(copied // 8))
    yield attempt({"ceiling": "launch of a kernel, microseconds"}, launches)


def machine() -> dict[str, Any]:
    """Return the hardware and the versions of the GPU's software, on which the results also depend."""
    found = {"processor": processor(), "cores": len(os.sched_getaffinity(0))}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "GPU": properties.name,
            "GPU memory, GiB": round(properties.total_memory / 2**30, 1),
            "compute capability": f"{properties.major}.{properties.minor}",
            "CUDA of torch": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def milliseconds(work: Callable[[], object], times: int) -> float:
    """Return the median time in milliseconds of a call that runs on the device, after two warm-up calls."""
    taken = []
    for _ in range(times + 2):
        wait()
        start = time.perf_counter()
        work()
        wait()
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken[2:])


def product(side: int, kind: torch.dtype) -> Row:
    """Return the rate of a square matrix product of random values in TFLOP/s."""
    a, b = (torch.randn(side, side, device=device(), dtype=kind) for _ in range(2))
    return {"reached": 2 * side**3 / milliseconds(lambda: a @ b, 10) / 1e9}


def copies(size: int) -> Row:
    """Return the rate of a copy within the memory of the device in GB/s, the sum of reads and writes."""
    source = torch.ones(size, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return {"reached": 2 * size / milliseconds(lambda: target.copy_(source), 10) / 1e6}


def to_device(size: int) -> Row:
    """Return the rate of a copy from pinned host memory to the device in GB/s."""
    source = torch.ones(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    target = torch.empty(size, dtype=torch.uint8, device=device())
    return {"reached": size / milliseconds(lambda: target.copy_(source, non_blocking=True), 10) / 1e6}


def launches() -> Row:
    """Return the time of a minimal kernel in microseconds, if many are launched one after another."""
    x = torch.zeros(1, device=device())

    def many() -> None:
        for _ in range(1000):
            x.add_(1)

    return {"reached": milliseconds(many, 3)}  # milliseconds of 1000 launches are microseconds of one
