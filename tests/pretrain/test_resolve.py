"""Settings of a run that follow from the machine, and the shards on which all processes must agree."""

import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tessera.data.shards import ShardError, Source
from tessera.data.shards.tar_shard import LocalTar, RemoteTar
from tessera.pretrain import job
from tessera.pretrain import resolve as resolving
from tessera.pretrain.command_line import load
from tessera.pretrain.config import settings_model
from tessera.pretrain.methods import METHODS
from tessera.pretrain.run import main
from tessera.runtime.isolation import isolated
from tessera.runtime.settings import SettingsError
from tests.pretrain.toy import ToyLabels
from tests.ranks import on_processes


def listed(*names):
    counts = np.full(len(names), 3)
    return Source([RemoteTar(f"http://h/{name}", 10, "") for name in names], counts, counts, counts)


def _agree(rank: int) -> None:
    both, one = listed("a.tar", "b.tar"), listed("a.tar")
    assert resolving.agree([both], [1024]) == resolving.fingerprint([both], [1024])
    with pytest.raises(ShardError, match="Process 1 sees 3 images, and process 0 sees 6"):
        resolving.agree([one if rank else both], [1024])


def test_processes_that_see_other_shards(free_port: int):
    on_processes(_agree, free_port, group=True)


def test_the_fingerprint_is_of_the_order():
    both = listed("a.tar", "b.tar")
    known = resolving.fingerprint([both], [1024])
    moved = Source([LocalTar(f"/disk/{n}", 99, "x") for n in ("a.tar", "b.tar")], both.counts, both.counts, both.counts)
    assert resolving.fingerprint([moved], [1024]) == known  # elsewhere, but the same order
    assert resolving.fingerprint([listed("b.tar", "a.tar")], [1024]) != known
    assert resolving.fingerprint([both], [512]) != known


@pytest.mark.parametrize(
    ("variant", "instructions", "launcher", "expected"),
    [
        ("vit_tiny", True, "no", "bf16"),
        ("vit_tiny", False, "no", "fp32"),
        ("vit_micro", True, "no", "fp32"),  # the conversions would take as long as they save
        ("swin_tiny", True, "no", "bf16"),
        ("vit_micro", False, "bf16", "bf16"),  # the user's choice
    ],
)
def test_automatic_precision_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, variant: str, instructions: bool, launcher: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    config = settings_model(variant)()
    assert resolving.with_precision(config).precision == expected


def test_emulated_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    bf16 = load(["--precision", "bf16"])
    assert resolving.emulates_bf16(bf16)
    assert not resolving.emulates_bf16(load(["--precision", "fp32"]))
    assert not resolving.emulates_bf16(load(["--precision", "bf16", "--dry_run", "--gpu", "h100"]))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert not resolving.emulates_bf16(bf16)


@pytest.mark.usefixtures("fresh_engine")
def test_a_run_in_emulated_bf16_is_told_to_be_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(job, "emulates_bf16", lambda config: True)  # an emulated step takes seconds
    words = ["--method", "mae", "--encoder.depth", "1", "--batch_size", "4", "--output", str(tmp_path / "run")]
    assert main([*words, "--dry_run"]) == 0
    assert "this machine emulates bf16" in caplog.text


@pytest.mark.parametrize(("capability", "expected"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_that_emulate_bf16_train_in_fp32(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    device = type("Device", (), {"major": capability[0], "minor": capability[1]})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda *_: True)  # by emulation
    assert resolving.faster_in_bf16(settings_model("vit_small")()) == expected


@pytest.mark.parametrize(
    ("variant", "given", "expected"),
    [
        ("vit_micro", {"precision": "bf16"}, True),
        ("rope_vit_micro", {"precision": "bf16"}, True),
        ("vit_micro", {"precision": "fp32"}, False),
        ("vit_micro", {"precision": "bf16", "encoder": {"bf16_residuals": False}}, False),
        ("swin_micro", {"precision": "bf16"}, False),  # has no such setting
    ],
)
def test_tokens_stay_in_bf16_on_a_gpu(monkeypatch, variant: str, given: dict[str, Any], expected: bool) -> None:
    model = settings_model(variant)
    given = {"steps": 10, "batch_size": 4} | given
    own = {"encoder": {"variant": variant} | given.pop("encoder", {})}
    on_cpu = resolving.resolve(model(**given, **own), 1000)
    assert on_cpu.encoder_settings.get("bf16_residuals", False) is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = resolving.resolve(model(**given, **own), 1000)
    assert found.encoder_settings.get("bf16_residuals", False) == expected


def _classes_are_counted_for_longer_than_collectives_wait(rank: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))

    def slow(sources: object) -> int:
        del sources
        time.sleep(3.5)
        return 7

    resolving.count_classes = slow
    METHODS.register("classifier", ToyLabels)
    config = settings_model("vit_micro")(method="classifier")
    accelerator = SimpleNamespace(is_main_process=rank == 0)
    assert resolving.measure_classes(config, [], accelerator) == 7  # pyright: ignore[reportArgumentType]
    dist.destroy_process_group()


@pytest.mark.slow
def test_the_other_processes_wait_while_the_main_process_reads_labels(free_port: int) -> None:
    on_processes(_classes_are_counted_for_longer_than_collectives_wait, free_port)


def test_deterministic_algorithms_are_used_where_asked(fresh_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        for asked in ("false", "true"):
            resolving.make_accelerator(load(["--encoder", "vit_micro", "--deterministic", asked]))
            assert torch.are_deterministic_algorithms_enabled() == (asked == "true")
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_tf32_is_for_the_products_of_a_gpu_that_has_it(fresh_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="--precision tf32 needs a GPU with TF32"):
        resolving.make_accelerator(load(["--precision", "tf32"]))
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    for precision, products in (("fp32", "none"), ("tf32", "tf32")):
        with isolated():
            accelerator, _ = resolving.make_accelerator(load(["--precision", precision]))
            assert accelerator.mixed_precision == "no"
            assert torch.backends.cuda.matmul.fp32_precision == products
    named = resolving.with_precision(load(["--precision", "tf32", "--dry_run", "--gpu", "a100"]))
    assert named.precision == "tf32"
