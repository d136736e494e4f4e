"""Check a method by a forward pass on the meta device before a run starts, and print the report of `--dry_run`."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.filesize import decimal

from tessera.data.batch_sampler import share_bounds
from tessera.data.crops import MixedCrops
from tessera.data.loader import mixture_sampler
from tessera.data.sampler import phases
from tessera.data.shards import ShardError, Source, Sources
from tessera.data.shards.cache import cache_folder, is_on_network
from tessera.encoders.unused import ON_META
from tessera.evaluation.memory import LIMITS
from tessera.pretrain.activations import activations, blank_batch
from tessera.pretrain.config import RECOMPUTE, RunConfig, to_yaml
from tessera.pretrain.engines.engine import UNSHARDED, Shards
from tessera.pretrain.engines.meta_copy import on_meta
from tessera.pretrain.methods.method import Method
from tessera.pretrain.origins import described, differing
from tessera.runtime.machine import memory
from tessera.runtime.user_error import printable

MOST_LINES = 16
"""Largest number of lines of settings in a plan, which has about 40 lines in all."""
HEADROOM = 0.9
"""Share of a memory that a run may fill. The rest is for the libraries and for fragmentation."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """Data and processes of a run, as input of `print_plan`."""

    shards: Sources
    images: int
    """Number of images in `shards`."""
    processes: int
    workers: int
    """Number of loader workers per process."""
    buffered_bytes: int
    """Size of the batches that the loader workers of a process prepare."""
    needs: "Needs | None"
    """Memory of a process; None except on the main process."""
    place: str
    """Name of the memory that holds the run, such as `an H100 of 80 GB`."""
    capacity: int
    """Size of this memory in bytes."""
    sharing: int = 1
    """Number of processes that share this memory."""
    step: int = 0
    """Number of steps that the run has done."""
    pixels: str = ""
    """Type and range of the images; empty for uint8 without a range."""
    left_out: str = ""
    """Number of the images that `data.exclude` leaves out; empty without `data.exclude`."""
    recomputed: str | None = None
    """Parts that the backward pass recomputes, and the reason; None unless `encoder.checkpoint_activations` is auto."""
    lowered: str = ""
    """Sentence about the workers and batches that the memory does not allow; empty if it allows all."""
    evaluated: tuple[Source, Source] | None = None
    """Training and validation images of the evaluation; None if it needs no labels, or there is none."""
    together: int = 1
    """`Method.together` of the method."""


class Needs(NamedTuple):
    """Memory that a process needs, in bytes."""

    trained: int
    """Number of trained parameters."""
    state: int
    """Shards of the weights, gradients and AdamW's two moments, and all buffers."""
    activations: int | None
    """Tensors that a forward pass keeps for the backward pass; None if they cannot be estimated."""

    checkpoint: int
    """Weights, buffers and AdamW's two moments, over all processes."""


def dry_forward(method: Method) -> None:
    """Check a method by a forward pass of a copy on the meta device, which computes shapes but no values.

    The method gets one batch for each combination of crop sizes that a step can draw. Each batch contains crops of a
    square, a wide and a tall image. The random generators of the run do not advance.

    The check is skipped, and a message is logged, if the method reads tensor values, because the meta device has none.
    It is also skipped if the method uses a tensor that is neither a parameter nor a buffer, because the copy leaves
    such a tensor on its device.

    Raises:
        ValueError: the method or its encoder does not support the crops.
        RuntimeError: the method fails in another way, for example because shapes do not match.
    """
    transform = method.transform()
    transforms = transform.transforms if isinstance(transform, MixedCrops) else [transform]
    batches = [blank_batch(method, one, [(64, 64), (32, 256), (256, 32)]).to("meta") for one in transforms]
    phantom = on_meta(method)
    with torch.random.fork_rng(devices=[]):
        try:
            for batch in batches:
                phantom(batch, 0)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if not ON_META.search(str(error)):
                raise
            name = type(method).__name__
            log.info("%s is not checked before the run, because it does not run on the meta device: %s", name, error)


