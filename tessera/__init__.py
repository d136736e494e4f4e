"""Tessera from Python: pretrain an encoder, load it, and encode images.

    import tessera

    run = tessera.pretrain(method="dino", data="shards/train", encoder="vit_small", steps=1000)
    features = tessera.embed(run.encoder, "shards/val").features  # (N, D)

Keyword arguments have the names of the commands' settings. Pass a section of settings as a dictionary: the argument
`optim={"lr": 1e-3}` corresponds to the flag `--optim.lr 1e-3`.

- `pretrain(method, data, **settings)` trains an encoder and returns a `Run`.
- `load(path)` returns the encoder of a run, a file or timm. `embed(encoder, data)` returns the features of images.
- `knn(checkpoint, train, val)` and `linear_probe(checkpoint, train, val)` return the accuracy of an encoder.
- `transform(encoder)` returns its preprocessing of Pillow images.
- `training_batches(method, data, **settings)` and `OrderedShards(shards, batch_size=...)` feed other training loops.

`help(tessera.pretrain)` and so on describe the arguments. `tessera COMMAND --help all` lists the settings.
"""

import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera import methods
    from tessera.data.ordered_shards import OrderedShards
    from tessera.interface import Run, embed, knn, linear_probe, load, pretrain, training_batches, transform

__all__ = [
    "OrderedShards",
    "Run",
    "embed",
    "knn",
    "linear_probe",
    "load",
    "methods",
    "pretrain",
    "training_batches",
    "transform",
]


def __getattr__(name: str) -> Any:
    """Import and return a function of this package. `import tessera` is fast, because it does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module 'tessera' has no attribute '{name}'")
    if name in ("methods", "pretrain"):  # `pretrain` is a package that can be called; see pretrain/__init__.py
        return imported(f"tessera.{name}")
    return getattr(imported("tessera.data.ordered_shards" if name == "OrderedShards" else "tessera.interface"), name)


def imported(module: str) -> ModuleType:
    """Import and return a module. Other packages that it imports add no warning filters to those of the program."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, in notebooks without ipywidgets
        try:
            return import_module(module)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "Interrupted while PyTorch was imported, which leaves it in parts. Restart the kernel or Python."
            ) from None


def __dir__() -> list[str]:
    return __all__
