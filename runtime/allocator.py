"""The memory allocator of the C library, which torch uses for tensors on the CPU."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD = -1
"""Number of glibc's setting for the amount of free memory above which it returns memory to the system."""
M_MMAP_MAX = -4
"""Number of glibc's setting for the largest number of blocks that are taken from the system and not from the heap."""
NEVER = -1
"""Value of M_TRIM_THRESHOLD with which glibc returns no memory."""


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next tensors. Return False if it stays as it is.

    By default, glibc gets each tensor of more than 32 MiB from the system and returns it afterwards, and the system has
    to fill its pages with zeros again at every step. With this function, a step uses the memory of the last one.

    The function does nothing with another C library, or if the user set environment variables of glibc's allocator.
    """
    chosen = any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    if not sys.platform.startswith("linux") or chosen or "GLIBC_TUNABLES" in os.environ:
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return all(library.mallopt(setting, value) for setting, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER)))
