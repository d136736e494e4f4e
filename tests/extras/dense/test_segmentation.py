import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import jaccard_score
from torch import nn

from tessera import encoders
from tessera.data.shards import ShardError
from tessera.evaluation.features import EvaluationError
from tessera.evaluation.tokens import patch_tokens
from tessera.extras.dense.frozen import window_tokens
from tessera.extras.dense.segmentation import (
    Head,
    SegmentationSettings,
    backward,
    class_numbers,
    cross_entropy,
    resized,
    run,
    scores,
)
from tests.data.batches import saved, write_tar
from tests.evaluation.conftest import FAMILIES, results_of_one_and_two_processes, save_encoder

COLOURS = np.array([[30, 30, 30], [220, 40, 40], [40, 220, 40], [40, 40, 220]])


def scene(seed, height, width):
    """Rectangles of three colours on a dark background, the map of their colours, and a few ignored pixels."""
    rng = np.random.default_rng(seed)
    values = np.zeros((height, width), np.uint8)
    for value in (1, 2, 3):
        top, left = rng.integers(0, height // 2), rng.integers(0, width // 2)
        values[top : top + height // 2, left : left + width // 2] = value
    pixels = COLOURS[values] + rng.integers(-20, 21, (height, width, 3))
    values[:2] = 255
    return pixels.astype(np.uint8), values


def write_scenes(path, seeds, change=lambda values: values):
    """Write a shard of scenes with maps, and return its path."""
    members = []
    for seed in seeds:
        pixels, values = scene(seed, 32, 40 + seed % 5)
        members += [(f"scene-{seed:03d}.png", saved(pixels, "PNG"))]
        members += [(f"scene-{seed:03d}.seg.png", saved(change(values), "PNG"))]
    return write_tar(path, members)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    train, val = write_scenes(folder / "train.tar", range(24)), write_scenes(folder / "val.tar", range(100, 107))
    return {"train": train, "val": val, "workers": 0}


def result(tmp_path, **settings):
    """Run the command, and return its result file."""
    file = tmp_path / f"result-{len(list(tmp_path.glob('result-*')))}.json"
    run(SegmentationSettings(**settings, output=str(file)))
    return json.loads(file.read_text())


def test_scores_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    truth, predicted = rng.integers(0, 6, 5000), rng.integers(0, 6, 5000)
    predicted = np.where(rng.random(5000) < 0.6, truth, predicted)
    truth[truth == 5], predicted[predicted == 5] = 4, 4  # class 5 does not occur
    predicted[predicted == 2] = 1  # class 2 is never predicted
    matrix = torch.zeros(6, 6, dtype=torch.int64)
    for row, column in zip(truth, predicted, strict=True):
        matrix[row, column] += 1
    found = scores(matrix, range(6))
    iou = [row["iou"] for row in found["per_class"].values()]
    assert found["mean_iou"] == pytest.approx(jaccard_score(truth, predicted, average="macro"), abs=1e-12)
    each = jaccard_score(truth, predicted, average=None)  # pyright: ignore[reportArgumentType]
    assert iou[:5] == pytest.approx(each, abs=1e-12)
    assert (iou[2], iou[5]) == (0.0, None)
    assert found["pixel_accuracy"] == pytest.approx((truth == predicted).mean(), abs=1e-12)
    with pytest.raises(EvaluationError, match="no pixel that is scored"):
        scores(torch.zeros(3, 3, dtype=torch.int64), range(3))


def test_the_head_and_its_gradients_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    tokens = 3 * torch.randn(3, 5, 4, 6, generator=generator) + 1
    targets = torch.randint(0, 7, (3, 13, 17), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = 255
    targets[1, :, :4] = 255
    head = Head(5, 7, seed=1)
    norm, convolution = nn.BatchNorm2d(5).double(), nn.Conv2d(5, 7, 1).double()
    convolution.load_state_dict(head.classifier.state_dict())
    for _ in range(2):
        logits = head(tokens)
        backward(logits, targets)
        expected = convolution(norm(tokens.double()))
        assert torch.allclose(logits.double(), expected, atol=1e-5)
        large = F.interpolate(expected, (13, 17), mode="bilinear", align_corners=False)
        assert torch.allclose(resized(logits, (13, 17)).double(), large, atol=1e-5)
        loss = F.cross_entropy(large, targets, ignore_index=255)
        loss.backward()
        own = cross_entropy(resized(logits, (13, 17)), targets) / (targets != 255).sum()
        assert own.item() == pytest.approx(loss.item(), rel=1e-5)
    for one, other in zip(head.parameters(), (*norm.parameters(), *convolution.parameters()), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad.double(), other.grad, atol=1e-5)
    head.eval()
    norm.eval()
    assert torch.allclose(head(tokens).double(), convolution(norm(tokens.double())), atol=1e-5)


def test_a_step_without_a_pixel_has_no_gradient():
    head = Head(5, 7, seed=1)
    backward(head(torch.randn(2, 5, 3, 3)), torch.full((2, 6, 6), 255))
    assert all(float(parameter.grad.abs().max()) == 0 for parameter in head.parameters() if parameter.grad is not None)


def test_ignored_values_are_not_numbered():
    numbers = class_numbers(5, [0, 3])
    assert numbers[:6].tolist() == [255, 0, 1, 255, 2, 255]
    assert (numbers[5:] == 255).all()
    with pytest.raises(EvaluationError, match="leaves no class"):
        class_numbers(2, [0, 1])


@pytest.mark.medium
def test_pixels_segment_coloured_rectangles(scenes, tmp_path):
    options = scenes | {"checkpoint": "pixels", "image_size": 24, "epochs": 20, "batch_size": 8, "lr": 0.04}
    found = result(tmp_path, **options)
    assert found["mean_iou"] > 0.85
    assert found["pixel_accuracy"] > 0.95
    assert (found["classes"], found["val_images"], found["train_images"]) == (4, 7, 24)
    assert found["settings"]["steps"] == 20 * 24 // 8
    assert found["mean_iou"] == pytest.approx(np.mean([one["iou"] for one in found["per_class"].values()]))
    again = result(tmp_path, **options)
    assert again["per_class"] == found["per_class"]
    ignoring = result(tmp_path, **options | {"ignore": [0], "epochs": 1})
    assert sorted(ignoring["per_class"]) == ["1", "2", "3"]
    counts = {value: found["per_class"][value]["pixels"] for value in "123"}
    assert {value: one["pixels"] for value, one in ignoring["per_class"].items()} == counts


@pytest.mark.parametrize("variant", FAMILIES)
def test_the_command_works_for_every_family(scenes, tmp_path, variant):
    path = save_encoder(tmp_path / f"{variant}.safetensors", variant)
    run(SegmentationSettings(checkpoint=path, **scenes, epochs=6, batch_size=8, lr=0.02))
    (file,) = tmp_path.glob(f"{variant}-segmentation-scenes*-val-*.json")
    found = json.loads(file.read_text())
    # the background alone has a third of the pixels, and a mean IoU of 0.1
    assert found["mean_iou"] > 0.2
    assert found["pixel_accuracy"] > 0.4


def test_wrong_data_is_refused(scenes, tmp_path):
    options = scenes | {"checkpoint": "pixels", "image_size": 16, "epochs": 1, "batch_size": 4}
    same = {"source": {"allow_overlap": True}}  # the images are those of --train

    def shifted(values):
        return np.where(values == 255, 255, values + 5).astype(np.uint8)

    write_scenes(tmp_path / "shifted.tar", range(6), shifted)
    write_scenes(tmp_path / "thin.tar", range(6), lambda values: values[:, 1:])
    write_scenes(tmp_path / "empty.tar", range(6), lambda values: np.full_like(values, 255))
    cases = {
        "have the value 8, but --train has 4 classes": {"val": str(tmp_path / "shifted.tar"), **same},
        "--train has 2 classes": {"classes": 2},
        "takes 50 images from a source that has only 24": {"batch_size": 50},
        "All pixels of the maps of --train are ignored": {"train": str(tmp_path / "empty.tar")},
        "in both --train and --val": {"val": scenes["train"]},
        "no pixel that is scored": {"val": str(tmp_path / "empty.tar"), **same},
    }
    for message, change in cases.items():
        with pytest.raises(EvaluationError, match=message):
            run(SegmentationSettings(**options | change))
    encoders.save(encoders.build("vit_micro", patch_size=14, image_size=28), tmp_path / "encoder.safetensors")
    cut = options | {"checkpoint": str(tmp_path / "encoder.safetensors"), "image_size": 32}
    with pytest.raises(EvaluationError, match=r"Images of 32 pixels are no whole number.*Give --image_size 28 or 42"):
        run(SegmentationSettings(**cut))
    with pytest.raises(ShardError, match=r"map of thin.tar/scene-000 cannot be used: the map has 39 x 32 pixels"):
        run(SegmentationSettings(**options | {"val": str(tmp_path / "thin.tar"), **same}))


def test_shards_without_maps_are_refused(scenes, shards):
    options = scenes | {"checkpoint": "pixels", "image_size": 16}
    with pytest.raises(ShardError, match=r"train-0-0000 has no segmentation map"):
        run(SegmentationSettings(**options | {"train": str(shards / "train-0.tar")}))


@torch.no_grad()
def test_windows_give_the_mean_of_their_logits():
    torch.manual_seed(0)
    encoder = encoders.build("vit_micro").eval()
    patch, side = encoder.stride, 4 * encoder.stride
    head, size = Head(encoder.dim, 3, seed=0).eval(), 7 * patch
    images = torch.randn(2, 3, size, size)
    assert torch.equal(window_tokens(encoder, images, "fp32", size), patch_tokens(encoder, images, "fp32"))
    assert torch.equal(window_tokens(encoder, images, "fp32"), patch_tokens(encoder, images, "fp32"))
    total, count = torch.zeros(2, 3, 7, 7, dtype=torch.float64), torch.zeros(7, 7)
    for row in (0, 2, 3):  # windows of 4 tokens, at most 8 / 3 tokens apart
        for column in (0, 2, 3):
            top, left = row * patch, column * patch
            tokens = patch_tokens(encoder, images[:, :, top : top + side, left : left + side], "fp32")
            total[:, :, row : row + 4, column : column + 4] += head(tokens)
            count[row : row + 4, column : column + 4] += 1
    assert torch.allclose(head(window_tokens(encoder, images, "fp32", side)).double(), total / count, atol=1e-6)
    whole = head(window_tokens(encoder, images, "fp32")).double()
    assert not torch.allclose(whole, total / count, atol=1e-3), "windows matter"
    for wrong in (side + 1, size + patch):
        with pytest.raises(EvaluationError, match=f"Windows of {wrong} pixels do not fit an image of {size} pixels"):
            window_tokens(encoder, images, "fp32", wrong)


@pytest.mark.slow
def test_two_processes_give_the_same(scenes, tmp_path, free_port):
    path = save_encoder(tmp_path / "encoder.safetensors")
    options = scenes | {"checkpoint": path, "epochs": 4, "batch_size": 8, "lr": 0.01}
    one, two = results_of_one_and_two_processes(tmp_path, free_port, run, SegmentationSettings, options)
    assert (two["val_images"], two["train_images"], two["classes"]) == (7, 24, 4)
    for value, row in one["per_class"].items():
        assert two["per_class"][value]["pixels"] == row["pixels"]
        assert two["per_class"][value]["iou"] == pytest.approx(row["iou"], abs=2e-3)
    assert two["mean_iou"] == pytest.approx(one["mean_iou"], abs=1e-3)
    assert one["mean_iou"] > 0.2
