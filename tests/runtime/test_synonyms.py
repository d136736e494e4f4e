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
    assert set(VALUES.values()) <= {"fp32", "bf16", "fp16", *METHODS.names()}


def _nested(name: str, value: str) -> dict[str, object]:
    section, _, last = name.rpartition(".")
    given = [value] if last == "sinks" else value
    return {section: {last: given}} if section else {last: given}


# Flags and settings as the other projects spell them, and the flag here.
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        # DINO
        *(("--arch", "--encoder"), ("--out_dim", "--dino.prototypes"), ("--momentum_teacher", "--dino.momentum")),
        *(("--batch_size_per_gpu", "--batch_size"), ("--saveckp_freq", "--checkpoint_every")),
        *(("--local_crops_number", "--dino.local_crops"), ("--data_path", "--data"), ("--output_dir", "--output")),
        *(("--warmup_epochs", "--optim.warmup_steps"), ("--clip_grad", "--optim.clip"), ("--lr", "--optim.lr")),
        *(("--num_workers", "--workers"), ("--use_fp16", "--precision fp16"), ("--min_lr", "--optim.min_lr")),
        *(("--freeze_last_layer", "--dino.freeze_steps"), ("--teacher_temp", "--dino.teacher_temperature")),
        *(("--global_crops_scale", "--dino.global_scale"), ("--patch_size", "--encoder.patch_size")),
        # DINOv2 and DINOv3
        *(("--student.arch", "--encoder"), ("--train.dataset_path", "--data"), ("--optim.base_lr", "--optim.lr")),
        *(("--crops.local_crops_size", "--dino.local_size"), ("--student.drop_path_rate", "--encoder.drop_path")),
        *(("--student.num_register_tokens", "--encoder.registers"), ("--config-file", "--config")),
        *(("--ibot.mask_ratio_min_max", "--dinov2.mask_ratio"), ("--optim.layerwise_decay", "--optim.layer_decay")),
        *(("--dino.koleo_loss_weight", "--dinov2.koleo_weight"), ("--nodes", "tessera --num_machines N COMMAND")),
        # MAE and timm
        *(("--model", "--encoder"), ("--accum_iter", "--accumulate"), ("--blr", "--optim.lr")),
        *(("--input_size", "--dino.global_size"), ("--norm_pix_loss", "--mae.normalize_targets")),
        pytest.param("--smoothing", "--finetune.label_smoothing", marks=needs_extra("finetune")),
        *(pytest.param("--reprob", "--finetune.erasing", marks=needs_extra("finetune")), ("--img-size", None)),
        *(("--drop-path", "--encoder.drop_path"), ("--amp", "--precision fp16"), ("--data-dir", "--data")),
        *(("--log-wandb", "--metrics.sinks wandb"), ("--device", "tessera --cpu COMMAND")),
        # lightly-train, PyTorch Lightning and solo-learn
        *(("--out", "--output"), ("--resume_interrupted", "--resume"), ("--loggers", "--metrics.sinks")),
        *(("--backbone", "--encoder"), ("--max_epochs", "--epochs"), ("--wandb", "--metrics.sinks wandb")),
        *(("--devices", "tessera --num_processes N COMMAND"), ("--strategy", "tessera --config_file zero2 COMMAND")),
        *(("--train_data_path", "--data"), ("--val_data_path", "--evaluation.val"), ("--crop_size", None)),
        *(("--accumulate_grad_batches", "--accumulate"), ("--gradient_clip_val", "--optim.clip")),
        *(("--embed_dim", "--encoder.dim"), ("--checkpoint", "--init_from"), ("--engine", None)),
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
