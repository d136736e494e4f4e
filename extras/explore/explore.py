"""Look at images through an encoder: near-copies, leaks, outliers, doubtful labels, clusters.

    tessera explore ENCODER --data SHARDS [--val SHARDS] --output FOLDER

FOLDER/findings.parquet has a row for each image of --data: its key, its flags and its scores. FOLDER/val.parquet has
those of --val, and FOLDER/pairs.parquet the near-copies. FOLDER/findings.json has the numbers that are printed.
FOLDER/index.html is a map of the images. FOLDER/work holds the features: a command that was stopped goes on there.

The processes of `tessera --num_processes N explore` share the encoding and the search. The rest runs on the first one.

Shape letters: N images of both sets, D features per image, K neighbours.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from pydantic import Field
from threadpoolctl import threadpool_limits

from tessera.data.shards import Source, describe_remote, open_shards
from tessera.encoders.base import Encoder
from tessera.evaluation.command import run_command
from tessera.evaluation.embed import pyarrow
from tessera.evaluation.features import (
    PIXELS,
    EvaluationError,
    FeatureSettings,
    LabelledFeatures,
    extract,
    load_encoder,
)
from tessera.evaluation.knn import knn_ranks
from tessera.extras.explore import checks, copies
from tessera.extras.explore.embedding import embed_set, joined, pack_thumbnails, read_parts
from tessera.extras.explore.findings import ACROSS, DATA, VAL, WITHIN_DATA, WITHIN_VAL, Findings
from tessera.extras.explore.neighbours import EXACT, Neighbours, faiss, nearest, recall, search
from tessera.extras.explore.page import write_page
from tessera.extras.explore.planting import KINDS, planted
from tessera.extras.explore.tables import KINDS_OF_PAIRS, summary, write_tables
from tessera.extras.explore.thumbnails import SIDE, Thumbnails
from tessera.runtime.collectives import alone, broadcast_object, patient_group
from tessera.runtime.files import atomic_write
from tessera.runtime.processes import make_accelerator
from tessera.runtime.settings import Positional

K = 20
"""Number of neighbours of each image."""
PLANTED = 500
"""Number of images of which copies are planted."""
RIDGE = 0.1
"""Part of the mean variance that is added to each variance before features are whitened."""
MOST_WHITENED = 4096
"""Largest number of features that are whitened. More features are only centred."""
LEAST_READ = 0.5
"""Least share of the images of a set that can be read."""


class ExploreSettings(FeatureSettings):
    """Find copies, leaks, outliers, blank images and doubtful labels, and draw a map of the images."""

    checkpoint: Positional[str]  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    """run folder, checkpoint in a run folder, exported encoder, `timm:NAME` for a pretrained model of timm, or `pixels`
    for the pixels of the images scaled to 16 x 16"""
    image_size: int | None = Field(None, ge=1)
    """side of the images in pixels; default: the size that the encoder was built for, and 64 for `pixels`"""
    data: str | list[str]
    """SHARDS of the images"""
    val: str | list[str] | None = None
    """SHARDS of validation images, whose copies in --data are leaks"""
    output: Path
    """folder to write; a stopped command with the same settings goes on there"""


def run(settings: ExploreSettings) -> Findings | None:
    """Write the findings to `settings.output`. Return them on the main process, and None on the others.

    Raises:
        EvaluationError: the encoder cannot be used, a package is missing, or the folder belongs to other settings.
        ShardError: the shards cannot be read.
    """
    faiss(), pyarrow()
    if find_spec("umap") is None:
        raise EvaluationError('The map needs umap-learn. Install it: pip install "tessera-ssl[explore]"')
    if settings.checkpoint == PIXELS and settings.image_size is None:
        settings = settings.model_copy(update={"image_size": SIDE})
    accelerator, work = make_accelerator(), settings.output / "work"
    encoder, _ = load_encoder(settings)
    encoder.to(accelerator.device)
    sets = _open_sets(settings, accelerator)
    with patient_group() as group:
        paths = [
            embed_set(name, settings, encoder, one, accelerator, work)
            for name, one in zip(("data", "val"), sets, strict=False)
        ]
        _check_read(paths, sets)
        written = None
        if accelerator.is_main_process:
            with threadpool_limits(1):  # the last digits depend on the number of threads
                written = _write_features(paths, work)
        digest, transform = broadcast_object(written, group)
        features = np.load(work / "features.npy", mmap_mode="r")
        (folder := work / f"neighbours-{digest}").mkdir(exist_ok=True)
        found = search(features, K, folder, accelerator)
        result = None
        if accelerator.is_main_process:
            with alone():
                calibration = _planted(settings, encoder, sets[0], accelerator, transform)
                with threadpool_limits(1):
                    result = _findings(paths, sets, features, found, calibration)
                _write(result, paths, settings.output)
        if group is not None:
            dist.barrier(group)
    return result


def _open_sets(settings: ExploreSettings, accelerator: Accelerator) -> list[Source]:
    """Open the images. A class of the validation set has the number of the class of this name in the data set."""
    given = [settings.data] if settings.val is None else [settings.data, settings.val]
    access = describe_remote(given, settings.access)
    opened = [open_shards(one, source=access, progress=accelerator.is_main_process) for one in given]
    names = [one.class_names() if one.count_labels() else None for one in opened]
    if all(names):
        known = list(dict.fromkeys(name for some in names for name in some or ()))
        numbers = [tuple(known.index(name) for name in some or ()) for some in names]
        return [replace(o, classes=tuple(known), numbers=n) for o, n in zip(opened, numbers, strict=True)]
    return opened


def _check_read(paths: Sequence[list[Path]], sets: Sequence[Source]) -> None:
    """Raise `EvaluationError` if too few images of a set can be read to find anything about the set."""
    for name, of_set, one in zip(("data", "val"), paths, sets, strict=False):
        if (read := len(joined(of_set, "labels"))) < LEAST_READ * one.images:
            raise EvaluationError(
                f"Only {read:,} of {one.images:,} images of --{name} can be read. The lines above say why. Use an "
                "encoder that was trained on such images, or other images."
            )


def _write_features(paths: Sequence[list[Path]], work: Path) -> tuple[str, tuple[np.ndarray, np.ndarray]]:
    """Write the features of all images to WORK/features.npy: whitened, of length 1. Return their hash.

    Also return the mean (D,) and the matrix (D, D) with which features are whitened. Features that are correlated, as
    those of most encoders are, hide the small differences by which copies are told from other images. The mean and the
    matrix are those of the images of both sets: with fewer images than features, those of one set alone make the images
    of the other set look like each other.

    Raises:
        EvaluationError: a feature is NaN or infinite.
    """
    count, total, products = 0, 0.0, 0.0
    for (part,) in read_parts([path for of_set in paths for path in of_set], "features"):
        if not np.isfinite(part).all():
            raise EvaluationError(
                "Some features are NaN or infinite. Check whether the encoder has diverged, or try --precision fp32."
            )
        part = part.astype(np.float64)
        count, total = count + len(part), total + part.sum(0)
        if part.shape[1] <= MOST_WHITENED:
            products = products + part.T @ part
    mean = np.asarray(total / count)
    matrix = np.ones(1)
    if isinstance(products, np.ndarray):
        variance, axes = np.linalg.eigh(products / count - np.outer(mean, mean))
        variance = variance.clip(0)
        matrix = axes / np.sqrt(variance + RIDGE * max(variance.mean(), 1e-12))
    transform = (mean, matrix)
    hashed = hashlib.sha256()
    images = sum(len(joined(of_set, "labels")) for of_set in paths)
    with atomic_write(work / "features.npy") as temporary:
        out = np.lib.format.open_memmap(temporary, "w+", np.float32, (images, len(mean)))
        start = 0
        for of_set in paths:
            for (part,) in read_parts(of_set, "features"):
                rows = whitened(part, transform)
                out[start : start + len(rows)] = rows
                hashed.update(rows.tobytes())
                start += len(rows)
        out.flush()
    return hashed.hexdigest()[:16], transform


def whitened(features: np.ndarray, transform: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Return whitened features of length 1: (N, D) -> (N, D) float32."""
    mean, matrix = transform
    centred = features - mean
    found = centred @ matrix if matrix.ndim == 2 else centred
    return (found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)).astype(np.float32)


