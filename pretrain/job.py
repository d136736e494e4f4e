"""Prepare a pretraining run from its settings, train, evaluate, and export the encoder."""

import logging
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from tessera import encoders
from tessera.data.batch_sampler import BatchSampler, batch_ranges, share_bounds
from tessera.data.batches import Batches
from tessera.data.dataset import Decoding
from tessera.data.decode import ImageError
from tessera.data.exclude import without
from tessera.data.failures import DroppedError
from tessera.data.loader import Reading, training_batches
from tessera.data.python_objects import is_name
from tessera.data.shards import ShardError, Source, Sources, WeightedShards, describe_remote, open_sources
from tessera.data.workers import free_cores
from tessera.evaluation.features import EvaluationError
from tessera.evaluation.splits import check_training_images
from tessera.pretrain.build import build_method, build_on_meta, check_memory
from tessera.pretrain.checkpoints.continuing import continue_run
from tessera.pretrain.checkpoints.resume import Checkpoint, restore
from tessera.pretrain.checkpoints.save import Saver
from tessera.pretrain.checkpoints.trainer_json import TrainState
from tessera.pretrain.config import RunConfig, to_yaml
from tessera.pretrain.engines import Engine
from tessera.pretrain.engines.engine import Shards
from tessera.pretrain.flop import count_work
from tessera.pretrain.forecasts import FORECASTS
from tessera.pretrain.loop import train
from tessera.pretrain.methods.method import Method
from tessera.pretrain.monitoring.online import (
    OF_MAPS,
    Accuracy,
    OnlineEvaluation,
    OnlineKNN,
    OnlineViews,
    write_accuracy,
)
from tessera.pretrain.monitoring.profile import check_profile
from tessera.pretrain.monitoring.recorder import Recorder, earlier_contents, record_start
from tessera.pretrain.monitoring.verdict import Scores, baselines, linear
from tessera.pretrain.origins import differing
from tessera.pretrain.preflight import Plan, needs, print_plan, print_table
from tessera.pretrain.recompute import Recomputation, device_memory, with_recomputation
from tessera.pretrain.resolve import (
    agree,
    emulates_bf16,
    make_accelerator,
    measure_classes,
    measure_data,
    resolve,
    training_shards,
    with_precision,
)
from tessera.pretrain.run_folder import claimed, delete_run, newest_checkpoint
from tessera.pretrain.training_run import TrainingRun
from tessera.runtime import bf16
from tessera.runtime.collectives import broadcast_object, first_of_node_first, run_on_all_ranks
from tessera.runtime.files import atomic_write
from tessera.runtime.preemption import saving_on_interrupt
from tessera.runtime.settings import SettingsError
from tessera.runtime.user_error import without_controls
from tessera.runtime.watchdog import record_collectives, watched

PROBED = 16
"""Number of images of each source whose size a dry run compares with the crops."""

log = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """The settings of a run and its opened data."""

    config: RunConfig
    """Settings with all derived values."""
    shards: WeightedShards
    """SHARDS to train on: those of the user, or those of the embedded digits."""
    sources: Sources
    """The opened shards."""
    fingerprint: str
    """Hash of everything that determines the sample order; see `resolve.fingerprint`."""
    pixels: str
    """Type and range of the images, and where they come from; empty for uint8 without a range."""
    left_out: str = ""
    """Number of the images that `data.exclude` leaves out; empty without `data.exclude`."""

    @property
    def images(self) -> int:
        """Number of training images."""
        return sum(source.images for source in self.sources.lists)


def prepare(given: RunConfig, accelerator: Accelerator) -> Prepared:
    """Open the training data, and return it with the settings of the run. Collective.

    Runs, `--dry_run`, `tessera preview` and `tessera.training_batches` all call this function, so all of them use
    the same settings and sample order.

    Raises:
        UserError: the shards cannot be read, or the settings do not fit together.
    """
    access = describe_remote([given.data.shards], given.access)
    with first_of_node_first():  # the first process of each node fills the caches for the others
        shards, given = training_shards(given)
        sources, left_out = without(open_sources(shards, source=access), given.data.exclude)
    fingerprint = agree(sources.lists, given.stream.buffers(sources.lists))
    measured = measure_data(given, sources, accelerator)
    images = sum(source.images for source in sources.lists)
    statistics = measured and measured.preprocessing
    config = resolve(given, images, statistics, measure_classes(given, sources, accelerator))
    return Prepared(config, shards, sources, fingerprint, measured.summary if measured else "", left_out)


