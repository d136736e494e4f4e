"""Where the settings of a run come from."""

from pathlib import Path

import pytest

from tessera.pretrain.command_line import from_values, load
from tessera.pretrain.config import RunConfig, to_yaml
from tessera.pretrain.origins import described, differing
from tessera.pretrain.resolve import resolve


def found(given: RunConfig, images: int = 1000) -> dict[str, tuple[object, str]]:
    return differing(resolve(given, images))


def test_each_layer_names_the_settings_that_it_sets(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("data: x.tar\nseed: 5\nbatch_size: 64\noptim: {clip: 1}\n")
    origins = found(load(["--config", str(file), "--batch_size", "128", "--encoder", "vit_micro", "--epochs", "2"]))
    assert origins["seed"] == (5, f"file {file}")
    assert origins["optim.clip"] == (1.0, f"file {file}")
    assert origins["batch_size"] == (128, "flags")
    assert origins["encoder.variant"] == ("vit_micro", "flags")
    assert origins["steps"] == (15, "derived: 2 epochs of 1,000 images")
    assert origins["optim.lr"][1] == "derived: the batch size"
    assert origins["optim.warmup_steps"][1].startswith("derived: ")
    assert "dry_run" not in origins
    assert not [name for name in origins if name.startswith("mae.")]


def test_a_setting_equal_to_its_default_is_left_out() -> None:
    assert "seed" not in found(load(["--data", "x.tar", "--seed", "0"]))
    assert found(load(["--data", "x.tar", "--seed", "1"]))["seed"] == (1, "flags")


def test_presets_python_and_the_run_to_resume_are_named(tmp_path: Path) -> None:
    assert found(load(["--config", "cifar10_dino", "--data", "x.tar"]))["data.shards"] == ("x.tar", "flags")
    preset = found(load(["--config", "cifar10_dino", "--data", "x.tar"]))
    assert preset["dino.global_size"][1] == "preset cifar10_dino"
    assert found(load(["--method", "dino"]))["encoder.variant"][1] == "preset digits_dino"
    given = from_values({"data": "x.tar", "seed": 3})
    assert found(given)["seed"] == (3, "Python")
    (tmp_path / "config.yaml").write_text(to_yaml(resolve(given, 1000)))
    resumed = found(load(["--resume", "--output", str(tmp_path), "--workers", "1"]))
    assert resumed["seed"] == (3, f"the run {tmp_path}")
    assert resumed["workers"] == (1, "flags")


def test_lines_are_few_and_keep_each_setting_in_one_piece() -> None:
    many = {f"section.name_{number}": (number, "flags") for number in range(200)}
    lines = described(many, most=5)
    assert len(lines) == 5
    assert lines[-1].endswith("more: --dry_run full")
    assert all(len(line) <= 120 for line in lines)
    assert "section.name_199 199" in described(many)[-1]


@pytest.mark.parametrize(("words", "value"), [([], True), (["true"], True), (["false"], False), (["full"], "full")])
def test_the_forms_of_dry_run(words: list[str], value: object) -> None:
    assert load(["--data", "x.tar", "--dry_run", *words]).dry_run == value
    assert load(["--data", "x.tar", f"--dry_run={words[0] if words else 'true'}"]).dry_run == value
    assert from_values({"data": "x.tar", "dry_run": value}).dry_run == value
