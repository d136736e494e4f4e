"""What FSDP2 sends: weights of the main process at the start; in a step, which weights are gathered, when, and in which
precision."""

import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.pretrain.build import build_method
from tessera.pretrain.checkpoints.trainer_json import TrainState
from tessera.pretrain.command_line import load
from tessera.pretrain.config import RunConfig
from tessera.pretrain.engines.fsdp2 import FSDP2, _mesh
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.mae import MAE
from tessera.pretrain.preflight import state_bytes
from tessera.pretrain.resolve import resolve
from tessera.runtime.collectives import all_reduce_sum, local
from tessera.runtime.processes import make_accelerator
from tessera.runtime.settings import SettingsError
from tests.pretrain import small
from tests.ranks import on_processes

Event = tuple[str, int]
IN_HEAD = "student.head.mlp.0.weight"
COLLECTIVES = {  # torch 2.15 has renamed them
    "gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce": ("reduce_scatter_single", "reduce_scatter_tensor"),
}


def log_collectives(events: list[Event]) -> None:
    """Append ("gather" or "reduce", bytes of the whole tensor) to `events` whenever FSDP2 sends something."""
    for kind, names in COLLECTIVES.items():
        name = next(name for name in names if hasattr(dist, name))
        setattr(dist, name, logged(kind, getattr(dist, name), events))


def logged(kind: str, collective: Any, events: list[Event]) -> Any:
    def log(*args: Any, **options: Any) -> Any:
        tensors = [each for each in (*args, *options.values()) if isinstance(each, Tensor)]
        events.append((kind, max(each.numel() * each.itemsize for each in tensors)))
        return collective(*args, **options)

    return log


def as_fsdp2() -> None:
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}


def padded(parameters: Iterable[Tensor]) -> int:
    """Number of values in parameters whose rows are padded to a multiple of two processes."""
    return sum(-(-len(p) // 2) * 2 * p[0].numel() for p in parameters)


def step(rank: int, precision: str, folder: str) -> None:
    """Take a step of MAE with a depth of 1 and a decoder of 2 blocks, and write what was sent and computed."""
    as_fsdp2()
    accelerator = make_accelerator(mixed_precision=precision)
    method = small.method("mae", seed=0)
    blocks = [block for sequence in method.units() for block in sequence]
    inside = {p for block in blocks for p in block.parameters()}
    outside = [p for p in method.parameters() if p not in inside]
    found: dict[str, Any] = {
        "blocks": [padded(block.parameters()) for block in blocks],
        "rest": padded(outside),
        "trained rest": padded(p for p in outside if p.requires_grad),
    }
    events: list[Event] = []
    log_collectives(events)
    engine, dtypes = FSDP2(accelerator, method, small.OPTIM), set()
    for number, block in enumerate(blocks):
        block.register_forward_hook(lambda *_, number=number: events.append(("ran", number)))
        for part in block.modules():
            if isinstance(part, nn.Linear):
                part.register_forward_hook(lambda part, *_: dtypes.add(str(part.weight.dtype)))
    engine.forward_backward(small.batch_for(method, 4), 0, last=True)
    gradients = {str(p.grad.dtype) for p in method.parameters() if p.grad is not None}
    kept = gradients | {str(p.dtype) for p in method.parameters()}
    found |= {"events": events, "computed": sorted(dtypes), "kept": sorted(kept)}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "width"), [("no", 4), ("bf16", 2)])
