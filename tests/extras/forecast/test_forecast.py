"""The forecast of `--dry_run`."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera.data.batch import Batch
from tessera.extras.forecast import forecast
from tessera.pretrain import job
from tessera.pretrain.command_line import load
from tessera.pretrain.config import RunConfig
from tessera.pretrain.job import large_crops, run_job
from tessera.pretrain.resolve import make_accelerator
from tessera.pretrain.run import main
from tessera.runtime.settings import SettingsError
from tests.data.batches import saved
from tests.pretrain import small
from tests.pretrain.test_preflight import HIDDEN, WIDTH, TwoLayers

SMALL = (
    "--encoder vit_micro --encoder.depth 1 --dino.local_crops 1 --dino.prototypes 32 --dino.hidden_dim 16 "
    "--dino.bottleneck_dim 8 --batch_size 16 --steps 30 --workers 0 --precision fp32 --evaluation.pictures 0"
)
pytestmark = pytest.mark.usefixtures("fresh_engine")


def report(text: str, tmp_path: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the table of the forecast in one line, without its borders."""
    config: RunConfig = load([*SMALL.split(), "--dry_run", *text.split()])
    accelerator, engine_class = make_accelerator(config)
    run_job(accelerator, engine_class, config, tmp_path)  # pyright: ignore[reportArgumentType]
    table = capsys.readouterr().out.split("forecast", 1)[1]
    return " ".join(re.sub(r"[^ -~]", " ", table).split())


