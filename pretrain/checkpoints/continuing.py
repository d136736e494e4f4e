"""Compare a run with the checkpoint that it continues: the order of its samples, and its settings."""

import hashlib
import inspect
import json
import logging
import os
from pathlib import Path
from typing import Any, cast

from tessera import encoders
from tessera.data.batch_sampler import BatchSampler, batch_ranges
from tessera.data.loader import mixture_sampler
from tessera.data.sampler import GrowingSampler, phases
from tessera.data.shards import Source, Sources
from tessera.data.shards.folder import ImageFolder
from tessera.data.shards.open import shown_paths
from tessera.pretrain.checkpoints.resume import Checkpoint, CheckpointError, open_checkpoint
from tessera.pretrain.config import RECOMPUTE, RunConfig, with_older_defaults
from tessera.pretrain.methods import METHODS
from tessera.pretrain.resolve import fingerprint
from tessera.runtime.collectives import broadcast_object, rank, run_on_all_ranks
from tessera.runtime.settings import flattened

log = logging.getLogger(__name__)
NOT_COMPARED = (
    "resume", "config", "output", "dry_run", "overwrite", "workers", "source.commands", "loader.crops", "shard_counts",
    "mixture", "samples", "gpu", "gpus", "shards", "images", "profile", "collective_timeout", f"encoder.{RECOMPUTE}",
)  # fmt: skip
"""Settings that may change between a run and its continuation without a warning."""

PIXELS = ("data.pixel_type", "data.range", "data.nodata", "data.fewer_channels")
"""Settings of the pixel values, which the weights are trained for."""
DATA = (
    "data.shards", "data.exclude", "evaluation.train", "evaluation.val", "evaluation.maps_train", "evaluation.maps_val",
)  # fmt: skip
"""Settings that hold paths, of which relative and absolute paths are the same."""


def continue_run(
    config: RunConfig, sources: Sources, order: str, newest: Path | None
) -> tuple[RunConfig, Checkpoint | None, dict[str, Any]]:
    """Return the settings of a run, the checkpoint that it continues, and the settings that it stores. Collective.

    Args:
        config: settings with all derived values.
        order: fingerprint of the sample order.
        newest: folder of the checkpoint; None for a new run.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit the run.
    """
    checkpoint, same = open_checkpoint(newest) if newest else None, dict[str, Any]()
    if checkpoint:
        config, same = settings_for_resume(config, sources, order, checkpoint)
    images = sum(source.images for source in sources.lists)
    settings: dict[str, Any] = config.model_dump(mode="json")
    settings |= {"shards": order, "shard_counts": [len(source.shards) for source in sources.lists]}
    settings |= {"mixture": phases(sources.weights), "images": images}
    settings["samples"] = notice_other_samples(sources, checkpoint, same.get("shards", order))
    if checkpoint:
        check_fits(checkpoint, settings | same)
    return config, checkpoint, settings


def settings_for_resume(
    config: RunConfig, sources: Sources, order: str, checkpoint: Checkpoint
) -> tuple[RunConfig, dict[str, Any]]:
    """Return the settings of a run that continues from a checkpoint, with the shards that were added since.

    Shards that follow the shards of the checkpoint join their source with its next epoch. `stream.growth` stores this
    epoch, so that the run can be resumed and repeated. Also return the values of settings that describe the order of
    the checkpoint, if the order of the run is the same up to the checkpoint, and otherwise an empty dictionary.

    Args:
        order: fingerprint of the sample order of the run.

    Raises:
        CheckpointError: the run has already used a batch that is to be skipped, or the shards of a run with added
            shards were changed or removed.
    """
    _check_past_batches(config, sources, checkpoint)
    saved, lists = checkpoint.settings, sources.lists
    past = [tuple(row) for row in saved.get("stream", {}).get("growth") or ()]
    counts = saved.get("shard_counts", [])
    old = [source.first(count) for source, count in zip(lists, counts, strict=False) if 0 < count <= len(source.shards)]
    complete = len(old) == len(lists)  # a source that has lost shards is not in `old`
    if complete and counts != [len(source.shards) for source in lists]:
        order = fingerprint(old, config.stream.buffers(old))
    if not complete or order != saved.get("shards"):
        if not past and complete and _only_renamed(saved, old, config.stream.buffers(old)):
            log.info("The folders of images have other names, but as many images as before. The order stays.")
            return config, {"shards": saved.get("shards")}
        if past:
            raise CheckpointError(
                f"Shards or stream settings were changed since {checkpoint.path}, whose order of samples has added "
                "shards. Give all shards of the run in their old order, and new shards at the end."
            )
        return config, {}
    growth = list(config.stream.growth or past)
    added = [(number, counts[number]) for number, source in enumerate(lists) if counts[number] < len(source.shards)]
    if [row for row in growth if row[:2] not in added] != past:
        return config, {}
    stream = config.stream.model_copy(update={"growth": tuple(past) or None})
    new = [one for one in added if not any(row[:2] == one for row in growth)]
    if new:
        before = config.model_copy(update={"stream": stream})
        growth += _first_epochs(before, sources, old, checkpoint.step, new)
    for number, count in added:
        shards = lists[number].shards
        log.info(
            "%s has %d shards, %d more than at the checkpoint. The new shards are used from pass %d over this data on "
            "(the first pass is 1). Until then, the old shards are read in the old order.",
            shown_paths([shard.path for shard in shards]),
            len(shards),
            len(shards) - count,
            next(row[2] for row in growth if row[:2] == (number, count)) + 1,
        )
    own = stream.model_copy(update={"growth": tuple(growth) or None})
    updated = config.derive({"stream": own}, {"stream.growth": "shards were added"})
    return updated, {"shards": saved.get("shards"), "stream": stream.model_dump(mode="json")}


