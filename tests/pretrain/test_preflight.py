"""What a dry run says against counts by hand and a real forward pass."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.filesize import decimal
from torch import Tensor, nn

from tessera import encoders
from tessera.data.batch import Batch
from tessera.data.crops import MultiCrop, MultiCropConfig
from tessera.data.shards import open_sources
from tessera.pretrain import build, preflight, recompute
from tessera.pretrain.activations import activations
from tessera.pretrain.command_line import load
from tessera.pretrain.config import CheckpointConfig, RunConfig
from tessera.pretrain.engines.engine import Shards
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.dino import DINO
from tessera.pretrain.methods.method import Method
from tessera.pretrain.preflight import (
    Needs,
    Plan,
    dry_forward,
    fit,
    needs,
    print_plan,
    state_bytes,
)
from tessera.pretrain.resolve import resolve
from tessera.pretrain.run import main
from tests.evaluation.conftest import write_shard
from tests.pretrain import small
from tests.views import batch_of

WIDTH, HIDDEN = 3 * 16 * 16, 32


class TwoLayers(Method):
    """Two linear layers over the 16-pixel global crops, a frozen copy of the second, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self.teacher = nn.Linear(HIDDEN, 1).requires_grad_(False)
        self.register_buffer("center", torch.zeros(7))

    def transform(self) -> MultiCrop:
        return MultiCrop(MultiCropConfig(global_size=16, local_crops=0))

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        return self.student(batch.views[0].images.flatten(1)).float().mean(), {}


def settings(*arguments: str) -> RunConfig:
    tiny = (
        "--data x.tar --encoder vit_micro --encoder.depth 2 --encoder.dim 24 --encoder.heads 2 --dino.global_size 16 "
        "--dino.local_size 8 --dino.local_crops 3 --dino.hidden_dim 32 --dino.bottleneck_dim 16 --dino.prototypes 64 "
        "--steps 8 --batch_size 8"
    )
    return resolve(load([*tiny.split(), *arguments]), 1000)


def dino(config: RunConfig) -> DINO:
    chosen: dict[str, Any] = dict(config.encoder_settings)
    return DINO(encoders.build(chosen.pop("variant"), **chosen), config.method_config, config.steps)


def test_state_is_weights_gradients_and_two_moments() -> None:
    trained = WIDTH * HIDDEN + HIDDEN + HIDDEN + 1
    assert state_bytes(TwoLayers()) == 4 * (4 * trained + (HIDDEN + 1) + 7)
    assert state_bytes(TwoLayers(), Shards(1, 1, 3)) == 4 * (2 * trained + (HIDDEN + 1) + 7) + 8 * trained // 3
    weights = 4 * (trained + HIDDEN + 1)
    assert state_bytes(TwoLayers(), Shards(2, 2, 2)) == weights // 2 + 6 * trained + 4 * 7


@pytest.mark.parametrize("images", [1, 5])
def test_activations_of_two_layers_counted_by_hand(images: int) -> None:
    crops = 2 * images
    kept = activations(TwoLayers(), "fp32", images).kept
    assert kept == 4 * crops * (WIDTH + HIDDEN)  # each layer's input
    kept = activations(TwoLayers(), "bf16", images).kept
    assert kept == 2 * crops * (WIDTH + HIDDEN) + 2 * HIDDEN  # a weight's bfloat16 copy is there once, for any batch


def test_activations_equal_those_of_a_real_forward_pass() -> None:
    config = settings("--precision", "fp32", "--encoder.drop_path", "0")
    method = dino(config)
    weights = {t.untyped_storage().data_ptr() for t in [*method.parameters(), *method.buffers()]}
    kept: dict[int, Tensor] = {}  # alive, so that no address comes twice

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = batch_of([torch.randn(2 * 4, 3, 16, 16), torch.randn(3 * 4, 3, 8, 8)], (2, 3))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        method(batch, 0)
    real = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in weights)
    assert activations(dino(config), config.precision, 4).kept == pytest.approx(real, rel=0.02)
    recomputed = settings("--precision", "fp32", "--encoder.drop_path", "0", "--encoder.checkpoint_activations", "true")
    assert activations(dino(recomputed), recomputed.precision, 4).kept < 0.7 * real


