"""The training step and the loop around it, with methods small enough to be followed by hand."""

import copy
import gc
import json
import math
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import GradientState
from torch import Tensor, nn

from tessera import encoders
from tessera.data.batch import Batch, View
from tessera.data.colors import ColorConfig, color_operations, draw_colors
from tessera.pretrain import loop
from tessera.pretrain.checkpoints import manifest, resume, save
from tessera.pretrain.command_line import load
from tessera.pretrain.config import RunConfig
from tessera.pretrain.loop import NonFiniteError, train
from tessera.pretrain.methods.dino import DINO
from tessera.pretrain.methods.method import Method
from tessera.pretrain.monitoring.collapse import CollapseError, effective_rank
from tessera.pretrain.monitoring.recorder import Recorder
from tessera.pretrain.optim import ema
from tessera.pretrain.resolve import make_accelerator, resolve
from tessera.pretrain.step import Step, finish_step, start_step, to_device
from tessera.pretrain.training_run import TrainingRun
from tessera.runtime import preemption
from tests.launched import MEASURED
from tests.ranks import on_processes
from tests.views import batch_of

MOMENTUM = 0.9
pytestmark = pytest.mark.usefixtures("fresh_engine")


class Root(torch.autograd.Function):
    """0 for every x, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return torch.tensor([torch.inf, 1.0, 1.0])


class Quadratic(Method):
    """Mean of (student(x) - 1)^2, with a teacher; a batch with the key `bad` has a gradient that is not finite."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2) if batch_norm else nn.Identity()
        self.student = nn.Linear(3, 2)
        with torch.no_grad():  # numbers whose sums and products float32 holds exactly
            self.student.weight.copy_(torch.tensor([[0.5, -0.25, 1.0], [2.0, 0.75, -0.5]]))
            self.student.bias.copy_(torch.tensor([0.25, -1.0]))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.steps_after: list[tuple[int, float]] = []
        self.dtypes: set[torch.dtype] = set()

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.norm(self.student(batch.views[0].images.flatten(1)))
        self.dtypes.add(y.dtype)
        loss = (y.float() - 1).square().mean()
        if "bad" in batch.keys:
            loss = loss + Root.apply(self.student.weight[0])
        return loss, {"output": y.detach().float().mean()}

    def after_step(self, step: int, updated: float | Tensor = 1.0) -> None:
        self.steps_after.append((step, float(updated)))
        ema.update(self.teacher, self.student, MOMENTUM, updated)

    def trained_parts(self) -> list[nn.Module]:
        return [self.student]


def settings(*arguments: str) -> RunConfig:
    """Resolved settings of a run of 8 steps of 8 images."""
    tiny = (
        "--data x.tar --encoder vit_micro --encoder.depth 1 --encoder.dim 24 --encoder.heads 2 --dino.global_size 16 "
        "--dino.local_size 8 --dino.local_crops 1 --dino.hidden_dim 16 --dino.bottleneck_dim 8 --dino.prototypes 32 "
        "--dino.freeze_steps 0 --dino.momentum 0.9 --dino.centering mean --steps 8 --batch_size 8 --optim.lr 0.5 "
        "--optim.warmup_steps 0 --evaluation.pictures 0 --record_every 1 --checkpoint_every 100 --precision fp32"
    )
    return resolve(load([*tiny.split(), *arguments]), 1000)


def make(method: Method, config: RunConfig, output: Path = Path()) -> TrainingRun:
    accelerator, engine_class = make_accelerator(config)
    engine = engine_class(accelerator, method, config.optim)
    to = save.Saver(output / "checkpoints", accelerator, engine, config.model_dump(mode="json"), config.checkpoint)
    return TrainingRun(config, output, accelerator, method, engine, None, None, to, images=64)


def training_step(run: TrainingRun, batches: Iterable[Batch], *, discard: bool = False) -> Step:
    return finish_step(run, start_step(run, run.state.step, batches, discard=discard))


def integers(images: int, seed: int = 0, keys: list[str] | None = None) -> Batch:
    x = torch.randint(-4, 5, (images, 3, 1, 1), generator=torch.Generator().manual_seed(seed)).float()
    return batch_of([x], keys=keys or [])


def split(batch: Batch, parts: int) -> list[Batch]:
    return [batch_of([images]) for images in batch.views[0].images.chunk(parts)]


