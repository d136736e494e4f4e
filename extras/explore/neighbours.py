"""The most similar images of every image, searched with faiss.

Up to `EXACT` images, the search compares all pairs. Above, inverted lists (faiss `IndexIVFFlat`) compare an image with
those of the `PROBES` nearest of `lists(N)` lists; the share of true neighbours that they find is measured on `SAMPLE`
images against the exact search.

An index holds at most `PIECE` images. More images are searched piece by piece, and the results are merged, so that the
memory does not grow with the number of images. The queries are split into blocks of `BLOCK` images, which the processes
share and write to files: a stopped search goes on at its last block, and the blocks do not depend on the number of
processes.

The last digits of a product of matrices depend on the number of threads that compute it. A block is therefore split
into slices of `SLICE` queries. The threads share the slices, and each slice is computed by one thread.

Shape letters: N images, Q queries of a block, D features per image, K neighbours.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from threadpoolctl import threadpool_limits

from tessera.evaluation.features import EvaluationError
from tessera.runtime.files import atomic_write
from tessera.runtime.progress import track

EXACT = 100_000
"""Largest number of images whose pairs are all compared."""
PIECE = 1_000_000
"""Largest number of images in an index of inverted lists."""
PROBES = 16
"""Number of lists that are searched for each image."""
BLOCK = 8192
"""Number of queries in a block."""
SLICE = 512
"""Number of queries that one thread searches at a time."""
SAMPLE = 1000
"""Number of queries on which the inverted lists are compared with the exact search."""
TRAINED = 64
"""Number of images per list from which the centres of the lists are computed."""

Neighbours = tuple[np.ndarray, np.ndarray]
"""Similarities (Q, K) float32 and indices (Q, K) int64, the nearest first; -inf and -1 where there is none."""


def faiss() -> Any:
    """Import and return faiss.

    Raises:
        EvaluationError: faiss is not installed.
    """
    try:
        import faiss
    except ImportError:
        raise EvaluationError('The search needs faiss. Install it: pip install "tessera-ssl[explore]"') from None
    return faiss


def lists(images: int) -> int:
    """Return the number of inverted lists of an index."""
    return max(2 ** round(np.log2(4 * images**0.5)), 1)


def make_index(features: np.ndarray, *, exact: bool) -> Any:
    """Return a faiss index of features (N, D) of length 1."""
    module, (images, dim) = faiss(), features.shape
    if exact:
        index = module.IndexFlatIP(dim)
        index.add(np.ascontiguousarray(features))
        return index
    count = lists(images)
    index = module.IndexIVFFlat(module.IndexFlatIP(dim), dim, count, module.METRIC_INNER_PRODUCT)
    index.cp.spherical, index.cp.niter, index.cp.max_points_per_centroid = True, 10, TRAINED
    index.nprobe = PROBES
    chosen = np.random.default_rng(0).choice(images, min(images, TRAINED * count), replace=False)
    index.train(np.ascontiguousarray(features[np.sort(chosen)]))
    for start in range(0, images, BLOCK):
        index.add(np.ascontiguousarray(features[start : start + BLOCK]))
    return index


def search(
    features: np.ndarray, k: int, folder: Path, accelerator: Accelerator, *, exact: int = EXACT, piece: int = PIECE
) -> Neighbours:
    """Return the cosine similarities (N, K) float32 and indices (N, K) int64 of the nearest images of each image.

    An image is no neighbour of itself. If there are fewer than K other images, the rest have the similarity -inf and
    the index -1. Collective: each process searches some of the blocks, and all of them return the result.

    Args:
        features: features (N, D) float32 of length 1, equal on all processes.
        k: number of neighbours.
        folder: folder of the blocks.
        accelerator: accelerator of all processes.
        exact: largest number of images whose pairs are all compared.
        piece: largest number of images in an index.
    """
    images, blocks = len(features), range(0, len(features), BLOCK)
    piece = images if images <= exact else piece
    own = range(accelerator.process_index, len(blocks), accelerator.num_processes)
    for first in range(0, images, piece):
        missing = [number for number in own if not _path(folder, first, number).exists()]
        if not missing:
            continue
        with threadpool_limits(1):
            index = make_index(features[first : first + piece], exact=images <= exact)
        title = f"neighbours of {images:,} images, blocks"
        for number in track(missing, title, total=len(missing), shown=accelerator.is_main_process):
            queries = np.ascontiguousarray(features[blocks[number] : blocks[number] + BLOCK])
            similarity, found = _in_slices(index, queries, k + 1)
            similarity, found = _others(similarity, np.where(found < 0, -1, found + first), blocks[number])
            with atomic_write(_path(folder, first, number)) as temporary, temporary.open("wb") as file:
                np.savez(file, similarity=similarity, number=found)
        del index
    accelerator.wait_for_everyone()
    joined = [_joined(folder, number, range(0, images, piece), k) for number in range(len(blocks))]
    return np.concatenate([similarity for similarity, _ in joined]), np.concatenate([found for _, found in joined])


def _in_slices(index: Any, queries: np.ndarray, k: int) -> Neighbours:
    """Return what `index.search` returns. The result does not depend on the number of threads."""
    slices = [queries[start : start + SLICE] for start in range(0, len(queries), SLICE)]
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=faiss().omp_set_num_threads, initargs=(1,)) as pool:
        similarity, number = zip(*pool.map(lambda some: index.search(some, k), slices), strict=True)
    return np.concatenate(similarity), np.concatenate(number)


def _path(folder: Path, first: int, block: int) -> Path:
    """Return the path of the neighbours that a block has in the piece that begins with the image `first`."""
    return folder / f"neighbours-{first:09d}-{block:05d}.npz"


def _joined(folder: Path, block: int, pieces: range, k: int) -> Neighbours:
    """Return the neighbours of a block in all pieces: (Q, K) each."""
    best: Neighbours | None = None
    for first in pieces:
        with np.load(_path(folder, first, block)) as arrays:
            found = arrays["similarity"], arrays["number"]
        best = merged(best or _none(len(found[0]), k), found, k)
    assert best is not None
    return best


def _none(queries: int, k: int) -> Neighbours:
    return np.full((queries, k), -np.inf, np.float32), np.full((queries, k), -1, np.int64)


def _others(similarity: np.ndarray, number: np.ndarray, first: int) -> Neighbours:
    """Return the neighbours of the images `first`, `first` + 1 and so on, without the images themselves."""
    absent = (number == first + np.arange(len(number))[:, None]) | (number < 0)
    return np.where(absent, -np.inf, similarity).astype(np.float32), np.where(absent, -1, number)


def merged(one: Neighbours, other: Neighbours, k: int) -> Neighbours:
    """Return the K best of two sets of neighbours: (Q, ...) similarities and indices each.

    Of equally similar images, the first one is the nearest.
    """
    similarity, number = (np.concatenate(pair, axis=1) for pair in zip(one, other, strict=True))
    order = np.lexsort((number, -similarity), axis=1)[:, :k]
    return np.take_along_axis(similarity, order, 1), np.take_along_axis(number, order, 1)


def nearest(features: np.ndarray, queries: np.ndarray, k: int, own: np.ndarray | None = None) -> Neighbours:
    """Return the exact neighbours of queries (Q, D) among features (N, D): (Q, K) each.

    Args:
        features: features that are searched.
        queries: features of the queries.
        k: number of neighbours.
        own: index in `features` of each query (Q,), which is no neighbour of itself; None if the queries are others.
    """
    best, index = _none(len(queries), k), faiss().IndexFlatIP(features.shape[1])
    for start in range(0, len(features), EXACT):
        index.reset()
        index.add(np.ascontiguousarray(features[start : start + EXACT]))
        similarity, found = index.search(np.ascontiguousarray(queries), min(k + 1, index.ntotal))
        found += start
        absent = np.zeros(found.shape, bool) if own is None else found == own[:, None]
        best = merged(best, (np.where(absent, -np.inf, similarity), np.where(absent, -1, found)), k)
    return best


def recall(features: np.ndarray, number: np.ndarray) -> float:
    """Return the share of the true neighbours, of `SAMPLE` images, that are among the found ones `number` (N, K)."""
    chosen = np.linspace(0, len(features) - 1, min(SAMPLE, len(features))).round().astype(np.int64)
    true = nearest(features, features[chosen], number.shape[1], chosen)[1]
    hits = sum(len(np.intersect1d(one[one >= 0], found)) for one, found in zip(true, number[chosen], strict=True))
    return hits / max(int((true >= 0).sum()), 1)