def pretrain(config: RunConfig) -> Path:
    """Train an encoder with the given settings, evaluate it during training, and export it. Return the run folder."""
    with watched():
        config = with_precision(config)
        accelerator, engine_class = make_accelerator(config)
        if not accelerator.is_main_process:
            logging.disable(logging.INFO)
        with claimed(config, accelerator.is_main_process) as output:
            if accelerator.device.type == "cuda" and not config.dry_run:
                record_collectives(output)
            run_job(accelerator, engine_class, config, output)
    return output


def run_job(accelerator: Accelerator, engine_class: type[Engine], given: RunConfig, output: Path) -> None:
    """Train, evaluate and export an encoder, in the folder `output`. The process group must be initialised.

    With `--dry_run`, do all of this up to the first step without writing, and print the plan of the run instead.
    """
    prepared = prepare(given, accelerator)
    newest = newest_checkpoint(prepared.config, output)
    config, checkpoint, settings = continue_run(prepared.config, prepared.sources, prepared.fingerprint, newest)
    position = checkpoint.trainer.position if checkpoint else TrainState(step=0)
    check_profile(config.profile, position.step, config.steps)
    shards = engine_class.shards(accelerator)
    empty = build_on_meta(config)
    check_memory(empty, config, accelerator, shards)
    torch.manual_seed(config.seed)  # all processes use the same seed to build equal weights
    main = accelerator.is_main_process if engine_class.sends_weights else None
    if accelerator.is_main_process and emulates_bf16(config):
        log.warning(bf16.EMULATED, "Use --precision auto.")
    for_method, recomputed = with_recomputation(config, empty, accelerator, shards)
    method = build_method(for_method, fresh=checkpoint is None, main=main)
    batches = loader(config, method, prepared.sources, position.step, accelerator)
    plan = None
    if config.dry_run:
        plan = make_plan(prepared, accelerator, config, method, batches, recomputed, position.step, shards)
    elif recomputed:
        log.log(logging.INFO if recomputed.fits else logging.WARNING, "the backward pass recomputes %s", recomputed)
    counted = accelerator.is_main_process and plan is None
    work = count_work(method, accelerator.device, config.precision) if counted else None
    # The steps of a named GPU are counted without tensors, so this machine needs no memory for the optimizer state.
    engine = engine_class(accelerator, method, config.optim) if checkpoint or config.gpu is None else None
    # Methods that draw from torch's generator need different random numbers on each process. Drop path does not use
    # this generator (encoders/randomness.py).
    torch.manual_seed(config.seed + 1 + accelerator.process_index)
    if checkpoint and engine:
        restore(checkpoint, accelerator, engine, point=not config.dry_run)
        how = "continues" if plan else "resumed"
        log.info("%s at step %d of %d: %s", how, position.step, config.steps, checkpoint.path)
    if checkpoint and position.step >= config.steps:
        log.warning("The run has done all of its %d steps. To train longer, give more --steps.", config.steps)
    online, accuracy, dense = evaluations(config, method, prepared, accelerator, continues=checkpoint is not None)
    if plan is not None:
        scored = (online if config.evaluation.val else None) or accuracy
        plan = replace(plan, evaluated=scored and (scored.train, scored.val))
        dry_run(prepared, accelerator, engine, config, method, plan)
        return
    assert engine is not None
    accelerator.wait_for_everyone()  # no process may write before all processes have checked the folder
    if config.overwrite:  # only now, because a run that is refused must not delete another one
        run_on_all_ranks(lambda: delete_run(output) if accelerator.is_main_process else None)
    recorder, other = None, False
    if accelerator.is_main_process:
        contents = scored_contents(config, online or accuracy, dense)
        recorder, other = start_records(output, config, checkpoint, engine, settings, contents)
        announce(config, prepared, engine)
    if broadcast_object(other):
        if position.step < config.steps:
            position.scores = {}  # `train` scores the new images before the first step
        else:
            accuracy = None
    with (
        saving_on_interrupt(),
        Saver(output / "checkpoints", accelerator, engine, settings, config.checkpoint) as saver,
    ):
        own = (recorder, online, saver, prepared.images, position, accuracy, dense, work)
        run = TrainingRun(config, output, accelerator, method, engine, *own)
        train(run, iter(batches))
    finish_run(run)


