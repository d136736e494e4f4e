"""DeepSpeed ZeRO: stage 1 shards the moments, stage 2 also the gradients, and stage 3 also the weights.

Each process holds one range of the flattened tensors.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from tessera.data.batch import Batch
from tessera.pretrain.engines.engine import (
    MOMENTS,
    Engine,
    Shards,
    allocate_moments,
    build_optimizer,
    trainable,
    weighted,
)
from tessera.pretrain.engines.local_state import LocalTensor, unsharded
from tessera.pretrain.engines.meta_copy import MetaCopy
from tessera.pretrain.methods.method import Method
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.runtime.settings import SettingsError


class ZeRO(Engine):
    """Engine that uses DeepSpeed.

    Gradient clipping and the skipping of steps work as under DDP. DeepSpeed's own versions of both are not used.

    Weights stay in float32, and autocast sets the precision of the forward pass. DeepSpeed's own bf16 would also cast
    the teacher's weights, and in bf16 most updates of a moving average are rounded to zero.
    """

    sharded = True

    def __init__(self, accelerator: Accelerator, method: Method, optim: OptimConfig) -> None:
        """Shard the method. Raise `SettingsError` if the method has compiled blocks under ZeRO-3."""
        self.stage: int = _config(accelerator)["zero_optimization"]["stage"]
        self.name = f"zero{self.stage}"
        if self.stage == 3 and any(module._compiled_call_impl for module in method.modules()):
            raise SettingsError(
                "--compile true is not supported under ZeRO-3, because it would compile DeepSpeed's gathering of "
                "weights. Remove --compile, or use FSDP2 (configs/accelerate/fsdp2.yaml)."
            )
        self.accelerator, self.method = accelerator, method
        self.meta_copy = MetaCopy(method) if self.stage == 3 else None
        self.trained = trainable(method)
        wrapped, _ = accelerator.prepare(method, build_optimizer(method, optim))
        self.engine = cast(Any, wrapped)
        self.zero = self.engine.optimizer
        self.optimizer = self.zero.optimizer
        flat = self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups
        allocate_moments(self.adamw_state, flat)
        if self.stage < 3:
            # this call maps each parameter to its range of the flattened moments
            self.zero._lazy_init_hp_params_optimizer_state()

    @staticmethod
    def shards(accelerator: Accelerator) -> Shards:
        stage, count = _config(accelerator)["zero_optimization"]["stage"], accelerator.num_processes
        return Shards(count if stage == 3 else 1, count if stage >= 2 else 1, count)

    def forward_backward(self, batch: Batch, step: int, *, last: bool) -> tuple[Tensor, dict[str, Tensor]]:
        self.engine.set_gradient_accumulation_boundary(last)
        loss, metrics = weighted(*self.engine(batch, step))
        self.engine.backward(loss)
        return loss.detach(), metrics

    def local_gradients(self, parts: list[nn.Module]) -> list[list[Tensor]]:
        """Return this process's ranges of the gradients as views. A view is empty if this process holds no range of the
        parameter."""
        if self._offloads and self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()  # wait until the gradients are copied to the host
        return [[self._gradient(p) for p in part.parameters() if p.requires_grad] for part in parts]

    @torch.no_grad()  # without no_grad, DeepSpeed 0.18 fails when it gathers weights into views
    def step(self, updated: Tensor) -> None:
        self._decide(updated)
        self.engine.step()  # also clears the gradients

    def full_parameters(self, module: nn.Module) -> Iterator[Tensor]:
        import deepspeed  # imported here, because the import takes seconds and other engines do not need DeepSpeed

        for parameter in module.parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                full = parameter.detach().clone()
            yield full

    def local_state(self) -> dict[str, LocalTensor]:
        found = {}
        for name, tensor in self.method.state_dict(keep_vars=True).items():
            sharded = self.stage == 3 and hasattr(tensor, "ds_tensor")
            found[f"method.{name}"] = self._range(tensor, tensor.ds_tensor) if sharded else unsharded(tensor)
        for name, parameter in self.trained.items():
            for moment in MOMENTS:
                found[f"{moment}.{name}"] = self._moment(parameter, moment)
        return found

    def after_load(self, optimizer_steps: int) -> None:
        self.zero.refresh_fp32_params()  # updates the optimizer's own copy of the weights
        super().after_load(optimizer_steps)

    @property
    def _offloads(self) -> bool:
        return bool(self.zero.offload_optimizer if self.stage == 3 else self.zero.cpu_offload)

    def _range(self, parameter: Any, flat: Tensor) -> LocalTensor:
        """Return this process's range of a parameter that ZeRO-3 flattened, without the padding of the last range."""
        offset = min(self.accelerator.process_index * parameter.partition_numel(), parameter.ds_numel)
        return LocalTensor(flat.detach()[: parameter.ds_numel - offset], offset, parameter.ds_numel)

    def _moment(self, parameter: Any, moment: str) -> LocalTensor:
        if self.stage == 3:
            group, start, count = self.zero.grad_position[self.zero.get_param_id(parameter)]
            flat = self.zero.fp32_partitioned_groups_flat[group]
            return self._range(parameter, self.adamw_state[flat][moment].narrow(0, start, count))
        fragment = parameter._hp_mapping
        if fragment is None:
            return LocalTensor(parameter.new_empty(0), 0, parameter.numel())
        return LocalTensor(fragment.get_hp_fragment(moment), fragment.lp_fragment_address.start, parameter.numel())

    def _gradient(self, parameter: Any) -> Tensor:
        """Return this process's gradient of a parameter as a view, either flat (n,) or in the shape of the parameter.

        Changes to the view take effect in DeepSpeed's next step.
        """
        if self.stage == 3:
            gradient, _ = self.zero._get_fp32_grad_state_partition(parameter, release_swap_buffers=False)
            return self._range(parameter, gradient).data
        fragment = parameter._hp_mapping
        if fragment is None:
            return parameter.new_empty(0)
        if self._offloads:
            flat = self.zero.single_partition_of_fp32_groups[fragment.param_group_index].grad
            return flat.narrow(0, fragment.hp_fragment_address.start, fragment.hp_fragment_address.numel)
        return fragment.get_lp_grad_fragment(parameter._index_in_param_group)