@pytest.mark.parametrize("workers", [0, 2])
def test_time_follows_from_measured_speeds(
    tmp_path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """A step of 16 images in 0.5 s, and a loader of 64 images/s: in turns 21.3 images/s, with workers 32."""
    monkeypatch.setattr(forecast, "step_seconds", lambda run, batch: len(batch) / 32)
    monkeypatch.setattr(forecast, "loader_speed", lambda batches: 64.0)
    shown = report(f"--workers {workers}", tmp_path, capsys)
    assert "training, images/s 32 (500 ms per step, measured)" in shown
    assert f"loader, images/s {64 * max(workers, 1)} (64 per worker, measured)" in shown
    seconds = 30 * 16 / 32 if workers else 30 * 16 * (1 / 32 + 1 / 64)
    assert f"{seconds:.1f} s" in shown


@pytest.mark.parametrize(("constant", "measured", "expected"), [(10, [4, 8], 18), (100, [4], 4 * 102)])
def test_a_long_step_is_extrapolated(
    tmp_path: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    constant: int,
    measured: list[int],
    expected: int,
) -> None:
    """10 s and 0.5 s for each image: of 4 and 8 images, not of 16. After a step of 102 s, no further step is done."""
    seen = []

    def seconds(run: object, batch: Batch) -> float:
        seen.append(len(batch))
        return constant + len(batch) / 2

    monkeypatch.setattr(forecast, "step_seconds", seconds)
    assert f"({1000 * expected:,} ms per step" in report("", tmp_path, capsys)
    assert seen == measured


@pytest.mark.parametrize(("steps", "done", "expected"), [((9, 3, 2), 3, 2), ((9, 22, 1), 2, 22), ((31, 1, 1), 1, 31)])
def test_slow_steps_are_measured_less_often(
    monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...], done: int, expected: int
) -> None:
    clock, own = [0.0], iter(steps)

    def work(*_: object) -> None:
        clock[0] += next(own)

    monkeypatch.setattr(forecast.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(forecast, "start_step", lambda *_: None)
    monkeypatch.setattr(forecast, "finish_step", work)
    run: Any = SimpleNamespace(config=SimpleNamespace(accumulate=1))
    assert forecast.step_seconds(run, None) == expected  # pyright: ignore[reportArgumentType]
    assert len(list(own)) == 3 - done


def test_real_steps_and_a_real_loader_are_measured(
    tmp_path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = list[str]()
    monkeypatch.setattr(job, "large_crops", lambda *own: lines.append(large_crops(*own)))
    shown = report("--accumulate 2", tmp_path, capsys)
    assert lines == [""]
    config: RunConfig = load([*SMALL.split(), "--dino.global_size", "96"])
    config = config.model_copy(update={"data": config.data.with_statistics()})
    images = saved(np.zeros((40, 30, 3), dtype=np.uint8), "PNG")
    source: Any = SimpleNamespace(images=40, image=lambda number: images)
    assert large_crops(config, [source]) == (
        "The first images have at most 40 pixels, but crops have 96. Smaller crops train faster: --dino.global_size 40."
    )
    assert re.search(r"training, images/s [1-9][\d,]* \([1-9][\d,]* ms per step, measured\)", shown)
    assert re.search(r"loader, images/s [1-9][\d,]*", shown)


def test_steps_of_a_named_gpu_are_counted(tmp_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    one, eight = (report(text, tmp_path, capsys) for text in ("--gpu h100", "--gpu h100 --gpus 8"))
    assert re.search(r"images/s of 1 H100 [1-9][\d,]*, limited by the launch of kernels \(a guess", one)
    assert "sent by a GPU" not in one
    assert "kB of gradients" in eight


def test_the_plan_names_the_cpus_that_keep_a_gpu_busy(
    tmp_path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed of an H100 here is that of the launch of kernels, and each loader worker reads 100 images/s."""
    monkeypatch.setattr(forecast, "loader_speed", lambda batches: 100.0)
    for gpus in (1, 8):
        shown = report(f"--gpu h100 --gpus {gpus}", tmp_path, capsys)
        speed = float(re.findall(r"images/s of \d H100 ([\d,]+)", shown)[0].replace(",", "")) / gpus
        cpus, workers, fed = re.findall(r"CPUs that keep a GPU busy (\d+) \(--workers (\d+) for ([\d,.]+)", shown)[0]
        assert float(fed.replace(",", "")) == pytest.approx(speed, abs=0.5)
        assert int(cpus) - 1 == int(workers) == -(-speed // 100)
        assert "if each reads 100 as here" in shown


def test_the_flop_of_a_step_are_those_counted_by_hand() -> None:
    crop = 2 * (2 * WIDTH * HIDDEN + 3 * HIDDEN)  # forward pass and gradients, without that of the image
    flop, kernels = forecast.step_work(TwoLayers())
    assert flop == 2 * crop
    assert 5 < kernels < 40


def test_settings_are_those_of_the_gpu(tmp_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    config: RunConfig = load(["--encoder", "vit_micro", "--encoder.depth", "1", "--dry_run", "--gpu", "a100"])
    accelerator, _ = make_accelerator(config)
    assert accelerator.mixed_precision == "bf16"


def test_the_loader_is_measured_after_its_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [type("Five", (), {"__len__": lambda self: 5})() for _ in range(9)]
    for given, expected in ((batches, 5), (batches[:1], 5)):  # a batch a second, which only the first reading shows
        clock = iter(np.arange(100.0))
        monkeypatch.setattr(forecast.time, "perf_counter", lambda clock=clock: float(next(clock)))
        assert forecast.loader_speed(given) == pytest.approx(expected)  # pyright: ignore


@pytest.mark.parametrize(("text", "message"), [
    ("--gpu h100 --compile true", "not compiled"),
])  # fmt: skip
def test_a_forecast_that_would_mislead_is_refused(
    text: str, message: str, tmp_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsError, match=message):
        report(text, tmp_path, capsys)


def test_several_processes_cannot_count() -> None:
    config = load([*SMALL.split(), "--dry_run", "--gpu", "h100"])
    with pytest.raises(SettingsError, match="without a launcher"):
        forecast.gpu_memory(config, 2)


@pytest.mark.slow
def test_a_dry_run_continues_where_the_run_does_and_refuses_what_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    train, val = small.scored_shards()
    output = tmp_path / "run"
    words = [*SMALL.split(), "--data", train, "--evaluation.val", val, "--output", str(output), "--steps", "2"]
    words += ["--dino.global_size", "16", "--dino.local_size", "16", "--evaluation.linear_iterations", "0"]
    assert main(words) == 0
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    resumed = ["--resume", str(output), "--dry_run"]
    caplog.set_level("INFO")
    for more, refused in (
        ([], "holds a run"),
        (["--resume", "--data", val], "is in both --data and --evaluation.val"),
        (["--resume", "--dino.prototypes", "64"], "does not fit this run"),
        (["--resume", "--encoder.depth", "2"], "is a checkpoint of another run"),
    ):
        assert main([*words, *more, "--dry_run"]) == 2
        assert refused in capsys.readouterr().err
    assert main(resumed) == 0
    assert "The run has done all of its 2 steps" in caplog.text
    assert "forecast" not in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecast, "step_seconds", lambda run, batch: len(batch) / 32)
        patch.setattr(forecast, "loader_speed", lambda batches: 64.0)
        assert main([*resumed, "--steps", "12", "--workers", "1"]) == 0
    assert "continues at step 2 of 12" in caplog.text
    assert f"{10 * 16 / 32:.1f} s at 32 images/s" in capsys.readouterr().out
    assert main([*resumed, "--steps", "12", "--batch_size", "32", "--dino.global_size", "32"]) == 0
    assert "because batch_size is 32, but step-00000002 was written with other data or settings." in caplog.text
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