def _planted(
    settings: ExploreSettings, encoder: Encoder, data: Source, accelerator: Accelerator, transform: Any
) -> tuple[np.ndarray, list[str]]:
    """Return features of planted copies of some images (M, 4, D), and the keys of these images."""
    options = settings.options() | {"feature": planted, "labels": False, "part": (0, 1), "images": PLANTED}
    found = extract(encoder, data, accelerator, **options)
    rows = found.features.numpy().reshape(len(found.keys) * len(KINDS), -1)
    return whitened(rows, transform).reshape(len(found.keys), len(KINDS), -1), list(found.keys)


def _findings(
    paths: Sequence[list[Path]],
    sets: Sequence[Source],
    features: np.ndarray,
    found: Neighbours,
    calibration: tuple[np.ndarray, list[str]],
) -> Findings:
    """Return the findings about all images."""
    per_set = [
        {name: joined(one, name) for name in ("keys", "labels", "deviation", "present", "bytes")} for one in paths
    ]
    facts = {name: np.concatenate([one[name] for one in per_set]) for name in per_set[0]}
    which = np.concatenate([np.full(len(one["labels"]), n, np.int8) for n, one in enumerate(per_set)])
    similarity, number = found
    names = list(sets[0].classes or ())
    findings = Findings([*facts["keys"].tolist()], which, facts["labels"], names, features)
    notes: dict[str, Any] = {
        "images": len(features),
        "data": int((which == DATA).sum()),
        "val": int((which == VAL).sum()),
    }
    findings.notes = notes
    findings.notes["unreadable"] = sum(one.images for one in sets) - len(features)
    findings.notes["neighbours_recall"] = 1.0 if len(features) <= EXACT else recall(features, number)
    _add_copies(findings, found, calibration)
    findings.scores["outlier"], findings.flags["outlier"] = checks.outliers(similarity)
    findings.flags["blank"] = checks.blank(facts["deviation"], facts["present"])
    findings.flags["tiny_file"] = checks.tiny(facts["bytes"])
    doubt = checks.doubtful_labels(similarity, number, findings.labels)
    findings.scores["label_doubt"], findings.flags["label_doubt"], agreement = doubt
    findings.notes["class_agreement"] = {names[c] if names else str(c): share for c, share in agreement.items()}
    findings.cluster, findings.medoids = checks.clusters(features)
    findings.notes["clusters"] = len(findings.medoids)
    findings.notes["knn"] = _knn(findings)
    return findings


