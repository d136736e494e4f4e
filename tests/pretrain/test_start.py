"""A run that starts from another run of its method, or of its family, takes all its weights."""

import json
from pathlib import Path

import pytest
import torch

from tessera import encoders
from tessera.pretrain.build import build_method, take_weights
from tessera.pretrain.checkpoints.resume import CheckpointError
from tessera.pretrain.checkpoints.trainer_json import TrainState
from tessera.pretrain.command_line import load
from tessera.pretrain.method_state import build, load_run
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.method import Method, RunSize
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.pretrain.resolve import resolve
from tessera.runtime.settings import SettingsError
from tests.pretrain.small import ENCODER, STEPS, make, method, saver


def start_from_run(started: Method, folder: Path) -> None:
    other = load_run(folder, started.continues)
    if other is not None:
        take_weights(started, other, folder)


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
        if ".head." in key and name == "dinov2":  # both heads start from the shared one
            assert torch.equal(own[key.replace(".head.", ".ibot_head.")], tensor), key


def test_encoder_and_projector_of_lejepa_go_on(tmp_path: Path) -> None:
    held = finished(tmp_path / "run", "lejepa")
    started = method("lejepa", seed=5)
    start_from_run(started, tmp_path / "run")
    own = started.state_dict()
    assert {key.partition(".")[0] for key in held} == {"encoder", "projector"}
    assert held.keys() == own.keys()
    assert all(torch.equal(own[key], tensor) for key, tensor in held.items())


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


def test_hostile_settings_of_a_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path / "run", "dinov2")
    file = tmp_path / "run" / "checkpoints" / "latest" / "trainer.json"
    trainer = json.loads(file.read_text())
    trainer["settings"]["dinov2"]["prototypes"] = 2**30
    file.write_text(json.dumps(trainer))
    monkeypatch.setattr("tessera.pretrain.method_state.verify", lambda path: None)  # the manifest may be as hostile
    with pytest.raises(CheckpointError, match=r"trainer\.json cannot be used: prototypes is larger than"):
        load_run(tmp_path / "run", method("dinov3", seed=5).continues)


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


def test_a_run_with_default_settings_describes_its_method() -> None:
    words = ["--data", "a.tar", "--method", "dinov2", "--encoder", "vit_micro", "--dinov2.prototypes", "64"]
    config = resolve(load(words), 1000)
    described = config.model_dump(mode="json")
    assert described["encoder"]["checkpoint_activations"] == "auto"
    assert build(described).state_dict().keys() == build_method(config, fresh=False).state_dict().keys()


def test_an_encoder_with_new_heads_learns_slowly_and_keeps_its_layers(tmp_path: Path) -> None:
    finished(tmp_path / "run", "dinov2")
    finished(tmp_path / "other", "lejepa")
    alone = str(tmp_path / "run/checkpoints/latest/encoder.safetensors")
    words = ["--data", "a.tar", "--method"]
    for name, source, expected in (
        ("dinov3", str(tmp_path / "run"), 1.0),
        ("dinov3", alone, 0.1),
        ("mae", str(tmp_path / "run"), 0.1),
        ("lejepa", str(tmp_path / "other"), 1.0),
        ("lejepa", str(tmp_path / "other/checkpoints/latest/encoder.safetensors"), 0.1),
    ):
        config = resolve(load([*words, name, "--init_from", source]), 1_000_000)
        assert config.optim.encoder_lr_factor == expected
        assert config.encoder_settings["layer_scale"] is None
    given = [*words, "dinov2", "--init_from", alone, "--optim.encoder_lr_factor", "0.5"]
    assert resolve(load(given), 1_000_000).optim.encoder_lr_factor == 0.5
    scratch = resolve(load([*words, "dinov2"]), 1_000_000)
    assert scratch.optim.encoder_lr_factor == 1.0
    assert scratch.encoder_settings["layer_scale"] == 1e-5


def _with(**settings) -> Method:
    chosen = METHODS["dinov2"]
    config, _ = chosen.resolve(
        chosen.Config(**chosen.small_settings | settings), OptimConfig(), RunSize(1000, 4, STEPS)
    )
    return chosen(encoders.build(**ENCODER), config, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_small_14_dinov2", "vit_small_14_dinov2_registers"])
def test_the_variant_of_a_weight_file_is_named(name: str, tmp_path: Path) -> None:
    torch.save(encoders.build(name).state_dict(), tmp_path / "weights.pth")
    words = ["--data", "a.tar", "--method", "dinov2", "--steps", "9", "--init_from", str(tmp_path / "weights.pth")]
    with pytest.raises(SettingsError, match=rf"init_from: .* --encoder {name}\.$"):
        build_method(resolve(load(words), 1000), fresh=True)
    build_method(resolve(load([*words, "--encoder", name]), 1000), fresh=True)
    with pytest.raises(SettingsError, match=r"^init_from: There is no file .*none\.pth"):
        build_method(resolve(load([*words, "--init_from", str(tmp_path / "none.pth")]), 1000), fresh=True)