def state(method: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in method.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("clip_by", ["tensor", "global"])
def test_accumulation_equals_one_big_batch_exactly(clip_by: str) -> None:
    limit = ["--optim.clip", "1", "--optim.clip_by", clip_by]
    whole = make(Quadratic(), settings(*limit))
    parts = make(Quadratic(), settings("--accumulate", "4", *limit))
    start = state(whole.method)
    for step in range(3):
        results = []
        for run, n in ((whole, 1), (parts, 4)):
            GradientState().plugin_kwargs["num_steps"] = n  # accelerate shares it between the two
            results.append(training_step(run, iter(split(integers(8, step), n))))
        a, b = results
        assert a.updated
        assert b.updated
        if step == 0:  # later the weights are no round numbers any more
            assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
            assert torch.equal(a.metrics["output"], b.metrics["output"])
            assert equal(state(whole.method), state(parts.method))
            assert not torch.equal(state(whole.method)["student.weight"], start["student.weight"])
            assert a.grad_norm > 1  # clipping was at work
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-6)
    for p, q in zip(whole.method.parameters(), parts.method.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert parts.method.steps_after == [(0, 1), (1, 1), (2, 1)]  # pyright: ignore
    assert (parts.state.step, parts.state.images) == (3, 24)


def test_a_step_is_adamw_then_the_teacher() -> None:
    run = make(Quadratic(), settings("--optim.clip", "0", "--optim.weight_decay", "0.1"))
    twin = Quadratic()
    teacher = [p.double() for p in twin.teacher.parameters()]
    step_size = 0.5 * 8 / 256
    oracle = torch.optim.AdamW(
        [{"params": [twin.student.weight], "weight_decay": 0.1}, {"params": [twin.student.bias], "weight_decay": 0.0}],
        lr=step_size,
    )
    lr_end, decay_end = run.config.optim.min_lr or 0, run.config.optim.weight_decay_end or 0
    for step in range(3):
        share = 0.5 * (1 + math.cos(math.pi * step / 8))
        for group in oracle.param_groups:
            group["lr"] = lr_end + (step_size - lr_end) * share
        oracle.param_groups[0]["weight_decay"] = decay_end + (0.1 - decay_end) * share
        oracle.zero_grad()
        twin(integers(8, step), step)[0].backward()
        oracle.step()
        teacher = [
            MOMENTUM * t + (1 - MOMENTUM) * s.detach().double()
            for t, s in zip(teacher, twin.student.parameters(), strict=True)
        ]
        training_step(run, [integers(8, step)])
    ours: Quadratic = run.method  # pyright: ignore
    for p, q in zip(ours.student.parameters(), twin.student.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    for p, t in zip(ours.teacher.parameters(), teacher, strict=True):
        torch.testing.assert_close(p.double(), t, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_weights_teacher_and_moments_stay_float32(precision: str, dtype: torch.dtype) -> None:
    run = make(Quadratic(), settings("--precision", precision))
    method: Quadratic = run.method  # pyright: ignore
    for step in range(2):
        before = [t.double() for t in method.teacher.parameters()]
        result = training_step(run, [integers(8, step)])
        assert result.updated
        for t, old, s in zip(method.teacher.parameters(), before, method.student.parameters(), strict=True):
            torch.testing.assert_close(t.double(), MOMENTUM * old + (1 - MOMENTUM) * s.double(), rtol=1e-6, atol=1e-7)
    assert method.dtypes == {dtype}
    moments = [value for held in run.engine.optimizer.state.values() for value in held.values()]
    assert {t.dtype for t in [*method.parameters(), *moments]} == {torch.float32}


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("poison", ["gradient", "loss"])
def test_a_step_that_is_not_finite_leaves_no_trace(poison: str, batch_norm: bool) -> None:
    run, twin = make(Quadratic(batch_norm), settings()), make(Quadratic(batch_norm), settings())
    bad = integers(8, 5, keys=["bad"])
    if poison == "loss":
        bad = batch_of([torch.full_like(bad.views[0].images, torch.nan)])
    for other in (run, twin):
        training_step(other, [integers(8, 0)])
    before, moments = state(run.method), copy.deepcopy(run.engine.optimizer.state_dict()["state"])
    result = training_step(run, [bad])
    assert not result.updated
    assert (result.loss == result.loss) == (poison == "gradient")  # a finite loss is reported as it is
    assert not torch.tensor(result.grad_norm).isfinite()
    assert equal(state(run.method), before)
    after = run.engine.optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][name], moments[i][name]) for i in moments for name in moments[i])
    twin.state.step = run.state.step  # the schedules went on
    assert run.state.step == 2
    for other in (run, twin):
        assert training_step(other, [integers(8, 1)]).updated
    assert equal(state(run.method), state(twin.method))
    assert run.method.steps_after == [(0, 1), (1, 0), (2, 1)]  # pyright: ignore


