"""Versions of the software, and the rates that the machine reaches at most: products, copies and launches."""

import importlib.metadata
import os
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import torch
import torch.cuda.nccl

from device.settings import ROOT, DeviceCheck, device, wait
from device.training import attempt, float32_products, milliseconds
from tessera.runtime.machine import processor, versions

Row = dict[str, Any]


def ceilings(check: DeviceCheck) -> Iterator[Row]:
    """Yield the versions, the packages that are missing, and the measured ceilings."""
    for name, version in (versions() | machine()).items():
        yield {"what": name, "is": version}
    missing = missing_packages()
    yield {"what": "missing packages", "is": ", ".join(missing) or "none"}
    side, copied = (256, 2**20) if check.small else (8192, 2**32)
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32, "TF32": torch.float32}
    for name, kind in kinds.items():
        row = {"ceiling": f"{name} product of {side} x {side}, TFLOP/s"}
        with float32_products("high" if name == "TF32" else "highest"):
            yield attempt(row, lambda kind=kind: {"reached": product(side, kind)})
    yield attempt({"ceiling": f"copy of {copied / 2**20:.0f} MiB, GB/s read and written"}, lambda: copies(copied))
    yield attempt({"ceiling": "host to device, pinned, GB/s"}, lambda: to_device(copied // 8))
    yield attempt({"ceiling": "launch of a kernel, microseconds"}, launches)
    if not check.small:
        yield attempt({"ceiling": "torch.compile of one sum, largest difference"}, compiles)


def machine() -> dict[str, Any]:
    """Return what results depend on beside the packages: the processor, and the GPU with its software."""
    found = {"processor": processor(), "cores": len(os.sched_getaffinity(0))}
    for name in ("triton", "transformers", "deepspeed", "pydantic", "webdataset"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
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


def missing_packages() -> list[str]:
    """Return the packages that pyproject.toml requires and that are not installed."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [re.split(r"[<>=\[; ]", line)[0] for line in wanted]
    installed = {re.sub("[-_.]+", "-", str(one.name)).lower() for one in importlib.metadata.distributions()}
    return [name for name in names if name not in installed]


def product(side: int, kind: torch.dtype) -> float:
    """Return the rate of a square matrix product of random values in TFLOP/s."""
    a, b = (torch.randn(side, side, device=device(), dtype=kind) for _ in range(2))
    return 2 * side**3 / milliseconds(lambda: a @ b, 10) / 1e9


def copies(size: int) -> Row:
    """Return the rate of a copy within the memory of the device."""
    source = torch.ones(size, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return {"reached": 2 * size / milliseconds(lambda: target.copy_(source), 10) / 1e6}


def to_device(size: int) -> Row:
    """Return the rate of a copy from pinned memory to the device."""
    source = torch.ones(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    target = torch.empty(size, dtype=torch.uint8, device=device())
    return {"reached": size / milliseconds(lambda: target.copy_(source, non_blocking=True), 10) / 1e6}


def launches() -> Row:
    """Return the time of a kernel that does next to nothing, many of which are launched one after another."""
    x = torch.zeros(1, device=device())

    def many() -> None:
        for _ in range(1000):
            x.add_(1)

    return {"reached": milliseconds(many, 3)}  # milliseconds of 1000 launches


def compiles() -> Row:
    """Compile a function with inductor, and return the difference from its eager result."""
    x = torch.randn(1000, device=device())
    compiled = torch.compile(lambda x: (x.exp() + 1).log())
    difference = float((compiled(x) - (x.exp() + 1).log()).abs().max())
    wait()
    return {"reached": difference, "ok": difference < 1e-5}
