"""Checkpoints survive kills, full disks and each other; in the background too."""

import errno
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tessera.pretrain.checkpoints import manifest, resume
from tessera.pretrain.checkpoints import save as saving
from tessera.pretrain.checkpoints.resume import CheckpointError, list_checkpoints
from tessera.pretrain.checkpoints.trainer_json import TrainState
from tessera.pretrain.engines import writing
from tessera.runtime import collectives
from tests.pretrain.small import make, saver, tensors, walk
from tests.ranks import on_processes


def write(to: saving.Saver, step: int) -> None:
    """Save a checkpoint and wait until it is complete."""
    to.save(TrainState(step, 4 * step), to.engine.method.trained_encoder())
    to.wait()


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


class Gate:
    """Replacement of the function that writes tensors, which waits until the gate is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened, self.original = threading.Event(), threading.Event(), saving.write
        monkeypatch.setattr(saving, "write", self)

    def __call__(self, *arguments: Any) -> None:
        self.reached.set()
        assert self.opened.wait(30)
        self.original(*arguments)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def test_a_checkpoint_is_renamed_once_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, engine = make()
    moves, rename = [], os.rename

    def watched(source: Path, target: Path) -> None:
        if Path(source).is_dir():  # torch renames a file
            assert manifest.wrong_sizes(source) == manifest.wrong_checksums(source) == []
            moves.append(target.name)
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    write(saver(tmp_path, accelerator, engine), 1)
    assert moves == ["step-00000001"]
    assert names(tmp_path / "checkpoints") == {"step-00000001", "latest"}


def test_retention_by_count_and_by_interval(tmp_path: Path) -> None:
    accelerator, engine = make()
    to = saver(tmp_path, accelerator, engine, keep=2, keep_every=3)
    folder = tmp_path / "checkpoints"
    for step in range(1, 8):
        if step == 4:  # what a kill leaves
            (folder / ".step-00000003.part").mkdir()
            (folder / ".latest.part").symlink_to("nowhere")
        to.save(TrainState(step, step), engine.method.trained_encoder())
        assert (folder / "latest").resolve().name == f"step-{step:08d}"
    assert [p.name for p in list_checkpoints(folder)] == [f"step-{s:08d}" for s in (3, 6, 7)]
    assert names(folder) == {"latest", *(p.name for p in list_checkpoints(folder))}
    to.save(TrainState(8, 8), engine.method.trained_encoder(), keep_old=True)
    assert [int(p.name[5:]) for p in list_checkpoints(folder)] == [3, 6, 7, 8]


def test_a_checkpoint_that_cannot_be_removed_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, engine = make()
    to, folder, remove = saver(tmp_path, accelerator, engine, keep=1), tmp_path / "checkpoints", saving.shutil.rmtree

    def rmtree(path: Path, **options: Any) -> None:
        if path.name == ".step-00000001.part" and not options:
            raise PermissionError(errno.EACCES, "Permission denied")
        remove(path, **options)

    monkeypatch.setattr(saving.shutil, "rmtree", rmtree)
    for step in (1, 2, 3):
        to.save(TrainState(step, step), engine.method.trained_encoder())
    assert names(folder) == {"latest", "step-00000003", ".step-00000001.part"}
    assert "could not remove" in caplog.text


def test_an_existing_checkpoint_is_kept(tmp_path: Path) -> None:
    accelerator, engine = make()
    to, folder = saver(tmp_path, accelerator, engine), tmp_path / "checkpoints"
    to.save(TrainState(1, 4), engine.method.trained_encoder())
    before = (folder / "step-00000001" / "manifest.json").stat().st_mtime_ns
    walk(engine)
    saver(tmp_path, accelerator, engine).save(TrainState(1, 4), engine.method.trained_encoder())
    assert (folder / "step-00000001" / "manifest.json").stat().st_mtime_ns == before
    (folder / "step-00000002").mkdir()
    (folder / "step-00000002" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"step-00000002: Directory not empty.*continues from step-00000001"):
        to.save(TrainState(2, 8), engine.method.trained_encoder())
    assert names(folder) == {"step-00000001", "step-00000002", "latest"}


@pytest.mark.parametrize("step", ["torch.save", "encoders.save", "manifest.describe", "manifest.write", "os.rename"])
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_at_any_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, background: bool) -> None:
    accelerator, engine = make()
    to, folder = saver(tmp_path, accelerator, engine, background=background), tmp_path / "checkpoints"
    write(to, 1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "a file")

    place, name = step.split(".")
    with monkeypatch.context() as patched:
        patched.setattr(getattr(saving, place), name, full)
        with pytest.raises(
            CheckpointError, match=r"No space.*needs \d+\.\d kB\. Free this amount of space.*from step-00000001"
        ):
            write(to, 2)
    assert names(folder) == {"step-00000001", "latest"}
    resume.verify(folder / "step-00000001")
    to.save(TrainState(3, 3), engine.method.trained_encoder())  # and then there is room again
    to.wait()
    assert names(folder) == {"step-00000001", "step-00000003", "latest"}


def test_too_little_space_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, engine = make()
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(
        CheckpointError,
        match=r"No space left on device: \S+ has 1\.0 kB free\. A checkpoint .* needs .* kB\. Free .*\. There is no",
    ):
        saver(tmp_path, accelerator, engine).save(TrainState(1, 1), engine.method.trained_encoder())
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_ctrl_c_while_writing_raises_keyboard_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, engine = make()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tessera.pretrain.engines.writing.torch.save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saver(tmp_path, accelerator, engine).save(TrainState(1, 1), engine.method.trained_encoder())
    assert list_checkpoints(tmp_path / "checkpoints") == []


def test_a_background_save_writes_the_state_of_its_start(tmp_path: Path, gate: Gate) -> None:
    accelerator, engine = make()
    position = TrainState(1, 4, alarm={"rung": ["rank"]})
    later = saver(tmp_path / "later", accelerator, engine, background=True)
    later.save(position, engine.method.trained_encoder())
    assert gate.reached.wait(30)
    before = tensors(engine)
    walk(engine)  # the training goes on
    position.alarm["rung"].append("entropy")
    torch.rand(1)
    gate.opened.set()
    later.wait()
    accelerator, engine = make()  # the same moment again
    saver(tmp_path / "now", accelerator, engine).save(
        TrainState(1, 4, alarm={"rung": ["rank"]}), engine.method.trained_encoder()
    )
    one, two = (tmp_path / name / "checkpoints" / "step-00000001" for name in ("later", "now"))
    files = json.loads((one / "manifest.json").read_text())["files"]
    others = json.loads((two / "manifest.json").read_text())["files"]
    assert files.keys() == others.keys()
    assert {name for name in files if files[name] != others[name]} <= {".metadata"}  # which holds its own path
    for folder in (one, two):
        dcp_to_torch_save(folder, tmp_path / "whole.pt")
        saved = torch.load(tmp_path / "whole.pt")
        assert saved.keys() == before.keys()
        assert all(torch.equal(saved[name], before[name]) for name in before)
        encoder = load_file(folder / "encoder.safetensors")
        assert all(torch.equal(t.reshape(-1), before[f"method.teacher.encoder.{n}"]) for n, t in encoder.items())


def test_a_failed_background_save_is_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, engine = make()
    encoder = engine.method.trained_encoder()
    to = saver(tmp_path, accelerator, engine, background=True)

    def broken(*_: Any) -> None:
        raise RuntimeError("out of order")

    with monkeypatch.context() as patched:
        patched.setattr(saving, "write", broken)
        to.save(TrainState(1, 4), encoder)
        with pytest.raises(CheckpointError, match=r"step-00000001: RuntimeError: out of order"):
            to.save(TrainState(2, 8), encoder)
        to.save(TrainState(3, 12), encoder)
        with pytest.raises(CheckpointError, match="step-00000003"), to:
            pass
        to.save(TrainState(4, 16), encoder)
        assert to._thread is not None
        to._thread.join()
    to.save(TrainState(5, 20), encoder, exiting=True)  # a run that is asked to stop saves all the same
    assert "could not save" in caplog.text
    assert [p.name for p in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000005"]
    # what no one foresaw is not lost with the thread
    monkeypatch.setattr(saving.Saver, "_write", lambda *_: 1 / 0)
    to.save(TrainState(6, 24), encoder)
    with pytest.raises(ZeroDivisionError):
        to.wait()


def test_a_failed_run_waits_for_a_background_save(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, engine = make()
    for number, (seconds, kept) in enumerate([(0.2, False), (30.0, True)]):
        monkeypatch.setattr(saving, "BACKGROUND_TIMEOUT", seconds)
        gate.opened.clear()
        to = saver(tmp_path / str(number), accelerator, engine, background=True)
        started = time.monotonic()
        if kept:
            threading.Timer(1.0, gate.opened.set).start()
        to.save(TrainState(1, 4), engine.method.trained_encoder())
        with pytest.raises(ValueError, match="diverged"), to:
            raise ValueError("diverged")
        assert time.monotonic() - started < 5
        assert saving.has_unfinished_save() == (not kept)  # then run.py leaves without the interpreter's farewell
        assert bool(list_checkpoints(tmp_path / str(number) / "checkpoints")) == kept
        assert ("took too long" in caplog.text) != kept
        caplog.clear()
        gate.opened.set()
        to.wait()


INTERRUPTED = """
import sys, time
from pathlib import Path
from tessera.pretrain.checkpoints import save as saving
from tessera.pretrain.checkpoints.trainer_json import TrainState
from tests.pretrain.small import make, saver
from tests.ranks import on_processes
saving.BACKGROUND_TIMEOUT = 0.2
saving.write = lambda *_: time.sleep(600)
accelerator, engine = make()
with saver(Path(sys.argv[1]), accelerator, engine, background=True) as to:
    to.save(TrainState(1, 4), engine.method.trained_encoder())
    raise KeyboardInterrupt if sys.argv[2] == "ctrl-c" else ValueError
