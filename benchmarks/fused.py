"""Count what `--compile true` saves in a training step: blocks and colours as torch's compiler fuses them.

The compiler schedules them for the CPU, because it needs a GPU to schedule for a GPU. Its decisions for a GPU are
similar, but not equal. Attention is not counted on either side, because the blocks of a training step do not compile
it.
"""

import contextlib
import copy
import itertools
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from fake_device import DEVICE, GPU, Count, Counter, backward, counting, fake_copy
from torch import Tensor, nn
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch.utils._pytree import tree_map_only

from tessera.data.augment import compiled
from tessera.encoders.blocks import Block
from tessera.encoders.segments import Segments
from tessera.pretrain.methods.base import Method

TOKENS = 64
"""Number of tokens of an image for which a block is compiled."""
FEW, MORE = 64, 128
"""Numbers of images for which a block is compiled. The bytes of larger batches follow from these two."""
SOME_CROPS = 16
"""Number of crops for which colour changes are compiled. The bytes of more crops are in proportion."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
"""Matrix products. They stay kernels of their own."""


class Call(NamedTuple):
    """A forward pass of a block, and its backward pass if `trained`."""

    shape: tuple[int, ...]
    """Shape of the tokens, (B, N, D) or packed (T, D)."""
    images: int
    dtype: torch.dtype
    scaled: bool
    """True if drop path has factors."""
    trained: bool


class ColorCall(NamedTuple):
    """A call of `data.augment.fused`."""

    function: Callable[..., Tensor]
    x: Tensor
    """Fake tensor (N, C, H, W)."""
    rest: tuple[Any, ...]
    """Functions, and their arguments. The last axis of each tensor is N."""


Calls = Tally[tuple[nn.Module, Call]]
"""Number of calls of each block."""


class _Attention(torch.autograd.Function):
    """Attention that costs nothing: (..., N, 3, heads, d) -> (..., heads, N, d)."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        ctx.shape = qkv.shape
        return qkv.new_empty(*qkv.shape[:-3], *qkv.shape[-2:]).transpose(-3, -2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0].new_empty(ctx.shape)


@torch.compiler.disable()
def _free_attention(qkv: Tensor, **_: Any) -> Tensor:
    return _Attention.apply(qkv)  # pyright: ignore[reportReturnType]


def record_calls(method: Method) -> Calls:
    """Return a tally that counts the calls of all blocks of ViT and RoPE-ViT in the steps that follow."""
    calls: Calls = Tally()
    alike: dict[Any, nn.Module] = {}  # one block for all blocks with the same shapes

    def recorded(forward: Callable[..., Tensor], block: nn.Module) -> Callable[..., Tensor]:
        def call(x: Tensor, segments: Segments | None = None, scales: Any = None, *rest: Any) -> Tensor:
            images = len(x) if segments is None else len(segments.lengths)
            calls[block, Call(tuple(x.shape), images, x.dtype, scales is not None, torch.is_grad_enabled())] += 1
            return forward(x, segments, scales, *rest)

        return call

    for block in method.modules():
        if isinstance(block, Block):
            shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
            first = alike.setdefault((shapes, block.training, block.drop_path.rate > 0), block)
            block.forward = recorded(block.forward, first)
    return calls


def saving(calls: Calls, gpu: GPU) -> tuple[Count, Count]:
    """Return the counts of all calls, without attention: one kernel per operation, and as the compiler fuses them."""
    separate, fused = Count(), Count()
    with mock.patch("tessera.encoders.blocks.self_attention", _free_attention):
        for (block, call), times in calls.items():
            eager = _count_operations(block, call, gpu)
            products = [count for operation, count in eager.items() if operation in PRODUCTS]
            kernels = [gpu.kernel(size) for size in _fused_bytes(block, call)]
            for _ in range(times):
                separate.add(*eager.values())
                fused.add(*products, *kernels)
    return separate, fused


def _count_operations(block: nn.Module, call: Call, gpu: GPU) -> dict[str, Count]:
    """Return the counts of a call of a block by operation."""
    with counting(gpu) as counter, torch.set_grad_enabled(call.trained):
        own = _on_cpu(block)
        fake_copy(own)
        x, arguments = _arguments(call, call.shape, call.images, DEVICE)
        counter.rows.clear()
        with torch.autocast("cuda", torch.bfloat16):
            out = own(x, *arguments)
        if call.trained:
            backward(out)
            del counter.rows["", "ones_like"]  # the gradient of `out`
    return {operation: count for (_, operation), count in counter.rows.items()}