def test_the_memory_of_a_run_is_estimated_without_a_trace() -> None:
    config, method = settings("--batch_size", "8"), dino(settings())
    expected = state_bytes(method), activations(dino(config), config.precision, 4).kept
    before, random = {name: x.clone() for name, x in method.state_dict().items()}, torch.get_rng_state()
    found = needs(method, config.precision, 4)
    assert (found.state, found.activations) == expected
    assert all(torch.equal(x, before[name]) for name, x in method.state_dict().items())
    assert method._last is None
    assert torch.equal(torch.get_rng_state(), random)


def test_attention_counts_as_a_fused_kernel_would() -> None:
    """Each of the tensors grows with the number of tokens, and none with its square."""
    kept = {}
    for side in (32, 64):
        config = settings("--precision", "bf16", "--encoder.drop_path", "0", "--dino.local_crops", "0")
        chosen = {**config.encoder_settings, "image_size": side}
        sized = config.method_config.model_copy(update={"global_size": side})
        method = DINO(encoders.build(chosen.pop("variant"), **chosen), sized, config.steps)
        kept[side] = activations(method, "bf16", 2).kept
    assert kept[64] < 4.2 * kept[32]


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    for name, count in (("a", 30), ("b", 20)):
        write_shard(tmp_path / f"{name}.tar", np.zeros((count, 16, 16, 3), np.uint8), None)
    config = settings("--accumulate", "2", "--checkpoint_every", "3", "--checkpoint.keep", "1")
    method = dino(config)
    need = needs(method, config.precision, 2)
    opened = open_sources(str(tmp_path / "*.tar"))
    scored = (replace(opened.lists[0], classes=("cat", "dog")), opened.lists[0].first(1))
    plan = Plan(opened, 50, 2, 3, 9_000_000, need, "an H100 of 80 GB", 80 * 10**9, evaluated=scored)
    full = config.model_copy(update={"dry_run": "full"})
    print_plan(full, plan)
    said = re.sub(r"[ │┃]+", " ", capsys.readouterr().out)
    trained = sum(p.numel() for p in method.student.parameters() if p.requires_grad)
    for part in (
        f"trained parameters {trained:,}",
        "optimizer steps 8 of 8 images",
        "images 50 in 2 shards",
        "epochs 1.3",
        "labelled images of the evaluation 50 of 2 classes",
        "validation images 30",
        "processes x loader workers 2 x 3",
        "images per forward pass of a process 2",
        f"cache {tmp_path / 'cache'}, at most 64 GB on each node",
        f"checkpoints 3 of {decimal(need.checkpoint)}, of which the newest 1 are kept",
        f"{decimal(need.state)} of weights, gradients and optimizer + {decimal(need.activations or 0)} of activations "
        "fit an H100 of 80 GB.",
        "shards per worker 0.33 ",
        "memory per process: prepared batches of the workers 9.0 MB",
        "prototypes: 64",
    ):
        assert part in said, part
    long = {"steps": 12_800, "checkpoint_every": 1000, "checkpoint": CheckpointConfig(keep=2, keep_every=3000)}
    print_plan(config.model_copy(update=long), plan)
    said = re.sub(r" +", " ", capsys.readouterr().out)
    size = need.checkpoint  # kept: 3000, 6000, 9000, and the newest, 12000 and 12800
    assert (
        f"checkpoints 13 of {decimal(size)}, of which the newest 2 are kept, and those of every 3,000 steps: 5 at"
        in said
    )
    assert f"the end, {decimal(5 * size)}" in said
    for processes, size in ((3, "1 to 2"), (5, "0 to 1")):
        print_plan(config, replace(plan, processes=processes))
        assert f"images per forward pass of a process {size} " in re.sub(r"\s+", " ", capsys.readouterr().out)
    monkeypatch.setattr(preflight, "is_on_network", lambda folder: folder == tmp_path / "cache")
    print_plan(config, plan)
    said = re.sub(r"[ │┃\n]+", " ", capsys.readouterr().out)
    assert "It is on a network disk: set TESSERA_CACHE to a local folder" in said
    shards = [str(tmp_path / "a.tar"), str(tmp_path / "b.tar")]
    for weights, shares in (
        ([2, 1], "66.7 %, 33.3 %"),  # multiples of 1 / 1,024
        ([0.9999, 0.0001], "99.99 %, 0.01 %"),
        ([{0: 1, 4: 1}, {0: 0, 4: 3}], "100 %, 0 % from step 0; 25 %, 75 % from step 4"),
    ):
        sources = open_sources(dict(zip(shards, weights, strict=True)))
        print_plan(config, replace(plan, shards=sources))
        assert f"shares of the sources {shares} " in re.sub(r"[ │┃\n]+", " ", capsys.readouterr().out)


