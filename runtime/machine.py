"""The machine that a command runs on, its processes, and the versions of its packages."""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Number of the operation of Linux's `prctl` that sets the signal at the end of the parent."""
PACKAGES = ("tessera-ssl", "torch", "torchvision", "accelerate", "numpy", "pillow")


def processor() -> str:
    """Return the name of the CPU, or the name of the architecture if the system does not name the CPU."""
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # only Linux has this file
        names = []
    return names[0] if names else platform.machine()


def machine_id() -> str:
    """Return a name under which process ids are unique: a hash of the host, its last boot and the container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux has these files
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def process_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name of the program: state, process id of the parent, ...

    The list is empty if the process does not run, or if the system does not tell.
    """
    try:
        # the name of the program, in parentheses, may contain spaces and parentheses
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def signal_at_end_of_parent(number: int) -> None:
    """Let the kernel send a signal to this process when the thread that started it ends. Only Linux can do this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def start_time(pid: int) -> str | None:
    """Return the time at which a process of this machine started, in clock ticks since the boot of the machine.

    Return None if the process does not run, or if the system does not tell.
    """
    fields = process_fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None


def is_running(pid: int, started: str | None) -> bool:
    """Return True if a process of this machine still runs.

    Args:
        pid: process id.
        started: `start_time` of the process, because the system may have given its id to another process since; None
            if it is unknown.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        pass
    if not Path(f"/proc/{pid}/stat").exists():  # another system than Linux, or processes of other users are hidden
        return True
    now = start_time(pid)
    return now is not None and started in (None, now)


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages on which results depend. None marks a missing package."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
