"""The real command: resumed after a kill, over two processes, and with everything a user can get wrong."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from rich.filesize import decimal

from tessera import encoders
from tessera.data.demo import demo_shards
from tessera.pretrain.build import build_on_meta
from tessera.pretrain.command_line import load
from tessera.pretrain.engines.engine import Shards
from tessera.pretrain.preflight import state_bytes
from tessera.pretrain.resolve import resolve
from tessera.pretrain.run import main
from tests.launched import TINY, records
from tests.pretrain.small import flags, losses


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(launch, fork, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words = [*TINY, "--steps", "60", "--encoder.drop_path", "0.2"]  # a fast machine, too, is killed before the end
    log = fork([*words, "--output", str(whole)]).wait()
    assert (whole / "encoder.safetensors").exists(), log
    run = launch([*words, "--output", str(broken)])
    run.wait_for((broken / "checkpoints" / "step-00000004").exists)
    run.kill()
    done = max(losses(broken), default=0)
    assert done < 60, "the kill came too late to show anything"
    assert (broken / "checkpoints" / "latest").resolve().name >= "step-00000004"
    # the run's own settings are taken up again, also with another number of loader workers
    log = fork(["--output", str(broken), "--resume", "--workers", "2"]).wait()
    assert "resumed at step" in log
    assert losses(broken) == losses(whole)
    assert sorted(losses(whole)) == list(range(1, 61))
    ours, theirs = (encoders.load(folder / "encoder.safetensors").state_dict() for folder in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    knn = [{r["step"]: r["knn_top1"] for r in records(f) if "knn_top1" in r} for f in (whole, broken)]
    assert knn[0] == knn[1]
    assert sorted(knn[0]) == [0, 60]


@pytest.mark.slow
def test_run_folder_is_as_documented(launch, tmp_path: Path) -> None:
    output = tmp_path / "run"
    log = launch([*TINY, "--output", str(output), "--evaluate_every", "6", "--optim.lr", "4e-3"], direct=False).wait()
    names = {p.name for p in output.iterdir()}
    expected = "checkpoints config.yaml encoder.json encoder.safetensors metrics.jsonl pictures tensorboard"
    assert names >= {*expected.split(), "machine.jsonl"}
    assert {p.name for p in (output / "pictures").iterdir()} == {"crops.png", "attention.png", "pca.png"}
    assert {p.name for p in (output / "checkpoints").iterdir()} == {"step-00000008", "step-00000012", "latest"}
    assert {r["step"] for r in records(output) if "knn_top1" in r} == {0, 6, 12}
    last = records(output)[-1]
    wanted = "images loss lr weight_decay grad_norm images_per_second data_wait teacher_entropy teacher_student_kl "
    wanted += "prototypes_used feature_rank mfu tokens_per_second"
    assert set(wanted.split()) <= set(last)
    assert last["images"] == 12 * 16
    settings = yaml.safe_load((output / "config.yaml").read_text())
    assert settings["optim"]["lr"] == 4e-3
    assert settings["optim"]["warmup_steps"] == 1  # derived, and written down
    assert "tessera linear_probe --checkpoint" in log
    assert str(output / "encoder.safetensors") in re.sub(r"\s*\n\s*", "", log) or "encoder.safetensors" in log
    # the encoder of a checkpoint is one too
    encoders.load(output / "checkpoints" / "latest" / "encoder.safetensors")


@pytest.mark.slow
def test_dry_run_of_a_method_that_sums_over_processes(fork, tmp_path: Path) -> None:
    # FSDP2 shards weights, gradients and moments over the two processes
    more = ["--encoder", "vit_micro", *(word for pair in flags("dinov2").items() for word in pair)]
    words = ["--method", "dinov2", "--dry_run", "--output", str(tmp_path / "run"), *more]
    log = fork(words, processes=2, engine="fsdp2").wait()
    assert "images per forward pass of a process" in log
    method = build_on_meta(resolve(load([*words, "--data", demo_shards()[0]]), 1437))
    assert method is not None
    row = re.search("weights, gradients, optimizer +(.*)", log)
    assert row
    assert row[1].strip() == decimal(state_bytes(method, Shards(2, 2, 2)))
    assert row[1].strip() != decimal(state_bytes(method))
    assert "is lost" not in log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/nowhere/x-{0..3}.tar"], "/nowhere/x-"),
        (["--batch_size", "100000"], "A batch of 100000 takes 100000 images from a source that has only 1437"),
        (["--accumulate", "17"], "A batch of 16 images is too small for 17 accumulated passes"),
        (["--resume"], "--resume needs --output"),
        (["--resume", "--output", "/nowhere/run"], "/nowhere/run holds no run to continue"),
        (["--precision", "fp16"], "Use bf16 or fp32"),
        (["--encoder.bf16_residuals", "true"], "needs --precision bf16, but the precision of this run is fp32"),
        (["--encoder.heads", "5"], "heads"),
        (["--dino.loca_crops", "5"], "did you mean '--dino.local_crops'"),
    ],
)
def test_what_cannot_work_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main([*TINY, "--dry_run", *arguments]) == 2
    assert message in re.sub(r"\s+", " ", capsys.readouterr().err)
