"""Names that other projects use for settings, values and encoders, and the names here.

The sources are DINO, DINOv2, DINOv3, MAE, timm, torchvision, lightly-train, solo-learn, PyTorch Lightning and
Hugging Face. The names only improve error messages: a run never takes a synonym for the setting.
"""

_SETTINGS = {
    "encoder": "model model_name arch architecture backbone student_arch a",
    "data train": (
        "data_path data_dir train_data_path train_path train_dataset dataset dataset_path datasets train_data "
        "images image_dir"
    ),
    "evaluation.val val": "val_data_path val_path val_dir val_dataset val_data",
    "output": "output_dir out out_dir log_dir save_dir checkpoint_dir workdir",
    "config": "config_file cfg config_path yaml preset",
    "init_from checkpoint": (
        "pretrained pretrained_weights weights initial_checkpoint checkpoint ckpt ckpt_path finetune_from"
    ),
    "resume": "resume_interrupted auto_resume resume_from resume_from_checkpoint",
    "batch_size": (
        "batch_size_per_gpu batch_size_per_device bs b per_device_train_batch_size batchsize total_batch_size"
    ),
    "workers": "num_workers loader_workers n_workers j",
    "epochs": "max_epochs num_epochs num_train_epochs n_epochs",
    "steps": "max_steps iterations max_iter num_steps total_steps",
    "accumulate": "accum_iter accumulate_grad_batches gradient_accumulation_steps grad_accum_steps accum_steps",
    "optim.lr lr rates": "lr learning_rate base_lr blr peak_lr",
    "optim.min_lr": "min_learning_rate final_lr lr_min",
    "optim.warmup_steps": "warmup_epochs warmup num_warmup_steps warmup_iterations",
    "optim.weight_decay weight_decay": "wd weight_decay",
    "optim.weight_decay_end": "final_weight_decay weight_decay_final",
    "optim.clip": "clip_grad clip_grad_norm gradient_clip_val max_grad_norm grad_clip",
    "optim.layer_decay": "layerwise_decay layer_wise_lr_decay llrd",
    "optim.patch_embed_lr_factor": "patch_embed_lr_mult",
    "optim.betas": "opt_betas adamw_beta1 adamw_beta2",
    "optim.lr_scaling": "scaling_rule scale_lr",
    "encoder.drop_path": "drop_path_rate stochastic_depth",
    "encoder.layer_scale": "layerscale init_values",
    "encoder.patch_size": "patch patchsize",
    "encoder.registers": "num_register_tokens n_storage_tokens registers",
    "encoder.dim": "embed_dim hidden_size",
    "data.channels channels": "in_chans num_channels in_channels",
    "encoder.checkpoint_activations": (
        "gradient_checkpointing grad_checkpointing activation_checkpointing checkpointing"
    ),
    "*.global_size *.size image_size": (
        "image_size img_size input_size crop_size resolution global_crops_size global_crop_size global_size size"
    ),
    "*.local_size": "local_crops_size local_crop_size",
    "*.local_crops": "local_crops_number num_local_crops n_local_crops",
    "*.global_scale *.scale": "global_crops_scale global_crop_scale min_scale crop_scale",
    "*.local_scale": "local_crops_scale local_crop_scale",
    "*.flip": "horizontal_flips horizontal_flip_prob hflip",
    "*.jitter": "color_jitter colour_jitter color_jitter_prob",
    "*.grayscale": "gray_scale_prob grayscale_prob",
    "*.solarize_global2": "solarization_prob solarize",
    "*.prototypes": "out_dim head_n_prototypes num_prototypes",
    "*.hidden_dim": "head_hidden_dim proj_hidden_dim",
    "*.bottleneck_dim *.output_dim": "head_bottleneck_dim proj_output_dim",
    "*.head_layers": "head_nlayers num_head_layers",
    "*.batch_norm": "use_bn_in_head",
    "*.freeze_steps": "freeze_last_layer freeze_last_layer_epochs",
    "*.momentum": "momentum_teacher ema ema_decay base_tau_momentum",
    "dinov3.momentum_end": "final_momentum_teacher",
    "*.teacher_temperature": "teacher_temp",
    "*.student_temperature": "student_temp",
    "*.teacher_temperature_start": "warmup_teacher_temp",
    "*.teacher_temperature_steps": "warmup_teacher_temp_epochs",
    "*.koleo_weight": "koleo_loss_weight",
    "*.mask_probability": "mask_sample_probability",
    "*.mask_ratio": "mask_ratio_min_max masking_ratio",
    "mae.normalize_targets": "norm_pix_loss",
    "mae.decoder_dim": "decoder_embed_dim",
    "distill.teacher": "teacher_model teacher_name teacher_weights",
    "finetune.label_smoothing": "smoothing label_smoothing",
    "finetune.erasing": "reprob random_erasing",
    "finetune.randaugment": "aa auto_augment autoaugment",
    "finetune.classes classes": "num_classes nb_classes num_labels",
    "finetune.lora_rank": "lora lora_r",
    "checkpoint_every": (
        "saveckp_freq save_checkpoint_frequency save_steps checkpoint_frequency save_every save_freq save_interval"
    ),
    "checkpoint.keep": "save_total_limit max_checkpoints save_top_k checkpoint_hist",
    "evaluate_every": (
        "eval_period_iterations eval_every val_freq eval_freq eval_steps val_check_interval eval_interval"
    ),
    "record_every": "print_freq log_interval logging_steps log_every log_every_n_steps log_every_num_steps",
    "evaluation.k k": "nb_knn n_neighbors num_neighbors knn_k",
    "temperature": "temp knn_t",
    "metrics.sinks=wandb": "wandb log_wandb wandb_project project use_wandb",
    "metrics.sinks=tensorboard": "tensorboard tb tensorboard_dir",
    "metrics.sinks": "loggers logger report_to log_with",
    "precision=fp16": "use_fp16 fp16 amp half use_amp",
    "precision=bf16": "bf16 use_bf16",
    "precision": "dtype amp_dtype mixed_precision float32_matmul_precision",
    "compile": "torch_compile torchcompile use_compile",
    "seed": "random_seed manual_seed",
    "deterministic": "cudnn_deterministic use_deterministic_algorithms",
    "overwrite": "force overwrite_output_dir",
    "method=finetune": "finetune supervised",
    "method": "ssl_method algorithm objective",
}
SETTINGS = {name: ours for ours, names in _SETTINGS.items() for name in names.split()}
"""Name of a setting elsewhere -> names here, separated by spaces. The first one that the command has is suggested.

`*.NAME` is the setting NAME of any method, and `NAME=VALUE` is a setting with a value."""

