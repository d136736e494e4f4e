"""The machine that a command runs on: its name, processes and memory, and the versions of the installed packages."""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

LAUNCHERS = re.compile(
    r"accelerate([-_.](commands[.])?launch([.]py)?)?|torchrun|torch[.]distributed[.](run|launch)|deepspeed.*|tessera"
)
"""Pattern of the names of programs that start training processes: scripts, or modules after `-m`."""
PR_SET_PDEATHSIG = 1
"""Code of the Linux `prctl` operation that sets which signal a process receives when its parent ends."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Codes of three settings of glibc's `mallopt`: the amount of free memory at the end of the heap above which glibc
returns memory to the system, the size from which glibc allocates a block outside of the heap, and the largest number of
such blocks."""
LIBC = ctypes.CDLL(None)
"""The C library. It is opened here, because a forked process must not open a library: the process fails if another
thread of its parent was opening one during the fork."""
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""File in a container that holds the memory that the container may use, in bytes."""
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""File in a container that holds the CPU time, and the time in which the container may use it, in microseconds."""
CACHED_KERNELS = 256
"""Largest number of kernels in each of oneDNN's caches; a step of Swin with DINOv2 uses about 200."""
PACKAGES = ("tessera-ssl", "torch", "torchvision", "accelerate", "numpy", "pillow", "simplejpeg")


def processor() -> str:
    """Return the name of the CPU, or the name of the architecture if the system does not name the CPU."""
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # only Linux has this file
        names = []
    return names[0] if names else platform.machine()


def cores() -> int:
    """Return the number of cores that this process may use, by its affinity and by the CPU quota of its container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # without a container or a quota, no file, or the text "max"
        quota, period = map(int, CPU_QUOTA.read_text().split())
        count = min(count, max(quota // period, 1))
    return count


def memory() -> int:
    """Return the size in bytes of the memory of this machine, or of the part of it that its container may use."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # without a container or a limit, no file, or the text "max"
        size = min(size, int(MEMORY_LIMIT.read_text()))
    return size


def machine_id() -> str:
    """Return a hash of the host, its last boot and the container. Within this scope, process ids are unique."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux has these files
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def file_system(path: str | Path) -> str:
    """Return the type of the file system that holds `path`, such as `ext4` or `nfs4`; empty if it is not known."""
    path, found = os.path.realpath(path), (0, "")
    with contextlib.suppress(OSError):  # only Linux has this file
        for line in Path("/proc/mounts").read_text(errors="replace").splitlines():
            _, mount, kind, *_ = line.split(" ")
            mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount)  # such as \040 for a space
            if len(mount) >= found[0] and os.path.join(path, "").startswith(os.path.join(mount, "")):
                found = len(mount), kind
    return found[1]


def process_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the program name: the state, the id of the parent process, ...

    The list is empty if the process does not run, or if the system has no /proc.
    """
    try:
        # The program name is in parentheses, and may itself contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def command_line(pid: int) -> list[str]:
    """Return the command line of a process as a list of words. The list is empty if the command line is unknown."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def is_launcher(command: Sequence[str]) -> bool:
    """Return True if `command` runs a program that starts training processes, such as `torchrun`."""
    return any(LAUNCHERS.fullmatch(Path(word).name) for word in command[:4])  # python -u -m NAME


def signal_at_end_of_parent(number: int) -> None:
    """Let the kernel send this process the signal `number` when the thread that started this process ends.

    On systems other than Linux, the function does nothing.
    """
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, number)


def start_time(pid: int) -> str | None:
    """Return the time at which a process of this machine started, in clock ticks since the boot of the machine.

    Return None if the process does not run, or if its start time is unknown.
    """
    fields = process_fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None


def is_running(pid: int, started: str | None) -> bool:
    """Return True if a process of this machine still runs.

    Args:
        pid: process id.
        started: `start_time` of the process, or None if it is unknown. A later process with the same id has another
            start time.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        pass
    if not Path(f"/proc/{pid}/stat").exists():  # not Linux, or processes of other users are hidden
        return True
    now = start_time(pid)
    return now is not None and started in (None, now)


def set_environment() -> None:
    """Set the environment variables of libraries that training and evaluations need. Values of the user hold.

    OpenMP reads its variable when torch is loaded, and CUDA's allocator at its first allocation.
    """
    # By default, idle OpenMP threads spin and take cores from the loader. On two shared cores, training at times fell
    # to 38 images/s by default, but never below 275 images/s with PASSIVE.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # With images at native sizes, or crops of several sizes, tensor sizes change from step to step. Expandable segments
    # serve all sizes, so less memory is lost to fragmentation.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


_keeps_freed_memory = False


def keep_freed_memory() -> bool:
    """Let glibc keep the freed memory of tensors for the next tensors. Return True if glibc's settings were changed.

    By default, glibc requests memory from the system for each tensor of more than 32 MiB, and returns the memory when
    the tensor is freed. The system must then fill new pages with zeros at every step.

    The function does nothing with another C library, or if the user set environment variables of an allocator.
    """
    global _keeps_freed_memory
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    if sys.platform.startswith("linux") and not chosen and hasattr(LIBC, "gnu_get_libc_version"):
        _keeps_freed_memory = _mallopt({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1})  # -1 means never
    return _keeps_freed_memory


def return_freed_memory() -> None:
    """Restore glibc's defaults after `keep_freed_memory`, for example in a forked process.

    By default, glibc raises its thresholds from 128 KiB as a program frees larger blocks, up to the values here. Once a
    threshold was set, glibc no longer adapts it.
    """
    global _keeps_freed_memory
    if _keeps_freed_memory:
        _mallopt({M_MMAP_MAX: 65_536, M_MMAP_THRESHOLD: 32 * 2**20, M_TRIM_THRESHOLD: 64 * 2**20})
        _keeps_freed_memory = False


def trim_memory() -> None:
    """Return freed memory of this process to the system, even after `keep_freed_memory`.

    Call it before a fork. Otherwise, a page that this process frees before the fork and writes after it exists twice.
    """
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


def limit_kernel_caches() -> None:
    """Let the CPU keep at most `CACHED_KERNELS` compiled kernels per cache, unless the user set the size of a cache.

    For matrix products in bf16, oneDNN compiles a kernel of up to 1 MB for each new shape. By default, each of its two
    caches keeps 1,024 of them. If shapes change from step to step, as with random masks, that takes gigabytes.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # both are read at the first product
        os.environ.setdefault(name, str(CACHED_KERNELS))


def _mallopt(values: dict[int, int]) -> bool:
    return all(LIBC.mallopt(setting, value) for setting, value in values.items())


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages on which results depend. None marks a missing package."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