def state_bytes(method: Method, shards: Shards = UNSHARDED) -> int:
    """Return the bytes of a process for the weights, buffers, gradients and AdamW's two moments, all in float32."""
    weights = sum(p.nbytes for p in method.parameters())
    trained = sum(p.nbytes for p in method.parameters() if p.requires_grad)
    divided = weights // shards.weights + trained // shards.gradients + 2 * trained // shards.moments
    return sum(buffer.nbytes for buffer in method.buffers()) + divided


def _cache(config: RunConfig) -> str:
    """Return the folder and the size limit of the cache, with a warning if the folder is on a network disk."""
    try:
        folder = cache_folder()
    except ShardError as error:
        return str(error)
    text = f"{folder}, at most {config.source.cache_gb:g} GB on each node"
    return f"{text}. It is on a network disk: set TESSERA_CACHE to a local folder" if is_on_network(folder) else text


def _shares(config: RunConfig, shards: Sources) -> str:
    """Return the shares of the images that the sources of a mixture give, for each phase of the mixture."""
    sampler = mixture_sampler(shards.lists, shards.weights, config.seed, config.stream, config.batch_size)
    rows = [", ".join(f"{100 * share:.4g} %" for share in row) for row in sampler.shares.tolist()]
    if len(rows) == 1:
        return rows[0]
    return "; ".join(f"{row} from step {step}" for row, (step, _) in zip(rows, phases(shards.weights), strict=True))


def needs(method: Method, precision: str, images: int, shards: Shards = UNSHARDED) -> Needs:
    """Return the memory of a process whose forward passes have `images` images. `method` does not change."""
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad)
    kept = None
    try:
        kept = activations(method, precision, images).kept
    except Exception as error:  # black images without names may not suit a method of the user
        log.info("The memory of the activations is not estimated: %s", error)
    return Needs(trained, state_bytes(method, shards), kept, state_bytes(method) - 4 * trained)


def print_plan(config: RunConfig, run: Plan) -> bool:
    """Print the settings of the run, and a table of its length, data and memory use.

    The settings are those that differ from the defaults. With `--dry_run full`, all settings are printed.

    Return False if the run takes more memory than this machine, or its GPU, has.
    """
    full = config.dry_run == "full"
    if full:
        print(to_yaml(config))
    print("settings that differ from the defaults, and where they come from:")
    print("\n".join(described(differing(config), None if full else MOST_LINES)))
    print_table("this run", plan_rows(config, run, full=full))
    fits, sentence = fit(config, run)
    print(sentence)
    return fits


def _checkpoints(config: RunConfig, size: int) -> str:
    """Return how many checkpoints of `size` bytes a run writes, and which ones it keeps."""
    keep, often = config.checkpoint.keep, config.checkpoint.keep_every
    written = [*range(config.checkpoint_every, config.steps, config.checkpoint_every), config.steps]
    text = f"{len(written)} of {_amount(size)}, of which the newest {keep} are kept"
    if often is None:
        return text
    kept = sum(step % often == 0 for step in written[:-keep]) + min(keep, len(written))
    return f"{text}, and those of every {often:,} steps: {kept} at the end, {_amount(kept * size)}"


