"""Seeds for code of the user: data sets, stages and augmentations that draw random numbers.

Such code draws from the global generators of Python, NumPy and torch. For each sample, the generators are seeded from
the seed of the run and the position of the sample in the run, and restored afterwards. Random numbers of the user's
code therefore do not depend on workers, processes or restarts, and do not change those of the training.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tessera.data.sampler import user_seeds

READING, AUGMENTING = range(2)
"""Purposes of `seeded`. Each purpose has random numbers of its own."""
_lock = threading.RLock()  # several data sets of a list are opened in several threads


@contextmanager
def seeded(seed: int, position: int, purpose: int = READING) -> Iterator[torch.Generator]:
    """Seed the global generators of Python, NumPy and torch (on the CPU) for one sample. Yield a seeded generator.

    Args:
        seed: seed of the run.
        position: position of the sample in the run.
        purpose: `READING` or `AUGMENTING`.
    """
    seeds = user_seeds(seed, position, purpose)
    with _lock:
        states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        try:
            random.seed(seeds[0])
            np.random.seed(seeds[1] % 2**32)
            torch.default_generator.manual_seed(seeds[2])
            yield torch.Generator().manual_seed(seeds[3])
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.default_generator.set_state(states[2])