def _fused_bytes(block: nn.Module, call: Call) -> list[int]:
    """Return the bytes of the kernels of a compiled block, without matrix products."""
    few, more = (_compiled_bytes(block, call, images) for images in (FEW, MORE))
    tokens = call.shape[0] if len(call.shape) == 2 else call.shape[0] * call.shape[1]
    share = (tokens - TOKENS * FEW) / (TOKENS * (MORE - FEW))
    return [round(first + (second - first) * share) for first, second in zip(few, more, strict=True)]


def _compiled_bytes(block: nn.Module, call: Call, images: int) -> list[int]:
    shape = (TOKENS * images, call.shape[-1]) if len(call.shape) == 2 else (images, TOKENS, call.shape[-1])
    x, arguments = _arguments(call, shape, images, torch.device("cpu"))
    with recorded_bytes() as sizes, torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(call.trained):
        out = torch.compile(_on_cpu(block), options={"fx_graph_cache": False})(x, *arguments)
        if call.trained:
            out.backward(torch.ones_like(out))
    return sizes


@contextlib.contextmanager
def recorded_bytes(*, loops: bool = False) -> Iterator[list[int]]:
    """Record the bytes of the kernels that torch's compiler schedules inside the context, without matrix products.

    If `loops` is true, each loop of a kernel counts as a kernel.
    """
    sizes: list[int] = []
    codegen = GraphLowering.codegen

    def recorded(graph: GraphLowering) -> Any:
        result = codegen(graph)
        for node in graph.scheduler.nodes:
            if not isinstance(node, (ExternKernelSchedulerNode, NopKernelSchedulerNode)):
                split = loops and isinstance(node, OuterLoopFusedSchedulerNode)
                parts = node.get_outer_nodes() if split else [node]
                sizes.extend(part.get_read_write_buffers_sizes() for part in parts)
        return result

    torch._dynamo.reset()
    with (
        mock.patch.object(GraphLowering, "codegen", recorded),
        torch._functorch.config.patch(enable_autograd_cache=False),  # pyright: ignore
    ):
        yield sizes


@contextlib.contextmanager
def recorded_colors() -> Iterator[list[ColorCall]]:
    """Record the calls of functions that `data.augment` compiles inside the context, instead of compiling them."""
    calls: list[ColorCall] = []

    def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def recorded(x: Tensor, *rest: Any) -> Tensor:
            calls.append(ColorCall(function, x, rest))
            return torch.empty(x.shape, device=x.device)

        return recorded

    with mock.patch("tessera.data.augment.compiled", compiled):
        yield calls


def count_colors(counter: Counter, calls: list[ColorCall], part: str) -> None:
    """Count compiled functions of crops as a part of the step, by the kernels that the compiler makes of them.

    Their arithmetic is not counted.
    """
    sizes: dict[Any, list[int]] = {}
    for call in calls:
        known = (call.x.shape[1:], call.x.dtype, call.rest[0])
        sizes[known] = sizes.get(known) or _bytes_per_crop(call)
        for each in sizes[known]:
            with counter.named(part):
                counter.record(call.function.__name__, counter.gpu.kernel(len(call.x) * each))


def _bytes_per_crop(call: ColorCall) -> list[int]:
    """Compile a function for a few crops. Return the bytes of each loop per crop.

    A loop counts as a kernel, because it reads the pixels of a crop from memory again, where one over the tokens of an
    image finds them in the cache.
    """
    x = torch.zeros(SOME_CROPS, *call.x.shape[1:], dtype=call.x.dtype)
    rest = tree_map_only(Tensor, lambda t: torch.zeros(*t.shape[:-1], SOME_CROPS, dtype=t.dtype), call.rest)
    torch._dynamo.reset()
    with recorded_bytes(loops=True) as sizes:
        compiled(call.function)(x, *rest)
    return [size // SOME_CROPS for size in sizes]


def _on_cpu(block: nn.Module) -> nn.Module:
    """Return a copy of a block with real weights on the CPU."""
    real: dict[int, Any] = {id(p): nn.Parameter(torch.randn(p.shape, device="cpu") / 50) for p in block.parameters()}
    made = copy.deepcopy(block, real)
    made.__dict__.pop("forward", None)  # the one that records calls
    return made


def _arguments(call: Call, shape: tuple[int, ...], images: int, device: torch.device) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the tokens, and the other arguments of a block."""
    x = torch.zeros(shape, dtype=call.dtype, device=device, requires_grad=call.trained)
    segments = None
    if len(shape) == 2:
        ends = [shape[0] * n // images for n in range(images + 1)]
        segments = Segments(torch.tensor([b - a for a, b in itertools.pairwise(ends)]), device)
        segments.image_ids  # noqa: B018  # computed once for all blocks
    scales = torch.ones(2, images, device=device) if call.scaled else None
    return x, (segments, scales)