def _check_past_batches(config: RunConfig, sources: Sources, checkpoint: Checkpoint) -> None:
    """Check that the run skips no batch that is done. Warn if the weights of the data were others for steps that are
    done.

    Raises:
        CheckpointError: the run has already used a batch that is to be skipped.
    """
    step, saved = checkpoint.step, checkpoint.settings
    batches = BatchSampler(1, skipped=batch_ranges(config.skip_batches))
    before = BatchSampler(1, skipped=batch_ranges(saved.get("skip_batches")))
    if step and batches.skipped_below(before.batch(step - 1)) != before.skipped_below(before.batch(step - 1)):
        raise CheckpointError(
            f"--skip_batches {config.skip_batches} does not fit {checkpoint.path}, which has used or skipped other "
            f"batches up to step {step}. To skip a batch, continue from a checkpoint before it: move later checkpoints "
            "away."
        )
    past, done = saved.get("mixture", []), batches.batch(step - 1) if step else -1
    if past and [row for row in past if row[0] <= done] != [
        [*row] for row in phases(sources.weights) if row[0] <= done
    ]:
        log.warning(
            "the order of the samples changes, because the weights of the data are others for steps that are already "
            "done. The run goes on with the new weights. To keep the order, change only the weights of later steps: "
            "give each pattern the weights {0: OLD, %d: NEW}.",
            done + 2,
        )