def scored_contents(
    config: RunConfig, scored: OnlineKNN | OnlineViews | Accuracy | None, dense: OnlineEvaluation | None
) -> dict[str, str | None]:
    """Return a hash of the images that the run scores, by the name of the setting that gives them."""
    contents, own = dict[str, str | None](), config.evaluation
    if scored:
        name = "evaluation.val" if own.val else "evaluation.train" if own.train else "data.shards"
        contents[name] = scored.val.content()
    if dense:
        contents["evaluation.maps_val"] = dense.val.content()
    return contents


def start_records(
    output: Path,
    config: RunConfig,
    checkpoint: Checkpoint | None,
    engine: Engine,
    settings: dict[str, Any],
    contents: dict[str, str | None],
) -> tuple[Recorder, bool]:
    """Write config.yaml and the records of this start. Call it only on the main process.

    Return the recorder, and True if the run scored other images before.

    Args:
        settings: settings that the checkpoints of the run store.
        contents: result of `scored_contents`.
    """
    step = checkpoint.step if checkpoint else 0
    done = checkpoint is not None and step >= config.steps
    if not done:  # settings of a run that is done have no effect any more
        with atomic_write(output / "config.yaml") as part:  # written atomically, because --resume reads this file
            part.write_text(to_yaml(config))
    recorder = Recorder(output, step, config.metrics, settings)
    other = checkpoint is not None and scores_other_images(output, contents, done=done)
    record_start(output, step, engine, config.precision, {} if other and done else contents)
    return recorder, other


def scores_other_images(output: Path, contents: Mapping[str, str | None], *, done: bool) -> bool:
    """Return True if the run scored other images before, and log it. Call it only on the main process.

    Args:
        output: run folder.
        contents: hashes of the images that this start scores, as for `record_start`.
        done: True if the run has no steps left, so that nothing is scored.
    """
    before = earlier_contents(output)
    other = [name for name, one in contents.items() if one and before.get(name) not in (None, one)]
    if other and done:
        log.warning("%s names other images. The run is done and does not score them: use `tessera knn`.", other[0])
    elif other:
        log.warning("%s names other images. Their scores begin now, and are not compared with earlier ones.", other[0])
    return any(name != "evaluation.maps_val" for name in other)  # the verdict compares no scores of maps


def make_plan(
    prepared: Prepared,
    accelerator: Accelerator,
    config: RunConfig,
    method: Method,
    batches: Batches,
    recomputed: Recomputation | None,
    step: int,
    shards: Shards,
) -> Plan:
    """Return the plan of a run that has done `step` steps, before the engine moves or shards the weights."""
    processes = accelerator.num_processes if config.gpu is None else config.gpus
    place, capacity, sharing = device_memory(config, accelerator)
    _, each = share_bounds(config.batch_size, processes, config.accumulate, method.together)
    need = needs(method, config.precision, each, shards) if accelerator.is_main_process else None
    return Plan(
        shards=prepared.sources,
        images=prepared.images,
        processes=processes,
        workers=batches.workers if batches.lowered else workers(config, accelerator),
        buffered_bytes=batches.buffered_bytes,
        needs=need,
        place=place,
        capacity=capacity,
        sharing=sharing,
        step=step,
        pixels=prepared.pixels,
        left_out=prepared.left_out,
        recomputed=recomputed and str(recomputed),
        lowered=batches.lowered,
        together=method.together,
    )


