"""One pretraining run: prepare it from the settings, train, evaluate, and export the encoder."""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

from tessera import encoders
from tessera.data.batches import Batches
from tessera.data.decode import jpeg_decoder
from tessera.data.demo import demo_shards
from tessera.data.loader import Reading, training_batches
from tessera.data.sampler import BatchSampler, bounded_buffers
from tessera.data.shards import MOST_LISTED, ShardError, Source, Sources, WeightedShards, open_sources
from tessera.data.workers import free_cores
from tessera.pretrain import engines
from tessera.pretrain.build import build_method
from tessera.pretrain.checkpoints import resume
from tessera.pretrain.checkpoints.resume import TrainState
from tessera.pretrain.checkpoints.save import Saver
from tessera.pretrain.config import RunConfig, resolve, to_yaml
from tessera.pretrain.engines import Engine
from tessera.pretrain.folder import claimed, delete_run, newest_checkpoint
from tessera.pretrain.loop import Run, train
from tessera.pretrain.measurements import measure_classes, measure_pixels
from tessera.pretrain.methods.base import Method
from tessera.pretrain.monitoring.accuracy import Accuracy, write_result
from tessera.pretrain.monitoring.machine import record_start
from tessera.pretrain.monitoring.metrics import Recorder
from tessera.pretrain.monitoring.online_knn import OnlineKNN
from tessera.pretrain.monitoring.verdict import Scores, baselines, linear
from tessera.pretrain.precision import with_precision
from tessera.pretrain.preflight import Plan, report
from tessera.runtime import processes
from tessera.runtime.allocator import keep_freed_memory
from tessera.runtime.collectives import first_of_node_first, gather_objects, run_on_all_ranks
from tessera.runtime.files import atomic_write
from tessera.runtime.preemption import saving_on_interrupt
from tessera.runtime.settings import SettingsError
from tessera.runtime.watchdog import watched

log = logging.getLogger(__name__)


def pretrain(config: RunConfig) -> Path:
    """Train an encoder with the given settings, evaluate it during training, and export it. Return the run folder."""
    config = with_precision(config)
    accelerator, engine_class = make_accelerator(config)
    if not accelerator.is_main_process:
        logging.disable(logging.INFO)
    with watched(), claimed(config, accelerator.is_main_process) as output:
        run_job(accelerator, engine_class, config, output)
    return output


def run_job(accelerator: Accelerator, engine_class: type[Engine], given: RunConfig, output: Path) -> None:
    """Train, evaluate and export an encoder, in the folder `output`. The process group must be initialised."""
    with first_of_node_first():  # the first process fills the caches that the others use
        shards, given = training_shards(given)
        opened = open_sources(shards, source=given.source)
    sizes = [one.mean_bytes for one in opened.lists]
    shards_seen = agree(opened.lists, bounded_buffers(sizes, given.stream.window, given.stream.window_gb))
    images = sum(source.images for source in opened.lists)
    statistics = measure_pixels(given, opened, accelerator)
    config = resolve(given, images, statistics, measure_classes(given, opened, accelerator))
    newest = newest_checkpoint(config, output)
    settings = config.model_dump(mode="json") | {"shards": shards_seen}
    position = TrainState()
    if newest:
        resume.check_fits(newest, settings)
        position = resume.read_train_state(newest)
    torch.manual_seed(config.seed)  # the same seed on all processes, so that all build equal weights
    main = accelerator.is_main_process if engine_class.sends_weights else None
    method = build_method(config, fresh=newest is None, main=main)
    config = resolve_crops(config, method)
    settings["loader"] = config.loader.model_dump(mode="json")
    if config.data.shards is not None:
        # Load the JPEG decoder before the loader workers are forked, so that the workers share its memory. The embedded
        # digits do not need the decoder, because they are PNG files.
        jpeg_decoder()
    batches = loader(config, method, opened, position.step, accelerator)
    if config.dry_run:
        if accelerator.is_main_process:
            report(config, method, Plan(opened, images, accelerator.num_processes, workers(config, accelerator)))
        return
    accelerator.wait_for_everyone()  # no process may write before all processes have checked the folder
    if config.overwrite:
        run_on_all_ranks(lambda: delete_run(output) if accelerator.is_main_process else None)
    engine = engine_class(accelerator, method, config.optim)
    # A different seed per process, for code that draws from torch's generator. Drop path does not use that generator
    # (encoders/randomness.py).
    torch.manual_seed(config.seed + 1 + accelerator.process_index)
    if newest:
        resume.restore(newest, accelerator, engine)
        log.info("resumed from %s, step %d of %d", newest, position.step, config.steps)
    knn, accuracy = evaluations(config, method, shards, accelerator)
    recorder = None
    if accelerator.is_main_process:
        with atomic_write(output / "config.yaml") as part:  # written atomically, because --resume reads this file
            part.write_text(to_yaml(config))
        recorder = Recorder(output, position.step, config.metrics, settings)
        record_start(output, position.step, engine, config.precision)
        announce(given, config, images, engine)
    with (
        saving_on_interrupt(),
        Saver(output / "checkpoints", accelerator, engine, settings, config.checkpoint) as saver,
    ):
        run = Run(config, output, accelerator, method, engine, recorder, knn, saver, images, position, accuracy)
        train(run, iter(batches))
    finish_run(run)


