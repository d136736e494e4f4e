"""Print the cost of encoder variants: parameters, tokens, multiply-accumulates and activation memory.

    tessera summary [VARIANT ...] [--image_size 224] [--set depth=4 ...]

The table shows the cost of one image. The encoder is on torch's meta device, which allocates no memory. The number
of multiply-accumulates is half the number of floating-point operations that torch counts in matrix products,
convolutions and attention.
"""

import argparse
import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from tessera import encoders
from tessera.encoders.base import Encoder
from tessera.encoders.errors import EncoderError
from tessera.runtime import stdio


@dataclass
class Summary:
    """Cost of an encoder for one image."""

    parameters: int
    """Number of parameters."""
    tokens: tuple[int, int]
    """Number of rows and number of columns in the grid of output tokens."""
    macs: int
    """Multiply-accumulates of the forward pass."""
    activation_bytes: int
    """Size in bytes of all tensors that the forward pass of float32 training saves for the backward pass."""


def summarize(encoder: Encoder, height: int, width: int) -> Summary:
    """Return the cost of encoding one image of `height` x `width` pixels. The encoder must be on the meta device.

    Raises:
        EncoderError: the encoder does not accept images of this size.
    """
    kept: dict[int, int] = {}
    alive: list[torch.UntypedStorage] = []  # because a new storage may reuse the address of a freed one

    def keep(tensor: Tensor) -> None:  # a node that holds its own output would never be freed
        alive.append(tensor.untyped_storage())
        kept[alive[-1]._cdata] = alive[-1].nbytes()

    weights = {t.untyped_storage()._cdata for t in [*encoder.parameters(), *encoder.buffers()]}
    images = torch.empty(1, encoder.channels, height, width, device="meta")
    with (
        FlopCounterMode(display=False) as counter,
        FusedAttention() as attention,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda none: none),
    ):
        encoder(images)
    return Summary(
        parameters=sum(p.numel() for p in encoder.parameters()),
        tokens=encoder.grid(height, width),
        macs=(counter.get_total_flops() + attention.operations) // 2,
        activation_bytes=sum(size for address, size in kept.items() if address not in weights),
    )


class FusedAttention(TorchFunctionMode):
    """Torch function mode that counts the operations of attention, and replaces attention by a placeholder.

    On the meta device, torch's attention uses no fused kernel, so the saved tensors differ from those on a GPU. The
    placeholder saves the tensors that a fused kernel saves for the backward pass.
    """

    operations = 0
    """Number of operations of attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = args
        self.operations += sdpa_flop_count(q.shape, k.shape, v.shape)
        return _Kernel.apply(q, k, v, kwargs.get("attn_mask"))


class _Kernel(torch.autograd.Function):
    """Placeholder of a fused attention kernel. It allocates and saves the kernel's tensors, but computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        *batch, heads, n, _ = q.shape
        out = q.new_empty(*batch, n, heads, v.shape[-1]).transpose(-3, -2)  # same memory layout as in fused kernels
        normalizers = q.new_empty(q.shape[:-1])
        ctx.save_for_backward(*(t for t in (q, k, v, bias, out, normalizers) if t is not None))
        return out


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tessera summary", description="Print the cost of encoders.")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="encoder variants (default: all)")
    parser.add_argument("--image_size", type=int, help="side in pixels (default: image_size of the variant)")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="changed settings of the encoder")
    options = parser.parse_args(argv)
    try:
        settings = dict(setting(text) for text in options.set)
        rows = [row(variant, options.image_size, settings) for variant in options.variants or encoders.VARIANTS.names()]
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    headings = ("variant", "pixels", "parameters", "tokens", "GMAC", "memory")
    print("Cost of one image. Memory: tensors that float32 training keeps for the backward pass.\n")
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for cells in (headings, ["-" * width for width in widths], *rows):  # rows of a Markdown table
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |")


def setting(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE and return the pair (name, value). A value that is not valid JSON is returned as a string.

    Raises:
        EncoderError: `text` contains no "=".
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise EncoderError(f"--set takes NAME=VALUE, not {text!r}.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def row(variant: str, image_size: int | None, settings: dict[str, Any]) -> list[str]:
    """Return the row of the printed table for one variant."""
    with torch.device("meta"):
        encoder = encoders.build(variant, **settings)
    size = encoder.settings["image_size"] if image_size is None else image_size
    height, width = (size, size) if isinstance(size, int) else size
    s = summarize(encoder, height, width)
    return [
        variant,
        f"{height} x {width}",
        f"{s.parameters:,}",
        f"{s.tokens[0]} x {s.tokens[1]}",
        f"{s.macs / 1e9:,.3f}",
        f"{s.activation_bytes / 1e6:,.0f} MB",
    ]


if __name__ == "__main__":
    stdio.protect()
    main()
