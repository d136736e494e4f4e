"""A run that resumes under one engine after the other, on other numbers of processes, equals an uninterrupted run.

Three processes share a batch of 16 unevenly. One of the runs loses one of them by SIGKILL in the middle of a step.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tessera.pretrain.checkpoints import resume
from tessera.pretrain.methods import METHODS
from tests.launched import records
from tests.pretrain.small import arguments, losses

STEPS = 10
# the engine, its processes, and up to which step its checkpoints are left to the next one
CHAIN = [("zero2", 4, 2), ("zero3", 3, 4), (None, 1, 6), ("fsdp2", 2, 8), (None, 1, 10)]
BROKEN = [(None, 1, 6), ("fsdp2", 3, 8), (None, 1, 10)]
KILLED = 1
"""Index in `BROKEN` of the link whose last run is killed."""
CHAINED = ("dino", "dinov3", "lejepa", "mae")
"""The others hold parts of the state of these: tests/pretrain/test_pairs.py resumes them."""
MORE = {"--steps": str(STEPS), "--checkpoint_every": "2", "--checkpoint.keep": "9", "--evaluation.pictures": "0"}
MORE["--optim.eps"] = "1e-3"  # with 1e-8, AdamW makes whole steps of small gradients, and so of their rounding errors
SCRIPT = Path(__file__).parent / "engines" / "poisoned_runs.py"
OWN = {"freeze_steps": "1", "batch_norm": "false"}
"""of methods that have them; under batch norm some biases do not matter, and AdamW moves them by rounding errors"""


def command(method: str, output: Path, *more: str) -> list[str]:
    own = {f"--{method}.{name}": value for name, value in OWN.items() if name in METHODS[method].Config.model_fields}
    return [
        *arguments(method, "vit_micro", output),
        *(word for pair in (MORE | own).items() for word in pair),
        *more,
    ]


def held(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, read by torch's own tool."""
    dcp_to_torch_save(checkpoint, scratch)
    return settled(torch.load(scratch))


def settled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Remove the biases of the attention keys.

    Attention does not depend on them, so their gradients are rounding errors, which AdamW scales up to full steps. In
    float64, the largest gradient of the keys is 1e-20 in MAE's first block, that of queries 5e-5, and of values 2e-2.
    """
    for name in [name for name in tensors if name.endswith("qkv.bias")]:
        queries, _, values = tensors[name].chunk(3)
        tensors[name] = torch.cat([queries, values])
    return tensors


def assert_same_run(folder: Path, whole: Path, scratch: Path) -> None:
    ours, theirs = records(folder), records(whole)
    assert [line["step"] for line in ours] == list(range(STEPS + 1))
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5), (folder, a["step"])
        assert a["lr"] == b["lr"]
        assert a["images"] == b["images"]
    last = [f / "checkpoints" / f"step-{STEPS:08d}" for f in (folder, whole)]
    for path in (Path("encoder.safetensors"), last[0].relative_to(folder) / "encoder.safetensors"):
        torch.testing.assert_close(
            settled(load_file(folder / path)), settled(load_file(whole / path)), rtol=1e-5, atol=1e-5
        )
    a, b = (held(path, scratch) for path in last)
    assert a.keys() == b.keys()
    for name, tensor in b.items():
        # the gradient of a row's norm is the part of the row's gradient along it: rounded as the whole row is
        size = float(b[name.replace("weight_g", "weight_v") if name.startswith("exp_avg.") else name].abs().max())
        torch.testing.assert_close(a[name], tensor, rtol=1e-5, atol=1e-5 * size, msg=lambda m, n=name: f"{n}: {m}")
    assert {name.partition(".")[0] for name in b} == {"method", "exp_avg", "exp_avg_sq"}
    if "method.center" in b:  # the centres of Sinkhorn-Knopp do not move
        settings = yaml.safe_load((whole / "config.yaml").read_text())
        moves = settings[settings["method"]]["centering"] == "mean"
        assert (float(b["method.center"].norm()) > 0) == moves


def assert_killed(folder: Path, whole: Path) -> None:
    """The steps before the kill are those of one process, and a checkpoint is left."""
    found, expected = losses(folder), losses(whole)
    assert BROKEN[KILLED - 1][2] <= max(found) < 9
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-6)
    assert resume.list_checkpoints(folder / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize(("chain", "methods"), [(CHAIN, CHAINED), (BROKEN, ("dinov3", "mae"))], ids=["whole", "killed"])
def test_a_chain_of_engines_is_one_run(chain: list, methods: tuple[str, ...], start: Callable, tmp_path: Path) -> None:
    whole = {method: tmp_path / "whole" / method for method in methods}
    folders = {method: tmp_path / method for method in methods}
    start(SCRIPT, [{"arguments": command(method, folder)} for method, folder in whole.items()]).wait()
    for number, (engine, processes, last) in enumerate(chain):
        kills = chain is BROKEN and number == KILLED
        more = ["--resume"] * (number > 0) + ["--checkpoint.background", "true"] * (number % 2)
        runs: list[Any] = [{"arguments": command(method, folder, *more)} for method, folder in folders.items()]
        runs[-1]["poison"] = {8: [1, 1, "kill"]} if kills else {}
        launched = start(SCRIPT, runs, processes=processes, engine=engine)
        log = launched.wait_for_kill() if kills else launched.wait()
        for method, folder in folders.items():
            if kills and method == methods[-1]:
                assert_killed(folder, whole[method])
                continue
            if number:
                assert f"step-{chain[number - 1][2]:08d}" in log
            assert_same_run(folder, whole[method], tmp_path / "whole.pt")
            for path in (folder / "checkpoints").glob("step-*"):
                known = json.loads((path / "trainer.json").read_text())
                if int(path.name[5:]) > last:
                    assert (known["engine"], known["processes"]) == (engine or "ddp", processes)
                    shutil.rmtree(path)
