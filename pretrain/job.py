"""One pretraining run, from settings to a trained, exported and scored encoder."""

import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

import encoders
from data.demo import demo_shards
from data.loader import Batches, Reading, training_batches
from data.sampler import BatchSampler, bounded_buffers
from data.shards import MOST_LISTED, ShardError, ShardList, Sources, open_sources
from data.workers import free_cores
from evaluation.features import resolve_checkpoint
from pretrain import engines
from pretrain.checkpoints import resume
from pretrain.checkpoints.resume import TrainState
from pretrain.checkpoints.save import Saver
from pretrain.config import RunConfig, resolve, to_yaml
from pretrain.engines import Engine
from pretrain.loop import Run, train
from pretrain.methods import METHODS
from pretrain.methods.base import Method
from pretrain.monitoring.metrics import Recorder
from pretrain.monitoring.online_knn import OnlineKNN
from pretrain.preflight import rehearse, report
from runtime.collectives import broadcast_object, gather_objects
from runtime.processes import make_accelerator
from runtime.settings import SettingsError
from runtime.watchdog import watched

log = logging.getLogger(__name__)


def pretrain(config: RunConfig) -> None:
    """Run to the end: from settings to a trained, exported and scored encoder."""
    config = config.model_copy(update={"precision": arithmetic(config.precision)})
    accelerator, engine_class = processes(config)
    with watched():
        pretrain_on(accelerator, engine_class, config)


def pretrain_on(accelerator: Accelerator, engine_class: type[Engine], config: RunConfig) -> None:
    """The same, once the processes know of each other."""
    if not accelerator.is_main_process:
        logging.disable(logging.INFO)
    with accelerator.local_main_process_first():  # the first one fills the caches of indices and of the embedded data
        shards, config = sources(config)
        opened = open_sources(shards, source=config.source)
    sizes = [one.mean_bytes for one in opened.lists]
    buffers = bounded_buffers(sizes, config.stream.window, config.stream.window_gb)
    shards_seen = agree(opened.lists, buffers)
    images = sum(source.images for source in opened.lists)
    given, config = config, resolve(config, images)
    output, newest = run_folder(config)
    settings = config.model_dump(mode="json") | {"shards": shards_seen}
    position = TrainState()
    if newest:
        resume.check_fits(newest, settings)
        position = resume.read_train_state(newest)
    torch.manual_seed(config.seed)  # the same weights on every process
    method = build_method(config, fresh=newest is None)
    config = with_cutter(config, method)
    settings["loader"] = config.loader.model_dump(mode="json")
    batches = loader(config, method, opened, position.step, accelerator)
    if config.dry_run:
        if accelerator.is_main_process:
            report(config, method, opened, images, accelerator.num_processes, workers(config, accelerator))
        return
    accelerator.wait_for_everyone()  # nobody writes before all have looked
    make_folder(output)
    engine = engine_class(accelerator, method, cast(tuple[float, float], config.optim.betas))
    torch.manual_seed(config.seed + 1 + accelerator.process_index)  # drop path differs between processes
    if newest:
        resume.restore(newest, accelerator, engine)
        log.info("resumed from %s, step %d of %d", newest, position.step, config.steps)
    knn = online_knn(config, method, shards, accelerator)
    recorder = None
    if accelerator.is_main_process:
        write_settings(output, config)
        recorder = Recorder(output, position.step, config.metrics, settings)
        announce(given, config, images, accelerator, engine)
    with Saver(output / "checkpoints", accelerator, engine, settings, config.checkpoint) as saver:
        run = Run(config, output, accelerator, method, engine, recorder, knn, saver, position)
        train(run, iter(batches))
    finish_run(run)


def with_cutter(config: RunConfig, method: Method) -> RunConfig:
    """The settings with `loader.crops` resolved, so that config.yaml says who cut.

    Raises:
        SettingsError: this machine or this method cannot do what is asked for.
    """
    try:
        return config.model_copy(update={"loader": config.loader.resolved(method.transform())})
    except ValueError as error:
        raise SettingsError(f"loader: {error}") from error


def loader(config: RunConfig, method: Method, shards: Sources, first_step: int, accelerator: Accelerator) -> Batches:
    """This process's batches from `first_step` to the end.

    Raises:
        SettingsError: the images do not fill a batch, or processes and accumulated passes cannot share one equally.
    """
    assert config.steps is not None
    try:
        transform = method.transform()
    except ValueError as error:
        raise SettingsError(f"{config.method}: {error}") from error
    try:
        return training_batches(
            shards,
            transform,
            BatchSampler(
                batch_size=config.batch_size,
                first_step=first_step,
                steps=config.steps,
                rank=accelerator.process_index,
                world_size=accelerator.num_processes,
                accumulation=config.accumulate,
            ),
            seed=config.seed,
            stream=config.stream,
            reading=Reading(workers(config, accelerator), config.loader),
        )
    except ShardError:
        raise
    except ValueError as error:
        raise SettingsError(f"--batch_size: {error}") from error