_LAUNCHER = {
    "--num_processes N": (
        "processes devices gpus num_gpus ngpus nproc world_size nproc_per_node gpus_per_node num_processes"
    ),
    "--num_machines N": "num_machines num_nodes nnodes nodes",
    "--machine_rank N": "machine_rank node_rank",
    "--config_file zero2": "engine strategy deepspeed fsdp zero ddp",
    "--cpu": "accelerator device use_cuda no_cuda cpu",
}
LAUNCHER = {name: ours for ours, names in _LAUNCHER.items() for name in names.split()}
"""Name of a setting elsewhere -> flag of the launcher, which stands before the command: `tessera FLAG COMMAND`."""

NOTES = {
    "batch_size_per_gpu": "It counts the images of all processes.",
    "batch_size_per_device": "It counts the images of all processes.",
    "per_device_train_batch_size": "It counts the images of all processes.",
    "warmup_epochs": "It counts steps.",
    "warmup_teacher_temp_epochs": "It counts steps.",
    "freeze_last_layer": "It counts steps.",
    "freeze_last_layer_epochs": "It counts steps.",
    "saveckp_freq": "It counts steps.",
    **dict.fromkeys(("accelerator", "device", "use_cuda"), "Without it, a command takes the GPUs of the machine."),
}
"""Name of a setting elsewhere -> difference between its value and that of the setting here."""

_VALUES = {
    "fp16": "16 16-mixed 16-true fp16-mixed float16 half amp",
    "bf16": "bf16-mixed bf16-true bfloat16 amp_bf16",
    "fp32": "32 32-true float32 full no highest",
    "distill": "distillation distillationv1 distillationv2 distillationv3 kd",
    "finetune": "supervised classification fine-tune sup",
    "dino": "dinov1 dino_v1",
    "dinov2": "ibot dino_v2 dinov2_ibot",
    "dinov3": "dino_v3",
    "mae": "masked_autoencoder simmim",
    "lejepa": "le-jepa le_jepa sigreg",
}
VALUES = {name: ours for ours, names in _VALUES.items() for name in names.split()}
"""Value of a setting elsewhere -> value here."""

_SIZES = {"s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant"}
_DINOV3 = {
    "vits16": ("small", "vit_small_patch16_dinov3"),
    "vits16plus": ("small_plus", "vit_small_plus_patch16_dinov3"),
    "vitb16": ("base", "vit_base_patch16_dinov3"),
    "vitl16": ("large", "vit_large_patch16_dinov3"),
    "vith16plus": ("huge_plus", "vit_huge_plus_patch16_dinov3"),
    "vit7b16": ("7b", "vit_7b_patch16_dinov3"),
}


