"""Run code for a GPU without a GPU, and count the operations that the GPU would run.

Tensors on the device are fake: they have a shape, a data type and a device, but no values. Tensors on the CPU are real,
so all decisions of the CPU, such as which crops are blurred, are those of a real run. For each operation on the device,
the bytes that it reads and writes and its FLOP are counted.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from tessera.extras.forecast.forecast import GPUS as RATES
from tessera.extras.forecast.forecast import bare_run
from tessera.pretrain.config import RunConfig
from tessera.pretrain.engines.ddp import DDP
from tessera.pretrain.methods.method import Method
from tessera.pretrain.training_run import TrainingRun

DEVICE = torch.device("cuda")
FREE = {
    "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_pinned", "lift_fresh",
    "split_with_sizes", "split", "unbind", "_unsafe_view", "_reshape_alias", "alias", "set_", "chunk", "is_same_size",
}  # fmt: skip
"""Operations that launch no kernel. Operations that return views need not be listed."""
FILLS = {"new_full", "new_zeros", "new_ones", "zeros_like", "ones_like", "full_like"}
"""Operations that use only the shape of their input tensor, and do not read its values."""
LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GPU:
    """Rates that kernels reach on a GPU. They are lower than those of the data sheet, which no kernel reaches."""

    name: str
    memory: float
    """Memory bandwidth in bytes per second."""
    low: float
    """Rate of matrix products in bfloat16, in FLOP per second."""
    full: float
    """Rate of matrix products and other arithmetic in float32, in FLOP per second."""
    copy: float = 50e9
    """Rate of copies from pinned host memory, in bytes per second."""
    launch: float = 2.5e-6
    """Shortest time of a kernel, in seconds."""

    def kernel(self, size: int, flop: int = 0, *, low: bool = False) -> "Count":
        """Return the count of a kernel that moves `size` bytes and computes `flop` FLOP. `low` is True for bfloat16."""
        memory, arithmetic = size / self.memory, flop / (self.low if low else self.full)
        return Count(1, size, flop, memory, arithmetic, max(memory, arithmetic, self.launch))


MEMORY = {"h200": 0.9 * 4.3e12, "h100": 0.9 * 3.0e12, "a100": 0.9 * 1.9e12}
GPUS = {name: GPU(one.name, MEMORY[name], one.low, one.full) for name, one in RATES.items()}


@dataclass
class Count:
    """Kernels, bytes and FLOP of one part of a step, and the least time that they take."""

    kernels: int = 0
    bytes: int = 0
    flop: int = 0
    memory_seconds: float = 0.0
    """Time in which the GPU can move the bytes of all kernels."""
    arithmetic_seconds: float = 0.0
    """Time in which the GPU can compute the FLOP of all kernels."""
    seconds: float = 0.0
    """Sum over the kernels of the longest of three times of a kernel: for its bytes, its FLOP, and its launch."""
    host_reads: int = 0
    """Number of times that the CPU waits for a value from the device."""

    def add(self, *others: "Count") -> None:
        for other in others:
            for name, value in vars(other).items():
                setattr(self, name, getattr(self, name) + value)


class Stream:
    """A queue of work of the device, in place of `torch.cuda.Stream`."""

    def __init__(self, *_: Any) -> None:
        self.waited: set[Stream] = set()
        """Streams for which this stream has waited."""
        self.seconds = 0.0

    def wait_stream(self, other: "Stream") -> None:
        self.waited.add(other)


class Event:
    """A point in a stream, in place of `torch.cuda.Event`. It can be recorded, but has no time."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self) -> None:
        pass


@dataclass
class Counter:
    """Counts per part and per operation. `part` names the part that runs now."""

    gpu: GPU
    part: str = ""
    stream: Stream = field(default_factory=Stream)
    """Stream on which operations are queued now."""
    rows: dict[tuple[str, str], Count] = field(default_factory=dict)
    saved: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Storages that the forward pass keeps for the backward pass, by address. Each value is a text with part, shape and
    data type, and the size in bytes."""

    def record(self, operation: str, count: Count) -> None:
        self.rows.setdefault((self.part, operation), Count()).add(count)
        self.stream.seconds += count.seconds

    def clear(self) -> None:
        """Forget all operations so far."""
        self.rows.clear()
        self.stream.seconds = 0.0

    def seconds(self) -> float:
        """Return the least time of all operations. Streams run beside each other, so the longest one counts."""
        return max(stream.seconds for stream in (self.stream, *self.stream.waited))

    def current_stream(self, _: Any = None) -> Stream:
        return self.stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Queue the operations inside the context on `stream`, as `torch.cuda.stream` does."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def parts(self) -> dict[str, Count]:
        """Return the counts of each part, in the order in which the parts began."""
        parts: dict[str, Count] = {}
        for (part, _), count in self.rows.items():
            parts.setdefault(part, Count()).add(count)
        return parts

    def total(self) -> Count:
        total = Count()
        total.add(*self.rows.values())
        return total

    @contextlib.contextmanager
    def named(self, part: str) -> Iterator[None]:
        """Count the operations inside the context as those of `part`."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before


