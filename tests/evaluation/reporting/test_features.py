"""Neighbours and token colours against scikit-learn and SciPy."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator, PartialState
from scipy.linalg import orthogonal_procrustes
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from tessera import encoders
from tessera.encoders.base import Encoder, Features
from tessera.evaluation.features import extract
from tessera.evaluation.reporting.features import common_colours, examine, principal_components
from tessera.evaluation.reporting.runs import read_runs
from tests.evaluation.conftest import save_encoder
from tests.evaluation.reporting.made import make_run, record

ENCODER = {"depth": 1, "dim": 24, "heads": 2, "image_size": 16}


@pytest.fixture
def accelerator() -> Accelerator:
    PartialState(cpu=True)
    return Accelerator()


def run_with_encoder(folder: Path, val: str) -> Path:
    make_run(folder, [record(20, 1.0)], evaluation={"val": val, "k": 20})
    save_encoder(folder / "encoder.safetensors", **ENCODER)
    return folder


def test_neighbours_are_those_of_scikit_learn(tmp_path: Path, shards: Path, accelerator: Accelerator) -> None:
    val = str(shards / "train-*.tar")
    folder = run_with_encoder(tmp_path / "a", val)
    (group,), problems = examine(read_runs([folder])[0], accelerator, images=4, neighbours=3)
    assert problems == []
    assert (group.bank, group.shards) == (31, f"{shards.name}-train")
    found = extract(encoders.load(folder / "encoder.safetensors"), val, accelerator)
    queries = [0, 10, 20, 30]
    fitted = NearestNeighbors(n_neighbors=4, metric="cosine").fit(found.features.numpy())
    nearest = fitted.kneighbors(found.features[queries].numpy(), return_distance=False)
    labels = found.labels.numpy()
    for row, query, expected in zip(group.seen[0].rows, queries, nearest, strict=True):
        assert expected[0] == query  # an image is its own nearest neighbour
        assert [tile.label for tile in row] == [str(labels[number]) for number in expected]
        assert row[0].pixels.shape == (16, 16, 3)


def test_the_bank_is_spread_over_all_shards(tmp_path: Path, shards: Path, accelerator: Accelerator) -> None:
    folder = run_with_encoder(tmp_path / "a", str(shards / "train-*.tar"))
    (group,), _ = examine(read_runs([folder])[0], accelerator, images=2, bank=16, neighbours=99)
    assert group.bank == 16
    rows = group.seen[0].rows
    assert {len(row) for row in rows} == {16}
    assert [row[0].label for row in rows] == ["0", str(10 % 3)]  # the first image of all, and the last


def test_runs_that_cannot_be_examined_are_named(tmp_path: Path, shards: Path, accelerator: Accelerator) -> None:
    good = run_with_encoder(tmp_path / "good", str(shards / "bare-0.tar"))
    no_encoder = make_run(tmp_path / "no-encoder", [], evaluation={"val": str(shards / "bare-0.tar")})
    no_shards = run_with_encoder(tmp_path / "no-shards", str(shards / "missing.tar"))
    no_val = make_run(tmp_path / "no-val", [], evaluation={"val": None})
    broken = run_with_encoder(tmp_path / "broken", str(shards / "bare-0.tar"))
    (broken / "encoder.json").write_text(json.dumps({"variant": "other"}))
    runs, _ = read_runs([good, no_encoder, no_shards, no_val, broken])
    (group,), problems = examine(runs, accelerator, neighbours=2)
    assert [seen.run for seen in group.seen] == ["good"]
    assert group.seen[0].rows[0][0].label == ""  # the shards have no labels
    assert len(problems) == 4
    for name, word in {
        "no-encoder": "No encoder",
        "no-shards": "missing",
        "no-val": "--val",
        "broken": "other",
    }.items():
        assert any(problem.startswith(f"{name}: ") and word in problem for problem in problems)


class Known(Encoder):
    """Returns the tokens that it was made with, for patches of 4 pixels."""

    stride = 4

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, images: Tensor, mask: object = None, *, drop: bool = False) -> Features:
        return Features(self.tokens[:, 0], self.tokens.flatten(0, 1), self.grids(images))


def test_components_are_those_of_scikit_learn() -> None:
    tokens = torch.randn(3, 4, 6) * torch.tensor([9.0, 5.0, 3.0, 0.1, 0.1, 0.1]) + 4.0
    found = principal_components(Known(tokens), torch.zeros(3, 3, 8, 8))  # (3, 3, 2, 2)
    flat = found.permute(0, 2, 3, 1).flatten(0, 2).numpy()
    expected = PCA(3).fit_transform(tokens.flatten(0, 1).double().numpy())
    expected /= expected.std(0)
    signs = np.sign((flat * expected).sum(0))
    np.testing.assert_allclose(flat, expected * signs, atol=1e-6)
    alike = principal_components(Known(torch.ones(2, 4, 2)), torch.zeros(2, 3, 8, 8))
    assert alike.shape == (2, 3, 2, 2)
    assert not alike.any()


def test_colours_do_not_depend_on_the_axes_of_the_second_encoder() -> None:
    first = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    one, two = common_colours([first, torch.einsum("qchw,cd->qdhw", first, turn)])
    np.testing.assert_allclose(one, two, atol=1e-9)
    assert one.shape == (2, 4, 4, 3)
    assert one.min() == 0
    assert one.max() == 1


def test_the_rotation_is_that_of_scipy() -> None:
    first, second = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    flat = [one.permute(0, 2, 3, 1).reshape(-1, 3).numpy() for one in (first, second)]
    rotation, _ = orthogonal_procrustes(flat[1], flat[0])
    low, high = np.quantile(flat[0], 0.02, axis=0), np.quantile(flat[0], 0.98, axis=0)
    expected = np.clip((flat[1] @ rotation - low) / (high - low), 0, 1)
    np.testing.assert_allclose(common_colours([first, second])[1].reshape(-1, 3), expected, atol=1e-9)


def test_encoders_with_other_grids_share_the_colours() -> None:
    first = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    one, two = common_colours([first, first.repeat_interleave(2, 2).repeat_interleave(2, 3)])
    assert two.shape == (2, 8, 8, 3)
    np.testing.assert_allclose(two, one.repeat(2, 1).repeat(2, 2), atol=1e-2)
