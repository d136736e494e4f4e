"""A compiled training step for a GPU that is not there (tests/benchmarks/compiled_for_gpu.py)."""

import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import fake_copy
from training import loader_batch, make_config

from tessera import encoders
from tessera.extras.forecast.forecast import bare_run
from tessera.pretrain.build import compile_blocks
from tessera.pretrain.engines.ddp import DDP
from tessera.pretrain.methods import METHODS
from tessera.pretrain.step import start_step, to_device
from tessera.runtime.processes import make_accelerator

pytest.importorskip("triton", reason="Triton compiles the kernels")
if shutil.which("g++") is None or torch.version.cuda is None:
    pytest.skip("needs g++ and a torch with CUDA, but no GPU", allow_module_level=True)
if not torch.__version__.startswith("2.14."):
    pytest.skip("replaces private functions of torch 2.14", allow_module_level=True)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.benchmarks.compiled_for_gpu import build_library

    return build_library(tmp_path_factory.mktemp("library"))


def _in_a_process(target: Callable[..., None], *arguments: Any) -> None:
    """Call `target` in a process of its own, because torch stays changed. An error fails the test."""
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
    process.start()
    process.join(500)
    code = process.exitcode
    process.kill()
    assert code == 0


def _faults(library: Path) -> None:
    from tests.benchmarks.compiled_for_gpu import compiling

    with compiling(library, 9) as compiled:
        x = torch.empty(64, 32, device="cuda", requires_grad=True)
        torch.compile(lambda x: x.sin().square())(x).sum().backward()
        assert (compiled.graphs, compiled.reads, compiled.doubles(), compiled.breaks()) == (2, [], [], set())
        torch.compile(lambda x: x.double().cos().float())(x)
        assert len(compiled.doubles()) == 1
        torch.compile(lambda x: x * x.sum().item())(x)
        assert len(compiled.reads) == 1
        assert len(compiled.breaks()) == 1


def test_faults_are_found(library: Path) -> None:
    _in_a_process(_faults, library)


def _step(library: Path, method: str, variant: str, major: int) -> None:
    from tests.benchmarks.compiled_for_gpu import compiling

    options = {"depth": 2, "bf16_residuals": True}
    config = make_config(method, variant, 4, encoder=options, precision="bf16", compile=True)
    options = config.encoder_settings
    with torch.device("meta"):
        encoder = encoders.build(options.pop("variant"), **options)
        built = METHODS[method](encoder, config.method_config, config.steps)
    batch = loader_batch(built.transform(), 4)
    accelerator = make_accelerator(mixed_precision="bf16", cpu=True)
    with compiling(library, major) as compiled:
        fake_copy(built)
        built.to = lambda *_, **__: built
        for part in built.modules():
            if isinstance(part, encoders.Encoder):
                compile_blocks(part, fixed_sizes=built.fixed_sizes)
        run = bare_run(config, accelerator, built, DDP(accelerator, built, config.optim))
        graphs = list[int]()
        for step in range(2):
            start_step(run, step, [to_device(run, batch)])
            graphs.append(compiled.graphs)
    assert graphs[0] == graphs[1], "the second step compiled again"
    assert len(compiled.kernels) > 10
    assert (compiled.reads, compiled.doubles()) == ([], [])
    # Attention of packed images is not compiled, because its graph would depend on the lengths of the images.
    assert compiled.breaks() <= {"self_attention_by_run", "packed_attention"}


@pytest.mark.parametrize("method", ["dino", "mae"])
def test_a_step_is_compiled_to_machine_code(library: Path, method: str) -> None:
    _in_a_process(_step, library, method, "vit_tiny", 9)