def _on_device(tensors: list[Tensor]) -> bool:
    return any(tensor.device.type == DEVICE.type for tensor in tensors)


def _bytes(tensor: Tensor) -> int:
    """Return the number of bytes that a kernel reads from a tensor. An expanded dimension is read once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


class _CountOperations(TorchDispatchMode):
    """Counts operations on the device. Operations without fake tensors run on the real CPU and are not counted."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = {name: value for name, value in kwargs.items() if name != "out"}
        inputs = [t for t in tree_flatten((args, read))[0] if isinstance(t, Tensor)]
        target = kwargs.get("device")
        if not any(isinstance(t, FakeTensor) for t in inputs) and torch.device(target or "cpu").type == "cpu":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        outputs = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        name = func._schema.name.split("::")[-1]
        views = bool(func._schema.returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        if views or name in FREE or func.namespace == "prim" or not _on_device([*inputs, *outputs]):
            return out
        if name == "_to_copy" and not _on_device(inputs):
            size = sum(map(_bytes, inputs))
            self.counter.record(name, Count(bytes=size, seconds=size / self.counter.gpu.copy))
            return out
        self.counter.record(name, self._count(func, args, kwargs, out, inputs, outputs))
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Tensor], outputs: list[Tensor]) -> Count:
        name = func._schema.name.split("::")[-1]
        moved = outputs if name in FILLS else [*inputs, *outputs]
        if name in ("index", "index_select"):  # reads as many values as it writes
            moved = [*outputs, *outputs, *inputs[1:]]
        elif name == "index_copy_":  # writes as many values as it reads
            moved = [*inputs[1:], inputs[-1]]
        elif name == "copy_":  # does not read what it overwrites
            moved = [*inputs[1:], *outputs]
        if not outputs:  # an in-place operation on lists of tensors also writes the first list
            moved += [t for t in tree_flatten(args[0])[0] if isinstance(t, Tensor)]
        size = sum(_bytes(t) for t in moved if t.device.type == DEVICE.type)
        flop = 0
        if func._overloadpacket in flop_registry:
            flop = int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
        low = any(t.dtype in LOW for t in inputs)
        if name.startswith("_foreach_"):
            lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
            if not _one_kernel(lists):
                return self._each([*lists, out or lists[0]])
        return self.counter.gpu.kernel(size, flop, low=low)

    def _each(self, lists: list[Any]) -> Count:
        """Return the count of one kernel for each tensor, which reads all lists but the last, and writes the last."""
        count = Count()
        for tensors in zip(*lists, strict=True):
            count.add(self.counter.gpu.kernel(sum(map(_bytes, tensors))))
        return count


def _one_kernel(lists: list[Any]) -> bool:
    """Return True if torch runs an operation on lists of tensors as one kernel, and not as one kernel for each tensor.

    The conditions are those of `can_use_fast_route` (ATen/native/ForeachUtils.h): all tensors have one device and data
    type and are dense, and the tensors at the same place of two lists have one shape and layout. A kernel then takes
    hundreds of tensors.
    """
    first = lists[0][0]
    for tensors in zip(*lists, strict=True):
        layouts = {(t.device, t.dtype, t.shape, t.stride()) for t in tensors}
        if len(layouts) > 1 or (first.device, first.dtype) != (tensors[0].device, tensors[0].dtype):
            return False
        if not is_non_overlapping_and_dense_or_false(tensors[0]):
            return False
    return True


