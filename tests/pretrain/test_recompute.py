"""encoder.checkpoint_activations auto: as little recomputation as the memory allows, and the same results."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tessera import encoders
from tessera.pretrain import recompute
from tessera.pretrain.activations import Activations
from tessera.pretrain.build import build_on_meta
from tessera.pretrain.command_line import load
from tessera.pretrain.config import AUTO, RunConfig, recomputes, to_yaml
from tessera.pretrain.engines.engine import UNSHARDED, Shards
from tessera.pretrain.forecasts import gpu_memory
from tessera.pretrain.methods.method import Method
from tessera.pretrain.recompute import Recomputation, choose, with_recomputation
from tessera.pretrain.resolve import resolve
from tessera.pretrain.run import main
from tests.installed import needs_extra
from tests.pretrain import small
from tests.ranks import on_processes

TINY = (
    "--data x.tar --dino.global_size 16 --dino.local_size 8 --dino.local_crops 3 --dino.hidden_dim 32 "
    "--dino.bottleneck_dim 16 --dino.prototypes 64 --steps 8"
)


def settings(*arguments: str, encoder: str = "vit_micro") -> RunConfig:
    depth = ["--encoder.depth", "2"] if encoder == "vit_micro" else []
    return resolve(load([*TINY.split(), "--encoder", encoder, *depth, *arguments]), 10**9)


def count(method: Method, precision: str, images: int) -> Activations:
    """Activations of ViT-S/16 by DINO, in bytes an image, in place of a count that takes seconds."""
    del precision
    value: Any = method.trained_encoder().checkpoint_activations
    kept = {False: 111_000_000, "selective": 73_000_000, True: 9_000_000}[value]
    return Activations(images * kept, 0 if value is True else images * 9_000_000)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "activations", count)
    monkeypatch.setattr(recompute, "state_bytes", lambda method, shards: 10**6 // shards.weights)


@needs_extra("forecast")
@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize(
    ("gpu", "images", "value", "fits"),
    [
        ("a100", 512, False, True),
        ("a100", 800, "selective", True),
        ("a100", 1024, True, True),
        ("a100", 8192, True, False),
        ("h100", 800, "selective", True),
        ("h200", 800, False, True),
        ("h200", 1500, "selective", True),
        ("h200", 2048, True, True),
    ],
)
def test_the_memory_of_a_named_gpu_decides(gpu: str, images: int, value: Any, fits: bool) -> None:
    config = settings("--dry_run", "--gpu", gpu, "--batch_size", str(2 * images), "--gpus", "2")
    accelerator: Any = SimpleNamespace(num_processes=1, is_main_process=True)
    built, chosen = with_recomputation(config, build_on_meta(config), accelerator, UNSHARDED)
    assert chosen is not None
    assert (chosen.value, chosen.fits) == (value, fits)
    assert built.encoder_settings["checkpoint_activations"] == value
    assert gpu_memory(config, 1)[0] in str(chosen)
    assert "checkpoint_activations: auto" in to_yaml(config)


@pytest.mark.usefixtures("counts")
def test_state_blocks_and_the_largest_share_count() -> None:
    config, state = settings("--batch_size", "101"), 10**6

    def choice(size: float, processes: int = 1, shards: Shards = UNSHARDED) -> Any:
        chosen = choose(config, build_on_meta(config), "a GPU", round(size / 0.9), processes, shards, on_gpu=True)
        return chosen.value if chosen.fits else "nothing fits"

    assert choice(101 * 111e6 + state) is False
    assert choice(101 * 111e6) == "selective"
    assert choice(101 * 18e6 + state) is True  # a block is recomputed at a time
    assert choice(101 * 17e6) == "nothing fits"
    assert choice(2 * 111e6 + state, 100) is False  # of 101 images, one process has two
    assert choice(2 * 73e6 + state, 100) == "selective"
    assert choice(1 * 18e6 + state / 50, 101) == "nothing fits"
    assert choice(1 * 18e6 + state / 50, 101, Shards(101, 101, 101)) is True


def test_a_cpu_recomputes_only_if_the_run_would_end(counts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings("--batch_size", "100", "--dino.global_size", "224")

    def choice(size: int) -> Any:
        return choose(config, build_on_meta(config), "", size, 1, UNSHARDED, on_gpu=False).value

    assert choice(12 * 10**9) is False
    assert choice(11 * 10**9) == "selective"
    monkeypatch.setattr(recompute, "activations", None)  # not called, because counting takes seconds
    assert choice(10**12) is False


@pytest.mark.parametrize(
    ("variant", "values"),
    [("vit_micro", [False, "selective", True]), ("swin_micro", [False, True])],
)
def test_a_family_says_what_it_recomputes(variant: str, values: list[Any]) -> None:
    assert [value for value in (False, "selective", True) if recomputes(variant, value)] == values
    config = settings(encoder=variant)
    assert getattr(config.encoder, "checkpoint_activations", None) == AUTO
    assert "checkpoint_activations" not in config.encoder_settings
    asked = settings("--encoder.checkpoint_activations", "auto", encoder=variant)
    assert encoders.build(**asked.encoder_settings).checkpoint_activations is False


@needs_extra("backbones")
def test_an_encoder_that_cannot_recompute_has_no_such_setting() -> None:
    pytest.importorskip("timm")
    config = load(["--data", "x.tar", "--encoder", "timm:resnet10t"])
    assert not recomputes("timm:resnet10t", True)
    assert not hasattr(config.encoder, "checkpoint_activations")
    accelerator: Any = SimpleNamespace(num_processes=1, is_main_process=True)
    assert with_recomputation(config, build_on_meta(config), accelerator, UNSHARDED) == (config, None)


def test_a_method_that_cannot_be_counted_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no values")

    monkeypatch.setattr(recompute, "activations", fail)
    config = settings()
    chosen = choose(config, build_on_meta(config), "", 10**9, 1, UNSHARDED, on_gpu=True)
    assert chosen == Recomputation(False, "the memory of the activations is not known: no values")


def _the_smallest_memory_counts(rank: int) -> None:
    recompute.activations, sizes = count, (2 * 10**9, 10**10)
    recompute.device_memory = lambda *_: recompute.DeviceMemory("a GPU", sizes[rank])
    accelerator: Any = SimpleNamespace(
        num_processes=2, is_main_process=rank == 0, device=torch.device("cuda"), process_index=rank
    )
    config = settings("--batch_size", "100")
    _, chosen = with_recomputation(config, build_on_meta(config), accelerator, UNSHARDED)
    assert chosen is not None
    assert chosen.value is True
    dist.barrier()


@pytest.mark.slow
def test_all_processes_choose_for_the_smallest_memory(free_port: int) -> None:
    on_processes(_the_smallest_memory_counts, free_port, group=True)


@pytest.mark.slow
def test_a_run_that_is_resumed_with_another_choice_is_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(value: Any, *words: str) -> dict[str, Tensor]:
        monkeypatch.setattr(recompute, "choose", lambda *_, **__: Recomputation(value, "asked"))
        assert main([*words]) == 0
        said = f"the backward pass recomputes {recompute.NAMES[value]} (encoder.checkpoint_activations auto): asked"
        assert said in caplog.text
        return encoders.load(Path(words[-1]) / "encoder.safetensors").state_dict()

    caplog.set_level("INFO")
    whole = tmp_path / "whole"
    words = (
        "--encoder vit_micro --encoder.drop_path 0.3 --batch_size 16 --workers 0 --evaluation.pictures 0 --steps 4 "
        "--evaluation.linear_iterations 0 --checkpoint_every 2 --checkpoint.keep 9 --optim.warmup_steps 0 --output"
    )
    expected = start(False, *words.split(), str(whole))
    for value in ("selective", True):
        part = tmp_path / str(value)
        shutil.copytree(whole, part, symlinks=True)
        (part / "encoder.safetensors").unlink()
        shutil.rmtree(part / "checkpoints" / "step-00000004")
        (part / "checkpoints" / "latest").unlink()
        (part / "checkpoints" / "latest").symlink_to("step-00000002")
        caplog.clear()
        found = start(value, "--resume", "--output", str(part))
        assert "resumed at step 2 of 4" in caplog.text
        assert "settings changed" not in caplog.text
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert small.losses(part) == small.losses(whole)
