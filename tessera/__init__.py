"""Tessera from Python: pretrain an encoder, load it, and encode images.

    import tessera

    run = tessera.pretrain(method="dino", data="shards/train", encoder="vit_small", steps=1000)
    features = tessera.embed(run.encoder, "shards/val").features  # (N, D)

The functions take the settings of the commands by the same names, and a section of settings is a dictionary:
`optim={"lr": 1e-3}` is the flag `--optim.lr 1e-3`.

Tessera's packages have short names, such as `data`. After `import tessera`, these names mean Tessera's packages, also
in a folder that has a `data.py` of its own.
"""

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.interface import Run, embed, knn, linear_probe, load, pretrain, training_batches, transform

__all__ = ["Run", "embed", "knn", "linear_probe", "load", "pretrain", "training_batches", "transform"]

ROOT = Path(__file__).parent.parent
PACKAGES = ("runtime", "encoders", "data", "evaluation", "pretrain", "launch")
"""Names of Tessera's other packages."""


class _Finder(MetaPathFinder):
    """Finds Tessera's packages beside this package, whatever else `sys.path` holds under their names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del target
        if path is None and fullname in PACKAGES:
            return importlib.machinery.PathFinder.find_spec(fullname, [str(ROOT)])
        return None


def _check_names() -> None:
    """Check that no other module has taken the name of one of Tessera's packages.

    Raises:
        ImportError: a module of that name was imported before.
    """
    for name in PACKAGES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and not Path(file).resolve().is_relative_to(ROOT.resolve()):
            raise ImportError(
                f"{file} has the name of Tessera's package `{name}` and was imported first. Rename it, or import "
                "tessera before it."
            )


_check_names()
sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> Any:
    """Import the functions when they are first used, so that `tessera --help` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'tessera' has no attribute '{name}'")
    from tessera import interface

    return getattr(interface, name)


def __dir__() -> list[str]:
    return __all__
