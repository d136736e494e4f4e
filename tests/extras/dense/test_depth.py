import io
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import mean_absolute_percentage_error, root_mean_squared_error

from tessera.data.shards import ShardError
from tessera.evaluation.features import EvaluationError
from tessera.extras.dense import depth
from tessera.extras.dense.depth import DepthSettings, backward, depths, errors, metres, run
from tests.data.batches import saved, write_tar
from tests.evaluation.conftest import save_encoder

SETTINGS = DepthSettings(checkpoint="", train="", val="", depth_scale=1000, min_depth=0.5, max_depth=8)


def write_scenes(path, seeds, kind="png", depth_of=lambda ramp: 1 + 4 * ramp):
    """Write a shard of images whose brightness, a ramp from 0 to 1, determines the depth in metres."""
    members = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        y, x = np.mgrid[:32, : 40 + seed % 5] / 40
        ramp = 0.5 + 0.5 * np.sin(5 * (rng.random() + rng.normal() * x + rng.normal() * y))
        pixels = np.repeat((255 * ramp)[..., None], 3, 2).round().astype(np.uint8)
        truth = depth_of(ramp) + np.zeros_like(ramp)
        truth[:3] = 0
        content = saved((1000 * truth).round().astype(np.uint16), "PNG")
        if kind == "npy":
            file = io.BytesIO()
            np.save(file, truth)
            content = file.getvalue()
        members += [(f"scene-{seed:03d}.png", saved(pixels, "PNG")), (f"scene-{seed:03d}.depth.{kind}", content)]
    return write_tar(path, members)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    train, val = write_scenes(folder / "train.tar", range(8)), write_scenes(folder / "val.tar", range(100, 105))
    return {"train": train, "val": val, "workers": 0, "depth_scale": 1000, "batch_size": 4, "lr": 0.05}


def loss_in_float64(scores, targets):
    """The formulas of the module's docstring, for all images at once."""
    large = F.interpolate(scores, scale_factor=4, mode="bilinear")
    weights = large.clamp(min=0) + 0.1
    weights = weights / weights.sum(1, keepdim=True)
    depth = (weights * torch.linspace(0.5, 8, 256, dtype=torch.float64).view(1, -1, 1, 1)).sum(1, keepdim=True)
    predicted = F.interpolate(depth, targets.shape[1:], mode="bilinear")[:, 0]
    g = predicted[targets > 0].log() - targets[targets > 0].log()
    return predicted, (g.square().mean() - 0.85 * g.mean() ** 2).sqrt()


def test_depths_and_gradients_are_those_of_torch(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 256, 3, 4, generator=generator)
    targets = 0.5 + 7.5 * torch.rand(3, 21, 30, generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = 0
    targets[1] = 0
    exact = scores.double().requires_grad_()
    predicted, loss = loss_in_float64(exact, targets.double())
    assert torch.allclose(depths(scores, (21, 30), SETTINGS).double(), predicted, atol=1e-5)
    loss.backward()
    assert exact.grad is not None
    seen = []
    monkeypatch.setattr(depth, "depths", lambda one, *rest: seen.append(len(one)) or depths(one, *rest))
    own = scores.clone().requires_grad_()
    backward(own, targets, SETTINGS)
    assert own.grad is not None
    assert torch.allclose(own.grad.double(), exact.grad, atol=1e-3 * float(exact.grad.abs().max()))
    assert seen == [1] * 6, "memory of one image"


def test_a_step_without_a_depth_has_no_gradient():
    scores = torch.randn(2, 256, 3, 3).requires_grad_()
    backward(scores, torch.zeros(2, 12, 12), SETTINGS)
    assert scores.grad is not None
    assert float(scores.grad.abs().max()) == 0


def test_errors_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    target = rng.uniform(0.5, 8, 2000)
    predicted = target * rng.uniform(0.6, 1.5, 2000)
    rmse, relative, delta = errors(torch.from_numpy(predicted), torch.from_numpy(target)).tolist()
    assert rmse == pytest.approx(root_mean_squared_error(target, predicted))
    assert relative == pytest.approx(mean_absolute_percentage_error(target, predicted))
    assert delta == pytest.approx(np.mean((predicted < 1.25 * target) & (target < 1.25 * predicted)))
    assert 0.3 < delta < 0.8


def test_depths_out_of_range_are_left_out():
    assert metres(torch.tensor([0.0, 499, 500, 3000, 8000, 8001]), SETTINGS).tolist() == [0, 0, 0.5, 3, 8, 0]


def result(tmp_path, **settings):
    """Run the command, and return its result file."""
    file = tmp_path / f"result-{len(list(tmp_path.glob('result-*')))}.json"
    run(DepthSettings(**settings, output=str(file)))
    return json.loads(file.read_text())


@pytest.mark.slow
def test_pixels_predict_a_depth_that_is_linear_in_their_brightness(scenes, tmp_path):
    options = scenes | {"checkpoint": "pixels", "image_size": 12, "epochs": 120}
    found = result(tmp_path, **options)
    assert (found["val_images"], found["train_images"], found["settings"]["steps"]) == (5, 8, 240)
    assert found["delta1"] > 0.9
    assert found["abs_rel"] < 0.1
    assert found["rmse"] < 0.3  # the depths have a standard deviation of 1.4 m
    parts = {"train": range(8), "val": range(100, 105)}
    arrays = {name: write_scenes(tmp_path / f"{name}.tar", seeds, "npy") for name, seeds in parts.items()}
    short = options | {"epochs": 4}
    one, other = (result(tmp_path, **short | change) for change in ({}, arrays | {"depth_scale": 1}))
    assert one["rmse"] == pytest.approx(other["rmse"], rel=1e-3)


def test_a_constant_depth_is_found_by_every_encoder(tmp_path):
    train, val = (
        write_scenes(tmp_path / f"{name}.tar", seeds, depth_of=lambda _: 2.5)
        for name, seeds in (("train", range(8)), ("val", range(100, 103)))
    )
    path = save_encoder(tmp_path / "vit.safetensors")
    options = {"checkpoint": path, "train": train, "val": val, "workers": 0, "depth_scale": 1000}
    found = run(DepthSettings(**options, batch_size=4, epochs=20, lr=0.02))
    assert found["rmse"] < 0.1
    assert found["delta1"] == 1
    (file,) = tmp_path.glob("vit-depth-*.json")
    assert json.loads(file.read_text())["protocol"] == "linear depth"


def test_wrong_data_is_refused(scenes, shards):
    options = scenes | {"checkpoint": "pixels", "image_size": 12, "epochs": 1}
    with pytest.raises(EvaluationError, match=r"--val has no depth from 0\.001 to 10 m"):
        run(DepthSettings(**options | {"depth_scale": 0.01}))
    with pytest.raises(ShardError, match=r"train-0-0000 has no segmentation map or depth map"):
        run(DepthSettings(**options | {"train": str(shards / "train-0.tar")}))