def test_blocks_are_gathered_in_the_precision_of_the_run(
    precision: str, width: int, tmp_path: Path, free_port: int
) -> None:
    on_processes(step, free_port, precision, str(tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())
    events, blocks = found["events"], found["blocks"]
    gathered = [size for kind, size in events if kind == "gather"]
    reduced = [size for kind, size in events if kind == "reduce"]
    assert sorted(gathered) == sorted(
        [4 * found["rest"], *(width * n for n in 2 * blocks)]
    )  # blocks forward and backward
    assert sorted(reduced) == sorted(4 * n for n in (found["trained rest"], *blocks))
    assert found["computed"] == [{2: "torch.bfloat16", 4: "torch.float32"}[width]]
    assert found["kept"] == ["torch.float32"]
    # the decoder's second block is gathered before its first block has run
    first = events.index(["ran", 1])
    assert sum(kind == "gather" for kind, _ in events[:first]) == 1 + 3


def local_bytes(engine: FSDP2) -> int:
    """Return the bytes of weights, buffers, gradients and moments of both processes."""
    shards = [local(p).nbytes for p in engine.method.parameters()]
    trained = [local(p).nbytes for p in engine.method.parameters() if p.requires_grad]
    moments = [tensor.data.nbytes for name, tensor in engine.local_state().items() if not name.startswith("method.")]
    buffers = [buffer.nbytes for buffer in engine.method.buffers()]
    return int(all_reduce_sum(torch.tensor(sum(shards + trained + moments + buffers))))


def start(rank: int) -> None:
    """Start from an empty method on the second process, and compare with a method that was built there."""
    as_fsdp2()
    accelerator = make_accelerator()
    for name in METHODS.names():
        with torch.device("meta" if rank else "cpu"):
            method = small.method(name, seed=0)
        expected = small.method(name, seed=0)
        for each in (method, expected):
            for number, buffer in enumerate(each.buffers()):  # a centre of zeros would hide that it was not sent
                buffer += number + 1
        engine = FSDP2(accelerator, method, small.OPTIM)
        kept = local_bytes(engine)
        full = engine.gather_full_parameters(method)
        for kind in ("parameters", "buffers"):  # `state_dict` would leave out some buffers
            ours, wanted = (dict(getattr(each, f"named_{kind}")()) for each in (full, expected))
            assert ours.keys() == wanted.keys()
            assert all(torch.equal(ours[key], wanted[key]) for key in wanted), name
        trained = {key: p.requires_grad for key, p in method.named_parameters()}
        assert trained == {key: p.requires_grad for key, p in expected.named_parameters()}
        held = sum(local(p).untyped_storage().nbytes() for p in method.parameters())
        assert held == sum(2 * padded([p]) for p in expected.parameters()), name  # one of two processes, 4 bytes each
        assert kept == pytest.approx(2 * state_bytes(expected, FSDP2.shards(accelerator)), abs=16), name
        engine.forward_backward(small.batch_for(method, 4), 0, last=True)  # would fail if a weight were missing
        exported = engine.gather_on_main(method)
        for p in method.parameters():
            local(p.detach()).fill_(torch.nan)
        assert (exported is None) == (rank == 1)
        assert exported is None or all(torch.equal(p, full.get_parameter(k)) for k, p in exported.named_parameters())
    dist.destroy_process_group()


@pytest.mark.slow
def test_all_processes_start_from_the_weights_of_the_main_process(free_port: int) -> None:
    on_processes(start, free_port)


class Stray(MAE):
    """A method of another package, with a tensor that is neither a parameter nor a buffer."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.scales = [torch.linspace(0, 1, 3)]


class Reading(MAE):
    """A method of another package that reads the value of a tensor."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.half = float(torch.linspace(0, 1, 3)[1])


def build(rank: int, run: str) -> None:
    make_accelerator()
    held = torch.load(f"{run}/held.pt")
    small_settings = METHODS["dinov2"].small_settings

    def started(**own: Any) -> RunConfig:
        words = [f"--dinov2.{name}={value}" for name, value in (small_settings | own).items()]
        return resolve(load(["--data", "a.tar", "--method", "dinov2", "--init_from", run, *words]), 1000)

    for config, whole in ((started(), True), (started().model_copy(update={"init_from": None}), False)):
        for main in (None, rank == 0):
            torch.manual_seed(0)
            method = build_method(config, fresh=True, main=main)
            assert {p.is_meta for p in method.parameters()} == {main is False}
            if main is not False:
                assert torch.equal(method.state_dict()[IN_HEAD], held) == whole
    missing = started().model_copy(update={"init_from": "missing.safetensors"})
    for broken, message in ((missing, "missing.safetensors"), (started(prototypes=16), "The heads of the run")):
        with pytest.raises(SettingsError, match=message):  # on both, so that none waits for the other
            build_method(broken, fresh=True, main=rank == 0)
    said: list[str] = []
    logging.getLogger("tessera.pretrain.build").addFilter(lambda line: bool(said.append(line.getMessage())) or True)
    for method, reason in ((Stray, r"Stray\.scales is a tensor"), (Reading, r"item\(\) .*meta")):
        METHODS["mae"] = method
        config = resolve(load(["--data", "a.tar", "--method", "mae", "--encoder", "vit_micro"]), 1000)
        built = build_method(config, fresh=True, main=rank == 0)
        assert not any(p.is_meta for p in built.parameters())
        assert rank == 0 or re.search(f"^Process 1 builds .*: .*{reason}", said.pop())
    dist.destroy_process_group()


@pytest.mark.slow
def test_only_the_main_process_builds_the_weights(tmp_path: Path, free_port: int) -> None:
    accelerator, engine = small.make(0, "dinov2")
    small.saver(tmp_path / "run", accelerator, engine, "dinov2").save(TrainState(3, 4), engine.method.trained_encoder())
    torch.save(engine.method.state_dict()[IN_HEAD], tmp_path / "run" / "held.pt")
    on_processes(build, free_port, str(tmp_path / "run"))


def groups_of_copies(rank: int, folder: str) -> None:
    """Write the time-outs in seconds of all groups of a run with two copies of the shards."""
    os.environ["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = "2"
    mesh = _mesh(make_accelerator(3.0))
    groups = [dist.group.WORLD, *mesh.get_all_groups()]
    found = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups if group]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.medium
def test_all_groups_have_the_timeout_of_the_run(tmp_path: Path, free_port: int) -> None:
    on_processes(groups_of_copies, free_port, str(tmp_path))
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [180.0] * 3