"""


@pytest.mark.slow
def test_the_interpreter_does_not_wait_for_a_background_save(tmp_path: Path) -> None:
    codes = {"ctrl-c": -signal.SIGINT, "crash": 1}
    started = {
        how: subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, str(tmp_path / how), how],
            cwd=Path(__file__).parents[3], stderr=subprocess.PIPE, text=True,
        )
        for how in codes
    }  # fmt: skip
    for how, process in started.items():
        try:
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
        assert process.returncode == codes[how], errors
        assert "a checkpoint was not completed" in errors


def _exceed_quota(*_: Any, **__: Any) -> int:
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


def _save(rank: int, folder: str) -> None:
    collectives.VISIBILITY_TIMEOUT = 0.5
    output, other = Path(folder, "a"), Path(folder, "b")
    accelerator, engine = make()
    encoder = engine.method.trained_encoder()
    with pytest.raises(CheckpointError, match=r"^process 1: .*b/\.shared-\w+ is missing on .* that all nodes share\.$"):
        saver(output if rank == 0 else other, accelerator, engine)
    for background in (False, True):
        to = saver(output, accelerator, engine, background=background)
        first = 10 * background + 1
        write(to, first)
        # one finds no space, one cannot write, one is not on the disk: all say so, and the next one is written
        usage, append = saving.shutil.disk_usage, writing._append
        if rank == 0:
            saving.shutil.disk_usage = lambda _: type("Usage", (), {"free": 1000})()
        with pytest.raises(CheckpointError, match=rf"process 0: No space.* 1\.0 kB free\. A.*from step-{first:08d}"):
            write(to, first + 1)
        saving.shutil.disk_usage = usage
        if rank == 1:
            writing._append = _exceed_quota
        with pytest.raises(CheckpointError, match=r"process 1: Disk quota exceeded\. A checkpoint of .*\. Free this"):
            write(to, first + 2)
        writing._append = append
        if rank == 1:
            to.folder = other / "checkpoints"
        with pytest.raises(CheckpointError, match=r"process 1: .*b/checkpoints.*disk that all nodes share"):
            write(to, first + 3)
        to.folder = output / "checkpoints"
        if rank == 1 and background:
            copies = saving._Snapshot.to_host
            saving._Snapshot.to_host = lambda *_: (_ for _ in ()).throw(RuntimeError("cannot allocate"))  # pyright: ignore
        if background:
            with pytest.raises(CheckpointError, match="process 1: RuntimeError: cannot allocate"):
                to.save(TrainState(first + 4, 1), encoder)
            if rank == 1:
                saving._Snapshot.to_host = copies  # pyright: ignore
        write(to, first + 5)
        resume.verify(output / "checkpoints" / "latest")
    Path(folder, f"said-{rank}").touch()


@pytest.mark.slow
def test_a_failed_write_of_one_process_is_an_error_on_all(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    on_processes(_save, free_port, str(tmp_path))
    assert names(tmp_path) == {"said-0", "said-1", "a", "b"}
    assert names(tmp_path / "a" / "checkpoints") == {"step-00000011", "step-00000016", "latest"}
    assert names(tmp_path / "a") == {"checkpoints"}


def _save_for_ever(folder: str, seed: int) -> None:
    torch.set_num_threads(1)
    accelerator, engine = make()
    to, rng = saver(Path(folder), accelerator, engine, keep=1, background=bool(seed % 2)), random.Random(seed)
    originals = {name: getattr(os, name) for name in ("rename", "replace", "fsync", "unlink", "rmdir")}
    for name, original in originals.items():  # so that a kill falls between them

        def slow(*arguments: Any, original: Any = original, **options: Any) -> Any:
            time.sleep(rng.random() * 0.01)
            return original(*arguments, **options)

        setattr(os, name, slow)
    for step in range(1, 1_000_000):
        to.save(TrainState(step, step), engine.method.trained_encoder())


@pytest.mark.slow
def test_killed_at_any_moment_of_saving(tmp_path: Path) -> None:
    rng = random.Random(0)
    context = multiprocessing.get_context("fork")
    left = set()
    for attempt in range(16):
        output = tmp_path / str(attempt)
        folder = output / "checkpoints"
        process = context.Process(target=_save_for_ever, args=(str(output), attempt))
        process.start()
        end = time.monotonic() + 60
        while len(list_checkpoints(folder)) == 0:
            assert time.monotonic() < end
            time.sleep(0.01)
        end = time.monotonic() + rng.random() * 0.4
        while time.monotonic() < end:  # a reader never meets half of one
            for found in list_checkpoints(folder):
                faults = manifest.wrong_sizes(found)
                assert not faults or not found.exists(), faults  # it may be removed meanwhile
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        left |= {name.split("-")[0] for name in names(folder)}
        listed = list_checkpoints(folder)
        assert listed
        for found in listed:
            assert manifest.wrong_sizes(found) == manifest.wrong_checksums(found) == []
        if len(listed) > 1 or "latest" in names(folder):  # it is made after the first checkpoint
            assert (folder / "latest" / "trainer.json").exists()
        accelerator, engine = make(1)
        checkpoint = resume.open_checkpoint(listed[-1])
        resume.restore(checkpoint, accelerator, engine)
        assert checkpoint.step == int(listed[-1].name[5:])
        saver(output, accelerator, engine, keep=1).save(TrainState(10**6, 1), engine.method.trained_encoder())
        assert names(folder) == {"step-01000000", "latest"}
    assert ".step" in left  # some were hit amid writing
