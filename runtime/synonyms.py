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
    "tf32": "tensorfloat32 tensorfloat-32 high",
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