def test_a_discarded_step_leaves_no_trace() -> None:
    run = make(Quadratic(batch_norm=True), settings("--accumulate", "2"))
    training_step(run, split(integers(8, 0), 2))
    before = state(run.method)
    result = training_step(run, split(integers(8, 1), 2), discard=True)
    assert (result.discarded, result.updated, result.stop) == (True, False, True)
    assert equal(state(run.method), before)
    assert run.state.step == 1


@pytest.mark.parametrize("compile", [False, True])
def test_colours_are_compiled_where_asked(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr("tessera.data.augment.compiled", lambda function: used.append(function.__name__) or function)
    colors = draw_colors(np.random.default_rng(0), color_operations(ColorConfig(), [0.5] * 4, [0.2] * 4), 4)
    batch = Batch([View(torch.zeros(4, 3, 16, 16, dtype=torch.uint8), 1, colors=colors)])
    run = make(Quadratic(), settings("--compile", str(compile)))
    to_device(run, batch)
    assert bool(used) == compile


def test_loss_scaling_changes_nothing_but_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16's way through the step, with the scaler of the CPU in place of CUDA's."""
    plain = make(Quadratic(), settings("--accumulate", "2"))
    scaled = make(Quadratic(), settings("--accumulate", "2"))
    accelerator = scaled.accelerator
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    accelerator.native_amp = True
    monkeypatch.setattr(type(accelerator), "mixed_precision", "fp16")
    accelerator._optimizers.clear()
    accelerator.prepare_optimizer(scaled.engine.optimizer)
    for step in range(4):
        halves = split(integers(8, step), 2)
        if step == 2:
            halves[1].keys.append("bad")
        results = [training_step(run, iter(halves)) for run in (plain, scaled)]
        assert [r.updated for r in results] == [step != 2] * 2
        assert results[0].loss == results[1].loss
        assert accelerator.scaler.get_scale() == (1024.0 if step < 2 else 512.0)
        if step != 2:
            assert results[0].grad_norm == results[1].grad_norm
    assert equal(state(plain.method), state(scaled.method))


class Faulty(DINO):
    """DINO whose loss is nan for a batch with a key in `nan`, and which says `claims` of itself."""

    def __init__(self, config: RunConfig, claims: dict[str, float] | None = None) -> None:
        torch.manual_seed(0)
        chosen: dict[str, Any] = dict(config.encoder_settings)
        super().__init__(encoders.build(chosen.pop("variant"), **chosen), config.method_config, config.steps or 0)
        self.claims = claims or {}

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().forward(batch, step)
        if any(key.endswith("nan") for key in batch.keys):
            loss = loss * torch.nan
        if "loss" in self.claims:
            loss = loss * 0 + self.claims["loss"]
        return loss, metrics | {name: torch.tensor(v) for name, v in self.claims.items() if name != "loss"}


def raw(step: int, rank: int, images: int, key: str = "fine", skipped: int = 0) -> Batch:
    """A batch as the loader gives it."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    views = [torch.randint(0, 256, (n * images, 3, s, s), dtype=torch.uint8, generator=generator)
             for n, s in ((2, 16), (1, 8))]  # fmt: skip
    keys = [f"{rank}-{step}-{i}-{key}" for i in range(images)]
    return batch_of(views, (2, 1), keys=keys, skipped=["x"] * skipped)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_alarm_is_consulted_and_its_record_is_kept(tmp_path: Path) -> None:
    config = settings("--health.on_collapse", "stop", "--health.grace", "0", "--health.patience", "3")
    bound = math.log(32)
    run = make(Faulty(config, {"loss": bound, "teacher_entropy": bound}), config, tmp_path)
    run.recorder = Recorder(tmp_path, 0)
    with pytest.raises(CollapseError, match=r"at step 3: .* near ln K"):
        train(run, (raw(step, 0, 8) for step in range(8)))
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("what", ["record_and_score", "record_pictures"])
def test_scores_and_pictures_before_the_first_step_take_no_training_time(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, real = settings("--evaluation.pictures", "1"), loop.record_and_score
    run = make(Faulty(config), config, tmp_path)
    run.recorder = Recorder(tmp_path, 0)
    monkeypatch.setattr(loop, "record_pictures", lambda *_: None)

    def slow(*arguments: Any) -> None:
        if run.state.step == 0:
            time.sleep(0.5)
        if what == "record_and_score":
            real(*arguments)

    monkeypatch.setattr(loop, what, slow)
    train(run, (raw(step, 0, 8) for step in range(8)))
    first = next(line for line in lines(tmp_path / "metrics.jsonl") if line["step"] == 1)
    assert first["images_per_second"] > 8 / 0.5


def test_too_many_skipped_steps_in_a_row_stop_the_run(tmp_path: Path) -> None:
    config = settings("--optim.nonfinite_limit", "2")
    run = make(Faulty(config), config, tmp_path)
    run.recorder = Recorder(tmp_path, 0)
    bad = (0, 2, 4, 5)
    with pytest.raises(NonFiniteError, match="2 steps in a row up to step 6"):
        train(run, (raw(step, 0, 8, "nan" if step in bad else "fine") for step in range(8)))
    assert [line["step"] for line in lines(tmp_path / "skipped.jsonl")] == [step + 1 for step in bad]
    recorded = lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["skipped_steps"], line["loss"] is None) for line in recorded] == [
        (1, 1, True), (2, 1, False), (3, 2, True), (4, 2, False), (5, 3, True),
    ]  # fmt: skip


