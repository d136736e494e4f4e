"""The methods, the training loop and all that a run needs.

`tessera.pretrain` names this package and also the function `tessera.pretrain(method=..., data=...)`, so the package can
be called.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Pretrain an encoder; see `tessera.interface.pretrain`."""
        from tessera.interface import pretrain

        return pretrain(*arguments, **settings)


sys.modules[__name__].__class__ = _CallablePackage
