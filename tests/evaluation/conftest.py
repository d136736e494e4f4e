"""Small labelled shards with a cache of their own, features of digits, encoders, and oracles of several tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from tessera import encoders
from tessera.encoders.base import Encoder, Features
from tessera.evaluation.features import LabelledFeatures
from tests.data.batches import saved, write_tar
from tests.pretrain.small import on_processes

FAMILIES = ["vit_micro", "swin_micro", "twins_svt_micro", "navit_micro", "sam_vit_micro"]


def save_encoder(path: Path, variant: str = "vit_micro", seed: int = 0, **settings: Any) -> str:
    """Write an encoder with random weights, and return the path."""
    torch.manual_seed(seed)
    encoders.save(encoders.build(variant, **settings), path)
    return str(path)


def made_up(images: int, seed: int = 0, dim: int = 10, classes: int = 5, spread: float = 1.0) -> LabelledFeatures:
    """Return features around one centre for each class, which is the same for all seeds."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(classes, dim))
    labels = rng.integers(0, classes, images)
    features = centres[labels] + spread * rng.normal(size=(images, dim))
    return LabelledFeatures(torch.from_numpy(features).float(), torch.from_numpy(labels))


def knn_oracle(k: int) -> KNeighborsClassifier:
    """Return the weighted k-NN classifier of DINO."""
    votes: Any = lambda distance: np.exp((1 - distance) / 0.07)  # noqa: E731
    return KNeighborsClassifier(k, metric="cosine", algorithm="brute", weights=votes)


def results_of_one_and_two_processes(
    folder: Path, port: int, run: Callable[[Any], object], settings: Callable[..., Any], options: dict[str, Any]
) -> tuple[dict, dict]:
    """Call the function `run` of a command in this process and on two, and return the results."""
    on_processes(_call, port, run, settings(**options, output=str(folder / "two.json")))
    run(settings(**options, output=str(folder / "one.json")))
    one, two = (json.loads((folder / name).read_text()) for name in ("one.json", "two.json"))
    assert two["settings"]["processes"] == 2
    return one, two


def _call(rank: int, run: Callable[[Any], object], settings: Any) -> None:
    run(settings)


class Known(Encoder):
    """Gives the tokens (N, T, D) and the attention (N, heads, T, T) that it was made with, for patches of 4 pixels."""

    cls_token = True
    stride = 4

    def __init__(self, tokens: Tensor, attention: Tensor | None = None) -> None:
        super().__init__()
        self.tokens, self.attention = tokens, attention

    def forward(self, images: Any, mask: object = None, *, drop: bool = False) -> Features:
        return Features(self.tokens[:, 0], self.tokens.flatten(0, 1), self.grids(images))

    def last_attention(self, images: Tensor) -> Tensor | None:
        return self.attention


def write_shard(path: Path, images: np.ndarray, labels: list[int] | None, prefix: str = "image") -> Path:
    """`images` (N, H, W, 3) uint8 as PNG, which keeps pixels as they are."""
    members = []
    for i, pixels in enumerate(images):
        members.append((f"{prefix}-{i:04d}.png", saved(pixels, "PNG")))
        if labels is not None:
            members.append((f"{prefix}-{i:04d}.cls", str(labels[i]).encode()))
    write_tar(path, members)
    return path


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("TESSERA_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def digits() -> tuple[LabelledFeatures, LabelledFeatures]:
    """Pixels of scikit-learn's digits as features: 1,200 to train on, and 597 to score."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    keys = [f"digits.tar/{i}" for i in range(1200)]
    return LabelledFeatures(images[:1200], labels[:1200], keys), LabelledFeatures(images[1200:], labels[1200:])


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Images of 16 pixels in 3 classes that differ by a faint stripe: two training shards of 31 in all, one of 13."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)

    def make(name, count):
        labels = [i % 3 for i in range(count)]
        images = rng.integers(0, 120, (count, 16, 16, 3), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[:, 5 * label : 5 * label + 5, label] += 20
        return write_shard(folder / f"{name}.tar", images, labels, name)

    for name, count in (("train-0", 20), ("train-1", 11), ("val-0", 13)):
        make(name, count)
    write_shard(folder / "bare-0.tar", np.zeros((4, 16, 16, 3), np.uint8), None)
    return folder
