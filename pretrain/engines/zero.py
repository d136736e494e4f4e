"""DeepSpeed ZeRO: moments (1), gradients (2) and weights (3) in flat ranges, one a process."""

from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data.batch import Batch
from pretrain.engines.adamw_state import MOMENTS, fill_moments, optimizer_steps, set_optimizer_steps
from pretrain.engines.local_state import Piece, whole
from pretrain.engines.meta_copy import Skeleton
from pretrain.methods.base import Method
from pretrain.optim.adamw import parameter_groups
from runtime.settings import SettingsError


class ZeRO:
    """DeepSpeed's engine with all that is the method's own left to the method: the norms of gradients are ours, so that
    clipping and the skipping of steps are what they are under DDP.

    Weights stay float32 and autocast makes the arithmetic: DeepSpeed's own bf16 casts the teacher too, and an average
    in bf16 stands still.
    """

    sharded = True

    def __init__(self, accelerator: Accelerator, method: Method, betas: tuple[float, float]) -> None:
        """Raises SettingsError for compiled blocks under ZeRO-3."""
        plugin = accelerator.state.deepspeed_plugin
        assert plugin is not None
        self.stage: int = plugin.deepspeed_config["zero_optimization"]["stage"]
        self.name = f"zero{self.stage}"
        if self.stage == 3 and any(module._compiled_call_impl for module in method.modules()):
            raise SettingsError(
                "--compile true would compile DeepSpeed's gathering of weights too, anew for each module: leave it out "
                "under ZeRO-3, or take FSDP2 (configs/accelerate/fsdp2.yaml)"
            )
        self.accelerator, self.method = accelerator, method
        self.skeleton = Skeleton(method)
        optimizer = torch.optim.AdamW(parameter_groups(method, method.frozen()), lr=0.0, betas=betas)
        self.trained = {name: p for name, p in method.named_parameters() if p.requires_grad}
        wrapped, self.optimizer = accelerator.prepare(method, optimizer)
        self.engine = cast(Any, wrapped)
        self.zero = self.engine.optimizer
        flat = self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups
        fill_moments(self.zero.optimizer.state, flat)
        if self.stage < 3:
            self.zero._lazy_init_hp_params_optimizer_state()  # where in the flat moments each parameter's are

    def losses(self, batch: Batch, step: int, *, last: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of a batch; adds its gradient to this step's, which the `last` batch makes whole."""
        self.engine.set_gradient_accumulation_boundary(last)
        loss, metrics = self.engine(batch, step)
        self.engine.backward(loss)
        return loss.detach(), metrics

    def gradients(self, parts: list[nn.Module]) -> list[list[Tensor]]:
        """This process's ranges of the gradient: for each part, tensor after tensor, as views, empty where it has none
        of a tensor."""
        if self._offloads and self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()  # they may still be on their way to the host
        return [[self._gradient(p) for p in part.parameters() if p.requires_grad] for part in parts]

    @torch.no_grad()  # DeepSpeed 0.18 fails without, where it gathers weights into views
    def step(self) -> None:
        """Move the weights, and forget the gradient."""
        self.engine.step()
        if not self.engine.was_step_applied():
            raise RuntimeError("DeepSpeed dropped a step whose gradient is finite")

    @torch.no_grad()
    def skip(self) -> None:
        """Forget the gradient: a step of DeepSpeed's in which the optimizer does nothing."""
        self.zero.optimizer.step = lambda *_: None  # some versions drop a step that is not finite, some make it
        try:
            self.engine.step()
        finally:
            del self.zero.optimizer.step  # its class has the real one

    def whole(self, module: nn.Module, *, everywhere: bool = True) -> nn.Module | None:
        """`module`, a part of the method or all of it, with all its weights; under ZeRO-3 a plain copy."""
        keep = everywhere or self.accelerator.is_main_process
        if self.stage < 3:
            return module if keep else None
        return self.skeleton.fill(module, map(_gathered, module.parameters()), self.accelerator.device, keep=keep)

    def pieces(self) -> dict[str, Piece]:
        """What this process holds of the run's tensors, as views."""
        found = {}
        for name, tensor in self.method.state_dict(keep_vars=True).items():
            found[f"method.{name}"] = self._range(tensor, tensor.ds_tensor) if self._is_range(tensor) else whole(tensor)
        for name, parameter in self.trained.items():
            for moment in MOMENTS:
                found[f"{moment}.{name}"] = self._moment(parameter, moment)
        return found

    @property
    def optimizer_steps(self) -> int:
        """Steps that the optimizer made."""
        return optimizer_steps(self.zero.optimizer.state)

    def loaded(self, steps: int) -> None:
        """The pieces have been filled from a checkpoint, after `steps` of the optimizer."""
        self.zero.refresh_fp32_params()  # what it steps on is a copy of the weights
        set_optimizer_steps(self.zero.optimizer.state, steps)

    @property
    def _offloads(self) -> bool:
        return bool(self.zero.offload_optimizer if self.stage == 3 else self.zero.cpu_offload)

    def _is_range(self, tensor: Tensor) -> bool:
        return self.stage == 3 and hasattr(tensor, "ds_tensor")

    def _range(self, parameter: Any, flat: Tensor) -> Piece:
        """ZeRO-3's equal ranges of a flattened parameter; the last is filled up with numbers that mean nothing."""
        offset = min(self.accelerator.process_index * parameter.partition_numel(), parameter.ds_numel)
        return Piece(flat.detach()[: parameter.ds_numel - offset], offset, parameter.ds_numel)

    def _moment(self, parameter: Any, moment: str) -> Piece:
        if self.stage == 3:
            group, start, count = self.zero.grad_position[self.zero.get_param_id(parameter)]
            flat = self.zero.fp32_partitioned_groups_flat[group]
            return self._range(parameter, self.zero.optimizer.state[flat][moment].narrow(0, start, count))
        fragment = parameter._hp_mapping
        if fragment is None:
            return Piece(parameter.new_empty(0), 0, parameter.numel())
        return Piece(fragment.get_hp_fragment(moment), fragment.lp_fragment_address.start, parameter.numel())

    def _gradient(self, parameter: Any) -> Tensor:
        """(n,) or the parameter's shape: as DeepSpeed will step on it."""
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


def _gathered(parameter: nn.Parameter) -> Tensor:
    """All of a parameter that ZeRO-3 has partitioned. Called on all processes together."""
    import deepspeed  # seconds, which other engines need not wait

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def settings(accelerator: Accelerator, precision: str, accumulate: int) -> None:
    """Complete DeepSpeed's settings, which the launcher or its DeepSpeed file began.

    Raises:
        SettingsError: settings of theirs that would change what the method computes, or that have no effect here.
    """
    plugin = accelerator.state.deepspeed_plugin
    assert plugin is not None
    chosen: dict[str, Any] = plugin.deepspeed_config
    zero: dict[str, Any] = chosen["zero_optimization"]
    if precision == "fp16":
        raise SettingsError("precision fp16 does not work under DeepSpeed, whose fp16 casts the teacher too: use bf16")
    _check_sections(chosen, accumulate)
    _check_zero(zero)
    # a gradient is summed, and weights are gathered, as float32: no module counts as safe in less
    autocast = {"enabled": precision == "bf16", "dtype": "bfloat16", "lower_precision_safe_modules": []}
    chosen |= {
        "train_micro_batch_size_per_gpu": 1,  # the loader is ours; DeepSpeed only reports by it
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.0,
        "torch_autocast": autocast,
        "zero_force_ds_cpu_optimizer": False,
    }
    chosen.pop("train_batch_size", None)
    for name in [name for name, value in zero.items() if value == "auto"]:
        del zero[name]  # accelerate would look for the model's hidden_size
    for part in ("offload_optimizer", "offload_param"):
        if (zero.get(part) or {}).get("device", "none") == "none":
            zero.pop(part, None)
    # parameters that stay whole would not follow the teacher's average, which moves the ranges
    zero["stage3_param_persistence_threshold"] = 0
    zero.setdefault("reduce_bucket_size", 50_000_000)  # its own 500 million are a buffer of 2 GB


# sections of a DeepSpeed file that change no number, and those that are checked below
SECTIONS = {
    "zero_optimization", "fp16", "bf16", "torch_autocast", "gradient_clipping", "gradient_accumulation_steps",
    "train_batch_size", "train_micro_batch_size_per_gpu", "communication_data_type", "data_types", "steps_per_print",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger", "flops_profiler", "tensorboard", "wandb",
    "csv_monitor", "comet", "aio", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
}  # fmt: skip

# of zero_optimization: what lays weights out in another way than checkpoints and the teacher's average know, or rounds
# them; and the value that is right
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


def _check_sections(chosen: dict[str, Any], accumulate: int) -> None:
    """Raises SettingsError for what of a DeepSpeed file is not for it to say."""
    unknown = sorted(set(chosen) - SECTIONS)
    if unknown:
        hint = ", the settings under --optim say it all" if {"optimizer", "scheduler"} & set(unknown) else ""
        raise SettingsError(f"the DeepSpeed file has '{unknown[0]}', which is not supported here: remove it{hint}")
    for section in ("fp16", "bf16", "torch_autocast"):
        if str(chosen.get(section, {}).get("enabled", False)).lower() != "false":
            raise SettingsError(f"the DeepSpeed file enables '{section}': remove it and set --precision")
    types = {chosen.get("communication_data_type"), *chosen.get("data_types", {}).values()}
    if not types <= {None, "fp32", "float32", "auto"}:
        raise SettingsError("the DeepSpeed file sums gradients in low precision: remove communication_data_type and "
                            "data_types")  # fmt: skip
    if chosen.get("gradient_clipping", "auto") not in ("auto", 0, 0.0):
        raise SettingsError("the DeepSpeed settings clip gradients: leave that to --optim.clip and --optim.clip_by")
    passes = chosen.get("gradient_accumulation_steps", "auto")
    if passes not in ("auto", 1, accumulate):  # 1 is what accelerate says where nobody said anything
        raise SettingsError(
            f"the DeepSpeed settings have gradient_accumulation_steps {passes}: remove it and set --accumulate {passes}"
        )
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        if chosen.get(name, "auto") != "auto":
            raise SettingsError(f"the DeepSpeed file has '{name}': remove it, or write \"auto\"; --batch_size says it")


def _check_zero(zero: dict[str, Any]) -> None:
    """Raises SettingsError for what of zero_optimization is not supported."""
    if zero.get("stage") not in (1, 2, 3):
        raise SettingsError(f"ZeRO stage {zero.get('stage')}: take 1, 2 or 3, or launch with --multi_gpu")
    for name, right in FIXED.items():
        if zero.get(name, right) not in (right, "auto"):
            raise SettingsError(f"zero_optimization.{name} is not supported: remove it from the DeepSpeed file")
    for part in ("offload_optimizer", "offload_param"):
        offload = zero.get(part) or {}
        if offload.get("device") == "nvme":
            raise SettingsError("offloading to NVMe is not supported: take device cpu")
        if offload.get("ratio", 1) != 1 or offload.get("super_offload"):
            raise SettingsError(f"zero_optimization.{part} offloads all or nothing: remove ratio and super_offload")
