"""Check whether the device has instructions for bf16. Without them, it emulates bf16, and is slow."""

import torch

EMULATED = "precision bf16: this machine emulates bf16, which is much slower than fp32. %s"
"""Warning of a command in bf16 on such a machine, with the advice."""


def has_instructions() -> bool:
    """Return True if the device, a GPU or else the CPU, has instructions for bf16.

    V100 and T4 have none, and of the CPUs only those with AVX512-BF16 or AMX have them.
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]
