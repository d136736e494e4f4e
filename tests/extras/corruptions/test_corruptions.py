import json

import numpy as np
import pytest
import torch
from PIL import Image

from tessera import encoders
from tessera.extras.corruptions.corruptions import CorruptionSettings, run
from tessera.extras.corruptions.images import CORRUPTIONS, SEVERITIES, corrupt
from tests.evaluation.conftest import knn_oracle, save_encoder, write_shard


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Smooth images of 16 pixels in 3 classes, as shards and as arrays: 30 to train on, and 12 to score."""
    folder, rng = tmp_path_factory.mktemp("corrupted"), np.random.default_rng(0)
    labels = [i % 3 for i in range(42)]
    colours = rng.integers(60, 200, (3, 4, 4, 3))
    small = np.clip(colours[labels] + rng.normal(scale=40, size=(42, 4, 4, 3)), 0, 255).astype(np.uint8)
    images = np.stack([np.asarray(Image.fromarray(one).resize((16, 16), Image.Resampling.BICUBIC)) for one in small])
    write_shard(folder / "train.tar", images[:30], labels[:30], "train")
    write_shard(folder / "val.tar", images[30:], labels[30:], "val")
    return folder, images, np.array(labels)


def options(folder, tmp_path, **more):
    given = {"train": str(folder / "train.tar"), "val": str(folder / "val.tar"), "k": 5, "workers": 0}
    return given | {"checkpoint": save_encoder(tmp_path / "vit.safetensors")} | more


def test_accuracies_equal_those_of_scikit_learn(data, tmp_path):
    folder, images, labels = data
    run(CorruptionSettings(**options(folder, tmp_path, batch_size=12)))
    (file,) = tmp_path.glob("vit-corruptions-*.json")
    found = json.loads(file.read_text())
    encoder = encoders.load(tmp_path / "vit.safetensors").eval()
    mean, std = (
        torch.tensor(values)[:, None, None] for values in (encoder.preprocessing.mean, encoder.preprocessing.std)
    )

    def features(pixels: torch.Tensor) -> np.ndarray:
        with torch.inference_mode():
            return encoder((pixels / 255 - mean) / std).pooled.double().numpy()

    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    oracle = knn_oracle(5).fit(features(pixels[:30]), labels[:30])
    assert found["clean_top1"] == pytest.approx(oracle.score(features(pixels[30:]), labels[30:]))
    for name in CORRUPTIONS:
        for severity in range(1, SEVERITIES + 1):
            changed = [corrupt(one, name, severity, f"val.tar/val-{i:04d}") for i, one in enumerate(pixels[30:])]
            expected = oracle.score(features(torch.stack(changed)), labels[30:])
            assert found["corruptions"][name][severity - 1] == pytest.approx(expected), (name, severity)
    every = [one for accuracies in found["corruptions"].values() for one in accuracies]
    assert len(set(every)) > 4
    assert found["top1"] == pytest.approx(np.mean(every))
    assert found["relative_top1"] == pytest.approx(np.mean(every) / found["clean_top1"])
