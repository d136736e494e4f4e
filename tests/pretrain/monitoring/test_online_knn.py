"""The k-NN and the linear probe inside a run against scikit-learn, alone and over two processes."""

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from threadpoolctl import threadpool_limits

from tessera import encoders
from tessera.encoders.base import IMAGENET, Encoder, Preprocessing
from tessera.pretrain.config import EvaluationConfig
from tessera.pretrain.monitoring.online_knn import OnlineKNN
from tessera.runtime.processes import make_accelerator

SIDE, K = 16, 5


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Paths of the shards, and the pixels, of noisy images in 3 classes that differ by a faint stripe."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    paths, found = {}, {}
    for part, count in (("train", 45), ("val", 31)):
        images = rng.integers(0, 120, (count, SIDE, SIDE, 3), dtype=np.uint8)
        for i, image in enumerate(images):
            image[:, 5 * (i % 3) : 5 * (i % 3) + 5, i % 3] += 12
        paths[part], found[part] = str(tmp_path / f"{part}-0.tar"), images
        with tarfile.open(paths[part], "w") as archive:
            for i, image in enumerate(images):
                buffer = io.BytesIO()
                Image.fromarray(image).save(buffer, "png")
                for ending, content in (("png", buffer.getvalue()), ("cls", str(i % 3).encode())):
                    info = tarfile.TarInfo(f"{i:04d}.{ending}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
    return paths, found


def make(paths: dict[str, str], pictures: int = 2, **settings: Any) -> tuple[OnlineKNN, Encoder]:
    torch.manual_seed(0)
    encoder = encoders.build("vit_micro", depth=1, dim=24, heads=2, image_size=SIDE, drop_path=0.5)
    config = EvaluationConfig(val=paths["val"], k=K, batch_size=8, pictures=pictures, **settings)
    return OnlineKNN(config, paths["train"], SIDE, make_accelerator()), encoder


def normalised(images: np.ndarray, preprocessing: Preprocessing = IMAGENET) -> torch.Tensor:
    return torch.from_numpy((images / 255.0 - preprocessing.mean) / preprocessing.std).permute(0, 3, 1, 2).float()


@pytest.mark.parametrize("preprocessing", [IMAGENET, Preprocessing((0.1, 0.2, 0.3), (0.5, 0.1, 1.5))])
def test_equals_scikit_learn(shards, preprocessing: Preprocessing) -> None:
    paths, images = shards
    online_knn, encoder = make(paths)
    encoder.eval().preprocessing = preprocessing
    with torch.no_grad():
        features = {part: encoder(normalised(images[part], preprocessing)).pooled.numpy() for part in images}
    labels = {part: np.arange(len(images[part])) % 3 for part in images}
    votes: Any = lambda distance: np.exp((1 - distance) / 0.07)  # noqa: E731
    oracle = KNeighborsClassifier(K, metric="cosine", weights=votes)
    expected = oracle.fit(features["train"], labels["train"]).score(features["val"], labels["val"])
    assert 0.34 < expected < 1  # else the test could not see a mistake
    probe = make_pipeline(
        StandardScaler(), Normalizer(), LogisticRegression(C=1 / 0.0025, fit_intercept=False, tol=1e-8, max_iter=5000)
    )
    with threadpool_limits(1):  # its threads wait for each other on busy cores
        linear = probe.fit(features["train"], labels["train"]).score(features["val"], labels["val"])
    assert 0.34 < linear < 1
    scores = online_knn.evaluate(encoder)
    assert scores == {"knn_top1": pytest.approx(expected), "linear_top1": pytest.approx(linear)}
    assert online_knn.evaluate(encoder) == scores
    assert make(paths, linear_iterations=0)[0].evaluate(encoder) == {"knn_top1": scores["knn_top1"]}
    shown = online_knn.first_images(preprocessing)
    torch.testing.assert_close(shown, normalised(images["val"][:2], preprocessing), rtol=1e-5, atol=1e-5)


def test_raw_pixels_equal_scikit_learn_on_shrunk_centred_images(shards, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, images = shards
    online_knn, encoder = make(paths)
    monkeypatch.setattr("tessera.pretrain.monitoring.online_knn.PIXEL_SIDE", 8)
    means = {part: found.reshape(len(found), 8, 2, 8, 2, 3).mean((2, 4)) for part, found in images.items()}  # 2 x 2
    flat = {part: normalised(found).flatten(1).double().numpy() for part, found in means.items()}
    votes: Any = lambda distance: np.exp((1 - distance) / 0.07)  # noqa: E731
    oracle = KNeighborsClassifier(K, metric="cosine", weights=votes)
    centre = flat["train"].mean(0)
    oracle.fit(flat["train"] - centre, np.arange(45) % 3)
    expected = oracle.score(flat["val"] - centre, np.arange(31) % 3)
    plain = online_knn.evaluate(encoder)
    found = online_knn.evaluate(encoder, pixels=True)
    assert found == plain | {"knn_pixels": pytest.approx(expected)}
    assert 0.34 < expected < 1
    assert online_knn.queries == 31


def test_leaves_mode_random_numbers_and_gradients_as_they_were(shards) -> None:
    online_knn, encoder = make(shards[0])
    first = online_knn.evaluate(encoder.eval())
    assert not encoder.training
    before = torch.get_rng_state()
    assert online_knn.evaluate(encoder.train()) == first  # without drop path
    assert encoder.training
    assert encoder.blocks[0].training  # pyright: ignore
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in encoder.parameters())


def test_held_out_images_are_the_first_as_the_encoder_sees_them(shards) -> None:
    paths, images = shards
    online_knn, encoder = make(paths, pictures=3)
    torch.testing.assert_close(
        online_knn.first_images(encoder.preprocessing), normalised(images["val"][:3]), rtol=1e-5, atol=1e-5
    )
    assert make(paths, pictures=0)[0].first_images(encoder.preprocessing).shape == (0, 3, SIDE, SIDE)


def _process(rank: int, port: int, paths: dict[str, str], folder: str) -> None:
    torch.set_num_threads(1)
    mp.set_start_method("fork", force=True)  # of the loader's workers, as it is under a launcher
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    online_knn, encoder = make(paths)
    torch.save((online_knn.evaluate(encoder), online_knn.first_images(encoder.preprocessing)), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.medium
def test_two_processes_equal_one(shards, tmp_path: Path, free_port: int) -> None:
    online_knn, encoder = make(shards[0])
    expected = online_knn.evaluate(encoder)
    mp.start_processes(_process, (free_port, shards[0], str(tmp_path)), nprocs=2, start_method="forkserver")
    for rank in range(2):
        score, held_out = torch.load(tmp_path / f"{rank}.pt")
        assert score == expected
        assert torch.equal(held_out, online_knn.first_images(encoder.preprocessing))