def _add_copies(findings: Findings, found: Neighbours, calibration: tuple[np.ndarray, list[str]]) -> None:
    """Add pairs of near-copies, their flags, and the numbers of the calibration."""
    similarity, number = found
    around = copies.density(similarity)
    margin = copies.margins(similarity, number, around)
    largest = np.where(np.isfinite(margin), margin, -np.inf).max(1)
    findings.scores["copy"] = np.where(np.isfinite(largest), largest, -1).astype(np.float32)
    least = copies.threshold(findings.scores["copy"])
    findings.pairs, findings.pair_margin, places = copies.pairs_above(margin, number, least)
    findings.pair_similarity = similarity.reshape(-1)[places]
    in_val = findings.sets[findings.pairs] == VAL  # (P, 2)
    findings.pair_kind = np.select([~in_val.any(1), in_val.all(1)], [WITHIN_DATA, WITHIN_VAL], ACROSS).astype(np.int8)
    images, across = len(findings.keys), findings.pair_kind == ACROSS
    findings.flags["near_copy"] = copies.surplus(findings.pairs[~across], images)
    findings.flags["leak"] = np.isin(np.arange(images), findings.pairs[across])
    rows, keys = calibration
    places_of = {key: n for n, key in enumerate(findings.keys[: findings.notes["data"]])}
    original = np.repeat([places_of[key] for key in keys], len(KINDS))
    near = nearest(findings.features, rows.reshape(len(original), -1), K + 1)
    hit = copies.recall_of_planted(*near, original, around, least).reshape(-1, len(KINDS))
    findings.notes |= {
        "threshold": least,
        "planted_images": len(keys),
        "recall": dict(zip(KINDS, hit.mean(0).tolist(), strict=True)),
        "expected_false_share": copies.FALSE_SHARE,
        "expected_false_images": copies.FALSE_SHARE * images,
        "pairs": {name: int((findings.pair_kind == n).sum()) for n, name in enumerate(KINDS_OF_PAIRS)},
    }


def _knn(findings: Findings) -> dict[str, float] | None:
    """Return the k-NN accuracy of all validation images, and of those without copies in the data set.

    None without a labelled validation set.
    """
    labels, of_data, of_val = findings.labels, findings.sets == DATA, findings.sets == VAL
    of_data, of_val = of_data & (labels >= 0), of_val & (labels >= 0)
    if not of_data.any() or not of_val.any():
        return None
    bank, queries = (
        LabelledFeatures(torch.from_numpy(findings.features[one]), torch.from_numpy(labels[one]))
        for one in (of_data, of_val)
    )
    k = min(K, len(bank.labels))
    classes = int(labels.max()) + 1
    right = (knn_ranks(bank, queries, [k], classes=classes)[k] < 1).numpy()
    clean = ~findings.flags["leak"][of_val]
    return {
        "k": k,
        "all": float(right.mean()),
        "without_leaks": float(right[clean].mean()) if clean.any() else float("nan"),
    }


def _write(findings: Findings, paths: Sequence[list[Path]], output: Path) -> None:
    """Write the tables, the thumbnails and the page, and print the summary."""
    write_tables(findings, output)
    pack_thumbnails([path for of_set in paths for path in of_set], output)
    with atomic_write(output / "findings.json") as temporary:
        temporary.write_text(json.dumps(findings.notes, indent=2) + "\n")
    print(summary(findings), flush=True)
    table = output / "findings.parquet"
    print(f"findings written to {table}. Train without copies: --data.exclude {table}:near_copy,leak,blank", flush=True)
    print(f"page written to {write_page(findings, Thumbnails(output), output)}", flush=True)


main = partial(run_command, ExploreSettings, run)


if __name__ == "__main__":
    main()
