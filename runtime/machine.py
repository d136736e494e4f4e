"""The hardware that a command runs on, and the versions of its packages."""

import importlib.metadata
import platform
import re
from pathlib import Path

PACKAGES = ("tessera-ssl", "torch", "torchvision", "accelerate", "numpy", "pillow")


def processor() -> str:
    """Return the name of the CPU, or the name of the architecture if the system does not name the CPU."""
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # only Linux has this file
        names = []
    return names[0] if names else platform.machine()


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages on which results depend. None marks a missing package."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
