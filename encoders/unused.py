"""Parameters of an encoder that get no gradient from the features that a method uses.

A method freezes these parameters, because DDP fails if a trainable parameter gets no gradient. A forward pass on the
meta device, which computes no values, finds the parameters.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tessera.encoders.base import Encoder, encode
from tessera.encoders.images import Mask
from tessera.encoders.randomness import random_keys

ON_META = re.compile(r"\b(register_)?meta\b")
"""Pattern of torch's error messages for operations that need the data of a meta tensor. torch has no exception class
for such errors."""
IMAGES = 2
"""Number of images of the forward pass. Batch norm cannot normalise one image."""


def unused_parameters(
    encoder: Encoder,
    sides: Sequence[int],
    *,
    pooled: bool = True,
    tokens: bool = False,
    masked: bool = False,
    drop: bool = False,
    packed: bool = False,
) -> set[str]:
    """Return the names of the parameters, frozen ones included, that do not affect the features that a method uses.

    The encoder and all random states stay unchanged. The forward pass runs on the meta device. If the encoder reads the
    values of tensors, it cannot run there, and the forward pass runs on the device of the encoder's parameters.

    Args:
        encoder: encoder on any device.
        sides: side of the images of each view, in pixels.
        pooled: True if the method uses pooled features.
        tokens: True if the method uses the features of tokens.
        masked: True if tokens of the first view are hidden.
        drop: True if hidden tokens are dropped.
        packed: True if the method calls `encode`, which packs the views for encoders that take packed images.

    Raises:
        EncoderError: the encoder does not support such images or such a mask.
    """
    use = _Use(encoder, pooled, tokens, drop, packed)
    modes = {module: module.training for module in encoder.modules()}
    encoder.train()
    # An export sets the meta device as the default device, but the encoder must read the values of image grids.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), random_keys(0, 0, torch.arange(IMAGES)):
        views = [torch.zeros(IMAGES, encoder.channels, side, side) for side in sides]
        mask = _half_hidden(encoder, sides[0]) if masked else None
        try:
            return _not_reached(use, views, mask, torch.device("meta"))
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if not ON_META.search(str(error)):
                raise
            return _not_reached(use, views, mask, next(encoder.parameters()).device)
        finally:
            for module, mode in modes.items():
                module.training = mode


def freeze_unused(encoder: Encoder, sides: Sequence[int], **uses: bool) -> None:
    """Freeze the parameters that `unused_parameters` returns for the same arguments."""
    for name in unused_parameters(encoder, sides, **uses):
        encoder.get_parameter(name).requires_grad_(False)


class _Use(nn.Module):
    """Module that runs an encoder and returns only the features that a method uses: (views, mask) -> features."""

    def __init__(self, encoder: Encoder, pooled: bool, tokens: bool, drop: bool, packed: bool) -> None:
        super().__init__()
        self.encoder, self.pooled, self.tokens, self.drop, self.packed = encoder, pooled, tokens, drop, packed

    def forward(self, views: Sequence[Tensor], mask: Mask | None) -> list[Tensor]:
        if self.packed:
            pooled, tokens = encode(self.encoder, views, mask)
        else:
            pooled, tokens, _ = self.encoder(*views, mask, drop=self.drop)
        return [pooled] * self.pooled + [tokens] * self.tokens


def _not_reached(use: _Use, views: Sequence[Tensor], mask: Mask | None, device: torch.device) -> set[str]:
    """Return the names of the encoder's parameters that the used features do not depend on.

    All parameters require a gradient here, because a frozen parameter, such as those of a teacher, may be used. The
    function walks autograd's graph, because a backward pass would recompute checkpointed blocks with the encoder's
    own parameters, not with those of `functional_call`.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in [*use.named_parameters(), *use.named_buffers()]:
        copied = torch.empty_like(tensor, device=device) if device.type == "meta" else tensor.detach().clone()
        state[name] = copied.requires_grad_(isinstance(tensor, nn.Parameter))
    parameters = [name for name, tensor in state.items() if tensor.requires_grad]
    with torch.enable_grad():
        outputs = torch.func.functional_call(
            use, state, ([view.to(device) for view in views], None if mask is None else mask.to(device))
        )
    seen, nodes = set(), [output.grad_fn for output in outputs]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    reached = {id(node.variable) for node in seen if hasattr(node, "variable")}
    return {name.removeprefix("encoder.") for name in parameters if id(state[name]) not in reached}


def _half_hidden(encoder: Encoder, side: int) -> Mask:
    """Return a mask that hides every second token of images with this side."""
    rows, columns = encoder.grid(side, side)
    hidden = torch.arange(rows * columns) % 2 == 0
    return Mask.from_hidden(hidden.repeat(IMAGES), torch.tensor([[rows, columns]] * IMAGES))