def broken() -> None:
    raise RuntimeError("The metadata of the run is damaged.")


class ReadsValues(TwoLayers):
    """Reads a tensor in its forward pass: `how` says in which way."""

    def __init__(self, how: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.how = how

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        self.how(next(self.parameters()))
        return super().forward(batch, step)


@pytest.mark.parametrize(
    "how",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x.tolist(),
        lambda x: x.detach().numpy(),
        lambda x: x + torch.ones(x.shape),  # of another device
    ],
)
def test_a_method_that_reads_values_is_not_checked(
    how: Callable[[Tensor], object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        dry_forward(ReadsValues(how))
    assert "ReadsValues is not checked before the run" in caplog.text


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (lambda x: x @ torch.ones(x.shape[-1] + 1, 1, device=x.device), RuntimeError),
        (lambda x: sum(["a"]), TypeError),  # pyright: ignore
        (lambda x: broken(), RuntimeError),
    ],
)
def test_other_errors_of_a_method_end_the_run(how: Callable[[Tensor], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        dry_forward(ReadsValues(how))


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_is_checked(name: str, caplog: pytest.LogCaptureFixture) -> None:
    method = small.method(name, seed=0)
    before = torch.random.get_rng_state()
    with caplog.at_level("INFO"):
        dry_forward(method)
    assert "not checked" not in caplog.text
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dino.local_size 3", "Images of 3 x 3 pixels are smaller than one patch"),
        ("--encoder navit_micro --dino.local_size 10", "do not divide into patches of 4"),
        ("--encoder navit_micro --encoder.image_size 8", "Build the encoder with image_size"),
    ],
)
def test_crops_that_the_encoder_does_not_take_are_refused_before_the_start(arguments: str, message: str) -> None:
    chosen = arguments.split()
    config = resolve(load(["--data", "x.tar", "--encoder", "vit_micro", "--dino.global_size", "16", *chosen]), 1000)
    with pytest.raises(ValueError, match=message):
        dry_forward(dino(config))


@pytest.mark.slow
def test_a_run_that_cannot_fit_in_memory_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--method", "dino", "--encoder", "vit_micro", "--output", str(tmp_path / "run"), "--workers", "0"]
    needed = state_bytes(dino(settings()))
    assert needed < 10**8
    monkeypatch.setattr(recompute, "memory", lambda: 10**8)
    assert main([*words, "--dry_run", "--batch_size", "1024"]) == 0
    said = capsys.readouterr().out
    assert "do not fit this machine of 0.1 GB. --accumulate" in said
    monkeypatch.setattr(build, "memory", lambda: 10**6)
    for more in ([], ["--dry_run"]):
        assert main([*words, *more]) == 2
        assert "but this machine has 1.0 MB of memory. Choose a smaller encoder" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_verdict_names_the_accumulation_that_fits() -> None:
    config = settings("--batch_size", "64")
    need = Needs(trained=1, state=6 * 10**9, activations=47 * 10**9, checkpoint=1)
    plan = Plan(None, 50, 2, 3, 0, need, "an H100 of 80 GB", 80 * 10**9)  # pyright: ignore[reportArgumentType]
    assert fit(config, plan) == (
        True, "6.0 GB of weights, gradients and optimizer + 47.0 GB of activations fit an H100 of 80 GB.",
    )  # fmt: skip
    fits, said = fit(config, replace(plan, place="a GPU of 24 GB", capacity=24 * 10**9))
    assert not fits
    assert "do not fit a GPU of 24 GB. --accumulate 4 needs 6.0 GB + 11.8 GB." in said
    _, uneven = fit(config, replace(plan, processes=3, place="a GPU of 24 GB", capacity=24 * 10**9))
    assert "--accumulate 4 needs 6.0 GB + 12.8 GB." in uneven  # of 22 images, forward passes of at most 6
    assert fit(config, replace(plan, capacity=54 * 10**9))[0]
    assert "Choose a smaller encoder" in fit(config, replace(plan, capacity=6 * 10**9))[1]