def workers(config: RunConfig, accelerator: Accelerator) -> int:
    """Loader processes of this process."""
    return free_cores(accelerator.num_processes) if config.workers is None else config.workers


def make_folder(output: Path) -> None:
    """The run folder.

    Raises:
        SettingsError: it cannot be made or written to.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"cannot make {output}: {error.strerror}; choose another --output") from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise SettingsError(f"{output} cannot be written to: choose another --output")


def write_settings(output: Path, config: RunConfig) -> None:
    """`config.yaml`, whole or not at all: --resume reads it."""
    part = output / ".config.yaml.part"
    part.write_text(to_yaml(config))
    os.replace(part, output / "config.yaml")


def arithmetic(precision: str) -> str:
    """The precision of the forward pass where `auto` leaves it open: the launcher's, else bf16 where a GPU has it.

    Raises:
        SettingsError: fp16 without CUDA.
    """
    if precision == "auto":
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if precision == "no" and torch.cuda.is_available() and torch.cuda.is_bf16_supported():
            precision = "bf16"
    if precision == "fp16" and not torch.cuda.is_available():
        raise SettingsError("precision fp16 needs a CUDA device: use bf16 or fp32 on this machine")
    return {"no": "fp32"}.get(precision, precision)


def processes(config: RunConfig) -> tuple[Accelerator, type[Engine]]:
    """accelerate, set up for this run, and the engine that the launcher asks for.

    Raises:
        SettingsError: an engine that is not there.
    """
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    accelerator = make_accelerator(
        # DeepSpeed's own low precision would cast the teacher; ours is autocast (engines/zero.py)
        mixed_precision="no" if deepspeed or config.precision == "fp32" else config.precision,
        # the loader is not prepared, so its end must not trigger a step of its own
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config.accumulate, sync_with_dataloader=False
        ),
        # gradients lie in the buckets that are summed, not beside them
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    return accelerator, engines.select(accelerator, config.precision, config.accumulate)


def sources(config: RunConfig) -> tuple[Any, RunConfig]:
    """The SHARDS to train on, and the settings with the embedded data's evaluation shards where no data is given."""
    if config.data is not None:
        return config.data, config
    train_shards, val_shards = demo_shards()
    evaluation = config.evaluation.model_copy(
        update={"train": config.evaluation.train or train_shards, "val": config.evaluation.val or val_shards}
    )
    return train_shards, config.model_copy(update={"evaluation": evaluation})


def agree(opened: list[ShardList], windows: list[int]) -> str:
    """The fingerprint of the order, which is the same on all processes.

    Raises:
        ShardError: it is not; says what each of the two sees.
    """
    own = fingerprint(opened, windows)
    missing = [name for source in opened for name in source.unreadable]
    seen = gather_objects((own, sum(source.images for source in opened), missing))
    for rank, (other, images, lacking) in enumerate(seen):
        if other != seen[0][0]:
            differ = sorted(set(lacking) ^ set(seen[0][2]))[:MOST_LISTED]
            raise ShardError(
                f"process {rank} sees {images} images and process 0 sees {seen[0][1]}: all must see the same shards"
                + (f"; left out by one of the two: {', '.join(differ)}" if differ else "")
                + "; start again, or look at the disks of the nodes"
            )
    return own


def fingerprint(opened: list[ShardList], windows: list[int]) -> str:
    """Changes with what the order of the samples follows from: names, sizes and order of the shards; and windows."""
    counts: list[Any] = [
        [shard.name, int(n)] for source in opened for shard, n in zip(source.shards, source.counts, strict=True)
    ]
    return hashlib.sha256(json.dumps([counts, windows]).encode()).hexdigest()