def complete_config(accelerator: Accelerator, precision: str, accumulate: int) -> None:
    """Check the DeepSpeed settings of the launcher or its DeepSpeed file. Set the values that the run determines.

    Raises:
        SettingsError: a DeepSpeed setting would change the results of the method, or would have no effect.
    """
    config = _config(accelerator)
    zero: dict[str, Any] = config["zero_optimization"]
    if precision == "fp16":
        raise SettingsError(
            "--precision fp16 is not supported under DeepSpeed, because it would also cast the teacher. "
            "Use --precision bf16."
        )
    _check_sections(config, accumulate)
    _check_zero_section(zero)
    # No module is marked as safe for low precision, so DeepSpeed reduces gradients and gathers weights in float32.
    autocast = {"enabled": precision == "bf16", "dtype": "bfloat16", "lower_precision_safe_modules": []}
    config |= {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed requires a value, but uses it only to report throughput
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.0,
        "torch_autocast": autocast,
        "zero_force_ds_cpu_optimizer": False,
    }
    config.pop("train_batch_size", None)
    for name in [name for name, value in zero.items() if value == "auto"]:
        # accelerate would derive a value for "auto" from `hidden_size`, an attribute that encoders here do not have
        del zero[name]
    for part in ("offload_optimizer", "offload_param"):
        if (zero.get(part) or {}).get("device", "none") == "none":
            zero.pop(part, None)
    # With a higher threshold, small parameters of the teacher would not be sharded. The moving average would miss these
    # parameters, because it updates only the local ranges of sharded parameters.
    zero["stage3_param_persistence_threshold"] = 0
    zero.setdefault("reduce_bucket_size", 50_000_000)  # DeepSpeed's default of 500 million allocates a buffer of 2 GB


def _config(accelerator: Accelerator) -> dict[str, Any]:
    """Return DeepSpeed's configuration as a dict that can be changed until `Accelerator.prepare` is called."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        raise SettingsError("The launcher did not configure DeepSpeed. Use a file of configs/accelerate/.")
    return plugin.deepspeed_config


# Sections that a DeepSpeed file may have, which cannot change the results of a run.
LOGGING = {
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger", "flops_profiler",
    "tensorboard", "wandb", "csv_monitor", "comet", "aio", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization",
}  # fmt: skip

# Other sections with the values that do not differ from what the run sets, and the flag that takes their place.
SECTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp16": ((False, "auto"), "--precision"),
    "bf16": ((False, "auto"), "--precision"),
    "torch_autocast": ((False, "auto"), "--precision"),
    "gradient_clipping": (("auto", 0), "--optim.clip"),
    "gradient_accumulation_steps": (("auto", 1), "--accumulate"),  # accelerate sets 1 if no value is given
    "train_batch_size": (("auto",), "--batch_size"),
    "train_micro_batch_size_per_gpu": (("auto",), "--batch_size"),
    "communication_data_type": ((None, "fp32", "auto"), "--precision"),
    "optimizer": ((), "--optim"),
    "scheduler": ((), "--optim"),
}

# Options of zero_optimization, each with the only supported value. Other values would change the layout or precision
# of parameters, on which checkpoints and the EMA rely.
FIXED = {
    "round_robin_gradients": False,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "mics_shard_size": -1,
    "zenflow": None,
    "stage3_param_persistence_threshold": 0,
}


def _check_sections(config: dict[str, Any], accumulate: int) -> None:
    """Raise `SettingsError` for DeepSpeed sections that this project sets itself or does not support."""
    for name in sorted(config.keys() - LOGGING):
        allowed, flag = SECTIONS.get(name, ((), ""))
        value = config[name].get("enabled", False) if isinstance(config[name], dict) else config[name]
        if value not in allowed and (name, value) != ("gradient_accumulation_steps", accumulate):
            cure = f", and use {flag}" if flag else ""
            raise SettingsError(f"The DeepSpeed settings have '{name}', which is not supported. Remove it{cure}.")


def _check_zero_section(zero: dict[str, Any]) -> None:
    """Raise `SettingsError` for options of the section zero_optimization that are not supported."""
    if zero.get("stage") not in (1, 2, 3):
        raise SettingsError(
            f"ZeRO stage {zero.get('stage')} is not supported. Use stage 1, 2 or 3, or launch with --multi_gpu."
        )
    for name, supported in FIXED.items():
        if zero.get(name, supported) not in (supported, "auto"):
            raise SettingsError(f"zero_optimization.{name} is not supported. Remove it from the DeepSpeed file.")
    for part in ("offload_optimizer", "offload_param"):
        offload = zero.get(part) or {}
        if offload.get("device") == "nvme" or offload.get("ratio", 1) != 1 or offload.get("super_offload"):
            raise SettingsError(f"zero_optimization.{part} must offload everything to the CPU: use only device cpu.")
