"""Saving and restoring the states of a process's random generators."""

import random
from typing import Any

import numpy as np
import torch


def get_states() -> dict[str, Any]:
    """Return the random states of Python, NumPy, torch and the CUDA device, as types that `torch.load` accepts with
    `weights_only`."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_states(states: dict[str, Any]) -> None:
    """Set the random generators to states that `get_states` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
