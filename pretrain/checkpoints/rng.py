"""The states of a process's random generators, which a resumed run goes on from."""

import random
from typing import Any

import numpy as np
import torch


def get() -> dict[str, Any]:
    """Those of Python, NumPy, torch and the device, as torch.load reads them with `weights_only`."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def put_back(states: dict[str, Any]) -> None:
    """Go on from what `get` gave."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