def plan_rows(config: RunConfig, run: Plan, *, full: bool) -> dict[str, str]:
    """Return the rows of the table of a plan. `full` adds rows that matter to few runs."""
    assert run.needs is not None
    least, most = share_bounds(config.batch_size, run.processes, config.accumulate, run.together)
    count = sum(len(source.shards) for source in run.shards.lists)
    size = sum(int(source.sizes.sum()) for source in run.shards.lists)
    evaluated = LIMITS["cuda" if config.gpu is not None or torch.cuda.is_available() else "cpu"]
    rows = {
        "trained parameters": f"{run.needs.trained:,}",
        "optimizer steps": f"{config.steps:,} of {config.batch_size} images",
        "images": f"{run.images:,} in {count:,} {'shard' if count == 1 else 'shards'}, {decimal(round(size))}; "
        "corrupt ones count until they are read (`tessera check_shards`)",
        **({"images left out": run.left_out} if run.left_out else {}),
        **({"pixels": run.pixels} if run.pixels else {}),
        "epochs": f"{config.steps * config.batch_size / run.images:.1f}",
        "processes x loader workers": f"{run.processes} x {run.workers}"
        + (" (by the free cores of this machine)" if config.workers is None else ""),
        "images per forward pass of a process": f"{most}" if least == most else f"{least} to {most}",
        "memory per process: weights, gradients, optimizer": _amount(run.needs.state),
        "memory per process: activations (estimate)": _amount(run.needs.activations),
        **({"recomputed in the backward pass": run.recomputed} if run.recomputed else {}),
        "memory per process: images of an evaluation and their activations": f"{decimal(evaluated)}, or one image",
        "memory per process: prepared batches of the workers": decimal(run.buffered_bytes)
        + (f". {run.lowered}" if run.lowered else ""),
        "cache": _cache(config),
        "checkpoints": _checkpoints(config, run.needs.checkpoint),
    }
    if run.evaluated:
        train, val = run.evaluated
        classes = f" of {len(train.classes):,} classes" if train.classes else ""
        rows["labelled images of the evaluation"] = f"{train.images:,}{classes}"
        rows["validation images"] = f"{val.images:,}"
    if config.gpu is None and not torch.cuda.is_available():
        rows["memory of this machine"] = decimal(memory())
    if full:
        readers = run.processes * max(run.workers, 1)
        shares = ", ".join(f"{len(source.shards) / readers:.2g}" for source in run.shards.lists)
        rows["shards per worker"] = f"{shares} (any number works)"
    if len(run.shards.lists) > 1:
        rows["shares of the sources"] = _shares(config, run.shards)
    if run.step:
        rows["optimizer steps"] += f"; continues at step {run.step:,} of {config.steps:,}"
    return rows


def fit(config: RunConfig, run: Plan) -> tuple[bool, str]:
    """Return True if a step fits the memory of the device, and a sentence that says so, or what to change."""
    assert run.needs is not None
    state, activations, times = run.needs.state, run.needs.activations, run.sharing
    _, each = share_bounds(config.batch_size, run.processes, config.accumulate, run.together)
    if activations is None:
        return True, f"The memory of the activations is unknown, so nothing is said about {run.place}."
    needed = f"{_amount(times * state)} of weights, gradients and optimizer + {_amount(times * activations)} of "
    needed += "activations"
    if times * (state + activations) <= HEADROOM * run.capacity:
        return True, f"{needed} fit {run.place}."
    passes = range(config.accumulate, config.batch_size // run.together // run.processes + 1)
    bounds = {n: share_bounds(config.batch_size, run.processes, n, run.together) for n in passes}
    even = config.batch_size % run.processes == 0  # then only passes of equal sizes are proposed
    sizes = {n: activations * most / each for n, (least, most) in bounds.items() if least == most or not even}
    less = (n for n, size in sizes.items() if times * (state + size) <= HEADROOM * run.capacity)
    advice = "Choose a smaller encoder, or smaller crops."
    if (accumulate := next(less, None)) is not None:
        smaller = _amount(round(times * sizes[accumulate]))
        advice = f"--accumulate {accumulate} needs {_amount(times * state)} + {smaller}. Or lower batch_size"
        recomputes = run.recomputed or getattr(config.encoder, RECOMPUTE, True) is True
        advice += "." if recomputes else ", or set encoder.checkpoint_activations to true."
    hardly = "hardly fit" if times * (state + activations) <= run.capacity else "do not fit"
    return hardly == "hardly fit", f"{needed} {hardly} {run.place}. {advice}"


def _amount(size: int | None) -> str:
    """Return a size in a unit that leaves digits, or `unknown`."""
    return "unknown" if size is None else decimal(size)


def print_table(title: str, rows: Mapping[str, str]) -> None:
    """Print quantities and their values in two columns."""
    width = max(map(len, rows), default=0)
    print(f"{title}:")
    for quantity, value in rows.items():
        print(f"  {quantity:<{width}}  {printable(value)}")
