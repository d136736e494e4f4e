"""Pretraining: the methods, the training loop, checkpoints and distributed engines.

Files in the order in which a run passes them: `run` (command), `command_line`, `config` (settings), `resolve` (derived
settings), `job` (prepares, trains, exports), `build` (method, encoder, engine), `loop`, `step`, `scoring`. The folders:
`methods` (losses; one paper is one file), `engines` (DDP, ZeRO, FSDP2), `checkpoints`, `optim`, `monitoring`.
`preflight` and `origins` print the plan of `--dry_run`; `run_folder` owns the layout of a run folder.

`tessera.pretrain` is both this package and the function `tessera.pretrain(method=..., data=...)`, so the package can be
called.
"""

import inspect
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    @property
    def __doc__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Text of `help(tessera.pretrain)`: the signature and the text of the function."""
        return f"pretrain{self.__signature__}\n\n{inspect.getdoc(self._function())}"

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Pretrain an encoder; see `tessera.interface.pretrain`."""
        return self._function()(*arguments, **settings)

    @staticmethod
    def _function() -> Any:
        import tessera

        return tessera.imported("tessera.interface").pretrain


sys.modules[__name__].__class__ = _CallablePackage
