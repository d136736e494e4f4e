"""Checkpoints survive kills and full disks."""

import multiprocessing
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

import encoders
from pretrain import checkpoint
from pretrain.checkpoint import CheckpointError, Position
from pretrain.methods.dino import DINO, DINOConfig, resolve
from pretrain.optim import OptimConfig, parameter_groups

SETTINGS = {"method": "dino", "encoder": {"variant": "vit_micro", "depth": 1}, "seed": 0, "batch_size": 4}
SETTINGS |= {"stream": {}, "shards": "abc"}


def make(seed: int = 0):
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True)
    config, _ = resolve(DINOConfig(prototypes=32, hidden_dim=24, bottleneck_dim=12), OptimConfig(), 1000, 4, 10)
    method = DINO(encoders.build("vit_micro", depth=1, dim=24, heads=2), config, 10)
    wrapped, optimizer = accelerator.prepare(
        method, torch.optim.AdamW(parameter_groups(method, method.frozen()), lr=1e-3)
    )
    for p in method.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    optimizer.step()
    return accelerator, wrapped, optimizer


def test_restores_everything(tmp_path: Path) -> None:
    accelerator, wrapped, optimizer = make(0)
    path = checkpoint.save(
        tmp_path, accelerator, wrapped, optimizer, wrapped.trained_encoder(), Position(7, 70), SETTINGS
    )
    expected = torch.rand(3), random.random()
    saved = {k: v.clone() for k, v in wrapped.state_dict().items()}
    moments = [optimizer.state[p]["exp_avg"].clone() for g in optimizer.param_groups for p in g["params"]]
    accelerator, wrapped, optimizer = make(1)
    assert not torch.equal(wrapped.state_dict()["center"] + 1, saved["center"])
    position = checkpoint.restore(path, accelerator, wrapped, optimizer)
    assert position == Position(7, 70)
    assert all(torch.equal(v, saved[k]) for k, v in wrapped.state_dict().items())
    restored = [optimizer.state[p]["exp_avg"] for g in optimizer.param_groups for p in g["params"]]
    assert all(torch.equal(a, b) for a, b in zip(moments, restored, strict=True))
    assert all("frozen_steps" in g and "decays" in g for g in optimizer.param_groups)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_retention_by_count_and_by_interval(tmp_path: Path) -> None:
    accelerator, wrapped, optimizer = make()
    for step in range(1, 8):
        checkpoint.save(
            tmp_path, accelerator, wrapped, optimizer, wrapped.trained_encoder(), Position(step, step), SETTINGS
        )
        checkpoint.retain(tmp_path, keep=2, keep_every=3)
        assert (tmp_path / "latest").resolve().name == f"step-{step:08d}"
    assert [p.name for p in checkpoint.whole(tmp_path)] == [f"step-{s:08d}" for s in (3, 6, 7)]


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    accelerator, wrapped, optimizer = make()
    first = checkpoint.save(
        tmp_path, accelerator, wrapped, optimizer, wrapped.trained_encoder(), Position(1, 1), SETTINGS
    )
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))  # no file may grow beyond 20 kB
        with pytest.raises(
            CheckpointError, match=r"could not save .*step-00000002: .*needs \d+\.\d+ GB.*step-00000001"
        ):
            checkpoint.save(
                tmp_path, accelerator, wrapped, optimizer, wrapped.trained_encoder(), Position(2, 2), SETTINGS
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")] == []
    assert (tmp_path / "latest").resolve() == first.resolve()
    checkpoint.restore(first, accelerator, wrapped, optimizer)


def _save_on_a_full_disk(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    accelerator, wrapped, optimizer = make()
    assert accelerator.num_processes == 2
    encoder = accelerator.unwrap_model(wrapped).trained_encoder()
    checkpoint.save(Path(folder), accelerator, wrapped, optimizer, encoder, Position(1, 1), SETTINGS)
    if rank == 0:  # the other process sees nothing of it
        checkpoint.shutil.disk_usage = lambda _: type("Usage", (), {"free": 1000})()
    with pytest.raises(CheckpointError, match=r"has 0\.00 GB free.*step-00000001, which is whole"):
        checkpoint.save(Path(folder), accelerator, wrapped, optimizer, encoder, Position(2, 2), SETTINGS)
    Path(folder, f"said-{rank}").touch()


@pytest.mark.slow
def test_no_process_waits_for_one_whose_disk_is_full(tmp_path: Path, free_port: int) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_save_on_a_full_disk, args=(rank, free_port, str(tmp_path))) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()  # it hangs, if it still runs
    assert {p.name for p in tmp_path.iterdir()} == {"said-0", "said-1", "step-00000001", "latest"}


def test_a_resumed_run_heeds_its_own_settings(tmp_path: Path) -> None:
    accelerator, wrapped, optimizer = make()
    path = checkpoint.save(
        tmp_path,
        accelerator,
        wrapped,
        optimizer,
        wrapped.trained_encoder(),
        Position(7, 70, alarm={"rung": ["rank"]}),
        SETTINGS,
    )
    (tmp_path / "latest").unlink()  # as a kill between the rename and the link leaves it
    accelerator, wrapped, optimizer = make()
    for group in optimizer.param_groups:
        group |= {"betas": (0.5, 0.6), "frozen_steps": 99}
    position = checkpoint.restore(path, accelerator, wrapped, optimizer)
    assert position.alarm == {"rung": ["rank"]}
    assert all(g["betas"] == (0.5, 0.6) and g["frozen_steps"] == 99 for g in optimizer.param_groups)
    assert (tmp_path / "latest").resolve() == path.resolve()


def test_too_little_space_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, wrapped, optimizer = make()
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(CheckpointError, match=r"has 0\.00 GB free.*from the beginning"):
        checkpoint.save(tmp_path, accelerator, wrapped, optimizer, wrapped.trained_encoder(), Position(1, 1), SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_another_encoder_is_refused_and_another_order_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, wrapped, optimizer = make()
    path = checkpoint.save(
        tmp_path, accelerator, wrapped, optimizer, wrapped.trained_encoder(), Position(1, 1), SETTINGS
    )
    checkpoint.check_fits(path, SETTINGS)
    assert "another order" not in caplog.text
    checkpoint.check_fits(path, SETTINGS | {"shards": "abd", "seed": 1})
    assert "changed since step-00000001: seed 0 -> 1, shards abc -> abd" in caplog.text
    assert "the samples go on in another order" in caplog.text
    with pytest.raises(CheckpointError, match=r"encoder\.depth is 1 there and 2 here"):
        checkpoint.check_fits(path, SETTINGS | {"encoder": {"variant": "vit_micro", "depth": 2}})


def test_damage_is_said(tmp_path: Path) -> None:
    accelerator, wrapped, optimizer = make()
    path = checkpoint.save(
        tmp_path, accelerator, wrapped, optimizer, wrapped.trained_encoder(), Position(1, 1), SETTINGS
    )
    (shard,) = path.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.restore(path, accelerator, wrapped, optimizer)


def _save_for_ever(folder: str) -> None:
    torch.set_num_threads(1)
    accelerator, wrapped, optimizer = make()
    step = 0
    while True:
        step += 1
        checkpoint.save(
            Path(folder), accelerator, wrapped, optimizer, wrapped.trained_encoder(), Position(step, step), SETTINGS
        )
        checkpoint.retain(Path(folder), keep=1, keep_every=None)


@pytest.mark.slow
def test_killed_at_any_moment_of_saving(tmp_path: Path) -> None:
    rng = random.Random(0)
    context = multiprocessing.get_context("fork")
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        process = context.Process(target=_save_for_ever, args=(str(folder),))
        process.start()
        end = time.monotonic() + 60
        while len(checkpoint.whole(folder)) == 0:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        newest = checkpoint.whole(folder)[-1]
        assert (folder / "latest" / "trainer.json").exists()
        accelerator, wrapped, optimizer = make(1)
        assert checkpoint.restore(newest, accelerator, wrapped, optimizer).step == int(newest.name[5:])
        checkpoint.retain(folder, keep=1, keep_every=None)
        assert {p.name for p in folder.iterdir()} == {newest.name, "latest"}
