"""A small teacher for runs of `--method distill`."""

import functools
import os
import tempfile
import zlib
from pathlib import Path

import torch

from tessera import encoders


@functools.cache
def small_teacher() -> str:
    """Return the path of an untrained encoder with tokens of 8 pixels. The file is the same in all processes."""
    checkout = zlib.crc32(__file__.encode())  # another one may have other encoders
    folder = Path(tempfile.gettempdir()) / f"tessera-teacher-{os.getuid()}-{checkout:08x}"
    folder.mkdir(exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        teacher = encoders.build("vit_micro", dim=32, depth=1, heads=2, patch_size=8)
    encoders.save(teacher, folder / "teacher.safetensors")
    return str(folder / "teacher.safetensors")


def small_settings(method: type) -> dict:
    """Return the small settings of a method, with a teacher for a method that needs one."""
    needed = {"teacher": small_teacher()} if "teacher" in method.Config.model_fields else {}
    return method.small_settings | needed
