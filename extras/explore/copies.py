"""Near-copies: pairs of images that are more similar than other images are, with a calibrated threshold.

The margin of a pair is its cosine similarity minus the mean similarity of both images to their own neighbours (CSLS,
1710.04087). Images in a dense region, such as a class of similar pictures, therefore need a higher similarity. The
neighbours `CROWD` count, without the nearest ones, which may be copies.

The threshold allows false finds for `FALSE_SHARE` of the images. The largest margin of an image without a copy has an
extreme value distribution. A Gumbel distribution is fitted to the lower half of the margins, where copies do not reach,
and its tail gives the expected share of false finds at a threshold. Recall is measured on planted copies (`planting`).

Shape letters: N images, K neighbours, M planted copies, P pairs, D features per image.
"""

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

CROWD = slice(2, 12)
"""Neighbours whose mean similarity counts as the density around an image."""
FALSE_SHARE = 0.01
"""Expected share of images with a false find."""
FITTED = (0.2, 0.5)
"""Quantiles of the largest margins to which the distribution is fitted."""


def density(similarity: np.ndarray, crowd: slice = CROWD) -> np.ndarray:
    """Return the mean similarity of each image to its neighbours `crowd`: (N, K) -> (N,) float32.

    Neighbours that do not exist are -inf, and do not count. An image without such neighbours has the density 0.
    """
    chosen = similarity[:, crowd]
    exists = np.isfinite(chosen)
    return (np.where(exists, chosen, 0).sum(1) / np.maximum(exists.sum(1), 1)).astype(np.float32)


def margins(similarity: np.ndarray, number: np.ndarray, around: np.ndarray) -> np.ndarray:
    """Return the margin of each image and each of its neighbours: (N, K) float32, -inf where there is no neighbour.

    Args:
        similarity: similarities of the neighbours (N, K).
        number: indices of the neighbours (N, K), -1 for none.
        around: density around each image (N,).
    """
    return similarity - (around[:, None] + around[number]) / 2


def threshold(largest: np.ndarray) -> float:
    """Return the margin that `FALSE_SHARE` of the images without copies exceed, from the largest margin of each image.

    Args:
        largest: largest margin of each image (N,); at most half of the images may have a copy.
    """
    low, high = np.quantile(largest, FITTED)
    standard = [-np.log(-np.log(q)) for q in (*FITTED, 1 - FALSE_SHARE)]
    scale = (high - low) / (standard[1] - standard[0])
    return float(low + scale * (standard[2] - standard[0]))


def pairs_above(margin: np.ndarray, number: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pairs (P, 2) whose margin is at least `least`, their margins (P,), and their places in `margin` (P,).

    Each pair is returned once, the smaller index first. The pair of the largest margin comes first.
    """
    row, column = np.nonzero((margin >= least) & (number >= 0))
    found = np.sort(np.stack([row, number[row, column]], 1), axis=1).astype(np.int64)
    _, first = np.unique(found[:, 0] * (len(margin) + 1) + found[:, 1], return_index=True)
    row, column, found = row[first], column[first], found[first]
    order = np.argsort(-margin[row, column], kind="stable")
    return found[order], margin[row, column][order], row[order] * margin.shape[1] + column[order]


def recall_of_planted(
    similarity: np.ndarray, number: np.ndarray, original: np.ndarray, around: np.ndarray, least: float
) -> np.ndarray:
    """Return which planted copies are found: mask (M,).

    Args:
        similarity: similarities (M, K + 1) of each planted copy to its nearest images.
        number: indices of these images (M, K + 1).
        original: index of the image of which each copy was made (M,).
        around: density around each image (N,).
        least: threshold of the margin.
    """
    own = number == original[:, None]
    others = np.where(own, -np.inf, similarity)
    others = -np.sort(-others, axis=1)
    # the original is one of the nearest images that do not count in the density around an image
    crowd = density(others, slice(CROWD.start - 1, CROWD.stop - 1))
    margin = np.where(own, similarity, -np.inf).max(1) - (crowd + around[original]) / 2
    return margin >= least


def surplus(pairs: np.ndarray, images: int) -> np.ndarray:
    """Return which images are superfluous, because an earlier image of their group of copies is kept: mask (N,).

    Args:
        pairs: pairs of copies (P, 2).
        images: number of images (N).
    """
    graph = coo_matrix((np.ones(len(pairs), np.int8), (pairs[:, 0], pairs[:, 1])), shape=(images, images))
    _, group = connected_components(graph, directed=False)
    first = np.unique(group, return_index=True)[1]
    kept = np.zeros(images, bool)
    kept[first] = True
    return ~kept
