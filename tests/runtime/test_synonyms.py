"""Names of other projects: every suggestion exists here, and the names are those that the other projects use."""

import importlib

import pytest
from accelerate.commands.launch import launch_command_parser

from tessera.__main__ import COMMANDS, installed_commands
from tessera.pretrain.config import settings_model
from tessera.pretrain.methods import METHODS
from tessera.runtime.settings import Settings, names_of, suggestion
from tessera.runtime.synonyms import LAUNCHER, NOTES, SETTINGS, VALUES
from tests.installed import needs_extra

PRETRAIN = settings_model("vit_small")
FLAGS = [f"--{name}" for name in names_of(PRETRAIN)]


def names_of_all_commands() -> set[str]:
    found = set(names_of(PRETRAIN))
    for module, _ in (COMMANDS | installed_commands()).values():
        for model in vars(importlib.import_module(module)).values():
            if isinstance(model, type) and issubclass(model, Settings) and model.__module__ == module:
                found |= set(names_of(model))
    return found


@needs_extra("dense")
@needs_extra("finetune")
def test_what_is_suggested_exists() -> None:
    known = names_of_all_commands()
    ends = {name.rpartition(".")[2] for name in known if "." in name}
    for targets in SETTINGS.values():
        for target in targets.split():
            name = target.partition("=")[0]
            assert name in known or (name.startswith("*.") and name[2:] in ends), target
            if "=" in target:
                PRETRAIN.model_validate(_nested(*target.split("=")))
    options = {option for action in launch_command_parser()._actions for option in action.option_strings}
    assert {flag.split()[0] for flag in LAUNCHER.values()} <= options
    assert NOTES.keys() <= SETTINGS.keys() | LAUNCHER.keys()
    assert not SETTINGS.keys() & LAUNCHER.keys()
    assert set(VALUES.values()) <= {"fp32", "tf32", "bf16", "fp16", *METHODS.names()}


def _nested(name: str, value: str) -> dict[str, object]:
    section, _, last = name.rpartition(".")
    given = [value] if last == "sinks" else value
    return {section: {last: given}} if section else {last: given}


# Flags and settings as the other projects spell them, and the flag here.
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *(("--arch", "--encoder"), ("--out_dim", "--dino.prototypes"), ("--use_fp16", "--precision fp16")),  # DINO
        *(("--student.arch", "--encoder"), ("--ibot.mask_ratio_min_max", "--dinov2.mask_ratio")),  # DINOv2
        *(("--nodes", "tessera --num_machines N COMMAND"), ("--config-file", "--config")),
        *(("--blr", "--optim.lr"), ("--norm_pix_loss", "--mae.normalize_targets")),
        pytest.param("--smoothing", "--finetune.label_smoothing", marks=needs_extra("finetune")),
        *(("--img-size", None), ("--devices", "tessera --num_processes N COMMAND"), ("--backbone", "--encoder")),
        ("--log-wandb", "--metrics.sinks wandb"),
        ("--strategy", "tessera --config_file zero2 COMMAND"),
    ],
)  # fmt: skip
def test_names_of_other_projects(theirs: str, ours: str | None) -> None:
    assert theirs not in FLAGS
    found = suggestion(theirs, FLAGS, "dino")
    assert found.startswith("; did you mean '")
    if ours is not None:
        assert found.partition("?")[0] == f"; did you mean '{ours}'"


def test_the_chosen_method_comes_first() -> None:
    assert suggestion("--image_size", FLAGS, "mae") == "; did you mean '--mae.size'?"
    assert suggestion("--mask_ratio", FLAGS, "mae") == "; did you mean '--mae.mask_ratio'?"
    assert suggestion("image_size", [name.lstrip("-") for name in FLAGS], "lejepa").endswith("'lejepa.global_size'?")
    assert suggestion("wandb", [name.lstrip("-") for name in FLAGS]) == "; did you mean 'metrics.sinks: wandb'?"
    assert "It counts the images of all processes." in suggestion("--batch_size_per_gpu", FLAGS)
