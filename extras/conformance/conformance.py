"""Compare the losses of a library with the formulas of their papers, on fixed tensors.

    tessera conformance [ADAPTER] [--device cuda]

ADAPTER is a Python module, such as mypackage.adapter, with functions that call the library:

    dino_loss(student, teacher, center, student_temperature, teacher_temperature)         DINO, 2104.14294
    ibot_loss(student, teacher, mask, center, student_temperature, teacher_temperature)   iBOT, 2111.07832
    koleo_loss(features)                                                                  KoLeo, 1806.03198
    sinkhorn(logits, temperature)                                                         SwAV, 2006.09882
    gram_loss(student, teacher)                                                           DINOv3, 2508.10104
    sigreg(embeddings, directions)                                                        LeJEPA, 2511.08544
    mae_loss(predicted, patches, mask)                                                    MAE, 2111.06377
    center_updates(logits, momentum)                                                      DINO
    teacher_updates(weights, momentum)                                                    DINO

Functions may be missing. They take positional arguments. The functions of the same names in `evaluation.references`
state shapes, formulas and conventions, and compute the expected values in float64. A function gets float32 tensors, and
returns a tensor. For a loss, the gradient with respect to the first argument is compared, too.
"""

import importlib
import math
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tessera.evaluation import references
from tessera.evaluation.command import run_command
from tessera.runtime.settings import Positional, Settings
from tessera.runtime.user_error import UserError, printable


class ConformanceError(UserError):
    """An adapter cannot be imported, or one of its functions differs from its formula."""


class ConformanceSettings(Settings):
    """Compare the losses of a library with the formulas of their papers. ADAPTER: module that calls the library."""

    adapter: Positional[str] = "tessera.extras.conformance.losses"
    """Python module with the functions, installed or in the current folder; default: the losses of this project"""
    device: str = "cpu"
    """device of the tensors, such as cpu or cuda"""
    tolerance: float = Field(default=1e-4, gt=0)
    """largest accepted difference, as a fraction of the largest expected value"""


class Case(NamedTuple):
    """A function and its arguments."""

    function: str
    title: str
    arguments: tuple[Any, ...]
    """Float32 or bool tensors, and numbers."""
    is_loss: bool = True
    """True if the gradient with respect to the first argument is compared, too."""


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Return float32 normal numbers from the raw numbers of NumPy's PCG64, which are equal in all versions."""
    raw = np.random.PCG64(seed).random_raw((2, math.prod(shape)))
    uniform = (raw >> np.uint64(11)) / 2.0**53  # [0, 1)
    values = np.sqrt(-2 * np.log1p(-uniform[0])) * np.cos(2 * np.pi * uniform[1])  # Box and Muller
    return torch.from_numpy(scale * values).float().reshape(shape)


def cases() -> list[Case]:
    """Return all cases. Their tensors are equal on every machine, up to the rounding of cosines and logarithms."""
    both = (normal(0, 8, scale=0.1), 0.1, 0.04)  # centre and temperatures
    student, teacher = normal(1, 5, 3, 8, scale=0.3), normal(2, 2, 3, 8, scale=0.1)
    tokens = (normal(3, 4, 5, 8, scale=0.3), normal(4, 4, 5, 8, scale=0.1))
    hidden = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    features = normal(5, 8, 6)
    near = torch.cat([features, features[:2] + normal(6, 2, 6, scale=0.01)])
    directions = F.normalize(normal(7, 6, 10), dim=0)
    patches = 0.5 + normal(9, 3, 6, 12, scale=0.3)
    patches[0, 0] = 0.5 + normal(10, 12, scale=0.001)  # a variance of about 1e-6
    masked = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1], [1, 1, 0, 1, 1, 0]]).bool()
    return [
        Case("dino_loss", "2 global crops", (student[:2], teacher, *both)),
        Case("dino_loss", "2 global and 3 local crops", (student, teacher, *both)),
        Case("ibot_loss", "0, 1, 3 and 5 hidden tokens", (*tokens, hidden, *both)),
        Case("koleo_loss", "8 images", (features,)),
        Case("koleo_loss", "near neighbours", (near,)),
        Case("sinkhorn", "12 rows, 5 prototypes", (normal(11, 12, 5, scale=0.3), 0.1), is_loss=False),
        Case("gram_loss", "2 crops", (normal(12, 2, 5, 6), normal(13, 2, 5, 6))),
        Case("sigreg", "3 views of 16 images", (0.3 + 1.5 * normal(8, 3, 16, 6), directions)),
        Case("mae_loss", "4 of 6 patches", (normal(14, 3, 6, 12), patches, masked)),
        Case("center_updates", "3 steps", (1 + normal(15, 3, 4, 8), 0.9), is_loss=False),
        Case("teacher_updates", "3 steps", (normal(16, 4, 6), 0.9), is_loss=False),
    ]