def large_crops(config: RunConfig, sources: list[Source]) -> str:
    """Return a sentence if crops are more than twice as large as the first images of the sources, or else ""."""
    name = next((one for one in ("global_size", "size") if hasattr(config.method_config, one)), None)
    crop, sides = getattr(config.method_config, name or "", None), list[int]()
    decoding = Decoding.of(config.data.preprocessing, config.loader.max_pixels)
    for source in sources:
        for number in range(min(source.images, PROBED)):
            with suppress(ImageError, DroppedError):
                sides += decoding.picture(source.image(number)).size
    if not sides or not isinstance(crop, int) or crop <= 2 * max(sides):
        return ""
    return (
        f"The first images have at most {max(sides)} pixels, but crops have {crop}. Smaller crops train faster: "
        f"--{config.method}.{name} {max(sides)}."
    )


def dry_run(
    prepared: Prepared,
    accelerator: Accelerator,
    engine: Engine | None,
    config: RunConfig,
    method: Method,
    plan: Plan,
) -> None:
    """Print the plan of a run, and the forecasts of the steps that remain. Collective.

    `method` cannot be used afterwards.
    """
    fits = print_plan(config, plan) if accelerator.is_main_process else True
    fits = broadcast_object(fits)
    if plan.step >= config.steps:
        return
    if accelerator.is_main_process and (line := large_crops(config, prepared.sources.lists)):
        print(line)

    def small_loader(batch_size: int) -> Batches:
        small = config.model_copy(update={"batch_size": batch_size, "workers": 0})
        return loader(small, method, prepared.sources, 0, accelerator)

    for name in FORECASTS.names():
        rows = FORECASTS[name].forecast(config, accelerator, engine, method, small_loader, plan, fits=fits)
        if accelerator.is_main_process:
            print_table(name, rows)


def first_batches(given: RunConfig) -> tuple[Prepared, Batches, torch.device]:
    """Return the settings and data of a run, its loader and its device, without starting the run.

    The loader begins at the first step.

    Raises:
        UserError: the shards cannot be read, or the settings do not fit together.
    """
    given = with_precision(given)
    accelerator, _ = make_accelerator(given)
    prepared = prepare(given, accelerator)
    method = build_method(prepared.config, fresh=False)
    return prepared, loader(prepared.config, method, prepared.sources, 0, accelerator), accelerator.device


