"""A run resumes from an intact checkpoint, and refuses damaged or foreign ones."""

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tessera import encoders
from tessera.pretrain.checkpoints import manifest, resume
from tessera.pretrain.checkpoints.resume import CheckpointError
from tessera.pretrain.checkpoints.trainer_json import TrainState
from tessera.runtime import collectives
from tests.pretrain.small import make, saver, tensors
from tests.ranks import on_processes


def saved(output: Path, *steps: int) -> Path:
    """Save checkpoints of these steps and return OUTPUT/checkpoints."""
    accelerator, engine = make()
    for step in steps:
        saver(output, accelerator, engine, keep=9).save(TrainState(step, 4 * step), engine.method.trained_encoder())
    return output / "checkpoints"


def test_restores_everything(tmp_path: Path) -> None:
    accelerator, engine = make(0)
    position = TrainState(7, 70, alarm={"rung": ["rank"]})
    saver(tmp_path, accelerator, engine).save(position, engine.method.trained_encoder())
    position.alarm["rung"].append("later")
    expected, before, steps = (torch.rand(3), random.random()), tensors(engine), engine.optimizer_steps
    (path,) = resume.list_checkpoints(tmp_path / "checkpoints")
    (path.parent / "latest").unlink()  # as a kill between the rename and the link leaves it
    accelerator, engine = make(1)
    for group in engine.optimizer.param_groups:
        group |= {"betas": (0.5, 0.6), "frozen_steps": 99}
    engine.after_load(steps + 5)
    engine.method.center -= 5
    other = tensors(engine)
    for name in ("method.center", "method.student.head.mlp.0.weight", "exp_avg_sq.student.head.mlp.0.weight"):
        assert not torch.equal(other[name], before[name])
    checkpoint = resume.open_checkpoint(path)
    resume.restore(checkpoint, accelerator, engine)
    assert checkpoint.trainer.position == TrainState(7, 70, alarm={"rung": ["rank"]})
    after = tensors(engine)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert engine.optimizer_steps == steps == 1
    # the run's own settings hold, not those of the one before
    assert all(g["betas"] == (0.5, 0.6) and g["frozen_steps"] == 99 for g in engine.optimizer.param_groups)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert (path.parent / "latest").resolve() == path.resolve()


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


FILES = ["__0_0.distcp", ".metadata", "random-00000.pt", "trainer.json", "encoder.safetensors", "encoder.json"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda f: os.truncate(f, f.stat().st_size // 2), r"{name} has \d+ bytes and should have \d+"),
        (flip, r"the checksum of {name} differs from manifest\.json"),
        (lambda f: f.unlink(), "{name} is missing"),
        (lambda f: f.with_name(f"{f.name}.2").touch(), r"{name}\.2 is not listed in manifest\.json"),
    ],
)
def test_damage_is_named_with_the_newest_intact_checkpoint(
    tmp_path: Path, harm: Callable[[Path], object], said: str
) -> None:
    folder = saved(tmp_path, 99_999_998, 99_999_999, 100_000_000)  # the last name is a digit longer
    before, middle, newest = resume.list_checkpoints(folder)
    (middle / "encoder.json").unlink()  # nor is this one whole
    for name in FILES:
        kept = (newest / name).read_bytes()
        harm(newest / name)
        accelerator, engine = make(1)
        untouched = tensors(engine)
        word = said.format(name=re.escape(name))
        if name == "trainer.json":  # it is read first, and without it there is no checkpoint to be listed
            word = (
                "is missing on" if "missing" in said else "trainer.json is not valid JSON" if "bytes" in said else word
            )
            if harm is flip:  # a flipped byte may break the syntax, which is noticed first
                word += "|trainer.json is not valid JSON"
        with pytest.raises(CheckpointError, match=word) as caught:
            resume.restore(resume.open_checkpoint(newest), accelerator, engine)
        if (newest / "trainer.json").exists():
            assert str(caught.value).startswith(f"{newest} is damaged: ")
            assert "--resume continues from step-99999998." in str(caught.value)
        assert all(torch.equal(tensor, untouched[key]) for key, tensor in tensors(engine).items())
        (newest / f"{name}.2").unlink(missing_ok=True)
        (newest / name).write_bytes(kept)
    resume.restore(resume.open_checkpoint(newest), *make(1))
    with pytest.raises(CheckpointError, match=r"encoder\.json is missing.*continues from step-99999998\."):
        resume.verify(middle)
    flip(before / "encoder.safetensors")
    with pytest.raises(CheckpointError, match="from the beginning, because no earlier checkpoint is complete"):
        resume.verify(middle)
    (before / ".metadata").unlink()
    with pytest.raises(
        CheckpointError, match=r"\.metadata is missing.*from the beginning, because no earlier checkpoint is complete"
    ):
        resume.verify(before)


