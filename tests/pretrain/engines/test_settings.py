"""Launcher settings that engines accept or refuse, before anything is written."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.utils import DeepSpeedPlugin, DistributedType

from tessera.pretrain import engines
from tessera.pretrain.engines import ddp, fsdp2, zero
from tessera.runtime.settings import SettingsError
from tests.pretrain.small import OPTIM

CONFIGS = Path(__file__).parents[3] / "configs" / "accelerate"
# a user's file, written for Hugging Face's trainer
FILE: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1000,
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
    },
}


def deepspeed(file: dict[str, Any]) -> Any:
    """Return a stand-in for an accelerator that was launched with this DeepSpeed file."""
    plugin = DeepSpeedPlugin(hf_ds_config=file)
    plugin.set_mixed_precision("no")
    return SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=plugin), distributed_type=DistributedType.DEEPSPEED, num_processes=2
    )


def changed(key: str, value: Any) -> dict[str, Any]:
    """Return FILE with one key set. `zero.x` is a key of zero_optimization."""
    name = key.removeprefix("zero.")
    if key == name:
        return {**FILE, "zero_optimization": dict(FILE["zero_optimization"]), name: value}
    return {**FILE, "zero_optimization": FILE["zero_optimization"] | {name: value}}


def test_a_users_deepspeed_file_is_completed() -> None:
    accelerator = deepspeed(changed("zero.reduce_scatter", False))
    assert engines.select(accelerator, "bf16", 3) is zero.ZeRO
    chosen = accelerator.state.deepspeed_plugin.deepspeed_config
    left = chosen["zero_optimization"]
    assert "auto" not in left.values()
    assert "offload_param" not in left
    assert (left["offload_optimizer"]["device"], left["reduce_scatter"], left["overlap_comm"]) == ("cpu", False, True)
    assert left["stage3_param_persistence_threshold"] == 0
    assert (chosen["gradient_accumulation_steps"], chosen["train_micro_batch_size_per_gpu"]) == (3, 1)
    assert chosen["gradient_clipping"] == 0
    assert "train_batch_size" not in chosen
    assert not chosen["bf16"]["enabled"]
    assert not chosen["fp16"]["enabled"]
    assert (chosen["torch_autocast"]["enabled"], chosen["torch_autocast"]["lower_precision_safe_modules"]) == (True, [])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer", {"type": "AdamW", "params": {"lr": 1}}, "have 'optimizer'.*--optim"),
        ("bf16", {"enabled": True}, "have 'bf16'.*--precision"),
        ("torch_autocast", {"enabled": "true"}, "have 'torch_autocast'.*--precision"),
        ("gradient_clipping", 1.0, "--optim.clip"),
        ("gradient_accumulation_steps", 4, "--accumulate"),
        ("train_batch_size", 64, "have 'train_batch_size'.*--batch_size"),
        ("communication_data_type", "bf16", "'communication_data_type', which is not supported. Remove it"),
        ("zero.stage", 0, "stage 0.*--multi_gpu"),
        ("zero.round_robin_gradients", True, r"zero_optimization\.round_robin_gradients is not supported\. Remove"),
        ("zero.offload_optimizer", {"device": "nvme", "nvme_path": "/x"}, "use only device cpu"),
        ("zero.offload_optimizer", {"device": "cpu", "ratio": 0.5}, "use only device cpu"),
    ],
)
def test_deepspeed_settings_that_change_the_numbers_are_refused(key: str, value: Any, message: str) -> None:
    accelerator = deepspeed(changed(key, value))
    with pytest.raises(SettingsError, match=message):
        engines.select(accelerator, "fp32", 3)


def test_compiled_blocks_are_refused_where_deepspeed_gathers_weights() -> None:
    method: Any = torch.nn.Sequential(torch.nn.Linear(2, 2))
    method[0].compile()
    with pytest.raises(SettingsError, match=r"--compile.*FSDP2"):
        zero.ZeRO(deepspeed(FILE), method, OPTIM)


def test_fp16_is_refused_where_it_would_reach_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="Use --precision bf16"):
        engines.select(deepspeed(FILE), "fp16", 1)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(SettingsError, match="Use --precision bf16"):
        engines.select(fsdp(), "fp16", 1)


def fsdp(processes: int = 2) -> Any:
    return SimpleNamespace(
        distributed_type=DistributedType.MULTI_CPU, num_processes=processes, device=torch.device("cpu")
    )


@pytest.mark.parametrize(
    ("variable", "value", "processes", "message"),
    [
        ("FSDP_VERSION", "1", 2, "fsdp_version: 2"),
        ("FSDP_OFFLOAD_PARAMS", "true", 2, "needs a GPU, and this run is on the CPU"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", 2, "--encoder.checkpoint_activations"),
        ("FSDP_RESHARD_AFTER_FORWARD", "true", 1, "Launch two or more"),
        ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "3", 2, "dp_replicate_size 3 x dp_shard_size 1 are 3 processes"),
        ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2", 2, "dp_shard_size 1 shards nothing"),
        ("PARALLELISM_CONFIG_CP_SIZE", "2", 2, "Remove tp_size, cp_size, sp_size"),
        ("PARALLELISM_CONFIG_DP_SHARD_SIZE", "0", 2, "parallelism_config is invalid: .*dp_shard_size"),
    ],
)
def test_fsdp_settings_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, processes: int, message: str
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert engines.select(fsdp(), "bf16", 1) is fsdp2.FSDP2
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=message):
        engines.select(fsdp(processes), "bf16", 1)


def test_groups_of_processes_are_refused_without_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines.select(fsdp(), "bf16", 1) is ddp.DDP
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(SettingsError, match=r"hsdp\.yaml"):
        engines.select(fsdp(), "bf16", 1)


def test_other_distributed_types_are_refused() -> None:
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.MEGATRON_LM)
    with pytest.raises(SettingsError, match="configs/accelerate"):
        engines.select(accelerator, "fp32", 1)


def test_every_engine_has_a_file_for_the_launcher() -> None:
    found = {path.stem: yaml.safe_load(path.read_text()) for path in CONFIGS.glob("*.yaml")}
    kinds = {
        name: (file["distributed_type"], file.get("deepspeed_config", {}).get("zero_stage"))
        for name, file in found.items()
    }
    assert kinds == {
        "ddp": ("MULTI_GPU", None),
        "zero1": ("DEEPSPEED", 1),
        "zero2": ("DEEPSPEED", 2),
        "zero3": ("DEEPSPEED", 3),
        "fsdp2": ("FSDP", None),
        "hsdp": ("FSDP", None),
    }
