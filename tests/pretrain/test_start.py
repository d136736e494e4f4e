"""A run that starts from another run of the same family takes all its weights."""

from pathlib import Path

import pytest
import torch

import encoders
from pretrain.checkpoints.resume import TrainState
from pretrain.command_line import load
from pretrain.config import resolve
from pretrain.job import build_method
from pretrain.methods import METHODS
from pretrain.methods.base import Method, RunSize
from pretrain.optim.adamw import OptimConfig
from pretrain.start import start_from_run
from tests.pretrain.small import ENCODER, STEPS, make, method, saver


def finished(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Write a run folder with one checkpoint. Return the tensors of the method."""
    accelerator, engine = make(0, name)
    saver(folder, accelerator, engine, name).save(TrainState(3, 4), engine.method.trained_encoder())
    return {key: tensor.clone() for key, tensor in engine.method.state_dict().items()}


@pytest.mark.parametrize("name", ["dinov2", "dinov3"])
def test_student_teacher_and_heads_go_on(name: str, tmp_path: Path) -> None:
    held = finished(tmp_path / "run", name)
    started = method("dinov3", seed=5)
    start_from_run(started, tmp_path / "run")
    own = started.state_dict()
    assert {"student.head.mlp.0.weight", "teacher.encoder.cls_token", "center", "ibot_center"} <= held.keys()
    for key, tensor in held.items():
        if not key.startswith("gram_teacher."):
            assert torch.equal(own[key], tensor), key
        if key.startswith("teacher.encoder."):  # a Gram teacher starts from the teacher
            assert torch.equal(own[key.replace("teacher.encoder.", "gram_teacher.")], tensor), key


@pytest.mark.parametrize("name", ["dino", "nothing"])
def test_other_runs_give_only_their_encoder(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    if name == "dino":
        finished(tmp_path / "run", name)
    started = method("dinov2", seed=5)
    before = {key: tensor.clone() for key, tensor in started.state_dict().items()}
    start_from_run(started, tmp_path / "run")
    assert all(torch.equal(started.state_dict()[key], tensor) for key, tensor in before.items())


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    finished(tmp_path / "run", "dinov2")
    with pytest.raises(ValueError, match=r"The heads of the run .*run do not fit .*prototypes|size mismatch"):
        start_from_run(_with(prototypes=16), tmp_path / "run")


def test_init_from_a_run_fills_the_method_and_a_weight_file_only_its_encoder(tmp_path: Path) -> None:
    held = finished(tmp_path / "run", "dinov2")
    flags = [f"--dinov2.{name}={value}" for name, value in METHODS["dinov2"].small_settings.items()]
    for source, whole in (("run", True), ("run/checkpoints/latest/encoder.safetensors", False)):
        words = ["--data", "a.tar", "--method", "dinov2", "--init_from", str(tmp_path / source), *flags]
        started = build_method(resolve(load(words), 1000), fresh=True).state_dict()
        assert torch.equal(started["teacher.encoder.cls_token"], held["teacher.encoder.cls_token"])
        assert torch.equal(started["student.head.mlp.0.weight"], held["student.head.mlp.0.weight"]) == whole
        resumed = build_method(resolve(load(words), 1000), fresh=False).state_dict()
        assert not torch.equal(resumed["teacher.encoder.cls_token"], held["teacher.encoder.cls_token"])


def _with(**settings) -> Method:
    chosen = METHODS["dinov2"]
    config, _ = chosen.resolve(
        chosen.Config(**chosen.small_settings | settings), OptimConfig(), RunSize(1000, 4, STEPS)
    )
    return chosen(encoders.build(**ENCODER), config, STEPS)
