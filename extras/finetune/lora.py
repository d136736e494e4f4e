"""LoRA (2106.09685): low-rank updates of linear layers, which are trained in place of the layers' own weights.

A layer computes W x + b + (alpha / r) * up (down x), with `down` (r, D_in) and `up` (D_out, r) of rank r.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tessera.encoders.base import Encoder
from tessera.encoders.errors import EncoderError

DOWN, UP = "lora_down", "lora_up"
"""Names of the two parameters in a linear layer that has a low-rank update."""
ATTENTION = ("q", "kv", "qkv", "proj")
"""Names of the linear layers of attention in the encoders of this project and in most models of timm."""


def add_lora(encoder: Encoder, rank: int, alpha: float, layers: Sequence[str] | None = None) -> None:
    """Freeze all weights of an encoder, and add a low-rank update to linear layers of its blocks.

    The updates are 0 at first, so that the encoder computes the same features as before. Files of the encoder hold
    weights with the updates added.

    Args:
        encoder: encoder, which is changed in place.
        rank: rank r of the updates.
        alpha: factor of the updates, which is divided by `rank`.
        layers: last parts of the names of the layers, such as "qkv" for `blocks.0.attn.qkv`; None for `ATTENTION`.

    Raises:
        EncoderError: no block has a linear layer of one of the given names, or of any of `ATTENTION`.
    """
    linear = [
        (name.rpartition(".")[2], module)
        for block in encoder.blocks
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    ]
    known = sorted({name for name, _ in linear})
    chosen = {*ATTENTION} & {*known} if layers is None else {*layers}
    if unknown := sorted(chosen - {*known}):
        raise EncoderError(f"No block has a linear layer named '{unknown[0]}'. The names are: {', '.join(known)}.")
    if not chosen:
        raise EncoderError(f"No block has a linear layer of attention. The names are: {', '.join(known) or 'none'}.")
    encoder.requires_grad_(False)
    for name, layer in linear:
        if name in chosen:
            _add(layer, rank, alpha / rank)
    encoder.saved_state = partial(merged_state, encoder)


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a module, with each low-rank update added to the weight of its layer, in float32."""
    state = module.state_dict()
    for name in [name for name in state if name.endswith(f".{UP}")]:
        layer = module.get_submodule(name.removesuffix(f".{UP}"))
        prefix = name.removesuffix(UP)
        down, up = state.pop(prefix + DOWN).float(), state.pop(name).float()
        state[prefix + "weight"] = state[prefix + "weight"] + layer.lora_scale * up @ down
    return state


def _add(layer: nn.Linear, rank: int, scale: float) -> None:
    down = torch.empty(rank, layer.in_features, device=layer.weight.device)
    if not down.is_meta:
        nn.init.kaiming_uniform_(down, a=math.sqrt(5))  # as the official code does
    layer.register_parameter(DOWN, nn.Parameter(down))
    layer.register_parameter(UP, nn.Parameter(torch.zeros(layer.out_features, rank, device=down.device)))
    layer.lora_scale = scale
    layer.register_forward_hook(_update)


def _update(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Forward hook: return the output of a linear layer plus its low-rank update."""
    low = nn.functional.linear(inputs[0], layer.lora_down)  # pyright: ignore[reportArgumentType]
    return output + layer.lora_scale * nn.functional.linear(low, layer.lora_up)  # pyright: ignore