class _Replace(TorchFunctionMode):
    """Replaces functions that do not work on fake tensors: attention, pinned memory, and reads by the CPU."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is Tensor.pin_memory:
            return first
        if not isinstance(first, Tensor) or first.device.type != DEVICE.type:
            return func(*args, **kwargs)
        if func in (Tensor.tolist, Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__):
            self.counter.record("read by the CPU", Count(host_reads=1))
            ones = torch.ones(first.shape, device="cpu", dtype=first.dtype)
            return ones.tolist() if func is Tensor.tolist else func(ones)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """Compute attention with the kernel of a GPU: flash attention, or memory-efficient for a mask or for float32."""
    scale = options.get("scale")
    if attn_mask is None and q.dtype in LOW:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, False, False, scale=scale)[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p, False, scale=scale
    )[0]


def fake_copy(module: nn.Module) -> None:
    """Replace the parameters and buffers of a module by fake tensors on the device. Shared tensors stay shared."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
            made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        return made[id(tensor)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fake(tensor)  # pyright: ignore[reportArgumentType]


@torch.no_grad()
# Activation checkpointing reads the id of the backward pass. Without an id, a block is recomputed for each of its
# saved tensors, and not once.
@mock.patch.object(torch._C, "_current_graph_task_id", mock.Mock(return_value=1))
def backward(loss: Tensor) -> None:
    """Add the gradients of `loss` to the parameters, as `loss.backward()` does.

    Torch's own engine cannot be used, because it asks the driver for the context of the device.
    """
    first: Any = loss.grad_fn
    if first is None:
        raise ValueError("The loss depends on no parameter.")
    waiting: dict[Any, int] = {first: 0}  # node of the graph -> number of gradients that it still waits for
    nodes: list[Any] = [first]
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is not None and node not in waiting:
                waiting[node] = 0
                nodes.append(node)
            if node is not None:
                waiting[node] += 1
    gradients: dict[Any, list[Tensor | None]] = {first: [torch.ones_like(loss)]}
    ready: list[Any] = [first]
    while ready:
        node = ready.pop()
        own = gradients.pop(node)
        if hasattr(node, "variable"):  # an end of the graph, which holds a parameter
            given = own[0]
            node.variable.grad = given if node.variable.grad is None or given is None else node.variable.grad + given
            continue
        compute = getattr(node, "apply", node)  # the node of a Python function has a method `apply`
        made = compute(*own) if any(g is not None for g in own) else [None] * len(node.next_functions)
        made = made if isinstance(made, (tuple, list)) else (made,)
        # a Python function returns the gradients of its tensors first, then None for its other arguments
        made = made[: len(node.next_functions)]
        for (after, place), gradient in zip(node.next_functions, made, strict=True):
            if after is None:
                continue
            into = gradients.setdefault(after, [None] * max(len(after._input_metadata), 1))
            if gradient is not None:
                before, wanted = into[place], after._input_metadata[place]
                if gradient.shape != wanted.shape:  # torch's engine also sums the gradient of a bias over rows
                    gradient = gradient.sum_to_size(wanted.shape)
                gradient = gradient.to(wanted.dtype)
                into[place] = gradient if before is None else before + gradient
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.append(after)


@contextlib.contextmanager
def counting(gpu: GPU) -> Iterator[Counter]:
    """Make `DEVICE` a fake device, and count all operations on it inside the context."""
    counter = Counter(gpu)

    def pack(tensor: Tensor) -> Tensor:
        if tensor.device.type == DEVICE.type and not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            kind = f"{counter.part} | {' x '.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"
            counter.saved[storage._cdata] = (kind, storage.nbytes())
        return tensor

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False))
        stack.enter_context(mock.patch("torch.cuda.Stream", Stream))
        stack.enter_context(mock.patch("torch.cuda.Event", Event))
        stack.enter_context(mock.patch("torch.cuda.stream", counter.on))
        stack.enter_context(mock.patch("torch.cuda.current_stream", counter.current_stream))
        stack.enter_context(mock.patch.object(FakeTensor, "record_stream", create=True))
        stack.enter_context(mock.patch("torch.cuda.get_rng_state", return_value=None))
        stack.enter_context(mock.patch("torch.cuda.set_rng_state"))
        stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", return_value=True))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", Tensor.tolist))  # reads all values at once
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        stack.enter_context(_CountOperations(counter))
        stack.enter_context(_Replace(counter))
        yield counter


@contextlib.contextmanager
def fake_run(
    config: RunConfig, accelerator: Accelerator, method: Method, gpu: GPU
) -> Iterator[tuple[Counter, TrainingRun]]:
    """Return a context with a run on a fake GPU, and the counter of its work. The weights of `method` are lost."""
    with (
        mock.patch.dict(PartialState._shared_state, device=DEVICE),
        mock.patch.dict(AcceleratorState._shared_state, device=DEVICE),
        counting(gpu) as counter,
    ):
        fake_copy(method)
        method.to = lambda *_, **__: method  # torch cannot move fake parameters, which are on the device already
        accelerator.backward = backward  # pyright: ignore[reportAttributeAccessIssue]
        run = bare_run(config, accelerator, method, DDP(accelerator, method, config.optim))
        counter.clear()
        yield counter, run
