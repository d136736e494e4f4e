"""Pretraining: the methods, the training loop, checkpoints and distributed engines.

`tessera.pretrain` is both this package and the function `tessera.pretrain(method=..., data=...)`, so the package can be
called.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Pretrain an encoder; see `tessera.interface.pretrain`."""
        import tessera

        return tessera.imported("tessera.interface").pretrain(*arguments, **settings)


sys.modules[__name__].__class__ = _CallablePackage