def compare(case: Case, function: Callable[..., Tensor], device: str = "cpu") -> dict[str, float]:
    """Return the largest difference of `value` and, for a loss, `gradient`, as fractions of the largest expected one.

    Raises:
        ValueError: the result has another shape than expected.
    """
    expected = _outputs(case, getattr(references, case.function), torch.float64, "cpu")
    found = _outputs(case, function, torch.float32, device)
    differences = {}
    for name, wanted in expected.items():
        result = found[name].to("cpu", torch.float64)
        if result.shape != wanted.shape:
            raise ValueError(f"the result has the shape {tuple(result.shape)}, not {tuple(wanted.shape)}")
        differences[name] = ((result - wanted).abs().max() / wanted.abs().max()).item()
    return differences


def _outputs(case: Case, function: Callable[..., Tensor], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Return the value of a function for a case, and the gradient of a loss."""
    arguments = []
    for given in case.arguments:
        if isinstance(given, Tensor):  # a copy, which the function may overwrite
            given = given.to(device, dtype if given.is_floating_point() else given.dtype, copy=True)
        arguments.append(given)
    value = function(arguments[0].requires_grad_(case.is_loss), *arguments[1:])
    outputs = {"value": value.detach()}
    return outputs | {"gradient": torch.autograd.grad(value, arguments[0])[0]} if case.is_loss else outputs


def load_adapter(name: str) -> ModuleType:
    """Import the adapter of this name, which may be in the current folder.

    Raises:
        ConformanceError: it cannot be imported, or has none of the functions.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        adapter = importlib.import_module(name)
    except ImportError as error:
        raise ConformanceError(f"The adapter {name} cannot be imported: {error}. Correct the name.") from error
    names = dict.fromkeys(case.function for case in cases())
    if not any(hasattr(adapter, function) for function in names):
        raise ConformanceError(f"The adapter {name} has none of the functions {', '.join(names)}. Add one of them.")
    return adapter


def run(settings: ConformanceSettings) -> None:
    """Print one line for each case.

    Raises:
        ConformanceError: the adapter cannot be imported, or a function fails or differs from its formula.
    """
    adapter = load_adapter(settings.adapter)
    table = Table("function", "case", "value differs by", "gradient differs by", "result", box=None, pad_edge=False)
    wrong = set()
    for case in cases():
        function, found = getattr(adapter, case.function, None), {}
        result = "not provided"
        if function is not None:
            try:
                found = compare(case, function, settings.device)
                agrees = all(difference <= settings.tolerance for difference in found.values())
                result = "agrees" if agrees else "differs"
            except Exception as error:  # whatever the library raises
                result = f"fails: {type(error).__name__}: {error}"
            if result != "agrees":
                wrong.add(case.function)
        cells = [f"{found[name]:.1e}" if name in found else "" for name in ("value", "gradient")]
        table.add_row(case.function, case.title, *cells, printable(result))
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table, markup=False)
    if wrong:
        raise ConformanceError(f"{settings.adapter} differs from the formulas in {', '.join(sorted(wrong))}.")


def main() -> None:
    run_command(ConformanceSettings, run)


if __name__ == "__main__":
    main()
