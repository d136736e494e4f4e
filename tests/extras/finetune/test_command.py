"""The command that fine-tunes: the flags that it passes to `tessera pretrain`, and its run folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from tessera.extras.finetune.command import command, default_output
from tests.launched import ROOT


def test_flags_become_those_of_the_training_command() -> None:
    more = ["--steps", "5", "--output", "O"]
    given = command(["--checkpoint", "RUN", "--train=a.tar", "--train", "b.tar", "--val", "v.tar", *more])
    data = ["--data=a.tar", "--data", "b.tar", "--evaluation.val", "v.tar"]
    assert given == ["--method", "finetune", "--init_from", "RUN", *data, *more]


def test_the_run_folder_is_that_of_the_encoder(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoints" / "step-00000010"
    step.mkdir(parents=True)
    for folder in (tmp_path / "run", step):
        (folder / "encoder.safetensors").touch()
    (step.parent / "latest").symlink_to(step.name)
    (tmp_path / "vit.pth").touch()
    run = tmp_path / "run"
    for path, expected in (
        (run, run / "finetune"),
        (run / "encoder.safetensors", run / "finetune"),
        (step, run / "finetune-step-00000010"),
        (step / "encoder.safetensors", run / "finetune-step-00000010"),
        (step.parent / "latest", run / "finetune-step-00000010"),
        (tmp_path / "vit.pth", tmp_path / "vit-finetune"),
        (Path("timm:vit_tiny.in1k"), Path("vit_tiny.in1k-finetune")),
    ):
        assert default_output(path) == expected
    assert command(["--checkpoint", str(run), "--resume"])[-2:] == ["--output", str(run / "finetune")]


def test_a_settings_file_may_name_the_run_folder(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("output: runs/mine\n")
    assert "--output" not in command(["--checkpoint", "RUN", "--config", str(file)])
    assert command([f"--config={file}"])[-1] == f"--config={file}"
    file.write_text("steps: 5\n")
    assert command(["--checkpoint", "RUN", "--config", str(file)])[-2] == "--output"
    assert command(["--checkpoint", "RUN", "--config", "preset"])[-2] == "--output"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "RUN", "--train", "a.tar"], "--val is missing"),
        (["--train", "a.tar", "--val", "b.tar"], "--checkpoint is missing"),
        (["--resume"], "--output is missing"),
        (["--val", "b.tar", "--train", "a.tar", "--checkpoint"], "--checkpoint has no value. Give --checkpoint PATH"),
    ],
)
def test_missing_flags_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command(arguments)


def test_the_command_starts_the_training_command() -> None:
    script = str(ROOT / "evaluation" / "finetune.py")
    shown = subprocess.run(
        [sys.executable, script, "--help", "finetune"], capture_output=True, text=True, check=True
    ).stdout
    assert "--checkpoint PATH" in shown
    assert "--finetune.mixup float" in shown
