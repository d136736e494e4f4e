import json

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from sklearn.neighbors import NearestNeighbors

from tessera import encoders
from tessera.data.shards import open_shards
from tessera.evaluation.features import EvaluationError
from tessera.evaluation.view_retrieval import ViewRetrievalSettings, crop_features, run, view_retrieval
from tests.evaluation.conftest import results_of_one_and_two_processes, save_encoder, write_shard
from tests.installed import needs_extra


def crops(images: int, noise: float) -> torch.Tensor:
    """Features of two crops of each image, which differ by noise, around a mean that is not 0."""
    rng = np.random.default_rng(0)
    own = rng.normal(size=(images, 1, 8)) + 5
    return torch.from_numpy(own + noise * rng.normal(size=(images, 2, 8))).float()


@pytest.mark.parametrize("noise", [0.3, 0.5, 0.8])
def test_equals_the_nearest_neighbours_of_scikit_learn(noise):
    features = crops(200, noise)
    centred = features.double().numpy() - features.double().numpy().mean((0, 1))
    nearest = NearestNeighbors(n_neighbors=1, metric="cosine", algorithm="brute").fit(centred[:, 1])
    expected = (nearest.kneighbors(centred[:, 0], return_distance=False)[:, 0] == np.arange(200)).mean()
    assert 0.1 < expected < 0.99
    assert view_retrieval(features) == (pytest.approx(expected), 200)


def test_equal_and_broken_features_find_nothing():
    assert view_retrieval(torch.ones(50, 2, 8)) == (1 / 50, 50), "as by chance"
    features = crops(50, 0.0)
    assert view_retrieval(features)[0] == 1
    features[7] = torch.nan
    assert view_retrieval(features)[0] == 0
    with pytest.raises(EvaluationError, match="at least 2"):
        view_retrieval(features[:1])


def test_every_encoder_gets_the_same_two_different_crops(shards):
    seen, source = [], open_shards(str(shards / "train-{0..1}.tar"))
    encoder = encoders.build("vit_micro").eval()
    # the blank images that measure the memory do not count
    encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()) if inputs[0].any() else None)
    for batch_size in (8, 8, 5):
        options = {"images": 10, "batch_size": batch_size, "workers": 0}
        features = crop_features(encoder, source, Accelerator(), **options)
        assert features.shape == (10, 2, encoder.dim)
    first, again = ([half for crops in seen[i : i + 2] for half in crops.chunk(2)] for i in (0, 2))
    torch.testing.assert_close(first, again)
    parts = [crops.chunk(2) for crops in seen]
    views = [[torch.cat([pair[view] for pair in parts[i : i + 2]]) for view in (0, 1)] for i in (0, 4)]
    torch.testing.assert_close(views[0], views[1])
    assert (views[0][0] - views[0][1]).abs().mean() > 0.1


@pytest.mark.parametrize("variant", ["vit_micro", "swin_micro"])
def test_the_command_works(shards, tmp_path, variant):
    path, data = save_encoder(tmp_path / f"{variant}.safetensors", variant), str(shards / "train-{0..1}.tar")
    run(ViewRetrievalSettings(checkpoint=path, data=data, workers=0))
    (file,) = tmp_path.glob(f"{variant}-view_retrieval-shards*-train-*.json")
    found = json.loads(file.read_text())
    assert (found["protocol"], found["val_images"]) == ("view retrieval", 31)
    features = crop_features(encoders.load(path).eval(), open_shards(data), Accelerator(), batch_size=4, workers=0)
    assert found["top1"] == view_retrieval(features)[0]


def black(samples):
    """A stage that makes all images equal."""
    for sample in samples:
        yield sample | {name: np.zeros((16, 16, 3), np.uint8) for name in sample if name in ("png", "jpg")}


@needs_extra("stages")
def test_stages_run_before_the_crops(shards, tmp_path):
    path, data = save_encoder(tmp_path / "vit.safetensors"), str(shards / "train-{0..1}.tar")
    plain, equal = (
        run(ViewRetrievalSettings(checkpoint=path, data=data, stages=stages, workers=0))["top1"]
        for stages in (None, ["tests.evaluation.test_view_retrieval:black"])
    )
    assert plain != equal == 1 / 31


@pytest.mark.slow
def test_two_processes_give_the_same_without_labels(tmp_path, free_port):
    images = np.random.default_rng(0).integers(0, 256, (9, 1, 1, 3), dtype=np.uint8).repeat(16, 1).repeat(16, 2)
    write_shard(tmp_path / "train.tar", images, None)
    options = {"checkpoint": "pixels", "data": str(tmp_path / "train.tar"), "image_size": 16, "workers": 0}
    one, two = results_of_one_and_two_processes(tmp_path, free_port, run, ViewRetrievalSettings, options)
    assert two["top1"] == one["top1"]
    assert one["val_images"] == 9
    assert 1 / 9 < one["top1"] < 1