def build_method(config: RunConfig, *, fresh: bool) -> Method:
    """The method with its encoder, as the settings say; equal on all processes for the same seed.

    Only a `fresh` run starts from `init_from`; a resumed one has its weights in the checkpoint.
    """
    encoder_settings = config.encoder_settings
    try:
        encoder = encoders.build(encoder_settings.pop("variant"), **encoder_settings)
        if encoder.channels != 3:
            raise ValueError(f"images are decoded to 3 channels, not {encoder.channels}: leave encoder.channels at 3")
        if config.init_from and fresh:
            folder = Path(config.init_from).is_dir()
            source = resolve_checkpoint(config.init_from) if folder else config.init_from
            log.info("%s", encoders.load_weights(encoder, source))
    except (ValueError, OSError) as error:
        raise SettingsError(f"encoder: {error}") from error
    assert config.steps is not None
    try:
        method = METHODS[config.method](encoder, config.method_config, config.steps)
        rehearse(method, encoder)
    except ValueError as error:
        raise SettingsError(f"{config.method}: {error}") from error
    if config.compile:
        torch._dynamo.config.recompile_limit = 64  # shared by all blocks: stages times kinds times sizes of crops
        for part in method.modules():
            if isinstance(part, encoders.Encoder):
                for block in part.blocks:
                    block.compile()
    return method


def run_folder(config: RunConfig) -> tuple[Path, Path | None]:
    """The run's folder, and the newest whole checkpoint in it if the run is to go on; writes nothing.

    Raises:
        SettingsError: the folder holds another run, or `--resume` without `--output`.
    """
    if config.resume and not config.output:
        raise SettingsError("--resume needs --output FOLDER: the run to continue")
    name = f"{config.method}-{config.encoder_settings['variant']}-{time.strftime('%Y%m%d-%H%M%S')}"
    output = Path(broadcast_object(config.output or str(Path("runs") / name)))
    found = broadcast_object(resume.list_checkpoints(output / "checkpoints"))  # without a shared disk: rank 0's
    holds_run = any((output / part).exists() for part in ("config.yaml", "metrics.jsonl", "checkpoints"))
    if holds_run and not config.resume:
        raise SettingsError(f"{output} holds another run: continue it with --resume, or choose another --output")
    if config.resume and not holds_run and config.data is None and config.config is None:
        raise SettingsError(f"{output} holds no run to continue; to begin one there, name its --data or --config too")
    if config.resume and not found:
        log.info("%s has no checkpoint yet: starting from the beginning", output)
    return output, found[-1] if found else None


def online_knn(config: RunConfig, method: Method, shards: Any, accelerator: Accelerator) -> OnlineKNN | None:
    """Return the online k-NN, or None if `evaluation.val` is not set."""
    if config.evaluation.val is None:
        return None
    bank = config.evaluation.train or (list(shards) if isinstance(shards, dict) else shards)
    return OnlineKNN(config.evaluation, bank, method.image_size, accelerator, config.source)


def announce(given: RunConfig, config: RunConfig, images: int, accelerator: Accelerator, engine: Engine) -> None:
    """Say what the run is, and which values were derived."""
    derived = [
        f"{section}.{name} {value}"
        for section in ("optim", config.method)
        for name, value in getattr(config, section)
        if getattr(getattr(given, section), name) is None and value is not None
    ]
    assert config.steps is not None
    log.info(
        "%s of %s on %s: %d images, %d steps of %d images (%.1f epochs), %d process(es) (%s), %s, precision %s",
        config.method, config.encoder_settings["variant"], config.data or "the embedded digits", images, config.steps,
        config.batch_size,
        config.steps * config.batch_size / images, accelerator.num_processes, engine.name, accelerator.device,
        config.precision,
    )  # fmt: skip
    if derived:
        log.info("derived from data, batch and length: %s", ", ".join(derived))


def finish_run(run: Run) -> None:
    """Export the encoder and say what to do with it."""
    encoder = run.engine.gather_on_main(run.method.trained_encoder())
    run.accelerator.wait_for_everyone()
    if run.recorder is None or encoder is None:
        return
    path = run.output / "encoder.safetensors"
    encoders.save(encoder, path)
    run.recorder.close()
    evaluation = run.config.evaluation
    train_shards, val_shards = evaluation.train or run.config.data, evaluation.val
    if not isinstance(train_shards, str) or not isinstance(val_shards, str):
        train_shards = val_shards = "SHARDS"
    scores = run.recorder.values("knn_top1")
    if scores:
        before, after = (f"{100 * score:.1f} % after {step} steps" for step, score in (scores[0], scores[-1]))
        print(f"\n{evaluation.k}-NN accuracy on held-out images: {before}, {after}")
    print(f"encoder: {path}")
    print(
        f"next:    accelerate launch evaluation/linear_probe.py --checkpoint {run.output} "
        f"--train '{train_shards}' --val '{val_shards}'"
        + " --no-augment --batch_norm"
        * (run.config.data is None)  # a mirrored digit is another one
    )