def test_checkpoints_of_other_versions_are_refused(tmp_path: Path) -> None:
    (path,) = resume.list_checkpoints(saved(tmp_path, 1))
    known = json.loads((path / "trainer.json").read_text())
    later = known | {"position": known["position"] | {"epoch": 3}}
    earlier = {name: value for name, value in known.items() if name not in ("optimizer_steps", "engine")}
    (path / "manifest.json").unlink()
    no_step = known | {"position": {"images": 3}}
    for other in (later, earlier, no_step, []):
        (path / "trainer.json").write_text(json.dumps(other))
        with pytest.raises(CheckpointError, match=r"written by another version.*--init_from .*step-00000001"):
            resume.open_checkpoint(path)


def test_a_method_of_other_sizes_is_refused(tmp_path: Path) -> None:
    (path,) = resume.list_checkpoints(saved(tmp_path, 1))
    accelerator, engine = make()
    engine.method.center = torch.zeros(33)
    with pytest.raises(
        CheckpointError, match=r"step-00000001 does not fit this run: .*center \(64 elements instead of 33\)"
    ):
        resume.restore(resume.open_checkpoint(path), accelerator, engine)


def _restore(rank: int, folder: str) -> None:
    collectives.VISIBILITY_TIMEOUT = 0.5
    accelerator, engine = make(1)
    # what only one process finds, because its share holds it or its node reads otherwise, all say
    path = Path(folder, "checkpoints", "step-00000001")
    with pytest.raises(CheckpointError, match=r"the checksum of random-00000\.pt differs"):
        resume.restore(resume.open_checkpoint(path), accelerator, engine)
    with pytest.raises(CheckpointError, match=r"^process 1: .*/trainer\.json is missing on .*all nodes share"):
        resume.open_checkpoint(path if rank == 0 else Path(folder, "other", "step-00000001"))


@pytest.mark.slow
def test_processes_agree_on_what_is_damaged(tmp_path: Path, free_port: int) -> None:
    (path,) = resume.list_checkpoints(saved(tmp_path, 1))
    flip(path / "random-00000.pt")
    assert list(json.loads((path / "manifest.json").read_text())["files"]).index("random-00000.pt") % 2 == 0
    on_processes(_restore, free_port, str(tmp_path))


def test_a_copy_of_a_run_whose_links_are_folders_continues(tmp_path: Path) -> None:
    folder, copy, lost = saved(tmp_path, 1, 2), tmp_path / "copy", tmp_path / "lost"
    shutil.copytree(folder, copy)  # follows links
    assert not (copy / "latest").is_symlink()
    shutil.copytree(copy / "latest", lost / "latest")  # all that was copied
    resume.restore(resume.open_checkpoint(copy / "step-00000002"), *make(1))
    assert os.readlink(copy / "latest") == "step-00000002"
    resume.adopt_latest(lost)
    assert [path.name for path in lost.iterdir()] == ["step-00000002"]


def test_a_disk_without_links_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def symlink_to(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", symlink_to)
    folder = saved(tmp_path, 1, 2)
    assert "the disk does not support symlinks (Operation not permitted)" in caplog.text
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000001", "step-00000002"]
    resume.restore(resume.open_checkpoint(folder / "step-00000002"), *make(1))
    assert encoders.load(tmp_path).settings["variant"] == "vit_micro"


def test_random_states_of_older_checkpoints_and_of_blocks_are_found(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1)
    (path,) = resume.list_checkpoints(folder)
    states = torch.load(path / "random-00000.pt")
    assert list(states) == [0]  # by rank
    torch.save(states[0], path / "random-00000.pt")  # an older version wrote one file for each process
    manifest.write(path, manifest.describe([file for file in path.iterdir() if file.name != manifest.NAME]))
    accelerator, engine = make(1)
    resume.restore(resume.open_checkpoint(path), accelerator, engine)
    assert torch.equal(torch.get_rng_state(), states[0]["torch"])
    for first in (8, 24):
        (path / f"random-{first:05d}.pt").touch()
    found = [resume._random_file(path, process).name[7:12] for process in (0, 7, 8, 23, 24, 99)]
    assert found == ["00000", "00000", "00008", "00008", "00024", "00024"]
