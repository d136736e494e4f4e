"""Check the work on the streams of a fake GPU (`benchmarks/fake_device.py`).

It has no race and waits for no copy, and the CPU reads a copy only when it is done.
"""

from dataclasses import dataclass, field
from typing import Any, Self
from unittest import mock

from fake_device import DEVICE, FREE, Counter, Event, Stream
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


@dataclass
class Memory:
    """A storage of the device, and the streams that may use it without a race."""

    storage: Any
    """The storage, which is kept so that its address is not used again."""
    owner: Stream
    """Stream on which the storage was allocated. When it is freed, this stream may use the memory again."""
    writer: Stream
    written: int
    """Stream that wrote the storage last, and the number of this operation."""
    recorded: set[Stream] = field(default_factory=set)
    """Streams that the allocator waits for before it uses the memory again (`Tensor.record_stream`)."""
    used: set[Stream] = field(default_factory=set)


class StreamChecks(TorchDispatchMode):
    """Looks for races in the work that is queued inside this context, which lies inside that of a `Counter`."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter
        self.memory: dict[int, Memory] = {}
        self.operations: dict[Stream, int] = {}  # number of operations that were queued so far
        self.waited: dict[tuple[Stream, Stream], int] = {}  # (waiting, other): operations of the other one
        self.unpinned: list[str] = []
        """Copies from host memory that is not pinned, for which a process waits."""
        self.races: list[str] = []
        """Operations that use a value of another stream without waiting for it."""
        self.early: list[str] = []
        """Values that the CPU read before it waited for their copy from the device."""
        self.copied: dict[int, tuple[Any, Stream, int]] = {}
        """Storages in host memory to which the device copies, by address, with the stream of the copy, and the number
        of the copy among its operations."""
        self.done: dict[Stream, int] = {}  # number of operations of a stream for which the CPU has waited
        self._host = _Host(self)

    def __enter__(self) -> Self:
        self._host.__enter__()
        wait = Stream.wait_stream

        def wait_stream(stream: Stream, other: Stream) -> None:
            wait(stream, other)
            self.waited[stream, other] = self.operations.get(other, 0)

        def record_stream(tensor: Tensor, stream: Stream) -> None:
            self.memory[tensor.untyped_storage()._cdata].recorded.add(stream)

        def record(event: Event) -> None:
            event.place = self.counter.stream, self.operations.get(self.counter.stream, 0)

        def synchronize(event: Event) -> None:
            stream, number = event.place
            self.done[stream] = max(number, self.done.get(stream, 0))

        self._patches = (
            mock.patch.object(Event, "record", record),
            mock.patch.object(Event, "synchronize", synchronize, create=True),
            mock.patch.object(Stream, "wait_stream", wait_stream),
            mock.patch.object(FakeTensor, "record_stream", record_stream, create=True),
        )
        for patch in self._patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self._patches:
            patch.stop()
        self._host.__exit__(*error)

    def clear(self) -> None:
        self.unpinned.clear()
        self.races.clear()

    def reused_too_early(self) -> int:
        """Return the number of storages whose memory their stream may use again while another one still reads it."""
        return sum(bool(one.used - {one.owner} - one.recorded) for one in self.memory.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = {name: value for name, value in kwargs.items() if name != "out"}
        inputs, outputs = ([t for t in tree_flatten(part)[0] if isinstance(t, Tensor)] for part in ((args, read), out))
        name = func._schema.name.split("::")[-1]
        views = bool(func._schema.returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        on_device = any(t.device.type == DEVICE.type for t in [*inputs, *outputs])
        if on_device and not views and name not in FREE and func.namespace != "prim":
            self._queue(name, inputs, outputs)
            if name == "_to_copy" and outputs[0].device.type == "cpu" and kwargs.get("non_blocking"):
                storage, stream = outputs[0].untyped_storage(), self.counter.stream
                self.copied[storage._cdata] = storage, stream, self.operations[stream]
        return out

    def read(self, tensor: Tensor) -> None:
        """Note that the CPU reads a tensor in host memory."""
        _, stream, number = self.copied.get(tensor.untyped_storage()._cdata, (None, self.counter.stream, 0))
        if self.done.get(stream, 0) < number:
            self.early.append(f"{self.counter.part}: {tuple(tensor.shape)} {tensor.dtype}")

    def _queue(self, operation: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Note which stream uses and writes which memory, and whether it waits for the stream that wrote it."""
        stream, part = self.counter.stream, self.counter.part
        self.operations[stream] = self.operations.get(stream, 0) + 1
        copies = operation == "_to_copy" and inputs[0].device.type != DEVICE.type
        if copies and inputs[0].untyped_storage()._cdata not in self._host.pinned:
            shape = " x ".join(map(str, inputs[0].shape)) or "scalar"
            self.unpinned.append(f"{part}: {shape} {inputs[0].dtype}")
        for tensor in (t for t in inputs if t.device.type == DEVICE.type):
            known = self.memory.get(tensor.untyped_storage()._cdata)
            if known is None:
                continue
            known.used.add(stream)
            if known.writer is not stream and self.waited.get((stream, known.writer), 0) < known.written:
                self.races.append(f"{part}: {operation}")
        for tensor in (t for t in outputs if t.device.type == DEVICE.type):
            storage = tensor.untyped_storage()
            known = self.memory.setdefault(storage._cdata, Memory(storage, stream, stream, 0))
            known.writer, known.written = stream, self.operations[stream]


class _Host(TorchFunctionMode):
    """Collects the storages of host memory that are pinned, and notes reads of tensors that the device has copied."""

    def __init__(self, checks: StreamChecks) -> None:
        super().__init__()
        self.checks = checks
        self.pinned: dict[int, Any] = {}
        """Storages by address. They are kept so that no address is used again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.pin_memory:
            self.pinned[args[0].untyped_storage()._cdata] = args[0].untyped_storage()
        if func is Tensor.tolist and isinstance(args[0], FakeTensor) and args[0].device.type == "cpu":
            self.checks.read(args[0])
            return [1.0] * len(args[0])
        return func(*args, **(kwargs or {}))
