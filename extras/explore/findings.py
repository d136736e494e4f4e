"""Findings about the images of one or two sets.

Shape letters: N images (the data set first, then the validation set), D features per image, K classes, C clusters, P
pairs.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

DATA, VAL = 0, 1
"""Values of `Findings.sets`."""
WITHIN_DATA, ACROSS, WITHIN_VAL = 0, 1, 2
"""Values of `Findings.pair_kind`. In a pair of kind `ACROSS`, the first image belongs to the data set."""


@dataclass
class Findings:
    """Features, scores, flags, clusters and pairs of all images. Arrays have the order of `keys`."""

    keys: list[str]
    """Names `shard.tar/key` of the N samples, as `tessera embed` writes them."""
    sets: np.ndarray
    """Set of each image (N,) int8: `DATA` or `VAL`."""
    labels: np.ndarray
    """Class indices (N,) int64, -1 for an image without a label."""
    class_names: list[str]
    """Names of the K classes; empty if the classes have no names."""
    features: np.ndarray
    """Whitened features (N, D) float32 of length 1."""
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    """Scores (N,) float32 by name, such as `outlier`."""
    flags: dict[str, np.ndarray] = field(default_factory=dict)
    """Masks (N,) bool by name: near_copy, leak, outlier, blank, label_doubt, tiny_file."""
    cluster: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """Cluster of each image (N,) int32."""
    medoids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Index of the image nearest to the centre of each cluster (C,) int64."""
    pairs: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    """Indices of the two images of each near-copy (P, 2) int64, the pair of the largest margin first."""
    pair_similarity: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    """Cosine similarity of each pair (P,) float32."""
    pair_margin: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    """Margin of each pair (P,) float32: similarity minus the density around both images (`copies`)."""
    pair_kind: np.ndarray = field(default_factory=lambda: np.empty(0, np.int8))
    """Kind of each pair (P,) int8: `WITHIN_DATA`, `ACROSS` or `WITHIN_VAL`."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Numbers about the findings: threshold, recall by kind of copy, false finds, k-NN accuracies."""