def _first_epochs(
    config: RunConfig, sources: Sources, old: list[Source], step: int, added: list[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Return rows of `stream.growth` for sources with added shards: they are used from the next epoch of a source on.

    Args:
        config: settings of the run, with the `stream.growth` of the checkpoint.
        old: sources without the added shards.
        step: number of steps done.
        added: number and old count of shards of each source.
    """
    batches = BatchSampler(1, skipped=batch_ranges(config.skip_batches))
    mixture = mixture_sampler(old, sources.weights, config.seed, config.stream, config.batch_size)
    used = mixture.counts(batches.batch(step) * config.batch_size)
    growing = cast(list[GrowingSampler], mixture.samplers)
    return [(number, count, growing[number].next_epoch(int(used[number]))) for number, count in added]


def _only_renamed(saved: dict[str, Any], opened: list[Source], buffers: list[int]) -> bool:
    """Return True if folders of images have the order of a checkpoint, and only the names of the folders differ.

    The name of a folder is a part of the fingerprint, but does not determine the order.

    Args:
        saved: settings of the checkpoint.
        opened: sources of the run.
        buffers: sizes of the shuffle buffers.
    """
    shards = [shard for source in opened for shard in source.shards]
    named = (saved.get("data") or {}).get("shards")
    names = [Path(one).name for one in ([named] if isinstance(named, str) else named or [])]
    if len(names) != len(shards) or not all(isinstance(shard, ImageFolder) for shard in shards):
        return False
    counts = [count for source in opened for _, count in source.identity]
    renamed = [[name, count] for name, count in zip(names, counts, strict=True)]
    return hashlib.sha256(json.dumps([renamed, buffers]).encode()).hexdigest() == saved.get("shards")


def notice_other_samples(sources: Sources, checkpoint: Checkpoint | None, order: str) -> list[str]:
    """Return a hash of the samples of each source. Warn if they are not those of the checkpoint. Collective.

    The order of samples depends on the names and counts of shards only (`fingerprint`), so a run continues although a
    shard was replaced by other samples. Checkpoints of older versions have no such hashes. If the hash of the order,
    `order`, is another one than in the checkpoint, `check_fits` warns.
    """
    found = run_on_all_ranks(lambda: [one.samples_hash() for one in sources.lists] if rank() == 0 else [])
    found = broadcast_object(found)
    if checkpoint is None or rank() or checkpoint.settings.get("shards") != order:
        return found
    hashes, counts = checkpoint.settings.get("samples"), checkpoint.settings.get("shard_counts", [])
    if not isinstance(hashes, list) or len(hashes) != len(found) or len(counts) != len(found):
        return found
    for source, before, count in zip(sources.lists, hashes, counts, strict=True):
        if not 0 < count <= len(source.shards):
            continue
        now = source.first(count).samples_hash()
        if now.partition(":")[0] == str(before).partition(":")[0] and now != before:
            log.warning(
                "%s was changed since %s: images have other names, labels or sizes. The run continues with "
                "the images as they are now. If this is not intended, stop it and restore the data.",
                *(shown_paths([shard.path for shard in source.shards]), checkpoint.path),
            )
    return found


def check_fits(checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
    """Check that a checkpoint has the method, encoder and pixel values of the run, and warn about other settings that
    changed.

    A checkpoint may lack an encoder setting that was introduced after the checkpoint was written. The check then uses
    the default of the encoder variant.

    Args:
        settings: resolved settings of the run to resume.

    Raises:
        CheckpointError: the method, an encoder setting or a setting of the pixel values differs. The message names all
            of these settings that differ.
    """
    path, saved = checkpoint.path, with_older_defaults(checkpoint.settings)
    saved["encoder"] = _encoder_defaults(checkpoint.settings["encoder"].get("variant")) | checkpoint.settings["encoder"]
    settings = settings | {"encoder": _encoder_defaults(settings["encoder"].get("variant")) | settings["encoder"]}
    sections = {*METHODS.names()} - {settings["method"]}  # the run does not read them
    # the section of a method whose package was installed only then
    sections |= {name for name in saved.keys() - settings.keys() if isinstance(saved[name], dict)}
    old, new = (
        flattened({name: value for name, value in one.items() if name not in sections}) for one in (saved, settings)
    )
    differing = {name: (old.get(name), new.get(name)) for name in old | new if old.get(name) != new.get(name)}
    same = {"data.shards"} if all(saved.get(name) == settings.get(name) for name in ("shards", "samples")) else set()
    same |= {name for name in DATA if _absolute(old.get(name)) == _absolute(new.get(name))}
    same |= old.keys() ^ new.keys()  # settings that only one of the two versions has
    shown = [name for name in sorted(differing) if name not in NOT_COMPARED and name not in same]
    if shown:
        changed = ", ".join(f"{name} {differing[name][0]} -> {differing[name][1]}" for name in shown)
        log.warning("settings changed since %s: %s", path.name, changed)
    _warn_of_order(path, differing, old, new)
    differ = [
        f"{name} is {before} in the checkpoint and {now} in this run"
        for name, (before, now) in differing.items()
        if name in ("method", *PIXELS) or (name.startswith("encoder.") and name not in NOT_COMPARED)
    ]
    if differ:
        raise CheckpointError(
            f"{path} is a checkpoint of another run: {'; '.join(differ)}. Resume with the run's own settings "
            "(remove the flags that change them), or start a new run in another --output."
        )


def _warn_of_order(path: Path, differing: dict[str, Any], old: dict[str, Any], new: dict[str, Any]) -> None:
    """Log a warning if settings or data that determine the order of the samples changed since a checkpoint."""
    names = [n for n in sorted(differing) if n in ("seed", "batch_size", "shards") or n.startswith("stream.")]
    if not names:
        return
    reasons = [
        "the shards have other names or sizes" if one == "shards" else f"{one} is {new.get(one)}" for one in names
    ]
    cures = [f"resume with --{one} {old[one]}" for one in names if one != "shards" and old.get(one) is not None]
    cures += ["restore the data, or list the old shards first and new ones after them"] if "shards" in names else []
    log.warning(
        "the order of the samples changes, because %s, but %s was written with other data or settings. The run goes "
        "on with all images, but some may be used twice and others not at all in the present pass over the data.%s",
        *(" and ".join(reasons), path.name, f" To keep the order, {' and '.join(cures)}." if cures else ""),
    )


def _absolute(shards: str | list[str] | None) -> list[str]:
    """Return the paths of SHARDS as absolute paths."""
    return [os.path.abspath(one) for one in ([shards] if isinstance(shards, str) else shards or [])]


def _encoder_defaults(variant: object) -> dict[str, Any]:
    """Return the default settings of an encoder variant as JSON values. Return an empty dict for an unknown variant."""
    if not isinstance(variant, str) or variant not in encoders.VARIANTS:
        return {}
    parameters = inspect.signature(encoders.family(variant)).parameters
    settings = {name: encoders.VARIANTS[variant].get(name, parameter.default) for name, parameter in parameters.items()}
    return json.loads(json.dumps({k: v for k, v in settings.items() if v is not inspect.Parameter.empty}))
