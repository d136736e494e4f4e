"""Parameters of an encoder that get no gradient from the features that a method uses.

They are found by a backward pass on the meta device, on which no value is computed. A method freezes them, because DDP
fails if a trainable parameter gets no gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tessera.encoders.base import Encoder, encode
from tessera.encoders.images import Mask


def unused_parameters(
    encoder: Encoder,
    sides: Sequence[int],
    *,
    pooled: bool = True,
    tokens: bool = False,
    masked: bool = False,
    drop: bool = False,
) -> set[str]:
    """Return the names of the trainable parameters that get no gradient.

    Args:
        encoder: encoder on any device. It does not change.
        sides: side in pixels of the crops of each view. Several views are encoded together, as `encode` does.
        pooled: True if the method uses pooled features.
        tokens: True if the method uses the features of tokens.
        masked: True if tokens of the first view are hidden.
        drop: True if hidden tokens are dropped.
    """
    trained = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
    leaves = {name: torch.empty_like(p, device="meta", requires_grad=True) for name, p in trained.items()}
    others = [*encoder.named_parameters(), *encoder.named_buffers()]
    state = {name: torch.empty_like(t, device="meta") for name, t in others if name not in trained} | leaves
    views = [torch.empty(1, encoder.channels, side, side, device="meta") for side in sides]
    training = encoder.training
    # An export builds encoders on the meta device, on which the grids of images could not be read.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        mask = _first_token_hidden(encoder, sides[0]) if masked else None
        try:
            features = torch.func.functional_call(
                _Views(encoder.train()), {f"encoder.{name}": t for name, t in state.items()}, (views, mask, drop)
            )
        finally:
            encoder.train(training)
    used = [one for one, is_used in zip(features, (pooled, tokens), strict=True) if is_used]
    total = torch.stack([one.sum() for one in used]).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {name for name, gradient in zip(leaves, gradients, strict=True) if gradient is None}


def freeze_unused(encoder: Encoder, sides: Sequence[int], **uses: bool) -> None:
    """Freeze the parameters of `unused_parameters`, which has the same arguments."""
    for name in unused_parameters(encoder, sides, **uses):
        encoder.get_parameter(name).requires_grad_(False)


class _Views(nn.Module):
    """`encode` as a module, so that `functional_call` can replace the encoder's parameters."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, views: Sequence[Tensor], mask: Mask | None, drop: bool) -> tuple[Tensor, Tensor]:
        if len(views) == 1:
            features = self.encoder(views[0], mask, drop=drop)
            return features.pooled, features.tokens
        return encode(self.encoder, views, mask)


def _first_token_hidden(encoder: Encoder, side: int) -> Mask:
    rows, columns = encoder.grid(side, side)
    hidden = torch.arange(rows * columns) == 0
    return Mask.from_hidden(hidden, torch.tensor([[rows, columns]])).to("meta")