def _encoders() -> dict[str, tuple[str, str | None]]:
    names: dict[str, tuple[str, str | None]] = {
        "dino_resnet50": ("timm:resnet50", None),
        "dinov3_vitl16plus": ("rope_vit_large_plus", None),
        "vit_giant2": ("vit_giant_14_dinov2", "timm:vit_giant_patch14_dinov2.lvd142m"),
        "vit_7b": ("rope_vit_7b", "timm:vit_7b_patch16_dinov3.lvd1689m"),
        "deit_tiny": ("vit_tiny", "timm:deit_tiny_patch16_224.fb_in1k"),
        "deit_small": ("vit_small", "timm:deit_small_patch16_224.fb_in1k"),
        "deit_base": ("vit_base", "timm:deit_base_patch16_224.fb_in1k"),
    }
    for letter in "sb":
        size = _SIZES[letter]
        sixteen = (f"vit_{size}", f"timm:vit_{size}_patch16_224.dino")
        eight = (f"timm:vit_{size}_patch8_224", f"timm:vit_{size}_patch8_224.dino")
        names |= {f"dino_vit{letter}16": sixteen, f"facebook/dino-vit{letter}16": sixteen}
        names |= {f"dino_vit{letter}8": eight, f"facebook/dino-vit{letter}8": eight}
    for letter in "sblg":
        size = _SIZES[letter]
        plain = (f"vit_{size}_14_dinov2", f"timm:vit_{size}_patch14_dinov2.lvd142m")
        with_registers = (f"vit_{size}_14_dinov2_registers", f"timm:vit_{size}_patch14_reg4_dinov2.lvd142m")
        names[f"dinov2_vit{letter}14"] = plain
        # lightly-train 0.18.0, _models/dinov2_vit/dinov2_vit_src/configs/__init__.py: `vits14` loads
        # dinov2_vits14_reg4_pretrain.pth, and only the names with `noreg` have no registers.
        for end, (ours, weights) in (("", with_registers), ("-noreg", plain)):
            names |= dict.fromkeys(
                (f"dinov2/vit{letter}14{end}{more}" for more in ("", "-pretrained")), (ours, weights)
            )
            names[f"dinov2/vit{letter}14{end}-notpretrained"] = (ours, None)
        names |= dict.fromkeys((f"facebook/dinov2-{size}", f"dinov2_vit{letter}14_lc"), plain)
        names |= {f"dinov2_vit{letter}14_{end}": with_registers for end in ("reg", "reg4", "reg_lc")}
        names[f"facebook/dinov2-with-registers-{size}"] = with_registers
    for short, (size, published) in _DINOV3.items():
        ours = (f"rope_vit_{size}", f"timm:{published}.lvd1689m")
        names |= dict.fromkeys((f"dinov3_{short}", f"dinov3/{short}"), ours)
        names[f"facebook/dinov3-{short}-pretrain-lvd1689m"] = ours
    for size in ("tiny", "small", "base", "large"):
        convnext = (f"timm:convnext_{size}", f"timm:convnext_{size}.dinov3_lvd1689m")
        names |= dict.fromkeys((f"dinov3_convnext_{size}", f"dinov3/convnext-{size}"), convnext)
        names[f"facebook/dinov3-convnext-{size}-pretrain-lvd1689m"] = convnext
    for size, patch in (("base", 16), ("large", 16), ("huge", 14)):
        mae = (f"vit_{size}", f"timm:vit_{size}_patch{patch}_224.mae")
        names |= dict.fromkeys((f"mae_vit_{size}_patch{patch}", f"vit_{size}_patch{patch}"), mae)
        names |= dict.fromkeys((f"facebook/vit-mae-{size}", f"mae_vit_{size}"), mae)
    for letter, patch in (("s", 16), ("b", 16), ("l", 16), ("h", 14)):
        plain = (f"vit_{_SIZES[letter]}", None)
        names |= dict.fromkeys((f"vit_{letter}_{patch}", f"vit-{letter}/{patch}", f"vit-{letter}-{patch}"), plain)
        names |= dict.fromkeys((f"vit-{letter}", f"vit{letter}", f"vit{letter}{patch}"), plain)
    for size in ("tiny", "small", "base", "large"):
        names |= dict.fromkeys((f"swin_{size[0]}", f"swin-{size[0]}", f"swin-{size}"), (f"swin_{size}", None))
    return names


ENCODERS = _encoders()
"""Name of an encoder elsewhere, in small letters -> variant here, and the name of its published weights or None."""