def loader(config: RunConfig, method: Method, shards: Sources, first_step: int, accelerator: Accelerator) -> Batches:
    """Return the loader of this process's training batches, from `first_step` to the last step.

    Raises:
        SettingsError: there are too few images for one batch, or the batch has too few images for its forward passes.
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
                skipped=batch_ranges(config.skip_batches),
                together=method.together,
            ),
            seed=config.seed,
            stream=config.stream,
            reading=Reading(
                workers(config, accelerator),
                config.loader,
                config.access,
                config.data.preprocessing,
                method.classes,
                augment=config.own_augment,
                workers_given=config.workers is not None,
            ),
        )
    except ShardError:
        raise
    except ValueError as error:
        raise SettingsError(f"--batch_size: {error}") from error


def workers(config: RunConfig, accelerator: Accelerator) -> int:
    """Return the number of loader workers of this process.

    The default depends on the machine, so it is not stored in config.yaml.
    """
    return free_cores(accelerator.num_processes) if config.workers is None else config.workers


def evaluations(
    config: RunConfig, method: Method, prepared: Prepared, accelerator: Accelerator, *, continues: bool = False
) -> tuple[OnlineKNN | OnlineViews | None, Accuracy | None, OnlineEvaluation | None]:
    """Return the score of the features, the evaluation of a supervised method, and the evaluation of images with
    maps.

    The first is None for a supervised method, and the second for all other methods. If `evaluation.val` is not set, the
    first needs no labels (None if `evaluation.view_images` is 0), and the second is None. The third is None if no maps
    are named. A run that continues is warned of scored images in its training data, which earlier versions allowed. A
    new run is refused.
    """

    def compare(val: Source, flag: str) -> None:
        try:
            check_training_images(prepared.sources.lists, val, flag)
        except EvaluationError as error:
            if not continues:
                raise
            log.warning("%s", error)

    own, dense = config.evaluation, None
    train: Any = list(prepared.shards) if isinstance(prepared.shards, dict) else prepared.shards
    if own.maps_train is not None or own.maps_val is not None:
        dense = OF_MAPS["segmentation"](own, method.image_size, accelerator, config.access)
        compare(dense.val, "--evaluation.maps_val")
    access = config.access if own.val is None else config.labelled_access
    if config.data.exclude is not None and own.train is None:
        train = without(open_sources(train, source=access), config.data.exclude)[0].lists[0]
    options = (method.image_size, accelerator, access)
    if method.supervised:
        own = own.model_copy(update={"train": None})  # the classifier is trained on --data
        return None, None if own.val is None else Accuracy(own, train, *options), dense
    if own.val is None and not own.view_images:
        return None, None, dense
    score = OnlineViews if own.val is None else OnlineKNN
    online = score(own, own.train or train, *options)
    if own.val is not None and own.train is not None:  # otherwise, `online` has compared --data
        compare(online.val, "--evaluation.val")
    return online, None, dense


def announce(config: RunConfig, prepared: Prepared, engine: Engine) -> None:
    """Log a summary of the run, and the settings whose values were derived because they were not given."""
    found, images = differing(config), prepared.images
    derived = [f"{name} {value}" for name, (value, origin) in found.items() if origin.startswith("derived")]
    accelerator = engine.accelerator
    log.info(
        "%s of %s on %s: %d images, %d steps of %d images (%.1f epochs), %d process(es) (%s), %s%s, precision %s, "
        "learning rate up to %.3g%s",
        config.method, config.encoder.variant, config.data.shards or "the embedded digits", images, config.steps,
        config.batch_size,
        config.steps * config.batch_size / images, accelerator.num_processes, engine.name, accelerator.device,
        f" ({torch.get_num_threads()} threads)" if accelerator.device.type == "cpu" else "", config.precision,
        config.optim.scaled_lr(config.batch_size), config.optim.scaling_rule(config.batch_size),
    )  # fmt: skip
    if prepared.pixels:
        log.info("pixels: %s", prepared.pixels)
    if prepared.left_out:
        log.info("images left out: %s", prepared.left_out)
    if derived:
        log.info("derived settings (--dry_run says why): %s", ", ".join(derived))


def finish_run(run: TrainingRun) -> None:
    """Write the trained encoder to encoder.safetensors, and each other encoder to encoder-NAME.safetensors. Print the
    scores, and a command for the linear probe.

    For a supervised method, write its accuracies to a result file instead of printing scores and the command.
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
        if run.accuracy is not None and scores.history:
            write_accuracy(run.config, run.output, scores, run.accuracy.val.content())
        print(f"encoder: {paths}")
        return
    train_shards, val_shards = evaluation.train or run.config.data.shards, evaluation.val
    train, val = (
        shards if isinstance(shards, str) and not is_name(shards) else "SHARDS" for shards in (train_shards, val_shards)
    )
    if scores.history:
        after = f"{100 * scores.history[-1].accuracy:.1f} % after {scores.history[-1].step} steps"
        name = f"{evaluation.k}-NN accuracy on held-out images" if evaluation.val else OnlineViews.name
        print(f"\n{name}: {after} ({baselines(scores)}){linear(scores)}")
    form: dict[str, Any] = {"checkpoint": run.output, "train": train, "val": val}
    data = run.config.data
    stages = [data.stages] if isinstance(data.stages, str) else data.stages or []
    form |= {"image": data.image, "label": data.label, "labels": run.config.labels, "pages": data.pages}
    form["stages"] = ",".join("MODULE:FUNCTION" if is_name(one) else one for one in stages)
    command = "tessera linear_probe"
    command += "".join(f" --{name} {shlex.quote(str(value))}" for name, value in form.items() if value)
    # Suggest no augmentation for the digits, because mirroring changes the class of a digit, or on a CPU, because new
    # crops for each of 100 epochs would take longer than the run.
    if data.shards is None or run.accelerator.device.type == "cpu":
        command += " --no-augment --batch_norm"
    print(f"encoder: {paths}")
    print(without_controls(f"next:    {command}"))
