"""Models of timm under every method: one step in this process, and whole runs through the real command."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera import encoders
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.batch_norm import over_all_processes
from tessera.pretrain.methods.method import Method, RunSize
from tessera.pretrain.optim.adamw import OptimConfig, adamw
from tessera.pretrain.optim.running_statistics import StepStatistics, running_statistics
from tests.launched import ROOT, records, same_encoder, timeless
from tests.pretrain.small import arguments, batch_for, without_scores
from tests.teachers import small_settings

CROPS = {"global_size": 64, "local_size": 32}
SIZES: dict[str, dict[str, Any]] = {
    "dino": CROPS,
    "dinov2": CROPS | {"mask_probability": 0.0},
    "dinov3": CROPS | {"gram_size": 64, "gram_start": 100, "mask_probability": 0.0},
    "lejepa": CROPS,
    "distill": {"size": 64},
    "mae": {"size": 64},
    "finetune": {"size": 64, "classes": 2},
}
"""Settings of a method for images of two tokens of 32 pixels a side."""
FAMILIES = [
    "test_resnet",
    "test_convnext",
    "test_efficientnet",
    "test_byobnet",
    "test_nfnet",
    "test_mambaout",
    "test_maxvit",
    "test_vit",
    "regnetx_002",
    "mobilenetv3_small_050",
]
LARGER = [
    "swin_tiny_patch4_window7_224",
    "poolformerv2_s12",
    "levit_128s",
    "pvt_v2_b0",
    "xcit_nano_12_p16_224",
    "repvit_m1",
]
FIXED = {"test_maxvit", "levit_128s"}
"""Models that take images of one size. LeViT has one token of a crop of 64 pixels, too few for MAE."""


def make(method: str, name: str, **settings: Any) -> Method:
    chosen, size, variant = METHODS[method], RunSize(1000, 4, 10), f"timm:{name}"
    given = small_settings(chosen) | SIZES[method]
    known = {key: value for key, value in given.items() if key in chosen.Config.model_fields}
    config, _ = chosen.resolve(chosen.Config(**known), OptimConfig(), size)
    torch.manual_seed(0)
    own = chosen.encoder_defaults(config, variant, size) | {"fixed_size": name in FIXED} | settings
    built = chosen(encoders.build(variant, **own), config, 10)
    over_all_processes(built)
    return built


def one_step(method: Method) -> None:
    """Check that a step gives every trainable parameter a finite gradient and changes the weights."""
    method.train()
    batch = batch_for(method, 4)
    _, optim = type(method).resolve(method.config, OptimConfig(), RunSize(1000, 4, 10))
    optimizer = adamw(method, optim, {})
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    loss, _ = method(batch, 0)
    loss.backward()
    trained = {name: p for name, p in method.named_parameters() if p.requires_grad}
    assert [name for name, p in trained.items() if p.grad is None] == []
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in trained.values())
    optimizer.step()
    method.after_step(0)
    after = method.state_dict()
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert any("encoder.model" in name for name in moved)
    if running_statistics(method):
        assert any("running_mean" in name for name in moved)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[] if small or method == "mae" else pytest.mark.slow)
        for name in FAMILIES
        for method in SIZES
        if (small := name in ("test_resnet", "test_vit")) or method in ("dino", "mae")
    ],
)
def test_a_method_trains_a_model_of_timm(name: str, method: str) -> None:
    one_step(make(method, name))


def test_a_skipped_step_leaves_running_statistics_unchanged() -> None:
    method = make("dino", "test_resnet").train()
    before = [buffer.clone() for buffer in running_statistics(method)]
    statistics = StepStatistics(method)
    method(batch_for(method, 4), 0)
    assert any(not torch.equal(a, b) for a, b in zip(before, running_statistics(method), strict=True))
    statistics.settle(torch.tensor(0.0))
    method.after_step(0, torch.tensor(0.0))
    assert all(torch.equal(a, b) for a, b in zip(before, running_statistics(method), strict=True))


def test_the_teacher_follows_the_running_statistics_of_the_student() -> None:
    method = make("dino", "test_resnet", image_size=64).train()
    batch = batch_for(method, 4)
    student, teacher = (running_statistics(method.get_submodule(name)) for name in ("student", "teacher"))
    start = [buffer.clone() for buffer in teacher]
    method(batch, 0)
    method.after_step(0)
    momentum = method.momentum(0)
    for old, own, new in zip(start, teacher, student, strict=True):
        expected = momentum * old + (1 - momentum) * new if new.is_floating_point() else new
        torch.testing.assert_close(own, expected)
    assert not method.teacher.training


def test_mae_says_that_a_model_of_timm_cannot_drop_tokens() -> None:
    with pytest.raises(ValueError, match=r"timm:test_vit cannot drop hidden tokens. Remove mae.drop"):
        METHODS["mae"](
            encoders.build("timm:test_vit", image_size=64),
            METHODS["mae"].Config(size=64, drop=True),  # pyright: ignore[reportCallIssue]
            10,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    list(zip(LARGER, itertools.cycle(("dino", "mae")), strict=False)),
)
def test_a_method_trains_a_larger_model_of_timm(name: str, method: str) -> None:
    one_step(make(method, name))


FOLDER = ROOT / "tests" / "pretrain"
OWN: dict[str, dict[str, Any]] = {"dino": {"batch_norm": False}, "lejepa": {}, "mae": {}, "distill": {}}
OWN = {method: given for method, given in OWN.items() if method in METHODS}
PAIRS = [*((method, "test_resnet") for method in OWN), ("dino", "test_vit"), ("lejepa", "test_efficientnet")]
PAIRS += [("mae", "test_maxvit"), ("dino", "test_mambaout")]
COMMANDS = {
    f"{method} of timm:{name}": [
        *(word for key, value in (SIZES[method] | OWN[method]).items() for word in (f"--{method}.{key}", str(value))),
        *("--encoder.fixed_size", str(name in FIXED), "--evaluation.pictures", "2"),
    ]
    for method, name in PAIRS
}
"""Settings of whole runs."""
SCORED = [name for name in COMMANDS if name.endswith(("dino of timm:test_resnet", "test_maxvit"))]
"""Runs with evaluations: of a model that takes any size, and of one that takes a single size."""
EXACT = [name for name in COMMANDS if name.endswith(("test_resnet", "test_vit"))]
"""Runs of models that do not amplify rounding. tests/encoders/test_batch_norm.py compares the others in float64."""
SHARDED = [name for name in EXACT if name.startswith(("dino", "mae"))]
ENGINES = {"ddp": EXACT, "zero2": SHARDED[:1], "fsdp2": SHARDED}
"""Runs on two processes of each engine. Under ZeRO-2, weights and statistics are whole, as under DDP."""
POISON = {"3": [0, 1, "image"]}
"""The fourth step has a NaN in an image, so that it is skipped."""


def command(name: str, output: Path, *more: str) -> list[str]:
    method, _, variant = name.partition(" of ")
    return arguments(method, variant, output, *COMMANDS[name], *more)


@pytest.fixture(scope="module")
def runs(start: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all runs: resumed on one process, and with a skipped step on one process and on two of each engine."""
    folder = tmp_path_factory.mktemp("runs")
    resumed = {name: command(name, folder / "resumed" / name) for name in COMMANDS}
    resumed = {name: words if name in SCORED else without_scores(words) for name, words in resumed.items()}
    again = [[*words, "--resume"] for words in resumed.values()]
    alone = start(FOLDER / "runs_in_turn.py", [*resumed.values(), *again])
    for engine, names in {"alone": EXACT, **ENGINES}.items():
        commands = [without_scores(command(name, folder / engine / name)) for name in names]
        lines = [{"arguments": one, "poison": POISON} for one in commands]
        named = engine if engine in ("zero2", "fsdp2") else None
        how = {"processes": 1 if engine == "alone" else 2, "engine": named}
        start(FOLDER / "engines" / "poisoned_runs.py", lines, **how).wait()
    alone.wait()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_resumes_bit_for_bit(name: str, runs: Path) -> None:
    one = runs / "resumed" / name
    assert timeless(one) == timeless(one / "uninterrupted")
    assert same_encoder(one, one / "uninterrupted")


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine in ENGINES for name in ENGINES[engine]])
def test_two_processes_equal_one(engine: str, name: str, runs: Path) -> None:
    one, two = runs / "alone" / name, runs / engine / name
    expected = {line["step"]: line for line in records(one) if line["step"]}
    assert sorted(expected) == list(range(1, 7))
    assert expected[6]["skipped_steps"] == 1
    for line in (line for line in records(two) if line["step"]):
        loss = expected[line["step"]]["loss"]
        if line["step"] == 4:  # the skipped step
            assert line["loss"] is loss is None
        else:
            assert line["loss"] == pytest.approx(loss, rel=1e-4), line["step"]
    weights = encoders.load(one).state_dict()
    for key, tensor in encoders.load(two).state_dict().items():
        torch.testing.assert_close(tensor, weights[key], rtol=1e-3, atol=5e-4, msg=key)
