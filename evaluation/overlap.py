"""Check that no image of the validation set is also in the training set: by paths, files, checksums and contents."""

import os
from collections.abc import Sequence

import numpy as np

from tessera.data.shards import ShardError, Shards, Source, SourceConfig, expand
from tessera.evaluation.features import EvaluationError

MOST_COMPARED = 64
"""Maximum number of images whose contents are compared, of those with equal names and sizes in both sets."""
_BASE = np.uint64(0x9E3779B97F4A7C15)  # an odd number, so that it has an inverse modulo 2**64
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))
_REMEDY = "Choose other shards for --val, or allow this with --source.allow_overlap true."


def check_disjoint(train: Shards, val: Shards, source: SourceConfig) -> None:
    """Check that the training set and the validation set have no file in common.

    Raises:
        EvaluationError: a shard of the validation set is a shard of the training set, or a link to one.
    """
    if source.allow_overlap:
        return
    seen = {identity: path for path in expand(train, source) for identity in _identities(path)}
    for path in expand(val, source):
        if same := [seen[identity] for identity in _identities(path) if identity in seen]:
            what = "" if same[0] == path else f", where it is named {same[0]}"
            raise EvaluationError(f"{path} is in both --train and --val{what}. {_REMEDY}")


def _identities(path: str) -> list[str | tuple[int, int]]:
    """Return the real path of a shard and, for a local shard, the device and number of its file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return [os.path.realpath(path)]
    return [os.path.realpath(path), (status.st_dev, status.st_ino)]


def check_contents(train: Source, val: Source) -> None:
    """Check that the validation set has no image of the training set.

    Shards with equal SHA-256 in `index.json` are copies. Images with equal names and sizes in both sets are compared.

    Raises:
        EvaluationError: a shard of the validation set is a copy of a shard of the training set, or images of both sets
            have equal names and contents.
        ShardError: the index of a shard cannot be read.
    """
    if val.config.allow_overlap:
        return
    sums = {shard.sha256.lower(): shard.path for shard in train.shards if shard.sha256}
    for shard in val.shards:
        if shard.sha256 and (same := sums.get(shard.sha256.lower())):
            raise EvaluationError(f"{shard.path} of --val is a copy of {same} of --train. {_REMEDY}")
    codes = [_codes(opened) for opened in (train, val)]
    common = np.intersect1d(codes[0], codes[1])
    if not len(common):
        return
    chosen = common[np.unique(np.linspace(0, len(common) - 1, MOST_COMPARED).astype(np.int64))]
    places = [np.flatnonzero(np.isin(one, chosen)) for one in codes]
    first = {int(codes[0][place]): int(place) for place in places[0]}
    _, one_each = np.unique(codes[1][places[1]], return_index=True)
    for place in map(int, places[1][one_each]):
        same = first[int(codes[1][place])]
        try:
            images = [train.image(same), val.image(place)]
        except ShardError:
            continue  # the evaluation names an unreadable shard, or leaves it out
        if images[0] == images[1]:
            raise EvaluationError(
                f"The image {val.name(place)} of --val is also in --train, as {train.name(same)}. Images with equal "
                f"names and sizes in both sets: {len(common):,}. {_REMEDY}"
            )


def _codes(opened: Source) -> np.ndarray:
    """Return a hash of the name and of the size in bytes of each image, without its shard: (N,) uint64."""
    found: Sequence[np.ndarray] = [_shard_codes(opened, number) for number in range(len(opened.shards))]
    return np.concatenate(found)


def _shard_codes(opened: Source, number: int) -> np.ndarray:
    """Return the hashes of the S samples of one shard: (S,) uint64.

    The hash of a name is a polynomial of its bytes modulo 2**64, so that all names are hashed at once.
    """
    try:
        index = opened.shards[number].index()
    except ShardError:
        if opened.config.unreadable == "stop":
            raise
        return np.arange(opened.counts[number], dtype=np.uint64)  # the shard is left out later
    powers = np.cumprod(np.full(len(index.keys) + 1, _BASE))
    inverses = np.cumprod(np.full(len(index.keys) + 1, _INVERSE))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((index.keys.astype(np.uint64) + 1) * powers[:-1])])
    starts = np.concatenate([[0], index.ends[:-1]])
    names = (sums[index.ends] - sums[starts]) * inverses[starts]
    return names ^ (index.images[:, 1].astype(np.uint64) * _BASE)
