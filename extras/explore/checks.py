"""Outliers, blank images, tiny files, doubtful labels, and clusters.

Shape letters: N images, K neighbours, D features per image, C clusters.
"""

import numpy as np

from tessera.extras.explore.neighbours import faiss

DISTANT = 10
"""Number k of the neighbour whose distance is the score of an outlier."""
OUTLYING = 0.01
"""Share of the images that are flagged as outliers."""
LEAST_DEVIATION = 0.01
"""A blank image has a smaller standard deviation of its pixels, which run from 0 to 1, in each channel."""
LEAST_PRESENT = 0.05
"""A blank image has a smaller share of pixels with data."""
TINY = 0.1
"""A tiny file has a smaller part of the bytes of the median file."""
LEAST_OF_CLASS = 10
"""Least number of images of a class whose labels are judged. Most neighbours of a smaller class belong to others."""
TEMPERATURE = 0.07
"""Temperature of the votes of neighbours, as in the k-NN evaluation."""


def outliers(similarity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distance of each image to its k-th neighbour (N,), and the mask (N,) of the outliers.

    The distance is 1 minus the similarity. The outliers are the share `OUTLYING` of the images with the largest
    distances. The features give no scale on which an image would be an outlier by itself.
    """
    existing = np.isfinite(similarity).sum(1)
    place = np.minimum(DISTANT, np.maximum(existing, 1)) - 1
    distance = 1 - np.take_along_axis(similarity, place[:, None], 1)[:, 0]
    distance = np.where(np.isfinite(distance), distance, 0).astype(np.float32)
    chosen = np.zeros(len(distance), bool)
    chosen[np.argsort(-distance, kind="stable")[: int(OUTLYING * len(distance))]] = True
    return distance, chosen


def blank(deviation: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return the mask (N,) of images without content, from the facts of `embedding`."""
    return (deviation < LEAST_DEVIATION) | (present < LEAST_PRESENT)


def tiny(sizes: np.ndarray) -> np.ndarray:
    """Return the mask (N,) of files that are much smaller than the median file. A size of 0 is unknown."""
    known = sizes > 0
    return known & (sizes < TINY * np.median(sizes[known])) if known.any() else known


def doubtful_labels(
    similarity: np.ndarray, number: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, dict[int, float]]:
    """Return the score (N,) and the mask (N,) of labels that the neighbours contradict, and each class's agreement.

    The neighbours' votes estimate the probability of each class. As in confident learning (1911.00068), a class is
    likely if its probability is at least the mean of this probability over the images of the class. A label is doubtful
    if the most probable likely class is another one. The score is the largest probability of another class minus that
    of the label; -1 for an image without a label, and for classes of fewer than `LEAST_OF_CLASS` images. The agreement
    of a class is the mean probability of the label.
    """
    classes = int(labels.max()) + 1
    if classes < 1:
        return np.full(len(labels), -1, np.float32), np.zeros(len(labels), bool), {}
    labelled = labels >= 0
    own = np.zeros(len(labels))
    for start, votes in _votes(similarity, number, labels, classes):
        rows = np.arange(start, start + len(votes))
        own[rows] = np.where(labelled[rows], votes[np.arange(len(rows)), labels[rows]], 0)
    counts = np.bincount(labels[labelled], minlength=classes)
    judged = labelled & (counts[labels] >= LEAST_OF_CLASS)
    agreement = np.bincount(labels[labelled], own[labelled], minlength=classes) / np.maximum(counts, 1)
    score, doubt = np.full(len(labels), -1, np.float32), np.zeros(len(labels), bool)
    for start, votes in _votes(similarity, number, labels, classes):
        rows = start + np.flatnonzero(judged[start : start + len(votes)])
        votes = votes[rows - start]
        if not len(rows):
            continue
        likely = np.where((votes >= agreement) & (counts > 0), votes, -1)
        doubt[rows] = (likely.max(1) > 0) & (likely.argmax(1) != labels[rows])
        votes[np.arange(len(rows)), labels[rows]] = 0
        score[rows] = votes.max(1) - own[rows]
    return score, doubt, {int(c): float(agreement[c]) for c in np.flatnonzero(counts >= LEAST_OF_CLASS)}


def _votes(similarity: np.ndarray, number: np.ndarray, labels: np.ndarray, classes: int):
    """Yield the first image of a block, and the share of each class in its neighbours' votes (Q, classes)."""
    block = max(2**22 // classes, 1)
    for start in range(0, len(labels), block):
        near, who = similarity[start : start + block], number[start : start + block]
        of = np.where(who >= 0, labels[who], -1)  # (Q, K)
        largest = near.max(1, keepdims=True)
        weight = np.exp((near - np.where(np.isfinite(largest), largest, 0)) / TEMPERATURE) * (of >= 0)
        votes = np.zeros((len(near), classes))
        np.add.at(votes, (np.arange(len(near))[:, None], of.clip(0)), weight)
        yield start, votes / np.maximum(votes.sum(1, keepdims=True), 1e-12)


def clusters(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cluster of each image (N,) int32, and the image nearest to the centre of each cluster (C,) int64.

    Spherical k-means of faiss with about half the square root of N clusters, from 1 to 1000.
    """
    images, dim = features.shape
    count = int(np.clip(round(images**0.5 / 2), 1, 1000))
    means = faiss().Kmeans(
        dim, count, niter=20, spherical=True, seed=0, min_points_per_centroid=1, max_points_per_centroid=256
    )
    means.train(np.ascontiguousarray(features))
    similarity, cluster = np.empty(images, np.float32), np.empty(images, np.int64)
    for start in range(0, images, 65536):
        part = np.ascontiguousarray(features[start : start + 65536])
        found, nearest = means.index.search(part, 1)
        similarity[start : start + len(part)], cluster[start : start + len(part)] = found[:, 0], nearest[:, 0]
    order = np.lexsort((-similarity, cluster))
    _, first, cluster = np.unique(cluster[order], return_index=True, return_inverse=True)
    numbered = np.empty(images, np.int32)
    numbered[order] = cluster
    return numbered, order[first].astype(np.int64)
