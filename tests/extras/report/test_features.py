"""Neighbours against scikit-learn."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator, PartialState
from sklearn.neighbors import NearestNeighbors

from tessera import encoders
from tessera.evaluation.features import extract
from tessera.extras.report.neighbours import examine
from tessera.extras.report.run_folders import read_runs
from tests.evaluation.conftest import save_encoder, saved, write_shard, write_tar
from tests.extras.report.made import make_run, record

COPIES = {"a": "first", "b": "copy"}
ENCODER: dict[str, Any] = {"depth": 1, "dim": 24, "heads": 2, "image_size": 16}


@pytest.fixture
def accelerator() -> Accelerator:
    PartialState(cpu=True)
    return Accelerator()


def run_with_encoder(folder: Path, val: str, **settings: Any) -> Path:
    make_run(folder, [record(20, 1.0)], evaluation={"val": val, "k": 20}, **settings)
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


def test_runs_on_copies_of_the_same_images_share_a_gallery(tmp_path: Path, accelerator: Accelerator) -> None:
    images = np.random.default_rng(0).integers(0, 99, (6, 16, 16, 3), dtype=np.uint8)
    images[0] = 0  # a smaller file: images of one size distinguish no data sets
    (tmp_path / "first").mkdir()
    write_shard(tmp_path / "first" / "val-0.tar", images, [0, 1] * 3)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    folders = [run_with_encoder(tmp_path / name, str(tmp_path / of / "val-*.tar")) for name, of in COPIES.items()]
    (group,), _ = examine(read_runs(folders)[0], accelerator, images=2, neighbours=2)
    assert [seen.run for seen in group.seen] == ["a", "b"]


def test_the_image_and_the_label_are_those_of_the_run(tmp_path: Path, accelerator: Accelerator) -> None:
    members = []
    for key in range(4):
        for side in ("left", "right"):
            pixels = np.full((16, 16, 3), 10 * key + (side == "right"), dtype=np.uint8)
            members.append((f"{key}.{side}.png", saved(pixels, "PNG")))
        members.append((f"{key}.json", b'{"kind": 7}'))
    for number in range(2):
        write_tar(tmp_path / f"val-{number}.tar", members)
    val = str(tmp_path / "val-*.tar")
    good = run_with_encoder(tmp_path / "good", val, data={"image": "right.png", "label": "json:kind"})
    usual = run_with_encoder(tmp_path / "usual", val)
    (group,), (problem,) = examine(read_runs([good, usual])[0], accelerator, images=2, neighbours=1)
    assert [seen.run for seen in group.seen] == ["good"]
    tile = group.seen[0].rows[0][0]
    assert (tile.label, tile.pixels.min(), tile.pixels.max()) == ("7", 1, 1)
    assert problem.startswith("usual: neighbours are not shown. 2 of 2 shards cannot be used: ")
    assert "\n" not in problem


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
