"""Training methods by name (`--method`)."""

from tessera.pretrain.methods.dino import DINO
from tessera.pretrain.methods.dinov2 import DINOv2
from tessera.pretrain.methods.dinov3 import DINOv3
from tessera.pretrain.methods.lejepa import LeJEPA
from tessera.pretrain.methods.mae import MAE
from tessera.pretrain.methods.method import Method
from tessera.runtime.plugins import Registry

METHODS: Registry[type[Method]] = Registry(
    "method",
    {
        "dino": DINO,
        "dinov2": DINOv2,
        "dinov3": DINOv3,
        "lejepa": LeJEPA,
        "mae": MAE,
    },
    group="tessera.methods",
    expected="a subclass of tessera.pretrain.methods.method.Method",
    valid=lambda value: isinstance(value, type) and issubclass(value, Method),
)
"""Classes of methods by name, with those of extras and of other packages (docs/extending.md)."""


def pretraining_methods() -> tuple[str, ...]:
    """Return the names of the methods that need no labels."""
    return tuple(name for name, method in METHODS.working().items() if not method.supervised)
