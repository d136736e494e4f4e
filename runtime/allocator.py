"""The memory allocator of the C library, which torch uses for tensors on the CPU."""

import ctypes
import os
import sys
from collections.abc import Mapping

M_TRIM_THRESHOLD = -1
"""mallopt's parameter: free memory at the end of the heap above which glibc returns memory to the system."""
M_MMAP_MAX = -4
"""mallopt's parameter: largest number of blocks that glibc takes from the system outside the heap."""
KEEP = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1}
"""Values of `keep_freed_memory`. -1 turns trimming off."""
RETURN = {M_MMAP_MAX: 65_536, M_TRIM_THRESHOLD: 128 * 1024}
"""glibc's defaults."""
_keeps = False
"""True after `keep_freed_memory` has changed the settings."""


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next tensors. Return True if the settings were changed.

    By default, glibc gets each tensor of more than 32 MiB from the system, and returns it when it is freed. The system
    then fills its pages with zeros again at every step.

    The function does nothing with another C library, or if the user set environment variables of an allocator.
    """
    global _keeps
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    if sys.platform.startswith("linux") and not chosen and hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        _keeps = _set(KEEP)
    return _keeps


def return_freed_memory() -> None:
    """Undo `keep_freed_memory`, for example in a process that was forked after it."""
    global _keeps
    if _keeps:
        _set(RETURN)
        _keeps = False


def _set(values: Mapping[int, int]) -> bool:
    return all(ctypes.CDLL(None).mallopt(setting, value) for setting, value in values.items())
