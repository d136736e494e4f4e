"""The interface of all methods."""

from typing import Any

from torch import Tensor, nn

from data.batch import Batch
from encoders.base import Encoder


class Method(nn.Module):
    """One module that holds everything a method trains or averages, wrapped whole by the engine."""

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss () float32 of this process's images, and metrics () that cost no wait for the device."""
        raise NotImplementedError

    def after_step(self, step: int) -> None:
        """Called on every process after the optimizer moved; not called when the step was skipped."""

    def trained_encoder(self) -> Encoder:
        """The encoder to export and to evaluate."""
        raise NotImplementedError

    def trained_parts(self) -> list[nn.Module]:
        """The modules that the optimizer moves, each once: the units of clipping by module."""
        raise NotImplementedError

    def frozen(self) -> dict[str, int]:
        """Prefixes of parameter names, and for how many steps they keep learning rate 0."""
        return {}

    def collapse_bound(self) -> float | None:
        """Entropy of a teacher that says nothing, in nats; None for methods without one."""
        return None

    def health(self) -> dict[str, Any]:
        """Numbers about the last forward that are too dear for every step. Called on all processes together, on
        which it is the same."""
        return {}
