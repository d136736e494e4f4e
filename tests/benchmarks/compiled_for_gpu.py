"""Compile code for a GPU on a machine without one: Triton kernels become machine code, but do not run.

Tensors on the GPU are fake, as in benchmarks/fake_device.py, but the backward pass is torch's own. A compiled graph is
lowered to Triton kernels, each kernel is compiled by `ptxas`, and then the graph runs operation by operation on fake
tensors. This module changes torch for the rest of the process.
"""

import contextlib
import copy
import ctypes
import functools
import re
import subprocess
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import fake_device
import torch
import torch._dynamo.utils
from accelerate.state import AcceleratorState, PartialState
from einops import rearrange
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._inductor.runtime import triton_heuristics
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests.launched import ROOT

DEVICE = torch.device("cuda", 0)
SOURCE = Path(__file__).with_name("fake_cuda.cpp")


@dataclass
class Compiled:
    """Graphs and kernels that were compiled, and values that the CPU read from the GPU."""

    graphs: int = 0
    kernels: dict[str, str] = field(default_factory=dict)
    """Intermediate code of each Triton kernel, by name."""
    reads: list[str] = field(default_factory=list)
    """Lines of this project that wait for a value of the GPU."""

    def doubles(self) -> list[str]:
        """Return the kernels that compute in float64."""
        return [name for name, code in self.kernels.items() if "f64" in code]

    def breaks(self) -> set[str]:
        """Return the functions, or else the reasons, for which torch left the graph of a compiled function."""
        reasons = torch._dynamo.utils.counters["graph_break"]
        named = {reason: re.search(r"`<function (\w+)", reason) for reason in reasons}
        return {found[1] if found else reason for reason, found in named.items()}


class _RealHost(TorchDispatchMode):
    """Runs operations without fake tensors on the real CPU, and notes reads of values of the GPU, which are 1."""

    def __init__(self, compiled: Compiled) -> None:
        super().__init__()
        self.compiled = compiled

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else nothing would be compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fake = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        if not fake and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()]
            own = [
                line.removeprefix(f"{ROOT}/") for line in lines if line.startswith(str(ROOT)) and __file__ not in line
            ]
            self.compiled.reads.append(own[-1] if own else lines[-1])
            return 1
        return func(*args, **kwargs)


def build_library(folder: Path) -> Path:
    """Compile `SOURCE` to a library in `folder`, and return its path."""
    path, own = folder / "fake_cuda.so", Path(torch.__file__).parent
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{own / 'include'}", str(SOURCE), "-o", str(path)]
    subprocess.run([*command, f"-L{own / 'lib'}", "-lc10", "-ltorch_cpu"], check=True)
    return path


@contextlib.contextmanager
def compiling(library: Path, major: int, minor: int = 0) -> Iterator[Compiled]:
    """Make `DEVICE` a fake GPU of the given compute capability, and compile for it inside the context."""
    ctypes.CDLL(str(library)).install()
    properties = types.SimpleNamespace(
        name="fake", major=major, minor=minor, total_memory=2**36, multi_processor_count=132, warp_size=32,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        shared_memory_per_block=49152, shared_memory_per_block_optin=166912, L2_cache_size=2**25,
    )  # fmt: skip
    compiled, capability = Compiled(), (major, minor)
    target = GPUTarget("cuda", 10 * major + minor, 32)
    stream = fake_device.Stream()
    values = {
        "torch.cuda.is_available": True, "torch.cuda.is_initialized": True, "torch.cuda._lazy_init": None,
        "torch.cuda.device_count": 1, "torch.cuda.current_device": 0, "torch.cuda.current_stream": stream,
        "torch.cuda.get_device_properties": properties, "torch.cuda.get_device_capability": capability,
        "torch.cuda.is_bf16_supported": True, "torch.cuda.stream": contextlib.nullcontext(),
        "torch.cuda.get_rng_state": torch.zeros(16, dtype=torch.uint8), "torch.cuda.set_rng_state": None,
        "torch.cuda._exchange_device": 0, "torch.cuda._maybe_exchange_device": 0,
        "torch.cuda.is_current_stream_capturing": False, "torch.cuda.graphs._cuda_isCurrentStreamCapturing": False,
        "torch._C._cuda_getCurrentRawStream": 0,
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": None,
        # These make real tensors on the GPU to prepare rewrites that the project does not need.
        "torch._inductor.fx_passes.fuse_attention._sfdp_init": None,
        "torch._inductor.fx_passes.pad_mm._pad_mm_init": None,
        "torch._inductor.fx_passes.misc_patterns._misc_patterns_init": None,
    }  # fmt: skip
    interface = {
        "get_device_properties": properties, "get_compute_capability": 10 * major + minor,
        "is_triton_capable": True, "raise_if_triton_unavailable": None,
    }  # fmt: skip

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def precompile(tuner: Any, *_: Any, **__: Any) -> None:
        tuner.configs = tuner.configs[:1]  # the others differ in the sizes of blocks only
        tuner._precompile_worker()
        (result,) = tuner.compile_results
        assert result.kernel.asm["cubin"], tuner.fn.__name__
        compiled.kernels[tuner.fn.__name__] = result.kernel.asm["ttir"]

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        for name, value in values.items():
            enter(mock.patch(name, constant(value), create=True))
        for name, value in interface.items():
            enter(mock.patch.object(CudaInterface, name, staticmethod(constant(value))))
        enter(mock.patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(constant(properties))))
        enter(mock.patch("torch.cuda.Stream", fake_device.Stream))
        enter(mock.patch("torch.cuda.Event", fake_device.Event))
        enter(mock.patch.object(FakeTensor, "record_stream", constant(None), create=True))
        enter(mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor))
        enter(mock.patch("torch.nn.functional.scaled_dot_product_attention", fake_device._attention))
        enter(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        enter(mock.patch.object(driver, "_active", types.SimpleNamespace(get_current_target=constant(target))))
        enter(mock.patch.object(triton_heuristics.CachingAutotuner, "precompile", precompile))
        own = functools.partial(compile_fx.compile_fx, inner_compile=functools.partial(_compile, compiled))
        enter(mock.patch.object(compile_fx, "compile_fx", own))
        options = {"compile_threads": 1, "force_disable_caches": True, "use_static_triton_launcher": False}
        enter(inductor.patch(joint_graph_constant_folding=False, **options))
        enter(mock.patch.dict(PartialState._shared_state, device=DEVICE))
        enter(mock.patch.dict(AcceleratorState._shared_state, device=DEVICE))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        enter(_RealHost(compiled))
        # einops keeps a table of the types of tensors that it has seen, and a compiled graph depends on its length.
        rearrange(torch.empty(1, device="cuda"), "n -> n")
        yield compiled


def _compile(compiled: Compiled, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
    """Compile a graph of operations, and return a function that runs the operations one by one."""
    compiled.graphs += 1
    uncompiled = copy.deepcopy(graph)
    compile_fx.compile_fx_inner(graph, inputs, **options)

    def run(arguments: list[Any]) -> Any:
        return torch.fx.Interpreter(uncompiled).run(*arguments)

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run
