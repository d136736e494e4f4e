"""Which image of a listing goes to which shard: from the sizes of files and a seed, before any shard is written."""

from dataclasses import dataclass

import numpy as np

from data.tools.listing import NO_LABEL, Listing
from data.tools.pack import DIGEST, LeftOut, Recipe, digest, prepare, read
from data.tools.parallel import Advance, spread

PROBED = 64  # images that say how large encoded images become
CHUNK = 256  # images of a task that reads for duplicates
BLOCK = 512  # bytes that a member of a tar is padded to


@dataclass
class Split:
    """The images of S shards."""

    order: np.ndarray
    """(M,) int64: entries of the listing in the order in which they are written"""
    starts: np.ndarray
    """(S + 1,) int64: where in `order` each shard begins"""
    bytes: np.ndarray
    """(S,) int64: expected size of each shard"""

    def __len__(self) -> int:
        return len(self.bytes)

    def entries(self, shard: int) -> np.ndarray:
        return self.order[self.starts[shard] : self.starts[shard + 1]]


def split(listing: Listing, order: np.ndarray, shard_bytes: float, ratio: float) -> Split:
    """Cuts `order` into shards of nearly equal size, at most `shard_bytes` and one image.

    Args:
        ratio: bytes of an image in a shard over those of its file.
    """
    blocks = np.ceil(listing.sizes[order] * (ratio / BLOCK)).astype(np.int64) + 1  # content and its header
    blocks += np.where(listing.labels[order] != NO_LABEL, 2, 0)
    ends = np.cumsum(blocks)
    shards = max(1, int(np.ceil(ends[-1] * BLOCK / shard_bytes)))
    shard = ((ends - blocks) * shards) // ends[-1]  # of each image: where it begins
    starts = np.searchsorted(shard, np.arange(shards + 1))
    starts = np.unique(starts)  # an image larger than a shard leaves none for the next one
    bounds = np.concatenate([[0], ends])[starts]
    return Split(order, starts, np.diff(bounds) * BLOCK)


def shuffled(entries: np.ndarray, seed: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).permutation(entries)


def encoded_ratio(listing: Listing, order: np.ndarray, recipe: Recipe, workers: int) -> float:
    """Bytes of encoded images over those of their files, from some of them; 1 where none is encoded."""
    if not recipe.encodes:
        return 1.0

    def probe(entry: int, advance: Advance) -> tuple[int, int]:
        try:
            content = read(listing, entry, recipe.links)
            return len(content), len(prepare(content, recipe)[0])
        except LeftOut:
            return 0, 0
        finally:
            advance(1)

    probed = [int(order[n]) for n in np.unique(np.linspace(0, len(order) - 1, PROBED).astype(np.int64))]
    sizes = np.array(list(spread(probe, probed, workers=workers, title="estimating sizes", total=len(probed))))
    before, after = sizes.sum(axis=0)
    return float(after / before) if before else 1.0


def find_duplicates(listing: Listing, recipe: Recipe, workers: int) -> np.ndarray:
    """(K, 2) int64: entries and the first entry with the same bytes. Reads the files whose size is not their own."""
    usable = listing.usable
    _, places, counts = np.unique(listing.sizes[usable], return_inverse=True, return_counts=True)
    candidates = usable[counts[places] > 1]
    chunks = [(n, candidates[n : n + CHUNK]) for n in range(0, len(candidates), CHUNK)]
    digests = np.zeros((len(candidates), DIGEST), dtype=np.uint8)

    def hashed(chunk: tuple[int, np.ndarray], advance: Advance) -> tuple[int, bytes]:
        found = []
        for entry in map(int, chunk[1]):
            try:
                found.append(digest(read(listing, entry, recipe.links)))
            except LeftOut:  # it gets a digest of its own, and is reported when its shard is written
                found.append(digest(b"%d" % entry + listing.path(entry)))
            advance(1)
        return chunk[0], b"".join(found)

    for start, found in spread(hashed, chunks, workers=workers, title="duplicates", total=len(candidates)):
        rows = np.frombuffer(found, dtype=np.uint8).reshape(-1, DIGEST)
        digests[start : start + len(rows)] = rows
    return same(candidates, digests)


def same(entries: np.ndarray, digests: np.ndarray) -> np.ndarray:
    """(K, 2) int64, ascending: entries and the first one with the same digest.

    Args:
        entries: (M,) int64.
        digests: (M, 16) uint8.
    """
    low, high = digests.view(np.uint64).T
    order = np.lexsort((entries, low, high))
    new = np.ones(len(order), dtype=bool)
    new[1:] = (low[order][1:] != low[order][:-1]) | (high[order][1:] != high[order][:-1])
    first = np.flatnonzero(new)[np.cumsum(new) - 1]  # place of the first of each group
    pairs = np.stack([entries[order][~new], entries[order][first][~new]], axis=1)
    return pairs[np.argsort(pairs[:, 0])]
