"""Signals to stop, at any moment, to one process or to all, once or ten times, lose nothing."""

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from tessera.pretrain.methods.dino import DINO
from tessera.pretrain.monitoring.online import OnlineKNN
from tessera.pretrain.run import main
from tessera.runtime import preemption
from tessera.runtime.machine import is_running
from tests.launched import TINY, newest_step, records, same_encoder, timeless, wait_until
from tests.pretrain.small import few_digits

SCRIPT = Path(__file__).parent / "stops_in_turn.py"


def test_listening_records_signals_and_restores_the_handlers() -> None:
    called = []
    before = signal.signal(signal.SIGUSR1, lambda *_: called.append(1))
    try:
        with preemption.listening():
            assert not preemption.stop_requested()
            for number in (signal.SIGUSR1, signal.SIGTERM, *[signal.SIGUSR1] * 9):
                os.kill(os.getpid(), number)
            assert preemption.stop_requested()
            assert (
                "stopped by SIGUSR1. Step 7 is done and saved. To continue, start again with --resume 'a b'."
                in preemption.message(7, "a b")
            )
        assert not preemption.stop_requested()
        assert not called
        os.kill(os.getpid(), signal.SIGUSR1)
        assert called
        assert "another process received a signal" in preemption.message(7, "run")
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_a_second_ctrl_c_interrupts(launch, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run = launch([*TINY, "--steps", "5000", "--checkpoint_every", "5000", "--output", str(output)])
    run.wait_for(lambda: len(records(output)) > 2)
    os.kill(run.process.pid, signal.SIGINT)
    log = run.wait()
    assert run.process.returncode == preemption.EXIT_CODE
    assert "press Ctrl-C again" in log
    assert "stopped by SIGINT" in log
    assert "Traceback" not in log
    assert newest_step(output) == records(output)[-1]["step"]
    with preemption.listening():
        before = signal.getsignal(signal.SIGINT)
        with preemption.saving_on_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            assert preemption.stop_requested()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of a parent")
def test_sigterm_to_accelerate_launch_saves(launch, tmp_path: Path) -> None:
    output = tmp_path / "run"
    given = [*TINY, "--steps", "5000", "--checkpoint_every", "5000", "--output", str(output)]
    run = launch(given, direct=False)
    run.wait_for(lambda: len(records(output)) > 2)
    (trainer,) = run.children()
    os.kill(run.process.pid, signal.SIGTERM)
    run.process.wait(60)
    wait_until(lambda: not is_running(trainer, None), 60)
    log = run.log.read_text()
    assert "stopped by SIGTERM" in log
    assert "Traceback" not in log
    assert newest_step(output) == records(output)[-1]["step"] < 5000


def test_signals_before_the_run_starts_are_kept() -> None:
    before = {number: signal.getsignal(number) for number in preemption.SIGNALS}
    try:
        preemption.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        with preemption.listening():
            assert preemption.stop_requested()
        assert not preemption.stop_requested()
        preemption.ignore()
        os.kill(os.getpid(), signal.SIGTERM)  # would end the test
        assert not preemption.stop_requested()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ask_before(monkeypatch: pytest.MonkeyPatch, steps: set[int], bad: range = range(0)) -> None:
    """Signals to this process in the forward pass of `steps` (counted from 0); the loss of `bad` ones is not finite."""
    forward = DINO.forward

    def asking(self: DINO, batch, step: int):
        loss, metrics = forward(self, batch, step)
        if step in steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return (loss * torch.nan if step in bad else loss), metrics

    monkeypatch.setattr(DINO, "forward", asking)


@pytest.mark.slow
def test_a_resumed_run_makes_the_missed_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = []
    evaluate = OnlineKNN.evaluate
    monkeypatch.setattr(
        OnlineKNN, "evaluate", lambda self, encoder, **more: scored.append(1) or evaluate(self, encoder, **more)
    )
    run = [*TINY, "--evaluate_every", "6", "--record_every", "4"]
    assert main([*run, "--output", str(tmp_path / "whole")]) == 0
    assert len(scored) == 3
    scored.clear()
    with monkeypatch.context() as patch:
        _ask_before(patch, {5})
        assert main([*run, "--output", str(tmp_path / "stopped")]) == 75
    assert len(scored) == 1, "only the one of step 0"
    assert [r["step"] for r in records(tmp_path / "stopped")] == [0, 4]
    assert main(["--resume", "--output", str(tmp_path / "stopped")]) == 0
    assert len(scored) == 3
    assert timeless(tmp_path / "stopped") == timeless(tmp_path / "whole")
    assert [r["step"] for r in records(tmp_path / "whole") if "knn_top1" in r] == [0, 6, 12]


@pytest.mark.slow
def test_a_stop_between_skipped_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = [*TINY, "--checkpoint.keep", "1", "--encoder.drop_path", "0.2", "--optim.nonfinite_limit", "4"]
    with monkeypatch.context() as patch:
        _ask_before(patch, set(), bad=range(4, 7))
        assert main([*run, "--output", str(tmp_path / "whole")]) == 0
    output = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        _ask_before(patch, {5}, bad=range(4, 7))
        assert main([*run, "--output", str(output)]) == 75
        folders = {p.name for p in (output / "checkpoints").iterdir()}
        assert folders == {"step-00000004", "step-00000006", "latest"}
        saved = json.loads((output / "checkpoints" / "latest" / "trainer.json").read_text())["position"]
        assert (saved["step"], saved["skipped_steps"], saved["skipped_in_a_row"]) == (6, 2, 2)
        assert main(["--resume", "--output", str(output)]) == 0
    assert timeless(output) == timeless(tmp_path / "whole")
    assert same_encoder(output, tmp_path / "whole")


@pytest.mark.slow
def test_a_signal_in_the_last_step_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        _ask_before(patch, {1})
        assert main([*TINY, "--steps", "2", "--output", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "encoder.safetensors").exists()
    handler = signal.getsignal(signal.SIGTERM)
    assert main([*TINY, "--output", str(tmp_path / "run")]) == 2, "the folder holds a run"
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.slow
def test_twenty_stops_change_nothing(launch, fork, tmp_path: Path) -> None:
    run = [*TINY, "--steps", "120", "--checkpoint_every", "1", "--evaluate_every", "5", "--evaluation.pictures", "0"]
    train, val = few_digits()
    run += ["--encoder.drop_path", "0.2", "--evaluation.train", train, "--evaluation.val", val]
    output, stops = tmp_path / "stopped", 22  # a fast machine is three or four steps on at each stop
    (tmp_path / "plan.json").write_text(json.dumps({"arguments": run, "output": str(output), "stops": stops}))
    undisturbed = fork([*run, "--output", str(tmp_path / "whole")])
    stopping = launch([str(tmp_path / "plan.json")], script=SCRIPT, wrapped=True)
    stopping.wait(400)
    assert stopping.process.returncode == 0, stopping.log.read_text()
    undisturbed.wait()
    *stopped, last = json.loads((output / "stops.json").read_text())
    assert len(stopped) == stops
    for turn in stopped:
        assert turn["code"] == 75, turn
        assert turn["latest"] == turn["reported"], turn
        assert turn["recorded"] in (turn["reported"], turn["reported"] - 1), turn  # the latter: not yet evaluated
        assert f"Step {turn['reported']} is done and saved. To continue" in turn["message"][0]
    assert (last["code"], last["latest"], last["recorded"]) == (0, 120, 120)
    sent = [signal for turn in stopped for signal in turn["sent"]]
    assert {name for name, *_ in sent} == {"SIGTERM", "SIGUSR1", "SIGHUP"}
    assert {place for _, *places in sent for place in places} == {"step", "save", "evaluation", "other"}
    assert timeless(output) == timeless(tmp_path / "whole")
    assert same_encoder(output, tmp_path / "whole")


def _reported(log: Path) -> int:
    return max(map(int, re.findall(r"^step (\d+)/", log.read_text(), re.M)))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_signals_to_launcher_or_trainer_save(launch, tmp_path: Path, processes: int) -> None:
    """Signals to the launcher, to its process group, to one trainer, from its first moments on."""
    rng = random.Random(processes)
    output = tmp_path / "run"
    run = [*TINY, "--steps", "100000", "--checkpoint_every", "1", "--output", str(output)]
    for number in range(3):
        launched = launch([*run, *["--resume"] * (number > 0)], processes=processes, wrapped=True)
        before = len(records(output)) if number else 0
        if number < 2:
            launched.wait_for(lambda: len(records(output)) > before + 1)  # noqa: B023
            time.sleep(rng.uniform(0, 0.5))
            target = [launched.process.pid, rng.choice([launched.process.pid, *launched.children()])][number]
        else:  # while its modules are imported
            launched.wait_for(lambda: _imports(launched.children()[-1:] or [launched.process.pid]), 60)  # noqa: B023
            target = launched.process.pid
        for _ in range(3):
            os.kill(target, rng.choice(preemption.SIGNALS))
            time.sleep(rng.uniform(0, 0.2))
        if launched.process.poll() is None:
            os.killpg(launched.process.pid, signal.SIGTERM)
        log = launched.wait(60)
        assert launched.process.returncode == 75, log
        assert log.count("is done and saved") == 1
        assert "Traceback" not in log
        assert newest_step(output) == _reported(launched.log) == records(output)[-1]["step"]


def _imports(trainers: list[int]) -> bool:
    """Return whether the first trainer has begun to load torch's libraries, which it does after it set the handlers."""
    try:
        command = Path(f"/proc/{trainers[0]}/cmdline").read_text().split("\0")
        return (
            any(part.endswith("pretrain/run.py") for part in command[:3])
            and "libtorch" in Path(f"/proc/{trainers[0]}/maps").read_text()
        )
    except (OSError, IndexError):
        return False
