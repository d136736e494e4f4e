"""Assignment of images to shards. It depends on file sizes and a seed, and is made before any shard is written."""

from dataclasses import dataclass
from tarfile import BLOCKSIZE

import numpy as np

from tessera.data.shards.listing import NO_LABEL, Listing
from tessera.data.tools.pack import DIGEST, LeftOut, Recipe, digest, prepare, read
from tessera.data.tools.parallel import Advance, spread

PROBED = 64  # number of images that are encoded to estimate the encoded size of all images
IMAGES_PER_TASK = 256


@dataclass
class Split:
    """Assignment of M images to S shards."""

    order: np.ndarray
    """Entries of the listing in the order of writing: (M,) int64."""
    starts: np.ndarray
    """Index in `order` at which each shard begins, and the end of the last shard: (S + 1,) int64."""
    bytes: np.ndarray
    """Expected size of each shard in bytes: (S,) int64."""

    def __len__(self) -> int:
        return len(self.bytes)

    def entries(self, shard: int) -> np.ndarray:
        """Return the entries of the listing that one shard stores."""
        return self.order[self.starts[shard] : self.starts[shard + 1]]


def split(listing: Listing, order: np.ndarray, shard_bytes: float, ratio: float) -> Split:
    """Divide `order` into shards of nearly equal size. A shard may exceed `shard_bytes` by one image at most.

    Args:
        listing: files with their sizes and labels.
        order: entries of the listing in the order of writing.
        shard_bytes: target size of a shard in bytes.
        ratio: expected size of a stored image, divided by the size of its file.
    """
    # Number of tar blocks of each sample: the blocks of the image, one block for its header, two for a label, and those
    # of a segmentation map with its header.
    blocks = np.ceil(listing.sizes[order] * (ratio / BLOCKSIZE)).astype(np.int64) + 1
    blocks += np.where(listing.labels[order] != NO_LABEL, 2, 0)
    if listing.maps is not None:
        sizes = listing.maps.sizes[order]
        blocks += np.where(sizes > 0, -(-sizes // BLOCKSIZE) + 1, 0)
    ends = np.cumsum(blocks)
    shards = max(1, int(np.ceil(ends[-1] * BLOCKSIZE / shard_bytes)))
    shard = ((ends - blocks) * shards) // ends[-1]  # number of the shard in which each image begins
    starts = np.searchsorted(shard, np.arange(shards + 1))
    starts = np.unique(starts)  # remove empty shards, which follow an image that is larger than a shard
    bounds = np.concatenate([[0], ends])[starts]
    return Split(order, starts, np.diff(bounds) * BLOCKSIZE)


def shuffled(entries: np.ndarray, seed: int) -> np.ndarray:
    """Return `entries` in a random order that depends only on the seed."""
    return np.random.Generator(np.random.PCG64(seed)).permutation(entries)


def encoded_ratio(listing: Listing, order: np.ndarray, recipe: Recipe, workers: int) -> float:
    """Estimate the ratio of stored image sizes to file sizes. The ratio is 1 if images are not encoded again."""
    if not recipe.encodes:
        return 1.0

    def probe(entry: int, advance: Advance) -> tuple[int, int]:
        try:
            content = read(listing, entry, recipe.links)
            return len(content), len(prepare(content, recipe).content)
        except LeftOut:
            return 0, 0
        finally:
            advance(1)

    probed = [int(order[n]) for n in np.unique(np.linspace(0, len(order) - 1, PROBED).astype(np.int64))]
    sizes = np.array(list(spread(probe, probed, workers=workers, title="estimating sizes", total=len(probed))))
    before, after = sizes.sum(axis=0)
    return float(after / before) if before else 1.0


def find_duplicates(listing: Listing, recipe: Recipe, workers: int) -> np.ndarray:
    """Return pairs of a duplicate and the first entry with the same content: (K, 2) int64.

    A file whose size is unique is not read, because it cannot be a duplicate.
    """
    usable = listing.usable
    _, places, counts = np.unique(listing.sizes[usable], return_inverse=True, return_counts=True)
    candidates = usable[counts[places] > 1]
    tasks = [(n, candidates[n : n + IMAGES_PER_TASK]) for n in range(0, len(candidates), IMAGES_PER_TASK)]
    digests = np.zeros((len(candidates), DIGEST), dtype=np.uint8)

    def hash_files(task: tuple[int, np.ndarray], advance: Advance) -> tuple[int, bytes]:
        found = []
        for entry in map(int, task[1]):
            try:
                found.append(digest(read(listing, entry, recipe.links)))
            except LeftOut:  # an unreadable file gets a unique digest and is reported later
                found.append(digest(b"%d" % entry + listing.path(entry)))
            advance(1)
        return task[0], b"".join(found)

    for start, found in spread(hash_files, tasks, workers=workers, title="duplicates", total=len(candidates)):
        rows = np.frombuffer(found, dtype=np.uint8).reshape(-1, DIGEST)
        digests[start : start + len(rows)] = rows
    return same(candidates, digests)


def same(entries: np.ndarray, digests: np.ndarray) -> np.ndarray:
    """Return pairs of a duplicate and the first entry with the same digest: (K, 2) int64, sorted by duplicate.

    Args:
        entries: entries of the listing: (M,) int64.
        digests: digest of the content of each entry: (M, 16) uint8.
    """
    low, high = digests.view(np.uint64).T
    order = np.lexsort((entries, low, high))
    new = np.ones(len(order), dtype=bool)
    new[1:] = (low[order][1:] != low[order][:-1]) | (high[order][1:] != high[order][:-1])
    first = np.flatnonzero(new)[np.cumsum(new) - 1]  # position in `order` of the first entry with the same digest
    pairs = np.stack([entries[order][~new], entries[order][first][~new]], axis=1)
    return pairs[np.argsort(pairs[:, 0])]