def test_a_step_is_read_while_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only steps after which the weights are used are read at once: here for a checkpoint and at the end."""
    config = settings("--record_every", "100", "--checkpoint_every", "4")
    run = make(Faulty(config), config, tmp_path)
    order: list[str] = []

    def start(run: TrainingRun, step: int, *args: Any, **options: Any) -> loop.RunningStep:
        order.append(f"start {step}")
        return start_step(run, step, *args, **options)

    def finish(run: TrainingRun, running: loop.RunningStep) -> Step:
        order.append(f"finish {run.state.step}")
        return finish_step(run, running)

    monkeypatch.setattr(loop, "start_step", start)
    monkeypatch.setattr(loop, "finish_step", finish)
    train(run, (raw(step, 0, 8) for step in range(8)))
    expected = []
    for step in (0, 4):
        expected += [f"start {step}", f"start {step + 1}", f"finish {step}", f"start {step + 2}", f"finish {step + 1}"]
        expected += [f"start {step + 3}", f"finish {step + 2}", f"finish {step + 3}"]
    assert order == expected


class Cycle:
    """Object that holds itself, which only a collection frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize("processes", [1, 2])
def test_python_collects_garbage_at_the_same_steps_of_all_processes(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings("--record_every", "4", "--checkpoint_every", "100")
    run, alive, automatic = make(Faulty(config), config, tmp_path), weakref.WeakSet[Cycle](), list[int]()
    monkeypatch.setattr(type(run.accelerator), "num_processes", processes)
    most, full, steps = list[int](), list[int](), list[int]()

    def start(*args: Any, **options: Any) -> loop.RunningStep:
        most.append(len(alive))
        steps.append(len(steps))
        for _ in range(50):
            alive.add(Cycle())
        return start_step(*args, **options)

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and steps:
            (automatic if gc.isenabled() else full).append(info["generation"])

    monkeypatch.setattr(loop, "start_step", start)
    before = gc.get_threshold()
    gc.callbacks.append(collected)
    try:
        gc.set_threshold(100, 5, 5)
        train(run, (raw(step, 0, 8) for step in range(8)))
        frozen, enabled = gc.get_freeze_count(), gc.isenabled()
    finally:
        gc.callbacks.remove(collected)
        gc.set_threshold(*before)
    assert enabled
    if processes == 1:
        assert automatic
        assert not full
        return
    assert frozen == 0
    assert full == [1, 1, 1, 1, 2, 1, 1, 1, 1, 2]  # one at each step, and one at each record
    assert max(most) == 0  # cycles of a step are freed before the next one


def test_reading_late_changes_nothing(tmp_path: Path) -> None:
    """Every step read at once, or one step late, with two skipped steps: the same weights, counts and files."""
    found = []
    for every in (1, 100):
        folder = tmp_path / str(every)
        folder.mkdir()
        config = settings("--record_every", str(every))
        run = make(Faulty(config), config, folder)
        run.recorder = Recorder(folder, 0)
        train(run, (raw(step, 0, 8, "nan" if step in (2, 5) else "fine", skipped=step) for step in range(8)))
        skipped = [{**line, "time": None} for line in lines(folder / "skipped.jsonl")]
        moments = copy.deepcopy(run.engine.optimizer.state_dict()["state"])
        found.append((state(run.method), moments, skipped, vars(run.state), lines(folder / "metrics.jsonl")[-1]))
    (weights, moments, skipped, counted, last), (others, other_moments, *rest, other_last) = found
    assert equal(weights, others)
    assert all(equal(moments[i], other_moments[i]) for i in moments)
    assert [skipped, counted] == rest
    assert [line["step"] for line in skipped] == [3, 6]
    assert counted["corrupt_images"] == sum(range(8))
    measured = MEASURED | {"time"}
    assert {k: v for k, v in last.items() if k not in measured} == {
        k: v for k, v in other_last.items() if k not in measured
    }


@pytest.mark.medium
@pytest.mark.parametrize("stopped", [False, True])
def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    config = settings("--checkpoint_every", "2", "--checkpoint.background", "true", "--checkpoint.keep", "9")
    run = make(Faulty(config), config, tmp_path)
    original, ahead = save.write, []

    def slow(pieces: Any, folder: Path, group: Any) -> None:
        step = int(folder.name[6:-5])
        end = time.monotonic() + (2 if step in (5, 8) else 60)  # there, no step follows
        while run.state.step == step and time.monotonic() < end:
            time.sleep(0.01)
        original(pieces, folder, group)
        ahead.append((step, run.state.step > step))

    monkeypatch.setattr(save, "write", slow)

    def batches() -> Iterator[Batch]:
        for step in range(8):
            if stopped and step == 4:  # the checkpoint of step 4 is being written
                monkeypatch.setattr(preemption, "stop_requested", lambda: True)
            yield raw(step, 0, 8)

    if stopped:
        with pytest.raises(preemption.Preempted):
            train(run, batches())
        assert ahead == [(2, True), (4, True), (5, False)]
    else:
        train(run, batches())
        assert ahead == [(2, True), (4, True), (6, True), (8, False)]  # and the end waited
    found = resume.list_checkpoints(tmp_path / "checkpoints")
    assert [int(p.name[5:]) for p in found] == [step for step, _ in ahead]
    for path in found:
        assert manifest.wrong_sizes(path) == manifest.wrong_checksums(path) == []


def _process(rank: int, folder: str) -> None:
    config = settings("--steps", "3", "--accumulate", "2")
    run = make(Faulty(config), config, Path(folder))
    if rank == 0:
        run.recorder = Recorder(run.output, 0)
    snapshots = []

    def batches() -> Iterator[Batch]:
        for step in range(3):
            moments = run.engine.optimizer.state_dict()["state"]
            snapshots.append((state(run.method), copy.deepcopy(moments)))
            for micro in range(2):  # one pass of one process is broken
                broken = (step, micro, rank) == (1, 0, 1)
                yield raw(step, 2 * micro + rank, 2, "nan" if broken else "fine", skipped=rank)

    train(run, batches())
    features = torch.randn(12, 5, generator=torch.Generator().manual_seed(3)) * torch.tensor([9.0, 3, 1, 1, 0.1]) + 2
    rank_of_all = effective_rank(features.chunk(2)[rank])
    torch.save((snapshots, state(run.method), rank_of_all), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.medium
def test_nan_on_one_of_two_processes_is_skipped_on_both(tmp_path: Path, free_port: int) -> None:
    on_processes(_process, free_port, str(tmp_path))
    (snapshots, last, rank_of_all), (others, other_last, other_rank) = (
        torch.load(tmp_path / f"{rank}.pt") for rank in range(2)
    )
    (start, _), (before, moments), (after, moments_after) = snapshots
    for name in ("student.head.last_layer.weight_v", "teacher.head.last_layer.weight_v", "center"):
        assert not torch.equal(start[name], before[name]), name  # step 1 moved
        assert not torch.equal(after[name], last[name]), name  # and step 3
    assert equal(before, after)
    assert all(torch.equal(moments[i][name], moments_after[i][name]) for i in moments for name in moments[i])
    assert all(equal(a[0], b[0]) for a, b in zip(snapshots, others, strict=True))
    assert equal(last, other_last)
    (skip,) = lines(tmp_path / "skipped.jsonl")
    expected = {f"{r}-1-{i}-{'nan' if r == 1 else 'fine'}" for r in range(4) for i in range(2)}
    assert (skip["step"], set(skip["samples"]), len(skip["samples"])) == (2, expected, 8)
    recorded = lines(tmp_path / "metrics.jsonl")
    assert [line["corrupt_images"] for line in recorded] == [2, 4, 6]  # those of both
    assert [line["skipped_steps"] for line in recorded] == [0, 1, 1]
    assert resume.list_checkpoints(tmp_path / "checkpoints")[-1].name == "step-00000003"
    features = torch.randn(12, 5, generator=torch.Generator().manual_seed(3)) * torch.tensor([9.0, 3, 1, 1, 0.1]) + 2
    values = torch.linalg.svdvals((features - features.mean(0)).double())
    share = values / values.sum()
    assert rank_of_all == other_rank == pytest.approx((-(share * share.log()).sum()).exp().item(), rel=1e-6)
