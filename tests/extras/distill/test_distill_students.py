"""Several students of one teacher in one run, beside a run of each of them alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera import encoders
from tessera.data.demo import demo_shards
from tessera.encoders.randomness import random_keys
from tessera.extras.distill.distill import Distill, DistillConfig, resolve
from tessera.extras.exports import command as export
from tessera.pretrain.optim.adamw import OptimConfig, clip_gradients
from tessera.pretrain.preflight import dry_forward
from tessera.pretrain.run import main
from tessera.runtime.settings import SettingsError
from tests.extras.distill.test_distill import SIZE, make, save_teacher
from tests.launched import timeless
from tests.teachers import small_teacher
from tests.views import batch_of

MAIN = {"depth": 2, "dim": 24, "heads": 2, "drop_path": 0.5}
OTHERS = {variant: {"drop_path": 0.5} for variant in ("swin_micro", "navit_micro")}


def build(teacher: Path, variant: str, settings: dict[str, Any], students: Any = None) -> Distill:
    """Return the method of a run with seed 0."""
    config, _ = resolve(DistillConfig(size=16, teacher=str(teacher), students=students), OptimConfig(), SIZE)
    torch.manual_seed(0)
    return Distill(encoders.build(variant, **settings), config, 10)


def step(method: Distill, images: Tensor, clip_by: str) -> dict[str, Tensor]:
    """Leave clipped gradients of one forward pass with drop path in the method, and return its metrics."""
    method.train()
    with random_keys(0, 3, torch.arange(len(images))):
        loss, metrics = method(batch_of([images]), 0)
    loss.backward()
    parts = [[p.grad for p in part.parameters() if p.grad is not None] for part in method.trained_parts()]
    clip_gradients(parts, 0.05, clip_by)
    return metrics | {"loss": loss.detach()}


def assert_same_gradients(ours: nn.Module, alone: nn.Module) -> None:
    found = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("clip_by", ["tensor", "module"])
def test_gradients_of_each_student_equal_those_of_a_run_alone(clip_by: str, tmp_path: Path) -> None:
    """With drop path, and after clipping. The teacher encodes the images once."""
    path = save_teacher(tmp_path)
    images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    shared = build(path, "vit_micro", MAIN, students=OTHERS)
    calls = []
    hook = shared._teacher.encoder.register_forward_hook(lambda *_: calls.append(1))
    metrics = step(shared, images, clip_by)
    hook.remove()
    assert len(calls) == 1
    alone = build(path, "vit_micro", MAIN)
    found = step(alone, images, clip_by)
    losses = [found.pop("loss")]
    assert all(torch.equal(metrics[name], value) for name, value in found.items())
    assert_same_gradients(shared.encoder, alone.encoder)
    assert_same_gradients(shared.projections, alone.projections)
    for variant, student in shared.others.items():
        assert isinstance(shared.config.students, dict)
        alone = build(path, variant, shared.config.students[variant])
        alone.projections.load_state_dict(student.get_submodule("projections").state_dict())
        found = step(alone, images, clip_by)
        losses.append(found.pop("loss"))
        assert all(torch.equal(metrics[f"{variant}/{name}"], value) for name, value in found.items())
        assert_same_gradients(student.get_submodule("encoder"), alone.encoder)
        assert_same_gradients(student.get_submodule("projections"), alone.projections)
    assert torch.equal(metrics["loss"], torch.stack(losses).sum())


def test_initial_weights_do_not_depend_on_other_students(tmp_path: Path) -> None:
    path = save_teacher(tmp_path)
    given = ("swin_micro, navit_micro", ["navit_micro"], None)
    both, one, none = (build(path, "vit_micro", MAIN, students) for students in given)
    for name, tensor in none.state_dict().items():
        assert torch.equal(tensor, both.state_dict()[name])
    alone = build(path, "navit_micro", {"image_size": 16, "drop_path": 0.0})  # a run with --encoder navit_micro
    for name, tensor in both.others["navit_micro"].state_dict().items():
        assert torch.equal(tensor, one.others["navit_micro"].state_dict()[name])
        if name.startswith("encoder."):
            assert torch.equal(tensor, alone.state_dict()[name])
    first, second = (both.others[name].get_submodule("projections") for name in OTHERS)
    assert not torch.equal(*(torch.cat([p.flatten() for p in x.parameters()])[:24] for x in (first, second)))


@pytest.mark.parametrize(
    ("students", "message"),
    [
        (["swin_micro", "swin_micro"], "distill.students: swin_micro is given twice"),
        (["no_such"], "distill.students: Unknown encoder 'no_such'"),
        (
            {"rope_vit_micro": {"patch_size": 5, "image_size": 20}},
            "The tokens of the teacher cover 100% of the side of an image, and those of rope_vit_micro 94%",
        ),
        ("vit_micro", "distill.students: vit_micro is already the encoder of the run"),
        ({"swin_micro": {"wide": 3}}, "swin_micro cannot be built: Unknown setting 'wide' of swin_micro"),
        ({"swin_micro": {"channels": 1}}, r"swin_micro does not support images of 16 pixels .* \(B, 1, H, W\)"),
        (
            {"rope_vit_micro": {"patch_size": 32, "image_size": 32}},
            r"rope_vit_micro does not support images of 16 pixels \(distill.size\): .* smaller than one patch",
        ),
    ],
)
def test_students_that_cannot_be_are_refused(students: Any, message: str, tmp_path: Path) -> None:
    path = save_teacher(tmp_path)
    with pytest.raises((SettingsError, ValueError), match=message):
        dry_forward(make(path, students=students)[0])


def test_signs_of_collapse_name_the_student(tmp_path: Path) -> None:
    method, batch = make(save_teacher(tmp_path), students=["swin_micro"])
    with torch.no_grad():
        method.others["swin_micro"].get_submodule("projections.token.3").get_parameter("weight").zero_()
    record = {name: value.item() for name, value in method(batch, 0)[1].items()}
    signs = method.collapse_signs(record)
    assert list(signs) == ["swin_micro/token"]
    assert signs["swin_micro/token"].startswith("swin_micro/token_spread 0.000 is near 0")
    assert set(method.health()) == {"feature_rank", "swin_micro/feature_rank"}


def run(output: Path, *more: str) -> int:
    """Run the command on the digits, with narrow encoders and drop path, and without evaluation."""
    words = f"--method distill --distill.size 16 --distill.teacher {small_teacher()} --data {demo_shards()[0]} "
    words += "--steps 4 --batch_size 16 --record_every 1 --checkpoint_every 2 --workers 0 --evaluation.pictures 0 "
    words += "--encoder vit_micro --encoder.depth 2 --encoder.dim 24 --encoder.heads 2 --encoder.drop_path 0.3"
    return main([*words.split(), "--data.std", "0.4,0.5,0.6", "--output", str(output), *more])


@pytest.mark.slow
def test_a_run_exports_every_student_and_resumes_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    students = ["--distill.students", *OTHERS]
    assert run(tmp_path / "run", *students) == 0
    whole = timeless(tmp_path / "run")
    files = sorted((tmp_path / "run").glob("encoder*"))
    names = ("encoder-navit_micro", "encoder-swin_micro", "encoder")
    named = [f"{name}.{ending}" for name in names for ending in ("json", "safetensors")]
    assert [file.name for file in files] == named
    before = {file: file.read_bytes() for file in files}
    for variant in OTHERS:
        encoder = encoders.load(tmp_path / "run" / f"encoder-{variant}.safetensors")
        assert (encoder.settings["variant"], encoder.preprocessing.std) == (variant, (0.4, 0.5, 0.6))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    for file in files:
        file.unlink()
    assert run(tmp_path / "run", *students, "--resume") == 0
    assert timeless(tmp_path / "run") == whole
    assert {file: file.read_bytes() for file in files} == before
    for part in ("encoder", "encoder-swin_micro"):
        export.main([str(tmp_path / "run"), str(tmp_path / f"{part}.safetensors"), "--part", part])
        for ending in (".safetensors", ".json"):
            same = (tmp_path / part).with_suffix(ending).read_bytes() == before[tmp_path / "run" / f"{part}{ending}"]
            assert same, (part, ending)
    with pytest.raises(ValueError, match=r"has no encoder-swin_tiny\. Use --part encoder, --part encoder-navit_micro"):
        export.export(tmp_path / "run", tmp_path / "none.safetensors", "encoder-swin_tiny")
    start = ["--init_from", str(tmp_path / "run" / "encoder.safetensors")]
    assert run(tmp_path / "other", *students, *start) == 2
    assert "the encoders swin_micro, navit_micro start untrained" in capsys.readouterr().err
    assert run(tmp_path / "run", "--overwrite") == 0  # without other students
    assert [file.name for file in sorted((tmp_path / "run").glob("encoder*"))] == named[-2:]
    for shared, alone in zip(whole, timeless(tmp_path / "run"), strict=True):
        sums = {name: shared[name] for name in ("loss", "grad_norm") if name in alone}  # over all students
        assert {name: shared[name] for name in alone} == alone | sums
    assert json.loads((tmp_path / "run" / "encoder.json").read_text())["step"] == 4