class Prepared(NamedTuple):
    """The loader of a run that starts from its first step, and what it was built from."""

    config: RunConfig
    accelerator: Accelerator
    shards: Sources
    batches: Batches


def first_batches(given: RunConfig) -> Prepared:
    """Return the loader of a run with the given settings from its first step, without starting the run.

    Raises:
        UserError: the shards cannot be read, or the settings do not fit together.
    """
    given = with_precision(given)
    accelerator, _ = make_accelerator(given)
    shards, given = training_shards(given)
    opened = open_sources(shards, source=given.source)
    images = sum(source.images for source in opened.lists)
    statistics = measure_pixels(given, opened, accelerator)
    config = resolve(given, images, statistics, measure_classes(given, opened, accelerator))
    method = build_method(config, fresh=False)
    config = resolve_crops(config, method)
    return Prepared(config, accelerator, opened, loader(config, method, opened, 0, accelerator))


def make_accelerator(config: RunConfig) -> tuple[Accelerator, type[Engine]]:
    """Return an accelerator with the settings of the run, and the engine class that the launcher's settings choose.

    Raises:
        SettingsError: the engine's package is not installed, or the engine does not support the settings.
    """
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    accelerator = processes.make_accelerator(
        # DeepSpeed's own mixed precision would cast the teacher's weights, so its engine uses autocast (zero.py)
        mixed_precision="no" if deepspeed or config.precision == "fp32" else config.precision,
        # False, because accelerate does not prepare the loader and thus does not know where the loader ends.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config.accumulate, sync_with_dataloader=False
        ),
        # gradients are then views of DDP's communication buckets and take no additional memory
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    if accelerator.device.type == "cpu":
        keep_freed_memory()  # each step allocates the same tensors
    return accelerator, engines.select(accelerator, config.precision, config.accumulate)


def training_shards(config: RunConfig) -> tuple[WeightedShards, RunConfig]:
    """Return the SHARDS to train on, and the settings of the run.

    Without --data, the run trains on the embedded digits. The returned settings then evaluate on the digits too, unless
    the user gave other SHARDS for the evaluation.
    """
    if config.data.shards is not None:
        return config.data.shards, config
    train_shards, val_shards = demo_shards()
    evaluation = config.evaluation.model_copy(
        update={"train": config.evaluation.train or train_shards, "val": config.evaluation.val or val_shards}
    )
    return train_shards, config.model_copy(update={"evaluation": evaluation})


def agree(opened: list[Source], buffers: list[int]) -> str:
    """Check that all processes see the same shards, and return the fingerprint of the sample order.

    Raises:
        ShardError: two processes see different shards.
    """
    own = fingerprint(opened, buffers)
    missing = [name for source in opened for name in source.unreadable]
    seen = gather_objects((own, sum(source.images for source in opened), missing))
    for rank, (other, images, lacking) in enumerate(seen):
        if other != seen[0][0]:
            message = (
                f"process {rank} sees {images} images and process 0 sees {seen[0][1]}, "
                "but all processes must see the same shards"
            )
            if differ := sorted(set(lacking) ^ set(seen[0][2]))[:MOST_LISTED]:
                message += f". Only one of the two processes can read: {', '.join(differ)}"
            raise ShardError(f"{message}. Start again, or check the disks of the nodes")
    return own


def fingerprint(opened: list[Source], buffers: list[int]) -> str:
    """Return a hash of the data that determine the sample order: the names, image counts and order of the shards, and
    the sizes of the shuffle buffers."""
    counts = [shard for source in opened for shard in source.identity]
    return hashlib.sha256(json.dumps([counts, buffers]).encode()).hexdigest()


def resolve_crops(config: RunConfig, method: Method) -> RunConfig:
    """Return the settings with `loader.crops` resolved to `workers` or `device`.

    config.yaml then records where the crops are cut.

    Raises:
        SettingsError: the machine or the method does not support the value of `loader.crops`.
    """
    try:
        return config.model_copy(update={"loader": config.loader.resolved(method.transform())})
    except ValueError as error:
        raise SettingsError(f"loader: {error}") from error


def loader(config: RunConfig, method: Method, shards: Sources, first_step: int, accelerator: Accelerator) -> Batches:
    """Return the loader of this process's training batches, from `first_step` to the last step.

    Raises:
        SettingsError: there are too few images for one batch, or a batch cannot be split equally over the processes and
            their accumulated forward passes.
    """
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
            reading=Reading(
                workers(config, accelerator), config.loader, config.source, config.data.preprocessing, method.classes
            ),
        )
    except ShardError:
        raise
    except ValueError as error:
        raise SettingsError(f"--batch_size: {error}") from error


def workers(config: RunConfig, accelerator: Accelerator) -> int:
    """Return the number of loader workers of this process. config.yaml does not store the number, because the number
    depends on the machine."""
    return free_cores(accelerator.num_processes) if config.workers is None else config.workers


def evaluations(
    config: RunConfig, method: Method, shards: WeightedShards, accelerator: Accelerator
) -> tuple[OnlineKNN | None, Accuracy | None]:
    """Return the k-NN and linear probe of the run, or the accuracy of a supervised method. Both are None without
    `evaluation.val`."""
    if config.evaluation.val is None:
        return None, None
    train: Any = list(shards) if isinstance(shards, dict) else shards
    if method.supervised:
        return None, Accuracy(config.evaluation, train, method.image_size, accelerator, config.source)
    bank = config.evaluation.train or train
    return OnlineKNN(config.evaluation, bank, method.image_size, accelerator, config.source), None


def announce(given: RunConfig, config: RunConfig, images: int, engine: Engine) -> None:
    """Log a summary of the run, and the settings whose values were derived because they were not given."""
    derived = [
        f"{section}.{name} {value}"
        for section in ("optim", config.method)
        for name, value in getattr(config, section)
        if getattr(getattr(given, section), name) is None and value is not None
    ]
    if given.data.needs_statistics:
        derived += [f"data.mean {config.data.mean}", f"data.std {config.data.std}"]
    accelerator = engine.accelerator
    log.info(
        "%s of %s on %s: %d images, %d steps of %d images (%.1f epochs), %d process(es) (%s), %s%s, precision %s, "
        "learning rate up to %.3g",
        config.method, config.encoder.variant, config.data.shards or "the embedded digits", images, config.steps,
        config.batch_size,
        config.steps * config.batch_size / images, accelerator.num_processes, engine.name, accelerator.device,
        f" ({torch.get_num_threads()} threads)" if accelerator.device.type == "cpu" else "", config.precision,
        config.optim.scaled_lr(config.batch_size),
    )  # fmt: skip
    if derived:
        log.info("settings derived from the data, the batch size and the length of the run: %s", ", ".join(derived))


def finish_run(run: Run) -> None:
    """Write the trained encoder to encoder.safetensors, and each other encoder to encoder-NAME.safetensors. Print the
    scores, and a command for the linear probe.

    A supervised method writes its accuracy to a result file instead.
    """
    # encoder.safetensors is written last, because it marks the run as finished
    trained = {f"encoder-{name}": encoder for name, encoder in run.method.other_encoders().items()}
    trained["encoder"] = run.method.trained_encoder()
    gathered = {name: run.engine.gather_on_main(encoder) for name, encoder in trained.items()}
    run.accelerator.wait_for_everyone()
    if run.recorder is None:
        return
    for name, encoder in gathered.items():
        if encoder is not None:
            encoders.save(encoder, run.output / f"{name}.safetensors", step=run.state.step)
    paths = ", ".join(str(run.output / f"{name}.safetensors") for name in reversed(trained))
    run.recorder.close()
    evaluation, scores = run.config.evaluation, Scores(run.state.scores)
    if run.method.supervised:
        if scores.history:
            write_result(run.config, run.output, scores)
        print(f"encoder: {paths}")
        return
    train_shards, val_shards = evaluation.train or run.config.data.shards, evaluation.val
    train, val = (shards if isinstance(shards, str) else "SHARDS" for shards in (train_shards, val_shards))
    if scores.history:
        after = f"{100 * scores.history[-1].accuracy:.1f} % after {run.steps} steps"
        print(f"\n{evaluation.k}-NN accuracy on held-out images: {after} ({baselines(scores)}){linear(scores)}")
    command = f"tessera linear_probe --checkpoint {run.output} --train '{train}' --val '{val}'"
    # A mirrored digit is not the same digit. On a CPU, new crops for each of 100 epochs would take longer than the run.
    if run.config.data.shards is None or run.accelerator.device.type == "cpu":
        command += " --no-augment --batch_norm"
    print(f"encoder: {paths}")
    print(f"next:    {command}")
